"""One block to be copied from one tier to another: the word between deciding and moving bytes.

The planner emits copies in program order, as if each were instant; whoever carries them out may
reorder them, but never past a hazard (DESIGN §5, Loads).
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, Protocol

from tierd.block import Block, BlockHash, BlockId


class Outcome(Enum):
    """How a copy ended."""

    DONE = "done"
    FAILED = "failed"  # the bytes did not arrive
    LOST = "lost"  # the source itself is unreadable or corrupt
    CANCELLED = "cancelled"  # it was never begun


class Place(NamedTuple):
    """Where a block lies: level, layer group, place."""

    level: int
    group: int
    block_id: BlockId


@dataclass(frozen=True, slots=True, eq=False)
class Copy:
    """The block `key` (after `parent`) goes from `src` to `dst`, places of one or two pools.

    `holds_src`: the source is pinned for the copy's sake. A demotion's is not: its place may have
    a new owner already, who waits for the copy. `private`: the target is a lease's own, to be
    written further, and findable by no name; the source may then have no name either.
    """

    key: BlockHash | None
    parent: BlockHash | None
    group: int
    src_level: int
    src: Block
    dst_level: int
    dst: Block
    holds_src: bool
    private: bool = False

    @property
    def source(self) -> Place:
        return Place(self.src_level, self.group, self.src.block_id)

    @property
    def target(self) -> Place:
        return Place(self.dst_level, self.group, self.dst.block_id)


Settle = Callable[[Copy, Outcome], None]


class Transfer(Protocol):
    """Who carries copies out."""

    def submit(self, copies: Iterable[Copy], settle: Settle) -> None:
        """Begin `copies`; `settle(copy, outcome)` is called once for each, maybe already here.

        A copy waits for earlier ones that write its source or read or write its target. It fails
        if the one that writes its source fails.
        """

    def cancel(self, place: Place) -> None:
        """If the copy into `place` has not begun, settle it as cancelled now; else do nothing."""
