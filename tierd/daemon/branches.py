"""Sequences that branch and go back: leases that share blocks, the half-filled tail too.

A fork costs no block: it pins what its source has, and has borrowed what is not committed. Who goes
back lets go of what others hold too. It plans like the cache, whose part it is.
"""

from collections import Counter
from collections.abc import Sequence

from tierd.block import Block, State
from tierd.daemon.chain import TierChain
from tierd.daemon.lease import Lease, Notify
from tierd.daemon.loads import Loads
from tierd.daemon.match import first_block, num_blocks
from tierd.errors import LeaseError


class Branches:
    """Forks and truncates the leases of one cache."""

    def __init__(self, chain: TierChain, loads: Loads) -> None:
        self._chain, self._loads, self._layout = chain, loads, chain.layout
        self._sizes = [group.block_size for group in chain.layout.groups]

    def fork(self, forks: Sequence[tuple[Lease, int, Notify | None]]) -> list[Lease]:
        """For each `(source, num_tokens, notify)`: a lease of the first `num_tokens` of `source`,
        which shares every block with it, the partly filled tail too. It has no room: whoever goes
        on copies what is shared first.

        Costs no block. All or nothing: raises LeaseError and nothing has changed.
        """
        alike = Counter((source, num_tokens) for source, num_tokens, _ in forks)
        for source, num_tokens in alike:
            self.check_back(source, num_tokens, "fork")
        shared = {of: self._share(*of, times) for of, times in alike.items()}
        self._chain.counts.forks += len(forks)
        return [self._fork(of, n, *shared[of, n], notify) for of, n, notify in forks]

    def _share(
        self, source: Lease, num_tokens: int, times: int
    ) -> tuple[list[list[Block | None]], list[Block]]:
        """Pin what so many forks have of a lease: their tables, and which blocks are borrowed."""
        tables = [
            table[: num_blocks(num_tokens, size)]
            for table, size in zip(source.tables, self._sizes, strict=True)
        ]
        for pool, table in zip(self._chain.tiers[source.level].pools, tables, strict=True):
            pool.pin_all(table, times)
        private = State.PRIVATE
        return tables, [b for table in tables for b in table if b and b.state is private]

    def _fork(
        self,
        source: Lease,
        num_tokens: int,
        tables: Sequence[Sequence[Block | None]],
        borrowed: Sequence[Block],
        notify: Notify | None,
    ) -> Lease:
        return Lease(
            source.hashes[: num_tokens // self._layout.hash_step],
            [list(table) for table in tables],
            [set() for _ in tables],
            source.level,
            min(source.hit, num_tokens),
            min(source.committed, num_tokens),
            num_tokens,
            forked=num_tokens,
            borrowed=set(borrowed),
            tails=dict(source.tails),
            hints=source.hints,
            notify=notify,
            asked=num_tokens,
        )

    def truncate(self, cuts: Sequence[tuple[Lease, int]]) -> list[int]:
        """Each `(lease, num_tokens)` goes back to its first `num_tokens`; returns the room that is
        left to write at once.

        Where others hold what follows, the room ends there, and the next write is a copy. All or
        nothing: raises LeaseError and nothing has changed, also where a window has slid past.
        """
        for lease, num_tokens in cuts:
            self.check_back(lease, num_tokens, "truncate")
        return [self._truncate(*cut) for cut in cuts]

    def _truncate(self, lease: Lease, num_tokens: int) -> int:
        rest = [
            block
            for table, size in zip(lease.tables, self._sizes, strict=True)
            for block in table[num_tokens // size :]
        ]
        # Whoever forked it has borrowed its blocks up to some length, which may be a longer one.
        if not all(block and lease.may_write(block) and block.ref_cnt == 1 for block in rest):
            self._loads.cut(lease, num_tokens)
            for table, size in zip(lease.tables, self._sizes, strict=True):
                shared = [b for b in table[num_tokens // size :] if b and b.ref_cnt > 1]
                lease.borrowed.update(shared)
        del lease.hashes[num_tokens // self._layout.hash_step :]
        lease.hit, lease.committed = min(lease.hit, num_tokens), min(lease.committed, num_tokens)
        return lease.room

    def check_back(self, lease: Lease, num_tokens: int, verb: str) -> None:
        """Raise LeaseError unless the lease has `num_tokens` in place."""
        lease.check_held()
        if not 0 <= num_tokens <= lease.room:
            raise LeaseError(f"cannot {verb} {num_tokens} tokens of a lease of {lease.room}")
        for group, size in enumerate(self._sizes):
            if (window := self._layout.window(group)) is None:
                continue
            first = first_block(num_tokens, window, size)
            if None in lease.tables[group][first : num_blocks(num_tokens, size)]:
                raise LeaseError(
                    f"cannot {verb} {num_tokens} tokens: the window of {window} tokens of "
                    f"group {group} has slid past"
                )
