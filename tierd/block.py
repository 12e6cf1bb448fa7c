"""A block's name and its place, and the state of a place.

A name (`BlockHash`) says what the bytes are, wherever they lie; a place (`BlockId`) says where in
one pool of one tier. Nothing here knows sizes, tiers or policies.
"""

from dataclasses import dataclass
from enum import Enum
from typing import NewType

BlockId = NewType("BlockId", int)
BlockHash = NewType("BlockHash", bytes)

HASH_NBYTES = 16


class State(Enum):
    """What a place is at the moment; every place is in exactly one of the five."""

    FREE = "free"
    LOADING = "loading"  # findable, not yet readable; its references are those who wait
    PRIVATE = "private"  # not findable, written by one lease
    COMMITTED = "committed"  # findable, immutable
    QUARANTINED = "quarantined"  # a dead engine may still write it


@dataclass(slots=True, eq=False)
class Block:
    """One place of a pool and what it holds. Only its pool changes it."""

    block_id: BlockId
    state: State = State.FREE
    ref_cnt: int = 0
    key: BlockHash | None = None
    parent: BlockHash | None = None  # the key of the block before it in its sequence
