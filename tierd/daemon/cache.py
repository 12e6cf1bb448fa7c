"""The tiered cache of one namespace: what an engine asks, planned at once.

Every method is a synchronous plan over all layer groups and tiers, all or nothing: it finds what
it needs without changing anything, then changes every pool at once, then emits copies. There is no
lock: what is not there yet is *loading*, and others may wait for the same load. The bytes are moved
by the `Transfer` it was given; with one that moves none this class is the simulator.

It knows no socket, no file, no clock and no byte.
"""

from collections.abc import Callable, Sequence

from policies.base import Access
from tierd.block import Block, BlockHash, State
from tierd.daemon.chain import TierChain
from tierd.daemon.copy import Copy, Outcome, Place, Transfer
from tierd.daemon.lease import Lease
from tierd.daemon.match import PrefixMatch, check_names, first_block
from tierd.daemon.tier import Tier
from tierd.errors import LeaseError, OutOfBlocks
from tierd.layout import KVLayout

Notify = Callable[[Lease], None]
Found = Sequence[Sequence[tuple[int, int, Block]]]  # by group: `(index, level, block)`


class TieredCache:
    """A chain of tiers, hottest first. Only this class decides what moves along it."""

    def __init__(self, layout: KVLayout, tiers: Sequence[Tier], transfer: Transfer) -> None:
        self.layout = layout
        self.chain = TierChain(layout, tiers)
        self.match = PrefixMatch(layout, tiers)
        self._pools = tiers[0].pools
        self._transfer = transfer
        self._sizes = [group.block_size for group in layout.groups]
        self._waiters: dict[Block, list[tuple[Lease, int]]] = {}
        self._access = Access(0.0)  # the latest

    def acquire(
        self,
        hashes: Sequence[BlockHash],
        num_tokens: int,
        room: int,
        access: Access,
        notify: Notify | None = None,
        most: int | None = None,
    ) -> Lease:
        """Lease places for `room` tokens, the longest hit of a prompt of `num_tokens` in place or
        on its way; at most `most` tokens of it.

        Raises OutOfBlocks, nothing changed, if the top tier cannot hold it; LeaseError if a hash
        is named twice.
        """
        check_names(hashes)
        self._access = access
        hit = self.match.hit(hashes, num_tokens if most is None else min(num_tokens, most + 1))
        found = [self.match.find(group, hashes, hit) for group in range(len(self._sizes))]
        self._pin(found)
        need = [
            sum(level > 0 for _, level, _ in blocks) + _blocks(room, size) - hit // size
            for blocks, size in zip(found, self._sizes, strict=True)
        ]
        try:
            rooms = self.chain.reserve(0, need, access)
        except OutOfBlocks:
            self._unpin(found)
            self.chain.counts.out_of_blocks += 1
            raise
        lease = Lease(list(hashes), [], [], hit, committed=hit, room=room, notify=notify)
        for group, (blocks, places) in enumerate(zip(found, rooms, strict=True)):
            self._fill(lease, group, blocks, places, access)
        self._touch_below(lease, access)
        self.chain.counts.asked(
            num_tokens, hit, (level for blocks in found for _, level, _ in blocks)
        )
        self._emit()
        return lease

    def advance(
        self, steps: Sequence[tuple[Lease, int, Sequence[BlockHash], int]], access: Access
    ) -> list[list[list[Block]]]:
        """For each `(lease, committed, hashes, room)`: freeze tokens up to `committed`, then make
        room up to `room` tokens. `hashes` are those of the granules after the ones known.

        Returns the blocks added, by step and group. All or nothing: raises LeaseError or
        OutOfBlocks and nothing has changed.
        """
        self._access = access
        for lease, committed, hashes, room in steps:
            self._check_commit(lease, committed, hashes, room)
        if len({id(lease) for lease, *_ in steps}) != len(steps):
            raise LeaseError("a lease is named twice in one message")
        for lease, *_ in steps:  # whoever asks for more has heard what it lost
            self._unpark(lease)
        need = [
            sum(max(0, _blocks(room, size) - len(lease.tables[g])) for lease, _, _, room in steps)
            for g, size in enumerate(self._sizes)
        ]
        try:
            rooms = self.chain.reserve(0, need, access)
        except OutOfBlocks:
            self.chain.counts.out_of_blocks += 1
            raise
        added = []
        for lease, committed, hashes, room in steps:
            new = []
            for g, size in enumerate(self._sizes):
                count = max(0, _blocks(room, size) - len(lease.tables[g]))
                new.append([rooms[g].pop() for _ in range(count)])
                lease.tables[g].extend(new[g])
            lease.room = max(lease.room, room)
            self._commit(lease, committed, hashes, access)
            added.append(new)
        self._emit()
        return added

    def release(self, lease: Lease, access: Access) -> None:
        """Give everything back. Committed blocks stay, as the request's path, tail first."""
        self._let_go(lease, access, quarantine=False)

    def abandon(self, lease: Lease, access: Access) -> list[tuple[int, Block]]:
        """As `release`, but what the engine could write is quarantined: `(group, block)` each."""
        return self._let_go(lease, access, quarantine=True)

    def thaw(self, group: int, block: Block) -> None:
        """The engine that could write a quarantined block is really gone."""
        self._pools[group].thaw(block)

    def reclaim(self, limit: int) -> list[Copy]:
        """Make cold blocks clean ahead, at most `limit` a pool; returns the copies begun."""
        for level in range(len(self.chain.tiers) - 1):
            for group in range(len(self._sizes)):
                self.chain.clean_ahead(level, group, limit, self._access)
        return self._emit()

    def prefetch(
        self,
        hashes: Sequence[BlockHash],
        num_tokens: int,
        limit: int,
        access: Access,
        start: int = 0,
    ) -> list[Copy]:
        """Bring what a prompt would hit, from `start` on, from further below into host memory, at
        most `limit` blocks that are not there yet; returns the copies begun. It evicts nothing that
        would be missed.
        """
        hit = self.match.hit(hashes, num_tokens, start)
        found = [self.match.find(group, hashes, hit, start) for group in range(len(self._sizes))]
        self._pin(found)  # of the hit nothing gives way to the rest of it
        for group, blocks in enumerate(found):
            below = [(level, block) for _, level, block in blocks if level > 1][:limit]
            self.chain.fetch(group, below, access)
        self._unpin(found)
        return self._emit()

    def _pin(self, found: Found) -> None:
        for group, blocks in enumerate(found):
            for _, level, block in blocks:
                self.chain.tiers[level].pools[group].pin(block)

    def _unpin(self, found: Found) -> None:
        for group, blocks in enumerate(found):
            for _, level, block in blocks:
                self.chain.tiers[level].pools[group].unpin(block)

    def save(self, unsaved: Sequence[tuple[int, int, Block]]) -> None:
        """Copy some of `chain.unsaved()` into the coldest tier; they stay where they are too."""
        self.chain.save(unsaved, self._access)
        self._emit()

    def _fill(
        self,
        lease: Lease,
        group: int,
        found: Sequence[tuple[int, int, Block]],
        room: list[Block],
        access: Access,
    ) -> None:
        """Build the lease's table of a group from pinned `found` blocks and reserved `room`."""
        table: list[Block | None] = [None] * (lease.hit // self._sizes[group])
        loading: set[Block] = set()
        landing = self.chain.landing_places(group, [(lv, b) for _, lv, b in found if lv > 1])
        names = self.match.names(group, lease.hashes, 0, len(table))
        for index, level, source in found:
            block = source
            if level > 0:
                block = room.pop()
                parent = names[index - 1] if index else None
                self.chain.load(group, level, source, block, names[index], parent, landing, access)
            if block.state is State.LOADING:
                loading.add(block)
                self._waiters.setdefault(block, []).append((lease, group))
            table[index] = block
        lease.tables.append([*table, *room])
        lease.loading.append(loading)

    def _touch_below(self, lease: Lease, access: Access) -> None:
        """A request uses its hit in every tier that holds it; the top one is touched at release."""
        for group, size in enumerate(self._sizes):
            first = first_block(lease.hit, self.layout.window(group), size)
            path = self.match.names(group, lease.hashes, first, lease.hit // size)
            for tier in self.chain.tiers[1:]:
                tier.pools[group].touch(path, access)

    def _check_commit(
        self, lease: Lease, committed: int, hashes: Sequence[BlockHash], room: int
    ) -> None:
        if lease.released:
            raise LeaseError("the lease is released")
        if committed <= lease.committed and not hashes:
            return
        if not lease.ready:
            raise LeaseError("the lease may not commit before all its groups are ready")
        if committed > (most := max(lease.room, room)):
            raise LeaseError(f"cannot commit {committed} tokens, the lease has room for {most}")
        if (len(lease.hashes) + len(hashes)) * self.layout.hash_step < (
            committed // self.layout.hash_step * self.layout.hash_step
        ):
            raise LeaseError(f"hashes are missing to commit {committed} tokens")

    def _commit(
        self, lease: Lease, committed: int, hashes: Sequence[BlockHash], access: Access
    ) -> None:
        lease.hashes.extend(hashes)
        for group, size in enumerate(self._sizes):
            pool, table = self._pools[group], lease.tables[group]
            start, stop = lease.committed // size, committed // size
            parent = self.match.names(group, lease.hashes, start - 1, start)[0] if start else None
            for index, key in enumerate(self.match.names(group, lease.hashes, start, stop), start):
                block = table[index]
                assert block is not None, f"block {index} of group {group} is out of the window"
                pool.commit(block, key, parent, access)
                parent = key
        lease.committed = max(lease.committed, committed)

    def _let_go(self, lease: Lease, access: Access, *, quarantine: bool) -> list[tuple[int, Block]]:
        if lease.released:
            raise LeaseError("the lease is released already")
        lease.released, frozen = True, []
        for group, size in enumerate(self._sizes):
            first = first_block(lease.hit, self.layout.window(group), size)
            path = self.match.names(group, lease.hashes, first, lease.committed // size)
            self._pools[group].touch(path, access)
        tables = [(g, b) for g, table in enumerate(lease.tables) for b in table if b is not None]
        for group, block in tables + lease.parked:
            if quarantine and block.state is State.PRIVATE:
                self._pools[group].quarantine(block)
                frozen.append((group, block))
            else:
                self._drop(lease, group, block)
        return frozen

    def _unpark(self, lease: Lease) -> None:
        parked, lease.parked = lease.parked, []
        for group, block in parked:
            self._pools[group].unpin(block)

    def _drop(self, lease: Lease, group: int, block: Block) -> None:
        """A lease lets go of a block; the last to wait for a load cancels it."""
        if block in lease.loading[group]:
            lease.loading[group].discard(block)
            waiters = self._waiters[block]
            waiters.remove((lease, group))
            if not waiters:
                del self._waiters[block]
        self._pools[group].unpin(block)
        if block.state is State.LOADING and block.ref_cnt == 0:
            self._transfer.cancel(Place(0, group, block.block_id))

    def settle(self, copy: Copy, outcome: Outcome) -> None:
        """A copy has ended: its target is readable, or its waiters get a shorter hit (I6)."""
        tiers = self.chain.tiers
        src_pool = tiers[copy.src_level].pools[copy.group]
        dst_pool = tiers[copy.dst_level].pools[copy.group]
        if outcome is Outcome.LOST and copy.src.key == copy.key:
            self.chain.counts.lost += 1
            src_pool.forget(copy.src)
        if copy.holds_src:
            src_pool.unpin(copy.src)
        waiters = self._waiters.pop(copy.dst, [])
        if outcome is Outcome.DONE:
            dst_pool.landed(copy.dst)
            for lease, group in waiters:
                lease.loading[group].discard(copy.dst)
                if not lease.loading[group]:
                    _tell(lease)
        else:
            self.chain.counts.failed += outcome is not Outcome.CANCELLED
            dst_pool.failed(copy.dst)
            self._shorten(waiters, copy.dst)

    def _shorten(self, waiters: Sequence[tuple[Lease, int]], failed: Block) -> None:
        """Cut the hits of all who waited for `failed`, then give each private places instead."""
        cut = []
        for lease, group in waiters:
            lease.loading[group].discard(failed)
            start = lease.tables[group].index(failed) * self._sizes[group]
            cut.append((lease, self._roll_back(lease, start)))
        for lease, missing in cut:
            self._refill(lease, missing)
            lease.shortened = True
            _tell(lease)

    def _roll_back(self, lease: Lease, limit: int) -> list[list[int]]:
        """Let go of what the lease did not write past its new hit, at most `limit` tokens.

        Returns the table positions left empty, by group.
        """
        step = self.layout.alignment
        hit = limit // step * step
        while hit and not self._covers(lease, hit):
            hit -= step
        old, lease.hit, lease.committed = lease.hit, hit, hit
        missing: list[list[int]] = []
        for group, size in enumerate(self._sizes):
            table = lease.tables[group]
            missing.append(list(range(hit // size, old // size)))
            for index in missing[group]:
                block, table[index] = table[index], None
                if block is not None:
                    self._drop(lease, group, block)
        return missing

    def _covers(self, lease: Lease, hit: int) -> bool:
        """Whether the lease holds what a hit of `hit` tokens needs of its window groups."""
        return all(
            None not in lease.tables[g][first_block(hit, self.layout.window(g), size) : hit // size]
            for g, size in enumerate(self._sizes)
        )

    def _refill(self, lease: Lease, missing: Sequence[Sequence[int]]) -> None:
        """Put private places where the hit was; where too few are left, the room ends there."""
        try:
            rooms = self.chain.reserve(0, [len(gaps) for gaps in missing], self._access)
        except OutOfBlocks:
            self.chain.counts.out_of_blocks += 1
            lease.room = lease.hit
            for group, size in enumerate(self._sizes):
                table = lease.tables[group]
                lost = [block for block in table[lease.hit // size :] if block is not None]
                lease.parked += [(group, block) for block in lost]
                del table[lease.hit // size :]
            return
        for group, gaps in enumerate(missing):
            for index in gaps:
                lease.tables[group][index] = rooms[group].pop()
        self._emit()

    def _emit(self) -> list[Copy]:
        """Have the planned copies carried out; returns them."""
        if copies := self.chain.take():
            self._transfer.submit(copies, self.settle)
        return copies


def _tell(lease: Lease) -> None:
    if lease.notify is not None:
        lease.notify(lease)


def _blocks(num_tokens: int, size: int) -> int:
    """Blocks that hold `num_tokens`."""
    return -(-num_tokens // size)
