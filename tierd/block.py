"""A block's name and its place, and the state of a place.

A name (`BlockHash`) says what the bytes are, wherever they lie; a place (`BlockId`) says where in
one pool of one tier. Nothing here knows sizes, tiers or policies.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NewType

BlockId = NewType("BlockId", int)
BlockHash = NewType("BlockHash", bytes)

HASH_NBYTES = 16


class State(IntEnum):
    """What a place is at the moment; every place is in exactly one of the five."""

    FREE = 0
    LOADING = 1  # findable, not yet readable; its references are those who wait
    PRIVATE = 2  # not findable, written by one lease, perhaps held by several
    COMMITTED = 3  # findable, immutable
    QUARANTINED = 4  # a dead engine may still write it

    @property
    def word(self) -> str:
        """The state's name as people read it."""
        return self.name.lower()


@dataclass(slots=True, eq=False)
class Block:
    """One place of a pool and what it holds. Only its pool changes it."""

    block_id: BlockId
    state: State = State.FREE
    ref_cnt: int = 0
    key: BlockHash | None = None
    parent: BlockHash | None = None  # the key of the block before it in its sequence
    inner: Sequence[BlockHash] = ()  # the names of its granules but the last, whose is the key
