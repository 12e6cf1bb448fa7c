"""What an engine holds for one sequence, on the engine's side.

It always knows what may be written in place, so a decode step needs no message until a block fills.
Messages go through its pool, a batch at a time.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Self

import numpy as np
import numpy.typing as npt

from tierd import protocol
from tierd.errors import DaemonLost, LeaseError
from tierd.hints import Hints
from tierd.prefix import PrefixChain, Tokens, token_array
from tierd.protocol import StepRequest

if TYPE_CHECKING:
    from tierd.pool import Pool


class Lease:
    """What this engine holds for one sequence.

        0 ......... hit ......... committed ......... room
        filled by the daemon | frozen, shared | may be written in place

    `tables[g]` are the block ids of group g in token order, int32; -1 where a window has slid past.
    Until `wait` returns, `hit` is planned: a load that fails makes it shorter, and the tables then
    differ past it. `hints`: what was said of it so far.
    """

    def __init__(
        self,
        pool: "Pool",
        number: int,
        chain: PrefixChain,
        num_tokens: int,
        hints: Hints | None = None,
    ) -> None:
        self.number, self.hints = number, hints
        self.hit = self.committed = self.room = 0
        self.num_tokens = num_tokens  # whose ids are known
        self.tables: list[npt.NDArray[np.int32]] = []
        self.released = self.suspended = False
        self._pool, self._chain = pool, chain
        self._ready = 0
        self._sent = len(chain.hashes)  # hashes the daemon knows
        self._frozen = 0  # tokens the daemon was told are committed
        self._forked = 0  # tokens that a fork has of this

    def wait(self, group: int | None = None) -> int:
        """Wait until a group's (default: every group's) hit is in place; returns the hit.

        It is the one that stands as far as the groups waited for know. Where it is shorter than
        planned, compute from there on.
        """
        self.check()
        wanted = self._all_ready if group is None else 1 << group
        while not self._pool.client.await_push(lambda: self._ready & wanted == wanted):
            pass
        if self.room < self.num_tokens and group is None:
            self.extend(self.num_tokens)  # a hit cut short under pressure gave its room back
        return self.hit

    def append(self, tokens: Tokens) -> None:
        """The sequence goes on with `tokens`, whose K and V are not (all) written yet."""
        ids = token_array(tokens)
        self._chain.append(ids)
        self.num_tokens += len(ids)

    def extend(self, room: int) -> None:
        """Have places for `room` tokens. Raises OutOfBlocks, nothing changed."""
        self._pool.advance([(self, self.committed, room)])

    def commit(self, num_tokens: int) -> None:
        """K and V of the first `num_tokens` are written in every layer: full blocks are frozen."""
        self._pool.advance([(self, num_tokens, 0)])

    def publish(self, num_tokens: int | None = None) -> None:
        """As `commit` (default: all its tokens), and whole granules of the partly filled blocks
        too: other processes find them all. Whoever goes on writes a copy of those, this lease too;
        what it has written past `num_tokens` is to be written again.
        """
        length = self.num_tokens if num_tokens is None else num_tokens
        if self.room <= length and self._shared:
            self.extend(length + 1)  # its tail may be another's to write
        self._pool.publish([(self, length)])

    def fork(self, num_tokens: int | None = None) -> "Lease":
        """Another lease of the first `num_tokens` (default: all), whose K and V are written.

        They share every block until one of them goes on: that one gets its own copy, made where the
        block lies, when it asks for room. The fork has none yet. Raises LeaseError.
        """
        length = self.num_tokens if num_tokens is None else num_tokens
        return self._pool.fork([(self, length)])[0]

    def truncate(self, num_tokens: int) -> None:
        """Go back to the first `num_tokens`: rejected tokens are as if never written.

        Costs no message where they were nobody else's and in no frozen block. Raises LeaseError
        where a sliding window has passed.
        """
        self._pool.truncate([(self, num_tokens)])

    def suspend(self, num_tokens: int | None = None) -> None:
        """Give the places in the pool up, for a while: the first `num_tokens` (default: all), whose
        K and V are written, are kept below, the private tail too. Raises OutOfBlocks, nothing
        changed, if there is no room for them.
        """
        length = self.num_tokens if num_tokens is None else num_tokens
        self._pool.suspend([(self, length)])

    def resume(self) -> None:
        """Come back from `suspend`: `hit` tokens of it are in place or on their way, `wait` for
        them; there is no room for more yet. Raises OutOfBlocks, still suspended."""
        self._pool.resume([self])

    def advise(self, hints: Hints) -> None:
        """Say what is known by now; what was said before still holds where this is silent."""
        self._pool.advise_many([(self, hints)])

    def release(self, hints: Hints | None = None) -> None:
        """Give the lease back; what it committed stays in the cache. `hints`: as `advise`, in the
        same go."""
        self._pool.release([self], hints)

    def block_table(self, group: int) -> npt.NDArray[np.int32]:
        """`tables[group]`, safe for the op: a block past its window is named by another of ours."""
        table = self.tables[group]
        missing = table < 0
        if not missing.any():
            return table
        return np.where(missing, table.max(), table).astype(np.int32)

    def check(self) -> None:
        """Raise LeaseError unless the lease is held, and not suspended."""
        self.check_held()
        if self.suspended:
            raise LeaseError(f"lease {self.number} is suspended")

    def check_held(self) -> None:
        """Raise LeaseError if the lease is released."""
        if self.released:
            raise LeaseError(f"lease {self.number} is released")

    @property
    def _all_ready(self) -> int:
        return (1 << len(self._pool.layout.groups)) - 1

    @property
    def _shared(self) -> bool:
        """Whether the last block may be one that others hold."""
        return any(self.room % group.block_size for group in self._pool.layout.groups)

    # -- what its pool says for it ---------------------------------------------------------------

    def step(self, committed: int, room: int, *, publish: bool = False) -> StepRequest | None:
        """What the daemon must be asked; None if it need not be."""
        self.check()
        if committed > min(self.num_tokens, max(self.room, room)):
            raise LeaseError(
                f"cannot commit {committed} tokens: {self.num_tokens} are known and there is room "
                f"for {max(self.room, room)}"
            )
        layout = self._pool.layout
        fills = publish or any(
            committed // group.block_size > self._frozen // group.block_size
            for group in layout.groups
        )
        if not fills:
            if room <= self.room:
                self.committed = max(self.committed, committed)
                return None
            # Not `_frozen`: the hit may just have been cut short, and nobody knows here.
            return StepRequest(self.number, 0, room, ())
        if self._ready != self._all_ready:
            raise LeaseError(f"lease {self.number} may not commit before it was waited for")
        known = max(self._sent, committed // layout.hash_step)
        hashes = self._chain.hashes[self._sent : known]
        return StepRequest(self.number, max(committed, self._frozen), room, hashes, publish)

    def advanced(self, request: StepRequest, added: Sequence[protocol.AddedBlocks]) -> None:
        """The daemon has done it."""
        layout = self._pool.layout
        self.tables = [
            np.concatenate((table[:start], np.array(ids, np.int32))) if ids else table
            for table, (start, ids) in zip(self.tables, added, strict=True)
        ]
        self.room = max(self.room, request.room)
        self._sent += len(request.hashes)
        self._frozen = max(self._frozen, request.committed)
        self.committed = max(self.committed, self._frozen)
        if request.publish:
            self._cut(self._frozen)
        for group, table in enumerate(self.tables):
            if (window := layout.window(group)) is not None:
                size = layout.groups[group].block_size
                table[: max(0, self._frozen - window) // size] = -1

    def answered(self, body: bytes) -> None:
        """The daemon has leased the blocks."""
        state = protocol.parse_lease(body, len(self._pool.layout.groups))
        self.committed = self._frozen = state.hit
        self.update(state)

    def update(self, state: protocol.LeaseState) -> None:
        """Where the daemon says the lease stands."""
        self._ready = state.ready
        if state.tables is not None:
            self.hit, self.room = state.hit, state.room
            self.committed = min(self.committed, state.hit)
            self._frozen = min(self._frozen, state.hit)
            self.tables = [np.asarray(ids, np.int32) for ids in state.tables]

    def forked(self, number: int, num_tokens: int) -> "Lease":
        """The lease that `number` is to be; the daemon is asked next."""
        self.check()
        fork = Lease(self._pool, number, self._chain.fork(num_tokens), num_tokens, self.hints)
        fork.tables = [table.copy() for table in self.tables]
        fork.hit, fork.committed = min(self.hit, num_tokens), min(self.committed, num_tokens)
        fork._frozen = min(self._frozen, num_tokens)
        fork._sent = min(self._sent, len(fork._chain.hashes))
        fork._ready = self._all_ready
        fork._cut(num_tokens)
        self._forked = max(self._forked, num_tokens)
        return fork

    def cut(self, num_tokens: int) -> bool:
        """Go back, if that is nobody else's business; False if the daemon has to be asked."""
        self.check()
        if num_tokens > self.num_tokens:
            raise LeaseError(f"cannot go back to {num_tokens} tokens of {self.num_tokens}")
        step = self._pool.layout.hash_step
        if num_tokens < max(self._frozen, self._forked) or num_tokens // step < self._sent:
            return False
        self.back(num_tokens, self.room)
        return True

    def back(self, num_tokens: int, room: int) -> None:
        """It has gone back to `num_tokens`; `room` is left."""
        self._chain.truncate(num_tokens)
        self.num_tokens = num_tokens
        self.hit, self.committed = min(self.hit, num_tokens), min(self.committed, num_tokens)
        self._known(num_tokens)
        self._forked = min(self._forked, num_tokens)
        if room < self.room:
            self._cut(room)

    def gone(self, num_tokens: int) -> None:
        """It is suspended with `num_tokens`."""
        self.suspended, self.tables = True, []
        self.hit = self.room = num_tokens
        self._known(num_tokens)

    def come(self, body: bytes) -> None:
        """It is resumed."""
        self.suspended = False
        self.update(protocol.parse_lease(body, len(self._pool.layout.groups)))
        self._known(self.hit)

    def _known(self, num_tokens: int) -> None:
        """The daemon knows nothing past `num_tokens` any more."""
        self._frozen = min(self._frozen, num_tokens)
        self._sent = min(self._sent, num_tokens // self._pool.layout.hash_step)

    def _cut(self, room: int) -> None:
        self.room = room
        groups = self._pool.layout.groups
        self.tables = [
            table[: -(-room // group.block_size)]
            for table, group in zip(self.tables, groups, strict=True)
        ]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, tb: object) -> None:
        if not self.released and not isinstance(error, DaemonLost):
            self.release()
