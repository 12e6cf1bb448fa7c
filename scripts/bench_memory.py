"""Copies between the host tier and the cpu device tier, beside memcpy of the same blocks.

Ours is the store's: calls as large as StoreTransfer's, two at a time, two threads below, as in the
daemon. What planning each block as a copy of its own adds is a row of its own. Both tiers are the
shared memory that the daemon makes. memcpy is np.copyto, block by block, of one or two threads,
whichever is faster.
"""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import numpy as np
from bench_blocks import KIB, MIB, carry, copies, memory, shuffled
from bench_report import BenchReport, Figure
from bench_rounds import Rounds, seconds

from storage.base import Row
from storage.device import CpuDeviceStore
from storage.host import HostStore
from tierd.daemon.route import batch_size
from tierd.daemon.transfer import StoreTransfer
from tierd.shm import SharedMemory

SIZES = (64, 256, 720)
BAR = 0.90
COPIERS = 2  # as in the daemon


class Tiers:
    """A device and a host tier of equal size, each block of one going to the same of the other."""

    def __init__(self, stack: ExitStack, nbytes: int, block_nbytes: int) -> None:
        self._threads = stack.enter_context(ThreadPoolExecutor(COPIERS))
        self._runner = stack.enter_context(asyncio.Runner())
        arrays = [_shared(stack, nbytes, seed) for seed in (1, 2)]
        device = CpuDeviceStore(arrays[0], block_nbytes, self._threads)
        host = HostStore(arrays[1], block_nbytes, self._threads)
        self._order = shuffled(nbytes // block_nbytes)
        self._rows = [store.rows(self._order) for store in (device, host)]
        self._stores = (device, host)
        self._batch = batch_size(block_nbytes, memories=2)
        self._transfer = StoreTransfer([[device], [host]], lambda level: None)

    def store(self, src: int, dst: int) -> None:
        """By the store of the source."""
        self._runner.run(self._calls(src, dst))

    async def _calls(self, src: int, dst: int) -> None:
        starts = iter(range(0, len(self._order), self._batch))

        async def worker() -> None:
            for at in starts:
                cut = slice(at, at + self._batch)
                await self._stores[src].read(self._order[cut], self._rows[dst][cut])

        await asyncio.gather(*(worker() for _ in range(COPIERS)))

    def carry(self, src: int, dst: int) -> None:
        """By a transfer over both stores."""
        self._runner.run(carry(self._transfer, self._copies))

    def plan(self, src: int, dst: int) -> None:
        self._copies = copies(self._order, src, dst)

    def memcpy(self, src: int, dst: int) -> None:
        _copy(self._rows[dst], self._rows[src])

    def memcpy_twice(self, src: int, dst: int) -> None:
        """In two threads, half of the blocks each."""
        half = len(self._order) // 2
        parts = [(self._rows[dst][cut], self._rows[src][cut]) for cut in _halves(half)]
        list(self._threads.map(lambda part: _copy(*part), parts))


def measure(report: BenchReport, quick: bool) -> None:
    report.heading("Host <-> cpu device, scattered blocks, GB/s")
    nbytes = (64 if quick else 128) * MIB
    for kib in SIZES:
        with ExitStack() as stack:
            tiers = Tiers(stack, nbytes, kib * KIB)
            for name, src, dst in (("host -> device", 1, 0), ("device -> host", 0, 1)):
                _add(report, tiers, f"{name} {kib} KiB", src, dst, nbytes, 5 if quick else 11)


def _add(
    report: BenchReport, tiers: Tiers, what: str, src: int, dst: int, nbytes: int, number: int
) -> None:
    def rate(copy: Callable[[int, int], None]) -> float:
        tiers.plan(src, dst)
        return nbytes / seconds(lambda: copy(src, dst)) / 1e9

    measures = {
        "store": lambda: rate(tiers.store),
        "transfer": lambda: rate(tiers.carry),
        "memcpy, 1 thread": lambda: rate(tiers.memcpy),
        "memcpy, 2 threads": lambda: rate(tiers.memcpy_twice),
    }
    rounds = Rounds(measures, number)
    peer = max(list(measures)[2:], key=rounds.median)

    def figure(side: str, what: str) -> Figure:
        ours, against = rounds.median(side), rounds.median(peer)
        return Figure(what, ours, against, "GB/s", peer, rounds.ratio(side, peer))

    report.at_least(figure("store", what), BAR)
    report.note(figure("transfer", f"{what}, planned"))


def _shared(stack: ExitStack, nbytes: int, seed: int) -> Row:
    shared = SharedMemory.create("tierd-bench", nbytes)
    stack.callback(shared.close)
    shared.array[:] = memory(nbytes, seed)
    return shared.array


def _halves(half: int) -> Sequence[slice]:
    return slice(0, half), slice(half, None)


def _copy(targets: Sequence[Row], sources: Sequence[Row]) -> None:
    for target, source in zip(targets, sources, strict=True):
        np.copyto(target, source)
