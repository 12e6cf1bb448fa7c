"""One array of a volume as a block store: slots of slab files, written and read around zarr.

A block is served only if three agree: the row kept here, the trailer in its slot, and the checksum
of the bytes that were read. A slot about to be overwritten leaves the index first and comes back,
with a new sequence number, after its row is committed; so after a crash at any moment the old row
meets either the old bytes or a refusal. The store does not know budgets or other arrays.
"""

import asyncio
import errno
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial

import numpy as np
from crc32c import crc32c

from storage.base import BlockFault, BlockStore, CorruptBlock, Row
from storage.batch import check_batch, hop, hops, settle
from storage.catalog import Catalog
from storage.group_commit import GroupCommit
from storage.slab import PAGE, Trailer, prove
from storage.slab_files import Scratch, SlabFiles

Failures = dict[int, OSError]


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
        self._scratch = Scratch(files.geometry)
        made = set(files.made())
        num_slots = files.geometry.num_slots
        self._index = {
            slot: (seq, crc)
            for slot, seq, crc in self._catalog.proofs(name)
            if slot // num_slots in made
        }
        # Whose tags were told by the catalog, and not yet by the slots: a byte a slot.
        self._untold = bytearray(files.num_slabs * num_slots)
        for slot in self._index:
            self._untold[slot] = 1
        # What a killed life wrote is in the catalog and not yet in its slabs' indexes.
        self._dirty = made
        files.open()

    async def read(self, ids: Sequence[int], out: Sequence[Row]) -> None:
        check_batch(self.block_nbytes, ids, out)
        readers, cuts = self._shared.readers, hops(len(ids), self._shared.num_readers)
        await self._spread(readers, [partial(self._read, ids[cut], out[cut]) for cut in cuts])

    async def write(self, ids: Sequence[int], data: Sequence[Row], tags: Sequence[bytes]) -> None:
        check_batch(self.block_nbytes, ids, data, tags)
        writers, cuts = self._shared.writers, hops(len(ids), self._shared.num_writers)
        await self._spread(
            writers, [partial(self._write, ids[cut], data[cut], tags[cut]) for cut in cuts]
        )

    async def copy(self, src: int, dst: int) -> None:
        await self._spread(self._shared.writers, [partial(self._copy, src, dst)])

    async def flush(self) -> None:
        await hop(self._shared.writers, self.checkpoint)

    async def recover(self) -> list[tuple[int, bytes]]:
        return await hop(self._shared.readers, self._recover)

    async def close(self) -> None:
        if not self.closed:
            await hop(self._shared.writers, self.shut)

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
            self._shared.commits.commit()
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
        puts = zip(ids, data, tags, strict=True)
        return self._publish(
            {slot: partial(self._store, slot, row, tag) for slot, row, tag in puts}
        )

    def _copy(self, src: int, dst: int) -> Failures:
        row = self._scratch.row
        try:
            proof = self._load(src, row)
        except OSError as error:
            return {src: error}
        put = self._clone if self._shared.clones else self._store_copy
        return self._publish({dst: partial(put, src, dst, row, proof)})

    def _publish(self, puts: Mapping[int, Callable[[], Trailer]]) -> Failures:
        """Write slots, commit their rows in one transaction, then publish them."""
        failed: Failures = {}
        written: list[Trailer] = []
        for slot, put in puts.items():
            self._index.pop(slot, None)
            try:
                written.append(put())
            except OSError as error:
                failed[slot] = error
        slabs = {self._files.geometry.locate(trailer.slot)[0] for trailer in written}
        try:
            self._catalog.put(self._name, written)
            self._shared.commits.wrote(self._files, slabs, len(written))
        except OSError as error:
            return failed | dict.fromkeys((trailer.slot for trailer in written), error)
        for slot, seq, crc, _ in written:
            self._index[slot] = seq, crc
        self._dirty |= slabs
        return failed

    def _store(self, slot: int, row: Row, tag: bytes) -> Trailer:
        if not _is_aligned(row):
            np.copyto(self._scratch.row, row)
            row = self._scratch.row
        trailer = self._seal(slot, crc32c(row.data), tag)
        self._files.write(slot, row, self._scratch.tail)
        return trailer

    def _clone(self, src: int, dst: int, row: Row, proof: Trailer) -> Trailer:
        trailer = self._seal(dst, proof.crc, proof.tag)
        if self._files.clone(src, dst, self._scratch.tail):
            return trailer
        return self._store_copy(src, dst, row, proof)

    def _store_copy(self, src: int, dst: int, row: Row, proof: Trailer) -> Trailer:
        return self._store(dst, row, proof.tag)

    def _seal(self, slot: int, crc: int, tag: bytes) -> Trailer:
        """A new trailer, packed into the scratch's tail."""
        trailer = Trailer(slot, next(self._shared.seqs), crc, tag)
        packed = trailer.pack(self.block_nbytes, self._seed)
        self._scratch.tail[:] = np.frombuffer(packed, np.uint8)
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
        trailer = prove(scratch.tail.tobytes(), target, slot, seq, crc, self._seed)
        if slot < len(self._untold) and self._untold[slot]:
            tag = self._catalog.tag(self._name, slot, seq)
            if tag not in (trailer.tag, None):  # None: it was written again meanwhile
                raise CorruptBlock(errno.EIO, "the catalog has it under another tag")
            self._untold[slot] = 0
        if target is not row:
            np.copyto(row, target)
        return trailer

    def _forget(self, slot: int, seq: int) -> None:
        self._index.pop(slot, None)
        self._dirty.add(self._files.geometry.locate(slot)[0])
        self._catalog.forget(self._name, slot, seq)

    def _recover(self) -> list[tuple[int, bytes]]:
        """Only tags that came with the proof kept here: in a damaged catalog, a slot may have two
        rows."""
        tags, nothing = self._catalog.tags(self._name), (None, 0)
        return [(slot, tag) for slot, seq, tag in tags if self._index.get(slot, nothing)[0] == seq]


def _is_aligned(row: Row) -> bool:
    """Whether direct I/O takes the row as it is."""
    return row.flags.c_contiguous and row.__array_interface__["data"][0] % PAGE == 0
