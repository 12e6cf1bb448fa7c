"""The SSD store with checksums and catalog, beside the bare disk and stock zarr.

The bare disk is direct I/O of the same blocks, in the same order, a block a call, from four threads
into one preallocated file. Everything was written once before, so no side pays for new extents.
Blocks lie in runs of neighbours, as one prompt's do that was stored at once, or scattered.
"""

import asyncio
import os
import shutil
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import zarr
from bench_blocks import KIB, MIB, TAG, open_store, open_volume, rows, shuffled
from bench_report import BenchReport, Figure
from bench_rounds import Rounds, seconds
from zarr.storage import LocalStore

from storage.base import Durability, Row
from storage.ssd_store import SsdStore
from tierd.daemon.route import BATCH, batch_size

THREADS = 4
CALLS = 2  # of the store, each as large as StoreTransfer's: never fewer than one is under way
IN_FLIGHT = 16  # of zarr
RUN = 16  # neighbours
BARS = {256: (0.85, 0.90), 720: (0.85, 0.90), 64: (0.80, 0.90)}
ZARR_BARS = (2.5, 1.5)


class RawDisk:
    """One file, direct I/O, a block a call."""

    def __init__(self, path: Path, data: Sequence[Row], order: Sequence[int]) -> None:
        self._data, self._order = data, order
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
        os.posix_fallocate(self._fd, 0, len(order) * data[0].nbytes)
        self._threads = ThreadPoolExecutor(THREADS)

    def write(self) -> None:
        self._spread(os.pwritev)

    def read(self) -> None:
        self._spread(os.preadv)

    def _spread(self, call: Callable[[int, list[memoryview], int], int]) -> None:
        def part(first: int) -> None:
            for at in range(first, len(self._order), THREADS):
                row = self._data[at % len(self._data)]
                assert call(self._fd, [row.data], self._order[at] * row.nbytes) == row.nbytes

        list(self._threads.map(part, range(THREADS)))

    def close(self) -> None:
        self._threads.shutdown()
        os.close(self._fd)


class SlabDisk:
    """Our store: calls of a transfer's size, two at a time."""

    def __init__(self, store: SsdStore, data: Sequence[Row], order: Sequence[int]) -> None:
        self._store, self._data, self._order = store, data, order
        self._runner = asyncio.Runner()
        self._batch = batch_size(store.block_nbytes, memories=1)

    def write(self) -> None:
        self._runner.run(self._calls(self._write))

    def read(self) -> None:
        self._runner.run(self._calls(self._read))

    async def _calls(self, call: Callable[[list[int], list[Row]], object]) -> None:
        starts = iter(range(0, len(self._order), self._batch))

        async def worker() -> None:
            for at in starts:
                ids = list(self._order[at : at + self._batch])
                blocks = [self._data[i % len(self._data)] for i in range(at, at + len(ids))]
                await call(ids, blocks)  # type: ignore[misc]

        await asyncio.gather(*(worker() for _ in range(CALLS)))

    async def _write(self, ids: list[int], blocks: list[Row]) -> None:
        await self._store.write(ids, blocks, [TAG] * len(ids))

    async def _read(self, ids: list[int], blocks: list[Row]) -> None:
        await self._store.read(ids, blocks)

    def close(self) -> None:
        self._runner.close()


class ZarrDisk:
    """Stock zarr: a chunk a block, no codec, 16 coroutines. It writes to the page cache only."""

    def __init__(self, path: Path, data: Sequence[Row], order: Sequence[int]) -> None:
        self._data, self._order, self._path = data, order, path
        self._runner = asyncio.Runner()
        self._array = self._runner.run(self._create())

    async def _create(self) -> zarr.AsyncArray:
        nbytes = self._data[0].nbytes
        return await zarr.api.asynchronous.create_array(
            LocalStore(self._path), shape=(len(self._order), nbytes), chunks=(1, nbytes),
            dtype="uint8", compressors=None, filters=None, fill_value=0,
            config={"write_empty_chunks": True},
        )  # fmt: skip

    def write(self) -> None:
        self._runner.run(self._workers(self._write))

    def read(self) -> None:
        self._runner.run(self._workers(self._read))

    async def _workers(self, call: Callable[[int, Row], object]) -> None:
        numbers = iter(range(len(self._order)))

        async def worker() -> None:
            for at in numbers:
                await call(self._order[at], self._data[at % len(self._data)])  # type: ignore[misc]

        await asyncio.gather(*(worker() for _ in range(IN_FLIGHT)))

    async def _write(self, number: int, row: Row) -> None:
        await self._array.setitem((slice(number, number + 1),), row[None])

    async def _read(self, number: int, row: Row) -> None:
        row[:] = (await self._array.getitem((slice(number, number + 1),)))[0]

    def forget(self) -> None:
        """Have it on disk and out of the page cache."""
        for path in self._path.rglob("c/*/*"):
            fd = os.open(path, os.O_RDONLY)
            os.fdatasync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)

    def close(self) -> None:
        self._runner.close()


