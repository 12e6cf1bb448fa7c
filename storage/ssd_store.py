"""One array of a volume as a block store: slots of slab files, written and read around zarr.

A block is served only if three agree: the row kept here, the trailer in its slot, and the checksum
of the bytes that were read. A slot about to be overwritten leaves the index first and comes back,
with a new sequence number, after its row is committed; so after a crash at any moment the old row
meets either the old bytes or a refusal. The store does not know budgets or other arrays.
"""

import errno
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import NamedTuple

import numpy as np
from crc32c import crc32c

from storage.base import BlockFault, BlockStore, CorruptBlock, Row
from storage.batch import HOP, check_batch, hop, hops, settle
from storage.catalog import Catalog
from storage.group_commit import GroupCommit
from storage.slab import PAGE, Proof, Trailer, prove
from storage.slab_files import Failures, Scratch, SlabFiles

_slot = itemgetter(0)


@dataclass(frozen=True, slots=True)
class Shared:
    """What the arrays of a volume share. Loads have threads of their own, so that none waits
    behind a store."""

    catalog: Catalog
    commits: GroupCommit
    seqs: Iterator[int]
    readers: Executor
    num_readers: int
    writers: Executor
    num_writers: int
    clones: bool  # the file system copies by sharing: worth asking it


class _Known(NamedTuple):
    """A block of the index that is wanted: where its bytes go, and what they must prove."""

    slot: int
    row: Row
    proof: Proof


