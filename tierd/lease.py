"""What an engine holds for one sequence, on the engine's side.

It always knows what may be written in place, so a decode step needs no message until a block fills.
Messages go through its pool, a batch at a time.
"""

from typing import TYPE_CHECKING, Self

import numpy as np
import numpy.typing as npt

from tierd import protocol
from tierd.errors import DaemonLost, LeaseError
from tierd.prefix import PrefixChain, Tokens, token_array
from tierd.protocol import StepRequest

if TYPE_CHECKING:
    from tierd.pool import Pool


class Lease:
    """What this engine holds for one sequence.

        0 ......... hit ......... committed ......... room
        filled by the daemon | frozen, shared | may be written in place

    `tables[g]` are the block ids of group g in token order, int32. Until `wait` returns, `hit` is
    planned: a load that fails makes it shorter, and the tables then differ past it.
    """

    def __init__(self, pool: "Pool", number: int, chain: PrefixChain, num_tokens: int) -> None:
        self.number = number
        self.hit = self.committed = self.room = 0
        self.num_tokens = num_tokens  # whose ids are known
        self.tables: list[npt.NDArray[np.int32]] = []
        self.released = False
        self._pool, self._chain = pool, chain
        self._ready = 0
        self._sent = len(chain.hashes)  # hashes the daemon knows
        self._frozen = 0  # tokens the daemon was told are committed

    def wait(self, group: int | None = None) -> int:
        """Wait until a group's (default: every group's) hit is in place; returns the hit.

        It is the one that stands as far as the groups waited for know. Where it is shorter than
        planned, compute from there on.
        """
        self.check()
        groups = len(self._pool.layout.groups)
        wanted = (1 << groups) - 1 if group is None else 1 << group
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

    def release(self) -> None:
        """Give the lease back; what it committed stays in the cache."""
        self._pool.release([self])

    def block_table(self, group: int) -> npt.NDArray[np.int32]:
        """`tables[group]`, safe for the op: a block past its window is named by another of ours."""
        table = self.tables[group]
        missing = table < 0
        if not missing.any():
            return table
        return np.where(missing, table.max(), table).astype(np.int32)

    def check(self) -> None:
        """Raise LeaseError unless the lease is held."""
        if self.released:
            raise LeaseError(f"lease {self.number} is released")

    def step(self, committed: int, room: int) -> StepRequest | None:
        """What the daemon must be asked; None if it need not be."""
        self.check()
        if committed > min(self.num_tokens, max(self.room, room)):
            raise LeaseError(
                f"cannot commit {committed} tokens: {self.num_tokens} are known and there is room "
                f"for {max(self.room, room)}"
            )
        layout = self._pool.layout
        fills = any(
            committed // group.block_size > self._frozen // group.block_size
            for group in layout.groups
        )
        if not fills and room <= self.room:
            self.committed = max(self.committed, committed)
            return None
        known = max(self._sent, committed // layout.hash_step)
        hashes = self._chain.hashes[self._sent : known]
        return StepRequest(self.number, max(committed, self._frozen), room, hashes)

    def advanced(self, request: StepRequest, added: protocol.Tables) -> None:
        """The daemon has done it."""
        self.tables = [
            np.append(table, np.asarray(ids, np.int32)) if ids else table
            for table, ids in zip(self.tables, added, strict=True)
        ]
        self.room = max(self.room, request.room)
        self._sent += len(request.hashes)
        self._frozen = max(self._frozen, request.committed)
        self.committed = max(self.committed, self._frozen)

    def answered(self, body: bytes) -> None:
        """The daemon has leased the blocks."""
        self.update(protocol.parse_lease(body, len(self._pool.layout.groups)))

    def update(self, state: protocol.LeaseState) -> None:
        """Where the daemon says the lease stands."""
        self._ready = state.ready
        if state.tables is not None:
            self.hit, self.room = state.hit, state.room
            self.committed = self._frozen = state.hit
            self.tables = [np.asarray(ids, np.int32) for ids in state.tables]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, tb: object) -> None:
        if not self.released and not isinstance(error, DaemonLost):
            self.release()
