"""What the attention op is measured against: torch over contiguous keys, torch after a gather, a
plain read of the memory. vLLM's kernel has a file of its own.

Every peer gets its best form: the query heads of a KV head as one query's rows (enable_gqa is 8x
slower), buffers and indices made beforehand, its own layout.
"""

import ctypes
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
from bench_workload import Call, Paged, Workload, fill
from torch import Tensor


def contiguous(workload: Workload) -> Call:
    """SDPA over keys and values that lie in one piece: no paging at all."""
    w = workload
    numbers = fill(w)
    size = w.batch * w.kv_heads * w.context * w.dim
    count = len(numbers) // (2 * size)
    shape = (count, 2, w.batch, w.kv_heads, w.context, w.dim)
    pool = numbers[: count * 2 * size].view(shape)
    q = torch.randn(w.batch, w.kv_heads, w.heads // w.kv_heads, w.dim).to(w.dtype)

    def call(i: int) -> Tensor:
        return F.scaled_dot_product_attention(q, *pool[i % count])

    return call


def gathered(paged: Paged) -> Call:
    """Copy a batch's blocks into buffers that are kept, then SDPA."""
    w = paged.workload
    tables = torch.stack(paged.tables).long()
    width = tables.shape[2]
    rows = paged.pool.view(-1, w.block_size * w.dim)  # one of each (block, K or V, head)
    heads = torch.arange(w.kv_heads)[:, None]
    # [sets, 2, B, Hkv, width]
    kinds = torch.arange(2).view(1, 2, 1, 1, 1)
    index = (tables[:, None, :, None, :] * 2 + kinds) * w.kv_heads + heads
    index = index.reshape(len(tables), 2, -1)
    buffers = torch.empty(2, index.shape[2], rows.shape[1], dtype=rows.dtype)
    k, v = buffers.view(2, w.batch, w.kv_heads, width * w.block_size, w.dim)
    q = paged.q.view(w.batch, w.kv_heads, -1, w.dim)

    def call(i: int) -> Tensor:
        for kind in range(2):
            torch.index_select(rows, 0, index[i % len(index), kind], out=buffers[kind])
        return F.scaled_dot_product_attention(q, k, v)

    return call


@cache
def reader() -> ctypes.CDLL:
    source, folder = Path(__file__).with_name("bench_read.c"), Path(tempfile.mkdtemp())
    target = folder / "read.so"
    flags = ["-O3", "-march=native", "-funroll-loops", "-fopenmp", "-shared", "-fPIC"]
    subprocess.run(["gcc", *flags, source, "-o", target], check=True)
    library = ctypes.CDLL(str(target))
    library.read_all.restype = ctypes.c_uint64
    library.read_all.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int]
    return library


def read(paged: Paged, nbytes: int) -> Call:
    """Read `nbytes` of the same memory in order."""
    whole = paged.pool.view(-1).view(torch.uint8)
    count = len(whole) // nbytes

    def call(i: int) -> int:
        start = whole.data_ptr() + i % count * nbytes
        total: int = reader().read_all(start, nbytes, torch.get_num_threads())
        return total

    return call
