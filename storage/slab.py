"""The bytes of a slab: one Zarr v3 shard whose inner chunks are fixed, page-aligned slots.

    slab   | shard index, zeros up to a page | slot 0 | slot 1 | ...
    slot   | payload | crc32c of it, 4 bytes LE | trailer | zeros up to a page
           '------ the chunk, to zarr ----------'-- unused space, to zarr -----'

A slot proves itself: its trailer says which slot it is, when it was written and under which tag,
and its own checksum, seeded with the array's name, covers all of that and the payload's checksum.
The shard index is for foreign readers only. Nothing here does I/O.
"""

import errno
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import numpy as np
from crc32c import crc32c

from storage.base import CorruptBlock, Row

PAGE = 4096
CRC_NBYTES = 4
MAGIC = b"tierd\x00s1"
MOST_A_CALL = 512  # slots of two pieces each: IOV_MAX
EXTENTS_A_PAGE = 340  # of an ext4 extent tree
_TRAILER = struct.Struct("<I8sQQQH")  # payload crc, magic, slot, seq, payload bytes, tag bytes
_CRC = struct.Struct("<I")
_FREE = np.uint64(2**64 - 1)


@dataclass(frozen=True, slots=True)
class Geometry:
    """Where the slots of a slab lie."""

    block_nbytes: int
    num_slots: int

    @classmethod
    def fitting(cls, block_nbytes: int, slab_nbytes: int) -> Self:
        """As many slots as `slab_nbytes` of disk can hold, at least one."""
        if block_nbytes <= 0 or block_nbytes % PAGE:
            raise ValueError(f"blocks of {block_nbytes} bytes; a multiple of {PAGE} is needed")
        num_slots = max(1, slab_nbytes // (block_nbytes + PAGE))
        while num_slots > 1 and cls(block_nbytes, num_slots).footprint > slab_nbytes:
            num_slots -= 1
        return cls(block_nbytes, num_slots)

    @property
    def stride(self) -> int:
        return self.block_nbytes + PAGE

    @property
    def index_nbytes(self) -> int:
        return -(-(16 * self.num_slots + CRC_NBYTES) // PAGE) * PAGE

    @property
    def file_nbytes(self) -> int:
        return self.index_nbytes + self.num_slots * self.stride

    @property
    def footprint(self) -> int:
        """The most a slab can occupy: filling preallocated space piecemeal fragments it, and the
        file system charges the file for the pages that list its extents, a third full at worst."""
        return self.file_nbytes + PAGE * (2 + 3 * self.num_slots // EXTENTS_A_PAGE)

    def locate(self, slot: int) -> tuple[int, int]:
        """The slab of an array's slot, and the offset in its file."""
        slab, place = divmod(slot, self.num_slots)
        return slab, self.index_nbytes + place * self.stride

    def slots(self, slab: int) -> range:
        return range(slab * self.num_slots, (slab + 1) * self.num_slots)

    def runs(self, slots: Sequence[int]) -> Iterator[slice]:
        """Cut ascending slots where one call of the system ends: into neighbours in one slab."""
        start = 0
        for at in range(1, len(slots) + 1):
            if (
                at == len(slots)
                or slots[at] != slots[at - 1] + 1
                or slots[at] % self.num_slots == 0
                or at - start == MOST_A_CALL
            ):
                yield slice(start, at)
                start = at


class Trailer(NamedTuple):
    """What a slot says of itself; also its row of the catalog."""

    slot: int
    seq: int
    crc: int
    tag: bytes

    def pack(self, block_nbytes: int, seed: int) -> bytes:
        """The slot's tail page."""
        head = _TRAILER.pack(self.crc, MAGIC, self.slot, self.seq, block_nbytes, len(self.tag))
        body = head + self.tag
        return (body + _CRC.pack(crc32c(body, seed))).ljust(PAGE, b"\0")

    @classmethod
    def parse(cls, page: bytes, block_nbytes: int, seed: int) -> Self | None:
        """The trailer of a tail page, or None if it does not hold together."""
        crc, magic, slot, seq, nbytes, num_tag = _TRAILER.unpack_from(page)
        end = _TRAILER.size + num_tag
        if magic != MAGIC or nbytes != block_nbytes or end + CRC_NBYTES > PAGE:
            return None
        if _CRC.unpack_from(page, end)[0] != crc32c(page[:end], seed):
            return None
        return cls(slot, seq, crc, bytes(page[_TRAILER.size : end]))


# What is known of a slot's trailer beforehand: its slot, seq, crc and tag, maybe as a plain tuple,
# for there are millions of them.
Proof = tuple[int, int, int, bytes]


def seed_of(volume: str, array: str) -> int:
    """What a slot's trailer is checked with, so that no other array's slot passes for it."""
    return crc32c(f"{volume}/{array}".encode())


def prove(page: bytes, payload: Row, proof: Proof, seed: int) -> Trailer:
    """The trailer of a slot that holds what `proof` says of it, else `CorruptBlock`."""
    slot, seq, crc, tag = proof
    trailer = Trailer.parse(page, payload.nbytes, seed)
    if trailer is None:
        raise CorruptBlock(errno.EIO, "its trailer does not hold together")
    if (trailer.slot, trailer.seq, trailer.crc) != (slot, seq, crc):
        raise CorruptBlock(errno.EIO, f"slot {trailer.slot} at {trailer.seq}, not at {seq}")
    if trailer.tag != tag:
        raise CorruptBlock(errno.EIO, "the catalog has it under another tag")
    if crc32c(payload.data) != crc:
        raise CorruptBlock(errno.EIO, "its bytes do not match its checksum")
    return trailer


def shard_index(geometry: Geometry, slots: Iterable[int]) -> bytes:
    """The index of a slab in which only `slots` hold a block, padded to whole pages."""
    entries = np.full((geometry.num_slots, 2), _FREE, "<u8")
    for slot in slots:
        offset = geometry.locate(slot)[1]
        entries[slot % geometry.num_slots] = offset, geometry.block_nbytes + CRC_NBYTES
    body = entries.tobytes()
    return (body + _CRC.pack(crc32c(body))).ljust(geometry.index_nbytes, b"\0")
