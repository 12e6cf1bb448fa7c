"""Engines that ask without end, in processes of their own, and what a power cut does to a folder.

Every byte of every hit is checked against its block's name. An engine whose daemon is killed waits
for the next one; its counts are in a file that outlives both.
"""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from random import Random

import numpy as np

import tierd
from storage.base import CorruptBlock
from storage.survey import Survey
from tests.content import BLOCK, LAYOUT, ask, content, key_of, prompt
from tierd.errors import TierdError

PAGE = 4096
TRUNKS = 48  # prompts of up to 10 blocks: more than the SSD tier of 16 MiB holds
LONGEST = 10
_SLOTS = 4  # engines at once

trunk = cache(prompt)


class Tally:
    """Counts of the engines of one test, each in a row of its own, and whether they may ask."""

    def __init__(self, folder: Path) -> None:
        path = folder / "tally"
        if not path.exists():
            path.write_bytes(bytes(8 * 4 * _SLOTS))
        self.rows = np.memmap(path, np.int64, "r+", shape=(_SLOTS, 4))

    @property
    def going(self) -> bool:
        return bool(self.rows[0, 3])

    def go(self, going: bool) -> None:
        self.rows[0, 3] = going

    @property
    def requests(self) -> int:
        return int(self.rows[:, 0].sum())

    @property
    def blocks(self) -> int:
        """Blocks of hits, each checked byte by byte."""
        return int(self.rows[:, 1].sum())

    @property
    def wrong(self) -> int:
        return int(self.rows[:, 2].sum())


def ask_without_end(path: Path, folder: Path, slot: int, seed: int) -> None:
    """The engine's process."""
    tally, chance = Tally(folder), Random(seed)
    while True:
        try:
            with tierd.connect(path) as client, client.attach(LAYOUT) as pool:
                while True:
                    _ask_one(pool, tally, slot, chance)
        except AssertionError as error:
            tally.rows[slot, 2] += 1
            print(f"WRONG: {error}; the daemon is {path.exists()}", flush=True)
        except (TierdError, OSError):
            time.sleep(0.005)


def _ask_one(pool: tierd.Pool, tally: Tally, slot: int, chance: Random) -> None:
    if not tally.going:
        time.sleep(0.002)
        return
    tokens = trunk(chance.randrange(TRUNKS), chance.randint(1, LONGEST) * BLOCK)
    tally.rows[slot, 1] += ask(pool, tokens) // BLOCK
    tally.rows[slot, 0] += 1


def engine(path: Path, folder: Path, slot: int, seed: int) -> BaseProcess:
    """Start one; from a server that has our modules loaded, so that it takes no time."""
    context = get_context("forkserver")
    context.set_forkserver_preload(["tests.torture"])
    process = context.Process(target=ask_without_end, args=(path, folder, slot, seed))
    process.start()
    return process


def kill9(process: BaseProcess) -> None:
    process.kill()
    process.join()
    process.close()


@contextmanager
def engines(path: Path, folder: Path, count: int, seed: int) -> Iterator[Tally]:
    """`count` of them, which ask while the tally goes."""
    tally = Tally(folder)
    running = [engine(path, folder, slot, seed + slot) for slot in range(count)]
    try:
        yield tally
    finally:
        for process in running:
            kill9(process)


@dataclass
class Count:
    """Blocks of a folder: those that prove to be what their names say, refused ones, wrong ones."""

    kills: int = 0
    right: int = 0
    refused: int = 0
    wrong: list[str] = field(default_factory=list)

    def blocks_of(self, ssd: Path) -> None:
        """Read every block as the daemon would find it, and change nothing."""
        with Survey(ssd) as survey:
            assert not survey.unreadable
            for array in survey.arrays:
                for block in array.blocks:
                    if not block.tag:
                        continue  # it was a resting sequence's own
                    try:
                        data = array.read(block)
                    except CorruptBlock:
                        self.refused += 1
                        continue
                    if data == content(key_of(block.tag), 0, len(data)):
                        self.right += 1
                    else:
                        self.wrong.append(f"slot {block.slot} at {block.seq}")


