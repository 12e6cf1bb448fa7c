"""What a block store is: equal blocks of bytes on one medium, each with an opaque tag.

A store knows nothing of tokens, hashes, reference counts or other stores; whoever calls it decides
what a block id means and never asks for two conflicting operations on one block at a time. Host
memory is the narrow waist: a store moves bytes between its blocks and *rows* (one-dimensional
uint8 arrays of exactly one block each, in host memory), so a new medium is two copy paths, never
one per other medium.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import numpy as np
import numpy.typing as npt

Row = npt.NDArray[np.uint8]
MAX_TAG_NBYTES = 2048


class BlockFault(OSError):
    """Some blocks of a batch failed; every block not in `failed` is done.

    `failed` maps a block id to what went wrong with it: an `OSError` of the medium, or
    `CorruptBlock` when the bytes are not those that were written.
    """

    def __init__(self, failed: Mapping[int, OSError]) -> None:
        first = next(iter(failed.items()))
        super().__init__(f"{len(failed)} blocks failed, the first: {first[0]}: {first[1]}")
        self.failed = dict(failed)


class CorruptBlock(OSError):
    """A block whose bytes are not what was written: bad checksum, wrong block, short read."""


class BlockStore(ABC):
    """Blocks of `block_nbytes` bytes (a multiple of 4096) under integer ids."""

    block_nbytes: int

    @abstractmethod
    async def read(self, ids: Sequence[int], out: Sequence[Row]) -> None:
        """Fill `out[i]` with block `ids[i]`.

        Raises `BlockFault` naming the blocks that failed; their rows then hold anything.
        """

    @abstractmethod
    async def write(self, ids: Sequence[int], data: Sequence[Row], tags: Sequence[bytes]) -> None:
        """Fill block `ids[i]` with `data[i]` and keep `tags[i]`, of at most `MAX_TAG_NBYTES`.

        Raises `BlockFault` naming the blocks that failed; those blocks then hold anything.
        A crash in the middle leaves each block whole, or one that `read` refuses.
        """

    @abstractmethod
    async def copy(self, src: int, dst: int) -> None:
        """Copy one block, and its tag, within the store."""

    async def flush(self) -> None:  # noqa: B027  # a volatile store has nothing to do
        """Make everything written so far readable to whoever opens the medium next."""

    async def recover(self) -> Iterable[tuple[int, bytes]]:
        """The id and tag of every block a previous life of the store left readable.

        Volatile stores have none.
        """
        return ()

    async def close(self) -> None:  # noqa: B027  # nor to give back
        """Flush, and give back what the store holds. The memory it was handed is its owner's."""


class MemoryStore(BlockStore):
    """A store whose blocks are rows of host memory already, so nothing needs to be staged."""

    @abstractmethod
    def rows(self, ids: Sequence[int]) -> list[Row]:
        """The blocks themselves, without a copy."""


@dataclass(frozen=True, slots=True)
class ArrayFacts:
    """One array of a volume: what was said of it when it was made, the bytes it occupies, and when
    it was last written (seconds since 1970, 0 if never)."""

    attributes: Mapping[str, object]
    block_nbytes: int
    nbytes: int
    written_at: float


@dataclass(frozen=True, slots=True)
class Slab:
    """A slab's number of blocks, and the bytes of the budget it may come to take."""

    num_blocks: int
    nbytes: int


class Durability(StrEnum):
    """When a block that was written survives a power cut. A crash of the process alone costs no
    block that was acknowledged, and neither ever makes a wrong one."""

    NONE = "none"  # after a flush, or when the system gets round to it
    BATCH = "batch"  # a moment after it is acknowledged, together with its neighbours
    SYNC = "sync"  # before it is acknowledged


class Volume(ABC):
    """A persistent medium: arrays of blocks by name, and one budget of bytes for all of them.

    Space is given out, and given back, a *slab* at a time. `slabs`, `slab`, `grow` and `nbytes` are
    bookkeeping and never wait; everything else may block and is called in a thread, never on an
    event loop.
    """

    @classmethod
    @abstractmethod
    def open(
        cls,
        path: Path,
        *,
        nbytes: int,
        min_free_nbytes: int,
        slab_nbytes: int,
        durability: Durability = Durability.BATCH,
    ) -> "Volume":
        """Open or create the volume at `path` and lock it; its owner may keep `policies` there.

        `nbytes` is the physical budget, `min_free_nbytes` what must stay free on the file system.
        Raises `BlockingIOError` if another process has it open, other `OSError`s of the medium.
        """

    @abstractmethod
    def arrays(self) -> Mapping[str, ArrayFacts]:
        """Every array the volume holds, opened or not."""

    @abstractmethod
    def array(self, name: str, block_nbytes: int, attributes: Mapping[str, object]) -> BlockStore:
        """Open the array `name`, or create it with `attributes` (JSON).

        Raises `ValueError` if it exists with another `block_nbytes`.
        """

    @abstractmethod
    def slab(self, name: str) -> Slab:
        """What any one slab of an open array holds, and what it takes."""

    @abstractmethod
    def slabs(self, name: str) -> list[range]:
        """The ids that array `name` has room for, in ascending order, a slab each.

        A slab that has been written to survives a restart, whatever lies, or no longer lies, before
        it; all of an array are of one length, and begin at multiples of it.
        """

    @abstractmethod
    def grow(self, name: str) -> range | None:
        """Reserve one more slab for an open array: the new ids, or None if the budget is spent."""

    @abstractmethod
    def limit(self, nbytes: int, min_free_nbytes: int) -> None:
        """From now on the volume has another budget, and leaves other room free; see `open`.

        What is over a smaller budget stays until it is given back or dropped; nothing grows before.
        Both hold even if this raises `OSError`.
        """

    @abstractmethod
    def give_back(self, name: str, ids: range) -> None:
        """Give one of `slabs(name)` of an open array back, with all that lies in it.

        Nobody reads or writes it from before the call on; other slabs keep their ids. It is gone
        only after what was written before, and may have been copied from it, is as durable as the
        volume's durability says. After an `OSError` the slab is there, perhaps with fewer blocks.
        """

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of the budget in use, by what the file system says plus what is reserved."""

    @abstractmethod
    def drop(self, name: str) -> None:
        """Delete an array that is not open, and its blocks."""

    @abstractmethod
    def close(self) -> None:
        """Flush every array, end the threads, release the lock."""