class SsdStore(BlockStore):
    """The blocks of one array. Made, checkpointed and closed by its volume, in a thread."""

    def __init__(self, name: str, seed: int, files: SlabFiles, shared: Shared) -> None:
        self.block_nbytes = files.geometry.block_nbytes
        self.closed = False
        self._name = name
        self._seed = seed
        self._files = files
        self._shared = shared
        self._catalog = shared.catalog
        self._scratch = Scratch(files.geometry, HOP)
        made, num_slots = set(files.made()), files.geometry.num_slots
        self._index: dict[int, Proof] = {}
        for rows in self._catalog.rows(name):
            self._index |= {row[0]: row for row in rows if row[0] // num_slots in made}
        # What a killed life wrote is in the catalog and not yet in its slabs' indexes.
        self._dirty = made
        self._checkpointing = threading.Lock()
        files.open()

    async def read(self, ids: Sequence[int], out: Sequence[Row]) -> None:
        check_batch(self.block_nbytes, ids, out)
        gets = sorted(zip(ids, out, strict=True), key=_slot)
        readers, cuts = self._shared.readers, hops(len(gets), self._shared.num_readers)
        await self._spread(readers, [partial(self._read, gets[cut]) for cut in cuts])

    async def write(self, ids: Sequence[int], data: Sequence[Row], tags: Sequence[bytes]) -> None:
        check_batch(self.block_nbytes, ids, data, tags)
        puts = sorted(zip(ids, data, tags, strict=True), key=_slot)
        writers, cuts = self._shared.writers, hops(len(puts), self._shared.num_writers)
        await self._spread(writers, [partial(self._write, puts[cut]) for cut in cuts])

    async def copy(self, src: int, dst: int) -> None:
        await self._spread(self._shared.writers, [partial(self._copy, src, dst)])

    async def flush(self) -> None:
        await hop(self._shared.writers, self.checkpoint)

    async def recover(self) -> Iterator[tuple[int, bytes]]:
        return self._recovered()

    async def close(self) -> None:
        if not self.closed:
            await hop(self._shared.writers, self.shut)

    def checkpoint(self) -> None:
        """Write the shard index of every slab that has changed; blocks."""
        for slab in list(self._dirty):
            with self._checkpointing:
                if slab in self._dirty:
                    self._checkpoint(slab)

    def _checkpoint(self, slab: int) -> None:
        self._dirty.discard(slab)  # first: what is published from here on makes it dirty again
        slots = [slot for slot in self._files.geometry.slots(slab) if slot in self._index]
        try:
            self._files.checkpoint(slab, slots)
        except OSError:
            self._dirty.add(slab)
            raise

    def vacate(self, slab: int) -> None:
        """Give a slab back whose blocks nobody wants any more; blocks.

        In this order a crash at any moment leaves blocks that prove themselves, in a slab that
        counts, or no trace of them; what was copied elsewhere is durable before.
        """
        slots = self._files.geometry.slots(slab)
        with self._checkpointing:
            self._shared.commits.commit()
            for slot in slots:
                self._index.pop(slot, None)
            self._catalog.vacate(self._name, slots)
            self._dirty.discard(slab)
            self._files.drop(slab)

    def shut(self) -> None:
        """Checkpoint and give back the files; blocks. The second time it does nothing."""
        if self.closed:
            return
        try:
            self._shared.commits.commit()
            self.checkpoint()
        finally:
            self.closed = True
            self._files.close()

    async def _spread(self, executor: Executor, calls: Sequence[Callable[[], Failures]]) -> None:
        parts = await settle([executor.submit(call) for call in calls])
        failed = {key: error for part in parts for key, error in part.items()}
        if failed:
            raise BlockFault(failed)

    def _read(self, gets: Sequence[tuple[int, Row]]) -> Failures:
        """Fill rows with blocks, in the order of their slots."""
        failed: Failures = {}
        known: list[_Known] = []
        for slot, row in gets:
            if (proof := self._index.get(slot)) is not None:
                known.append(_Known(slot, row, proof))
            else:
                failed[slot] = self._refusal(slot, "nothing was written there")
        for run in self._runs([block.slot for block in known], [block.row for block in known]):
            failed |= self._load(known[run])[1]
        return failed

    def _write(self, puts: Sequence[tuple[int, Row, bytes]]) -> Failures:
        """Write slots, in their order, then commit their rows in one transaction."""
        for slot, *_ in puts:
            self._index.pop(slot, None)
        failed: Failures = {}
        written: list[Trailer] = []
        for run in self._runs([slot for slot, *_ in puts], [row for _, row, _ in puts]):
            trailers, wrong = self._store(puts[run])
            failed |= wrong
            written += trailers
        return failed | self._publish(written)

    def _copy(self, src: int, dst: int) -> Failures:
        row, proof = self._scratch.row, self._index.get(src)
        if proof is None:
            return {src: self._refusal(src, "nothing was written there")}
        found, failed = self._load([_Known(src, row, proof)])
        if failed:
            return failed
        self._index.pop(dst, None)
        try:
            copied = self._clone(src, dst, found[0]) if self._shared.clones else []
        except OSError as error:
            return {dst: error}
        if not copied:
            copied, failed = self._store([(dst, row, found[0].tag)])
        return failed | self._publish(copied)

    def _publish(self, written: Sequence[Trailer]) -> Failures:
        """Commit the rows of slots that are written, then publish them."""
        if not written:
            return {}
        slabs = {self._files.geometry.locate(trailer.slot)[0] for trailer in written}
        try:
            self._catalog.put(self._name, written)
            self._shared.commits.wrote(self._files, slabs, len(written))
        except OSError as error:
            return dict.fromkeys((trailer.slot for trailer in written), error)
        for trailer in written:
            self._index[trailer.slot] = trailer
        self._dirty |= slabs
        return {}

    def _runs(self, slots: Sequence[int], rows: Sequence[Row]) -> Iterator[slice]:
        """Cut ascending slots into runs; each is one if there is a row that direct I/O does not
        take as it is, because there is but one row of scratch."""
        if all(map(_is_aligned, rows)):
            return self._files.geometry.runs(slots)
        return (slice(at, at + 1) for at in range(len(slots)))

    def _store(self, puts: Sequence[tuple[int, Row, bytes]]) -> tuple[list[Trailer], Failures]:
        """Write a run; the trailers of those that are written, and what failed."""
        slots, rows = [slot for slot, *_ in puts], [row for _, row, _ in puts]
        if not _is_aligned(rows[0]):
            np.copyto(self._scratch.row, rows[0])
            rows = [self._scratch.row]
        tails = self._scratch.tails[: len(puts)]
        trailers = [
            self._seal(slot, crc32c(row.data), tag, tail)
            for (slot, _, tag), row, tail in zip(puts, rows, tails, strict=True)
        ]
        failed = self._files.write(slots, rows, tails)
        return [trailer for trailer in trailers if trailer.slot not in failed], failed

    def _clone(self, src: int, dst: int, proof: Trailer) -> list[Trailer]:
        """The trailer of a copy that the file system made, or nothing if it refuses."""
        tail = self._scratch.tails[0]
        trailer = self._seal(dst, proof.crc, proof.tag, tail)
        return [trailer] if self._files.clone(src, dst, tail) else []

    def _seal(self, slot: int, crc: int, tag: bytes, tail: Row) -> Trailer:
        """A new trailer, packed into `tail`."""
        trailer = Trailer(slot, next(self._shared.seqs), crc, tag)
        tail.data[:] = trailer.pack(self.block_nbytes, self._seed)
        return trailer

    def _load(self, run: Sequence[_Known]) -> tuple[list[Trailer], Failures]:
        """Fill the rows of a run with blocks that prove to be those in the index, and forget those
        that do not; the trailers of the ones, and what is wrong with the others."""
        slots, rows = [block.slot for block in run], [block.row for block in run]
        if not _is_aligned(rows[0]):
            rows = [self._scratch.row]
        tails = self._scratch.tails[: len(run)]
        failed, trailers = self._files.read(slots, rows, tails), []
        for block, row, tail in zip(run, rows, tails, strict=True):
            try:
                if block.slot in failed:
                    raise failed[block.slot]
                trailers.append(self._prove(block, row, tail))
            except CorruptBlock as error:
                failed[block.slot] = self._forget(block, str(error.strerror))
            except OSError as error:
                failed[block.slot] = error
        return trailers, failed

    def _prove(self, block: _Known, row: Row, tail: Row) -> Trailer:
        trailer = prove(tail.tobytes(), row, block.proof, self._seed)
        if row is not block.row:
            np.copyto(block.row, row)
        return trailer

    def _refusal(self, slot: int, why: str) -> CorruptBlock:
        path = self._files.path(self._files.geometry.locate(slot)[0])
        return CorruptBlock(errno.EIO, f"array {self._name}, block {slot}: {why}", str(path))

    def _forget(self, block: _Known, why: str) -> OSError:
        """Drop a block that is not what it should be; what to say of it."""
        slot, seq, *_ = block.proof
        self._index.pop(slot, None)
        self._dirty.add(self._files.geometry.locate(slot)[0])
        try:
            self._catalog.forget(self._name, slot, seq)
        except OSError as error:
            return error
        return self._refusal(slot, why)

    def _recovered(self) -> Iterator[tuple[int, bytes]]:
        """In the thread, and at the pace, of whoever wants them: there may be millions."""
        for slot, _, _, tag in list(self._index.values()):
            yield slot, tag


def _is_aligned(row: Row) -> bool:
    """Whether direct I/O takes the row as it is."""
    return row.flags.c_contiguous and row.__array_interface__["data"][0] % PAGE == 0
