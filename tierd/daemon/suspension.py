"""Suspended leases: a preempted sequence's blocks go down the tiers and come back.

    device   |c|c|c|p|     c: committed, shared with anybody   p: the lease's own, without a name
    below    |c|c|c|p|     each held by one reference of the lease, so that none vanishes (I3)

"Below" is below the level of the lease. What lies there already moves no bytes, and neither does,
on the way back, what is in its place still. A copy that fails on either way is a shorter hit (I6).
It plans like the cache, whose part it is.
"""

from collections.abc import Sequence

from policies.base import Access
from tierd.block import Block, State
from tierd.daemon.chain import TierChain
from tierd.daemon.lease import Away, Lease
from tierd.daemon.loads import Loads
from tierd.daemon.match import first_block, num_blocks
from tierd.errors import OutOfBlocks


class Suspension:
    """Suspends and resumes the leases of one cache."""

    def __init__(self, chain: TierChain, loads: Loads) -> None:
        self._chain, self._loads = chain, loads
        self._sizes = [group.block_size for group in chain.layout.groups]

    def suspend(self, lease: Lease, num_tokens: int, access: Access) -> None:
        """Move the first `num_tokens` of a held, ready lease below, and drop the rest.

        Raises OutOfBlocks, nothing changed.
        """
        tables = [
            table[: num_blocks(num_tokens, size)]
            for table, size in zip(lease.tables, self._sizes, strict=True)
        ]
        known = [
            [self._below(lease.level, group, block) for block in table]
            for group, table in enumerate(tables)
        ]
        for group, entries in enumerate(known):
            for entry in entries:
                if entry is not None:
                    self._chain.tiers[entry.level].pools[group].pin(entry.block)
        need = [
            sum(block is not None and entry is None for block, entry in zip(*pair, strict=True))
            for pair in zip(tables, known, strict=True)
        ]
        try:
            level, rooms = self._reserve(lease.level, need, access)
        except OutOfBlocks:
            for group, entries in enumerate(known):
                for entry in entries:
                    if entry is not None:
                        self._chain.tiers[entry.level].pools[group].unpin(entry.block)
            raise
        for group, table in enumerate(tables):
            for index, block in enumerate(table):
                if block is not None and known[group][index] is None:
                    place = rooms[group].pop()
                    known[group][index] = self._go(lease, group, block, level, place, access)
        for group, table in enumerate(lease.tables):
            self._loads.drop_all(lease, group, table)
        lease.away, lease.tables = known, [[] for _ in tables]
        lease.hit = lease.room = num_tokens
        lease.committed = min(lease.committed, num_tokens)
        del lease.hashes[num_tokens // self._chain.layout.hash_step :]
        self._chain.counts.suspended += 1
        self._loads.emit()

    def resume(self, lease: Lease, access: Access) -> None:
        """Bring a suspended lease back: `hit` tokens of it, without room for more.

        Raises OutOfBlocks, nothing changed.
        """
        assert lease.away is not None, "only a suspended lease is resumed"
        hit = self._whole(lease)
        home = self._chain.tiers[lease.level]
        found: list[list[Block | None]] = []  # what is in its place still
        for group, size in enumerate(self._sizes):
            entries = lease.away[group][: num_blocks(hit, size)]
            found.append([home.pools[group].get(e.key) if e and e.key else None for e in entries])
            for block in found[group]:
                if block is not None:
                    home.pools[group].pin(block)
        need = [
            num_blocks(hit, size)
            - sum(
                block is not None or entry is None
                for block, entry in zip(found[g], lease.away[g], strict=False)
            )
            for g, size in enumerate(self._sizes)
        ]
        try:
            rooms = self._chain.reserve(lease.level, need, access)
        except OutOfBlocks:
            for group, blocks in enumerate(found):
                for block in blocks:
                    if block is not None:
                        home.pools[group].unpin(block)
            raise
        away, lease.away = lease.away, None
        lease.hit, lease.committed, lease.room = hit, min(lease.committed, hit), hit
        del lease.hashes[hit // self._chain.layout.hash_step :]
        for group, blocks in enumerate(found):
            self._come(lease, group, away[group], blocks, rooms[group], access)
        self._loads.emit()

    def drop(self, lease: Lease) -> None:
        """The lease is given back: nothing below is held for it any more."""
        away, lease.away = lease.away, None
        for group, entries in enumerate(away or ()):
            for entry in entries:
                if entry is not None:
                    self._loads.drop(lease, group, entry.block, entry.level)

    def _below(self, home: int, group: int, block: Block | None) -> Away | None:
        """Where below level `home` a committed block lies, hottest first."""
        if block is None or block.key is None:
            return None
        for level, tier in enumerate(self._chain.tiers[home + 1 :], home + 1):
            if (copy := tier.pools[group].get(block.key)) is not None:
                return Away(level, copy, block.key)
        return None

    def _reserve(
        self, home: int, need: Sequence[int], access: Access
    ) -> tuple[int, list[list[Block]]]:
        """Places in the hottest tier below level `home` that has room for all."""
        shortage: OutOfBlocks | None = None
        for level in range(home + 1, len(self._chain.tiers)):
            try:
                return level, self._chain.reserve(level, need, access)
            except OutOfBlocks as error:
                shortage = error
        name = self._chain.tiers[home].name
        raise shortage or OutOfBlocks(f"there is no tier below {name!r} to suspend to")

    def _go(
        self, lease: Lease, group: int, block: Block, level: int, place: Block, access: Access
    ) -> Away:
        """Plan the copy of a block into a reserved place below, which the lease keeps hold of."""
        self._chain.tiers[lease.level].pools[group].pin(block)  # for the copy's sake
        if block.key is None:
            copy = self._chain.copy_on_write(group, lease.level, block, level, place)
            self._loads.wait_for_copy(lease, copy)
        else:
            self._chain.put(group, lease.level, block, level, place, access)
        return Away(level, place, block.key)

    def _whole(self, lease: Lease) -> int:
        """How many of its tokens a suspended lease still has."""
        assert lease.away is not None, "only a suspended lease has blocks away"
        layout, hit = self._chain.layout, lease.hit
        for group, size in enumerate(self._sizes):
            bad = [i for i, e in enumerate(lease.away[group]) if e is not None and not e.whole]
            window = layout.window(group)
            for index in bad:
                if index >= first_block(hit, window, size):
                    hit = min(hit, index * size)
        if hit == lease.hit:
            return hit
        hit = hit // layout.alignment * layout.alignment
        while hit and not all(self._covers(lease.away[g], g, hit) for g in range(len(self._sizes))):
            hit -= layout.alignment
        return hit

    def _covers(self, entries: Sequence[Away | None], group: int, hit: int) -> bool:
        size = self._sizes[group]
        first = first_block(hit, self._chain.layout.window(group), size)
        return all(e is not None and e.whole for e in entries[first : hit // size])

    def _come(
        self,
        lease: Lease,
        group: int,
        away: Sequence[Away | None],
        found: Sequence[Block | None],
        places: list[Block],
        access: Access,
    ) -> None:
        """Build a group's table of what is there still and what comes from below into `places`."""
        pools = [tier.pools[group] for tier in self._chain.tiers]
        lease.loading[group] = set()
        table: list[Block | None] = []
        for index, entry in enumerate(away):
            if index >= len(found) or entry is None:
                if entry is not None:
                    self._loads.drop(lease, group, entry.block, entry.level)
                if index < len(found):
                    table.append(None)
            elif (block := found[index]) is not None:
                pools[entry.level].unpin(entry.block)
                table.append(block)
            else:
                table.append(self._load(lease, group, entry, places.pop(), access))
        for block in table:
            if block is not None and block.state is State.LOADING:
                self._loads.wait(lease, group, block)
        lease.tables[group] = table

    def _load(self, lease: Lease, group: int, entry: Away, place: Block, access: Access) -> Block:
        """Plan the copy of a block from below; the lease's reference there is the copy's now."""
        if entry.key is None:
            copy = self._chain.copy_on_write(group, entry.level, entry.block, lease.level, place)
            self._loads.wait_for_copy(lease, copy)
        else:
            way = (group, entry.level, entry.block, place)
            self._chain.load(*way, iter(()), access, lease.level)
        return place
