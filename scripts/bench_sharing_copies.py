"""Copy-on-write: a writer's own copy of a block, made from the tier where the block lies.

A prompt takes the first half of a block that another one committed and that lies in one tier only.
What is timed is its acquire and the wait for the copy, beside the same of a prompt that finds
nothing, and so copies nothing; the difference stands beside np.copyto, or a direct read of a file
on the same disk, of as many bytes. The daemon counts the copies.
"""

import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from statistics import median
from time import perf_counter_ns

import numpy as np
from bench_blocks import memory
from bench_engine import fill, prompt
from bench_report import BenchReport, Figure
from bench_rounds import Rounds
from bench_sharing_stage import attached, moved, running

from tierd.layout import KVLayout
from tierd.pool import Pool

FINE = KVLayout("fine", 16, 2, 128, "bfloat16", granule=1)  # blocks of 256 KiB
BLOCK, BLOCK_NBYTES = 16, 256 << 10  # tokens, bytes
DEVICE = 64  # blocks
PUSHES = 10  # at most, until blocks lie where they should
BATCH = 16  # blocks in a round
PEERS = {"device": "np.copyto", "host": "np.copyto", "SSD": "O_DIRECT read"}
TIERS = tuple(PEERS)

Prompt = list[int]


class Blocks:
    """Prompts of a block each, and how they come to lie in one tier and no other."""

    def __init__(self, pool: Pool) -> None:
        self._pool, self._seeds = pool, count(1)
        self.copies = [0] * len(TIERS)  # made for the writers, by the tier of the block
        self.writers = [0] * len(TIERS)

    def new(self, number: int) -> list[Prompt]:
        return [prompt(next(self._seeds), BLOCK) for _ in range(number)]

    def lying(self, level: int) -> list[Prompt]:
        """Some that lie in the tier of that level."""
        prompts = self.new(BATCH)
        fill(self._pool, prompts)
        for _ in range(PUSHES):
            where = {int(self._pool.lookup(tokens)[-1]) for tokens in prompts}
            if where == {level}:
                return prompts
            if where != {0}:  # what is newer pushes them further down
                fill(self._pool, self.new(DEVICE - 1))
            self._clear()
        raise RuntimeError(f"blocks lie in tiers {where}, not in {level}")

    def _clear(self) -> None:
        """Have nothing in the device tier: whatever it has gives way to private places."""
        with self._pool.acquire(self.new(1)[0], room=DEVICE * BLOCK):
            pass

    def write(self, prompts: Sequence[Prompt]) -> float:
        """A writer for each, going on from its first half; median microseconds."""
        took = []
        for tokens in prompts:
            other = [*tokens[: BLOCK // 2], *prompt(0, BLOCK // 2)]
            begin = perf_counter_ns()
            lease = self._pool.acquire(other)
            lease.wait()
            took.append((perf_counter_ns() - begin) / 1e3)
            lease.release()
        return median(took)

    def copied(self, level: int) -> float:
        """As `write`, for blocks of one tier; the copies are counted."""
        prompts = self.lying(level)
        before = sum(moved(self._pool).values())
        took = self.write(prompts)
        self.copies[level] += sum(moved(self._pool).values()) - before
        self.writers[level] += len(prompts)
        return took


def measure(report: BenchReport, quick: bool) -> None:
    report.heading("Copy-on-write of a block of 256 KiB, by the tier where it lies, µs")
    with (
        running("16MiB", "24MiB", "1GiB") as on,
        attached(on, FINE) as pool,
        _plain(on.folder / "plain") as plain,
    ):
        blocks = Blocks(pool)
        measures: dict[str, Callable[[], float]] = {
            "nothing": lambda: blocks.write(blocks.new(BATCH)),
            **plain,
            **{tier: partial(blocks.copied, level) for level, tier in enumerate(TIERS)},
        }
        found = Rounds(measures, 3 if quick else 15)
    for level, (tier, peer) in enumerate(PEERS.items()):
        what, took = f"copy-on-write, {tier} -> device", found.values
        pairs = zip(took[tier], took["nothing"], took[peer], strict=True)
        added = [(mine - nothing, theirs) for mine, nothing, theirs in pairs]
        ours = median(mine for mine, _ in added)
        ratio = median(mine / theirs for mine, theirs in added)
        made = Figure(what, blocks.copies[level], blocks.writers[level], "copies", "writers")
        report.ratio_at_most(made, 1)
        report.note(Figure(f"{what}, what it adds", ours, found.median(peer), "µs", peer, ratio))


@contextmanager
def _plain(path: Path) -> Iterator[dict[str, Callable[[], float]]]:
    """The same bytes copied in memory, and read from a file in `path`: microseconds a block."""
    source = memory(BATCH * BLOCK_NBYTES)
    target = np.zeros_like(source)
    path.write_bytes(source.tobytes())
    page = mmap.mmap(-1, BLOCK_NBYTES)
    file = os.open(path, os.O_RDONLY | os.O_DIRECT)

    def each(copy: Callable[[int], object]) -> Callable[[], float]:
        def timed() -> float:
            took = []
            for at in range(0, len(source), BLOCK_NBYTES):
                begin = perf_counter_ns()
                copy(at)
                took.append((perf_counter_ns() - begin) / 1e3)
            return median(took)

        return timed

    def copyto(at: int) -> None:
        np.copyto(target[at : at + BLOCK_NBYTES], source[at : at + BLOCK_NBYTES])

    try:
        yield {
            "np.copyto": each(copyto),
            "O_DIRECT read": each(lambda at: os.preadv(file, [page], at)),
        }
    finally:
        os.close(file)
        page.close()
