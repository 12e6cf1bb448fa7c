"""Attention workloads to measure: a pool on huge pages, larger than any cache, and block tables.

A pool's blocks are [2 (K, V), Hkv, block_size, D] in memory, as an engine's are. Every call of a
workload attends to other blocks than the one before, in random order, so each is cold.
"""

import ctypes
import mmap
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

HUGE, MADV_COLLAPSE, MAP_FIXED = 2 << 20, 25, 0x10
POOL_NBYTES = 400 << 20


@dataclass(frozen=True)
class Workload:
    """A batch of equal sequences: `context` keys each, the last `queries` of them new."""

    batch: int = 8
    context: int = 4096
    queries: int = 1
    block_size: int = 16
    dtype: torch.dtype = torch.bfloat16
    cache_dtype: torch.dtype | None = None
    heads: int = 32
    kv_heads: int = 8
    dim: int = 128

    @property
    def stored(self) -> torch.dtype:
        return self.cache_dtype or self.dtype

    @property
    def nbytes(self) -> int:
        """Of the keys and values that one call reads."""
        tokens = self.batch * self.context
        return tokens * 2 * self.kv_heads * self.dim * self.stored.itemsize

    def with_(self, **changes: object) -> "Workload":
        return replace(self, **changes)  # type: ignore[arg-type]


@cache
def memory() -> tuple[Tensor, float]:
    """The pool's bytes, and the share of them on huge pages: shared memory, as a tier's is."""
    libc = ctypes.CDLL(None, use_errno=True)
    address, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    libc.mmap.restype = address
    libc.mmap.argtypes = [address, size, number, number, number, ctypes.c_long]
    libc.madvise.argtypes = [address, size, number]
    fd = os.memfd_create("bench")
    os.ftruncate(fd, POOL_NBYTES)
    os.posix_fallocate(fd, 0, POOL_NBYTES)  # there is nothing to collapse in an empty file
    reserved = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    start = libc.mmap(None, POOL_NBYTES + HUGE, 0, reserved, -1, 0)
    aligned = (start + HUGE - 1) // HUGE * HUGE
    readable = mmap.PROT_READ | mmap.PROT_WRITE
    libc.mmap(aligned, POOL_NBYTES, readable, mmap.MAP_SHARED | MAP_FIXED, fd, 0)
    # A page at a time: the kernel gives up where it finds no free one, and others may.
    pages = range(aligned, aligned + POOL_NBYTES, HUGE)
    collapsed = sum(libc.madvise(page, HUGE, MADV_COLLAPSE) == 0 for page in pages)
    pool = torch.frombuffer((ctypes.c_char * POOL_NBYTES).from_address(aligned), dtype=torch.uint8)
    return pool, collapsed / len(pages)


def fill(workload: Workload) -> Tensor:
    """The whole memory as numbers of the workload's stored type."""
    pool = memory()[0].view(workload.stored)
    noise = torch.randn(1 << 20, generator=torch.Generator().manual_seed(0))
    if workload.stored == torch.int8:
        noise = (noise * 40).round().clamp(-127, 127)
    for part in pool.split(len(noise)):
        part.copy_(noise[: len(part)])
    return pool


class Paged:
    """Calls of the op over the workload's blocks; `call(i)` takes the i-th set of them."""

    def __init__(self, workload: Workload) -> None:
        w = self.workload = workload
        shape = (2, w.kv_heads, w.block_size, w.dim)
        block = 2 * w.kv_heads * w.block_size * w.dim
        numbers = fill(w)
        self.num_blocks = len(numbers) // block
        self.pool = numbers[: self.num_blocks * block].view(self.num_blocks, *shape)
        self.k_cache, self.v_cache = self.pool[:, 0], self.pool[:, 1]
        order = torch.randperm(self.num_blocks, generator=torch.Generator().manual_seed(1)).int()
        width = -(-w.context // w.block_size)
        sets = self.num_blocks // (w.batch * width)
        self.tables = order[: sets * w.batch * width].view(sets, w.batch, width).unbind()
        self.q = torch.randn(w.batch * w.queries, w.heads, w.dim).to(w.dtype)
        self.out = torch.empty_like(self.q)
        self.lengths = torch.full((w.batch,), w.context, dtype=torch.int32)
        self.starts = torch.arange(w.batch + 1, dtype=torch.int32) * w.queries
        self.scales: dict[str, Tensor] = {}
        if w.stored == torch.int8:
            scale = torch.full((self.num_blocks, w.kv_heads, 1), 1 / 40)
            self.scales = {"k_scale": scale, "v_scale": scale}

    def call(self, i: int) -> None:
        w = self.workload
        torch.ops.tierd.paged_attention(
            self.out, None, self.q, self.k_cache, self.v_cache, self.tables[i % len(self.tables)],
            self.lengths, self.starts, w.queries, w.dim**-0.5, **self.scales,
        )  # fmt: skip


Call = Callable[[int], object]


def seconds(calls: dict[str, Call], rounds: int) -> dict[str, float]:
    """The best time of each, in rounds that go through all of them.

    With one thread it is processor time, of which others that share the core take nothing.
    """
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    best = dict.fromkeys(calls, float("inf"))
    for i in range(-1, rounds):
        for name, call in calls.items():
            start = clock()
            call(i % 64)
            if i >= 0:
                best[name] = min(best[name], clock() - start)
    return best