def orphans(ssd: Path) -> list[str]:
    """Files of a volume that no daemon would count."""
    known = {"LOCK", "catalog.sqlite", "catalog.sqlite-wal", "catalog.sqlite-shm"}
    found = [Path(folder, name) for folder, _, names in os.walk(ssd) for name in names]
    for path in (ssd / "store.zarr").glob("*/"):
        slabs = list(path.glob("c/*/0"))
        [size, *others] = {size for slab in slabs if (size := _size(slab))} or {0}
        assert not others, f"slabs of {size} and {others} bytes"
        known |= {str(slab.relative_to(ssd)) for slab in slabs}
        known.add(f"store.zarr/{path.name}/zarr.json")
        known.add(f"policies/{path.name.rpartition('-')[0]}")
    there = {str(path.relative_to(ssd)) for path in found if path.exists()}  # not swept since
    return sorted(there - known - {"store.zarr/zarr.json"})


def _size(path: Path) -> int:
    """Of a file that a daemon may delete meanwhile."""
    with suppress(FileNotFoundError):
        return path.stat().st_size
    return 0


class PowerCut:
    """Does to a volume's files what a power cut may: writes that came late, torn or never."""

    def __init__(self, ssd: Path, seed: int) -> None:
        self._ssd, self._chance = ssd, Random(seed)
        self._old: dict[Path, bytes] = {}

    def remember(self) -> None:
        """What is on the medium now, and may come back."""
        for path in (*self._slabs(), self._ssd / "catalog.sqlite"):
            if self._chance.random() < 0.3 or path not in self._old:
                self._old[path] = path.read_bytes()

    def strike(self) -> str:
        """Damage one to three files; what was done."""
        verbs: list[Callable[[Path], None]]
        done = []
        for _ in range(self._chance.randint(1, 3)):
            if self._chance.random() < 0.6 and self._slabs():
                path = self._chance.choice(self._slabs())
                verbs = [self._flip, self._cut, self._zero, self._put_back_pages]
            else:
                logs = [self._ssd / f"catalog.sqlite{end}" for end in ("", "", "-wal")]
                path = self._chance.choice([log for log in logs if log.exists()] or logs[:1])
                verbs = [self._flip, self._cut, self._zero, Path.unlink, self._put_back]
            if path.exists() and path.stat().st_size:
                verb = self._chance.choice(verbs)
                verb(path)
                done.append(f"{verb.__name__} {path.name}")
        return ", ".join(done)

    def _slabs(self) -> list[Path]:
        return sorted(self._ssd.glob("store.zarr/*/c/*/0"))

    def _flip(self, path: Path) -> None:
        with path.open("r+b") as file:
            for _ in range(self._chance.randint(1, 32)):
                at = self._chance.randrange(path.stat().st_size)
                [byte] = os.pread(file.fileno(), 1, at)
                os.pwrite(file.fileno(), bytes([byte ^ 1 << self._chance.randrange(8)]), at)

    def _cut(self, path: Path) -> None:
        os.truncate(path, self._chance.randrange(path.stat().st_size))

    def _zero(self, path: Path) -> None:
        at = self._chance.randrange(path.stat().st_size) // PAGE * PAGE
        nbytes = min(self._chance.randint(1, 40) * PAGE, path.stat().st_size - at)
        with path.open("r+b") as file:
            os.pwrite(file.fileno(), bytes(nbytes), at)

    def _put_back_pages(self, path: Path) -> None:
        """Some pages as they were: slots that are stale, whole or in part."""
        old = self._old.get(path, b"")
        with path.open("r+b") as file:
            for at in range(0, min(len(old), path.stat().st_size), PAGE):
                if self._chance.random() < 0.5:
                    os.pwrite(file.fileno(), old[at : at + PAGE], at)

    def _put_back(self, path: Path) -> None:
        """The catalog as it was, with or without today's log."""
        if old := self._old.get(path):
            path.write_bytes(old)
        if self._chance.random() < 0.5:
            path.with_name("catalog.sqlite-wal").unlink(missing_ok=True)
