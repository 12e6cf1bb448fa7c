"""One array of a volume as a block store: slots of slab files, written and read around zarr.

A block is served only if three agree: the row kept here, the trailer in its slot, and the checksum
of the bytes that were read. A slot about to be overwritten leaves the index first and comes back,
with a new sequence number, after its row is committed; so after a crash at any moment the old row
meets either the old bytes or a refusal. The store does not know budgets or other arrays.
"""

import asyncio
import errno
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial

import numpy as np
from crc32c import crc32c

from storage.base import BlockFault, BlockStore, CorruptBlock, Row
from storage.batch import check_batch, hop, hops, settle
from storage.catalog import Catalog
from storage.slab import PAGE, Trailer
from storage.slab_files import Scratch, SlabFiles

Failures = dict[int, OSError]


@dataclass(frozen=True, slots=True)
class Threads:
    """The threads of a volume. Loads have their own, so that none waits behind a store."""

    readers: Executor
    num_readers: int
    writers: Executor
    num_writers: int


class SsdStore(BlockStore):
    """The blocks of one array. Made, checkpointed and closed by its volume, in a thread."""

    def __init__(
        self,
        name: str,
        seed: int,
        files: SlabFiles,
        catalog: Catalog,
        threads: Threads,
        seqs: Iterator[int],
    ) -> None:
        self.block_nbytes = files.geometry.block_nbytes
        self.closed = False
        self._name = name
        self._seed = seed
        self._files = files
        self._catalog = catalog
        self._threads = threads
        self._seqs = seqs
        self._scratch = Scratch(files.geometry)
        made = set(files.made())
        num_slots = files.geometry.num_slots
        self._index = {
            slot: (seq, crc) for slot, seq, crc in catalog.proofs(name) if slot // num_slots in made
        }
        # What a killed life wrote is in the catalog and not yet in its slabs' indexes.
        self._dirty = made
        files.open()

    async def read(self, ids: Sequence[int], out: Sequence[Row]) -> None:
        check_batch(self.block_nbytes, ids, out)
        readers, cuts = self._threads.readers, hops(len(ids), self._threads.num_readers)
        await self._spread(readers, [partial(self._read, ids[cut], out[cut]) for cut in cuts])

    async def write(self, ids: Sequence[int], data: Sequence[Row], tags: Sequence[bytes]) -> None:
        check_batch(self.block_nbytes, ids, data, tags)
        writers, cuts = self._threads.writers, hops(len(ids), self._threads.num_writers)
        await self._spread(
            writers, [partial(self._write, ids[cut], data[cut], tags[cut]) for cut in cuts]
        )

    async def copy(self, src: int, dst: int) -> None:
        await self._spread(self._threads.writers, [partial(self._copy, src, dst)])

    async def flush(self) -> None:
        await hop(self._threads.writers, self.checkpoint)

    async def recover(self) -> list[tuple[int, bytes]]:
        return await hop(self._threads.readers, self._recover)

    async def close(self) -> None:
        if not self.closed:
            await hop(self._threads.writers, self.shut)

    def checkpoint(self) -> None:
        """Write the shard index of every slab that has changed; blocks."""
        for slab in list(self._dirty):
            self._dirty.discard(slab)  # first: what is published from here on makes it dirty again
            slots = [slot for slot in self._files.geometry.slots(slab) if slot in self._index]
            try:
                self._files.checkpoint(slab, slots)
            except OSError:
                self._dirty.add(slab)
                raise

    def shut(self) -> None:
        """Checkpoint and give back the files; blocks. The second time it does nothing."""
        if self.closed:
            return
        try:
            self.checkpoint()
        finally:
            self.closed = True
            self._files.close()

    async def _spread(self, executor: Executor, calls: Sequence[Callable[[], Failures]]) -> None:
        loop = asyncio.get_running_loop()
        futures = [loop.run_in_executor(executor, call) for call in calls]
        failed = {key: error for part in await settle(futures) for key, error in part.items()}
        if failed:
            raise BlockFault(failed)

    def _read(self, ids: Sequence[int], out: Sequence[Row]) -> Failures:
        failed: Failures = {}
        for slot, row in zip(ids, out, strict=True):
            try:
                self._load(slot, row)
            except OSError as error:
                failed[slot] = error
        return failed

    def _write(self, ids: Sequence[int], data: Sequence[Row], tags: Sequence[bytes]) -> Failures:
        """Write slots, commit their rows in one transaction, then publish them."""
        failed: Failures = {}
        written: list[Trailer] = []
        for slot, row, tag in zip(ids, data, tags, strict=True):
            self._index.pop(slot, None)
            try:
                written.append(self._store(slot, row, tag))
            except OSError as error:
                failed[slot] = error
        try:
            self._catalog.put(self._name, written)
        except OSError as error:
            return failed | dict.fromkeys((trailer.slot for trailer in written), error)
        for slot, seq, crc, _ in written:
            self._index[slot] = seq, crc
            self._dirty.add(self._files.geometry.locate(slot)[0])
        return failed

    def _copy(self, src: int, dst: int) -> Failures:
        try:
            trailer = self._load(src, self._scratch.row)
        except OSError as error:
            return {src: error}
        return self._write([dst], [self._scratch.row], [trailer.tag])

    def _store(self, slot: int, row: Row, tag: bytes) -> Trailer:
        scratch = self._scratch
        if not _is_aligned(row):
            np.copyto(scratch.row, row)
            row = scratch.row
        trailer = Trailer(slot, next(self._seqs), crc32c(row.data), tag)
        scratch.tail[:] = np.frombuffer(trailer.pack(self.block_nbytes, self._seed), np.uint8)
        self._files.write(slot, row, scratch.tail)
        return trailer

    def _load(self, slot: int, row: Row) -> Trailer:
        """Fill `row` with a block that proved to be the one in the index, else forget it."""
        proof = self._index.get(slot)
        try:
            if proof is None:
                raise CorruptBlock(errno.EIO, "nothing was written there")
            return self._prove(slot, row, *proof)
        except CorruptBlock as error:
            if proof is not None:
                self._forget(slot, proof[0])
            path = self._files.path(self._files.geometry.locate(slot)[0])
            what = f"array {self._name}, block {slot}: {error.strerror}"
            raise CorruptBlock(error.errno, what, str(path)) from None

    def _prove(self, slot: int, row: Row, seq: int, crc: int) -> Trailer:
        scratch = self._scratch
        target = row if _is_aligned(row) else scratch.row
        self._files.read(slot, target, scratch.tail)
        trailer = Trailer.parse(scratch.tail.tobytes(), self.block_nbytes, self._seed)
        if trailer is None:
            raise CorruptBlock(errno.EIO, "its trailer does not hold together")
        if (trailer.slot, trailer.seq, trailer.crc) != (slot, seq, crc):
            raise CorruptBlock(errno.EIO, f"slot {trailer.slot} at {trailer.seq}, not at {seq}")
        if crc32c(target.data) != crc:
            raise CorruptBlock(errno.EIO, "its bytes do not match its checksum")
        if target is not row:
            np.copyto(row, target)
        return trailer

    def _forget(self, slot: int, seq: int) -> None:
        self._index.pop(slot, None)
        self._dirty.add(self._files.geometry.locate(slot)[0])
        self._catalog.forget(self._name, slot, seq)

    def _recover(self) -> list[tuple[int, bytes]]:
        return [row for row in self._catalog.tags(self._name) if row[0] in self._index]


def _is_aligned(row: Row) -> bool:
    """Whether direct I/O takes the row as it is."""
    return row.flags.c_contiguous and row.__array_interface__["data"][0] % PAGE == 0
