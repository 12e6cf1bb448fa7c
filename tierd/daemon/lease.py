"""What an engine holds for one sequence: its block tables, the hit, and what it still waits for.

    tokens    0 ........ hit ........ committed ...... room
    blocks    | came with contents | frozen by this lease | may be written in place |

Leases share blocks: committed ones with anybody, private ones with their forks. A private block has
at most one lease that writes it; the others have *borrowed* it and copy it before they do (I5). A
lease is plain state: only the cache changes it. It knows no session and no socket.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from policies.base import NO_HINTS, Access, Hints
from tierd.block import Block, BlockHash, State
from tierd.errors import LeaseError


@dataclass(slots=True)
class Away:
    """One block of a suspended lease: where it lies below, and its name if it has one.

    `lost`: its bytes did not arrive there.
    """

    level: int
    block: Block
    key: BlockHash | None
    lost: bool = False

    @property
    def whole(self) -> bool:
        """Whether the place (still) holds what it was meant to."""
        return not self.lost and self.block.key == self.key


@dataclass(slots=True, eq=False)
class Lease:
    """Blocks of the tier at `level` held for one sequence, by layer group, in token order.

    `hit` is the planned hit until `ready`, then the one that stands. `None` in a table stands for
    a block that has slid out of a sliding window. `parked` are places the lease lost when its hit
    was cut short: the engine may write them until it has heard so. `notify(lease)` is called, never
    awaited, when a group became ready, or when the hit was cut short: the new tables then hold.
    """

    hashes: list[BlockHash]  # of every granule whose tokens are known
    tables: list[list[Block | None]]
    loading: list[set[Block]]  # by group: blocks of the hit whose bytes are not there yet
    level: int = 0  # of the tier that its engine has mapped
    hit: int = 0
    committed: int = 0
    room: int = 0  # tokens it has places for
    forked: int = 0  # tokens that it had from another lease when it began
    shortened: bool = False  # since the last notify
    released: bool = False
    borrowed: set[Block] = field(default_factory=set)  # private ones that it may not write
    tails: dict[int, BlockHash] = field(default_factory=dict)  # by group: the name of a used part
    away: Sequence[Sequence[Away | None]] | None = None  # by group, while it is suspended
    hints: Hints = NO_HINTS  # what the engine said of it last
    access: Access | None = None  # of the request that it was made for; None for a fork
    asked: int = 0  # tokens of that request's prompt, or of what was forked
    parked: list[tuple[int, Block]] = field(default_factory=list)  # `(group, block)`, see below
    notify: "Notify | None" = field(default=None, repr=False)

    @property
    def ready(self) -> bool:
        """Whether every block of the hit has its bytes."""
        return not any(self.loading)

    def check_here(self) -> None:
        """Raise LeaseError if it is released or suspended."""
        if self.released:
            raise LeaseError("the lease is released")
        if self.away is not None:
            raise LeaseError("the lease is suspended")

    def check_held(self) -> None:
        """Raise LeaseError unless all it has is in place."""
        self.check_here()
        if not self.ready:
            raise LeaseError("the lease is not ready: its hit is still on its way")

    def may_write(self, block: Block | None) -> bool:
        """Whether the block is this lease's to write in place: nobody else holds what it borrowed
        once the others are gone."""
        if block is None or block.state is not State.PRIVATE:
            return False
        return block not in self.borrowed or block.ref_cnt == 1


Notify = Callable[[Lease], None]
