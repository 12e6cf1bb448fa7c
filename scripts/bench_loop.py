"""What an SSD block costs the event loop: CPU time of its thread, by a batched transfer.

Beside it the same blocks, one hop to a thread each, as an asyncio program would do at first.
"""

import asyncio
import shutil
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

from bench_blocks import KIB, MIB, TAG, carry, copies, memory, open_store, open_volume, shuffled
from bench_report import BenchReport, Figure
from bench_rounds import Rounds

from storage.host import HostStore
from storage.ssd_store import SsdStore
from tierd.daemon.transfer import StoreTransfer

SIZES = (64, 256)
BAR = 6.0  # microseconds
HOST, SSD = 0, 1


def measure(report: BenchReport, folder: Path, quick: bool) -> None:
    report.heading("Event loop, CPU a block, µs")
    for kib in SIZES:
        with ExitStack() as stack:
            number = (64 if quick else 128) * MIB // (kib * KIB)
            threads = stack.enter_context(ThreadPoolExecutor(1))
            volume = open_volume(folder / str(kib))
            stack.callback(volume.close)
            ssd = open_store(volume, "a", kib * KIB, number)
            host = HostStore(memory(number * kib * KIB), kib * KIB, threads)
            runner = stack.enter_context(asyncio.Runner())
            for name, src, dst in (("store", HOST, SSD), ("load", SSD, HOST)):
                rounds = _rounds(runner, host, ssd, shuffled(number), src, dst, 3 if quick else 5)
                ours, hop = rounds.median("ours"), rounds.median("hop")
                what, peer = f"{name} {kib} KiB, loop CPU a block", "a hop a block"
                report.limit(Figure(what, ours, hop, "µs", peer), BAR)
        shutil.rmtree(folder / str(kib))


def _rounds(
    runner: asyncio.Runner, host: HostStore, ssd: SsdStore, ids: Sequence[int],
    src: int, dst: int, number: int,
) -> Rounds:  # fmt: skip
    transfer = StoreTransfer([[host], [ssd]], lambda level: None)
    blocks = host.rows(ids)

    def batched() -> Coroutine[None, None, None]:
        return carry(transfer, copies(ids, src, dst))

    async def alone() -> None:
        calls = [
            ssd.read([i], [row]) if src == SSD else ssd.write([i], [row], [TAG])
            for i, row in zip(ids, blocks, strict=True)
        ]
        await asyncio.gather(*calls)

    def cpu(work: Callable[[], Coroutine[None, None, None]]) -> float:
        """Microseconds a block of this thread, which runs the loop and nothing else."""
        coroutine = work()
        begin = time.thread_time()
        runner.run(coroutine)
        return (time.thread_time() - begin) / len(ids) * 1e6

    return Rounds({"ours": lambda: cpu(batched), "hop": lambda: cpu(alone)}, number)