def measure(report: BenchReport, folder: Path, quick: bool) -> None:
    """Write and read at each size, then stock zarr, then what durability costs."""
    report.heading(f"SSD store, checksums and catalog on, up to {BATCH} blocks a call, MB/s")
    for kib in BARS:
        for run, name in ((RUN, "in runs"), (1, "scattered")):
            _against_raw(report, folder / f"raw-{kib}", kib, f"{kib} KiB {name}", run, quick)
    _against_zarr(report, folder / "zarr", quick)
    _durable(report, folder / "durable", quick)


def _blocks(kib: int, quick: bool, run: int = RUN) -> tuple[list[Row], list[int]]:
    """Some rows, and an order of blocks: `run` neighbours at a time."""
    runs = (64 if quick else 128) * MIB // (kib * KIB) // run
    return rows(64, kib * KIB), [first * run + i for first in shuffled(runs) for i in range(run)]


def _against_raw(
    report: BenchReport, folder: Path, kib: int, name: str, run: int, quick: bool
) -> None:
    data, order = _blocks(kib, quick, run)
    with ExitStack() as stack:
        slabs = _slabs(stack, folder, data, order)
        raw = RawDisk(folder / "raw", data, order)
        stack.callback(raw.close)
        for disk in (slabs, raw):
            disk.write()  # both have their extents initialised now
        sides = {"ours": slabs, "raw": raw}
        for verb, bar in zip(("write", "read"), BARS[kib], strict=True):
            rate = _rates(sides, verb, order, data, 3 if quick else 9)
            report.at_least(_figure(f"{verb} {name}", rate, "raw", "O_DIRECT, 4 threads"), bar)
    shutil.rmtree(folder)


def _against_zarr(report: BenchReport, folder: Path, quick: bool) -> None:
    data, order = _blocks(256, quick=True)
    with ExitStack() as stack:
        slabs = _slabs(stack, folder, data, order)
        stock = ZarrDisk(folder / "stock", data, order)
        stack.callback(stock.close)
        sides = {"ours": slabs, "zarr": stock}
        for verb, bar in zip(("write", "read"), ZARR_BARS, strict=True):
            rate = _rates(sides, verb, order, data, 3 if quick else 5, before=stock.forget)
            report.at_least(_figure(f"{verb} 256 KiB", rate, "zarr", "zarr AsyncArray"), bar)
            cpu = {name: _cpu(disk, verb, len(order)) for name, disk in sides.items()}
            what = f"{verb} 256 KiB, CPU a block"
            report.note(Figure(what, cpu["ours"], cpu["zarr"], "µs", "zarr AsyncArray"))
    shutil.rmtree(folder)


def _durable(report: BenchReport, folder: Path, quick: bool) -> None:
    data, order = _blocks(256, quick)
    with ExitStack() as stack:
        sides = {
            kind.value: _slabs(stack, folder / kind.value, data, order, kind)
            for kind in (Durability.BATCH, Durability.NONE)
        }
        for disk in sides.values():
            disk.write()
        rate = _rates(sides, "write", order, data, 3 if quick else 7)
        figure = Figure(
            "durable batch, write 256 KiB", rate.median("batch"), rate.median("none"), "MB/s",
            "durability none", rate.ratio("batch", "none"),
        )  # fmt: skip
        report.at_least(figure, 0.9)
    shutil.rmtree(folder)


def _slabs(
    stack: ExitStack, folder: Path, data: Sequence[Row], order: Sequence[int],
    durability: Durability = Durability.NONE,
) -> SlabDisk:  # fmt: skip
    """Without durability, because what it stands beside has none either."""
    volume = open_volume(folder / "volume", durability=durability)
    stack.callback(volume.close)
    disk = SlabDisk(open_store(volume, "a", data[0].nbytes, len(order)), data, order)
    stack.callback(disk.close)
    return disk


def _rates(
    sides: dict[str, RawDisk | SlabDisk | ZarrDisk] | dict[str, SlabDisk],
    verb: str, order: Sequence[int], data: Sequence[Row], rounds: int,
    before: Callable[[], None] = lambda: None,
) -> Rounds:  # fmt: skip
    """MB/s of every side."""

    def measured(disk: RawDisk | SlabDisk | ZarrDisk) -> float:
        before()
        return len(order) * data[0].nbytes / seconds(getattr(disk, verb)) / 1e6

    return Rounds({name: lambda d=disk: measured(d) for name, disk in sides.items()}, rounds)


def _cpu(disk: SlabDisk | ZarrDisk, verb: str, number: int) -> float:
    """Microseconds of this process a block."""
    begin = time.process_time()
    getattr(disk, verb)()
    return (time.process_time() - begin) / number * 1e6


def _figure(what: str, rate: Rounds, other: str, peer: str) -> Figure:
    ratio = rate.ratio("ours", other)
    return Figure(what, rate.median("ours"), rate.median(other), "MB/s", peer, ratio)
