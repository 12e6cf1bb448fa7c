"""The tiered cache of one namespace: what an engine asks, planned at once.

Every method is a synchronous plan over all layer groups and tiers, all or nothing: it finds what
it needs without changing anything, then changes every pool at once, then emits copies. There is no
lock: what is not there yet is *loading*, and others may wait for the same load. The bytes are moved
by the `Transfer` it was given; with one that moves none this class is the simulator.

It knows no socket, no file, no clock and no byte.
"""

from collections.abc import Iterable, Sequence

from policies.base import Access, PlacementPolicy
from tierd.block import Block, BlockHash, State
from tierd.daemon.ahead import Ahead
from tierd.daemon.branches import Branches
from tierd.daemon.chain import TierChain
from tierd.daemon.compaction import Compaction
from tierd.daemon.copy import Copy, Transfer
from tierd.daemon.lease import Lease, Notify
from tierd.daemon.loads import Loads
from tierd.daemon.match import PrefixMatch, check_names, first_block, num_blocks
from tierd.daemon.steps import Added, Step, Steps
from tierd.daemon.suspension import Suspension
from tierd.daemon.tier import Tier
from tierd.errors import LeaseError, OutOfBlocks
from tierd.layout import KVLayout

Found = Sequence[Sequence[tuple[int, int, Block]]]  # by group: `(index, level, block)`
Parts = Sequence[tuple[int, Block] | None]  # by group: `(level, block)` that begins like the hit


class TieredCache:
    """A chain of tiers, hottest first. Only this class decides what moves along it."""

    def __init__(
        self,
        layout: KVLayout,
        tiers: Sequence[Tier],
        transfer: Transfer,
        placement: PlacementPolicy | None = None,
    ) -> None:
        self.layout = layout
        self.chain = TierChain(layout, tiers, placement)
        self.ahead = Ahead(self.chain)
        self.match = PrefixMatch(layout, tiers)
        self.loads = Loads(self.chain, transfer)
        self.compaction = Compaction(self.chain, self.loads)
        self._steps = Steps(self.chain, self.ahead, self.match, self.loads)
        self._branches = Branches(self.chain, self.loads)
        self._suspension = Suspension(self.chain, self.loads)
        self._pools = [tier.pools for tier in tiers]  # by level
        self._sizes = [group.block_size for group in layout.groups]

    # -- a request -----------------------------------------------------------------------------

    def acquire(
        self,
        hashes: Sequence[BlockHash],
        num_tokens: int,
        room: int,
        access: Access,
        notify: Notify | None = None,
        most: int | None = None,
        level: int = 0,
    ) -> Lease:
        """Lease places at `level` for `room` tokens, the longest hit of a prompt of `num_tokens` in
        place or on its way; at most `most` tokens of it.

        Raises OutOfBlocks, nothing changed, if that tier cannot hold it; LeaseError if a hash is
        named twice.
        """
        check_names(hashes)
        self.loads.access = access
        hit = self.match.hit(hashes, num_tokens if most is None else min(num_tokens, most + 1))
        groups = range(len(self._sizes))
        found = [self.match.find(group, hashes, hit, level=level) for group in groups]
        parts = [self.match.find_part(group, hashes, hit, level) for group in groups]
        self._pin(found, parts)
        need = [
            sum(at != level for _, at, _ in blocks) + num_blocks(room, size) - hit // size
            for blocks, size in zip(found, self._sizes, strict=True)
        ]
        try:
            rooms = self.chain.reserve(level, need, access)
        except OutOfBlocks:
            self._pin(found, parts, undo=True)
            self.chain.counts.out_of_blocks += 1
            raise
        lease = Lease(
            list(hashes), [], [], level, hit, hit, room, hints=access.hints, notify=notify
        )
        lease.access, lease.asked = access, num_tokens
        for group, (blocks, places) in enumerate(zip(found, rooms, strict=True)):
            self._fill(lease, group, blocks, places, access)
            if (part := parts[group]) is not None:
                self._take_part(lease, group, *part)
        self._touch_elsewhere(lease, found, parts, access)
        self.chain.counts.asked(num_tokens, hit, _levels(found, parts))
        self.loads.emit()
        return lease

    def advance(self, steps: Sequence[Step], access: Access) -> list[list[Added]]:
        """Go on with every lease of a batch, all of one level: see `Steps.advance`."""
        self.loads.access = access
        return self._steps.advance(steps, access)

    def release(self, lease: Lease, access: Access) -> None:
        """Give everything back. Committed blocks stay, as the request's path, tail first."""
        self._let_go(lease, access, quarantine=False)

    def abandon(self, lease: Lease, access: Access) -> list[tuple[int, Block]]:
        """As `release`, but what the engine could write is quarantined: `(group, block)` each."""
        return self._let_go(lease, access, quarantine=True)

    def thaw(self, level: int, group: int, block: Block) -> None:
        """The engine that could write a quarantined block is really gone."""
        self._pools[level][group].thaw(block)

    # -- sequences that branch, go back, and rest ------------------------------------------------

    def fork(self, forks: Sequence[tuple[Lease, int, Notify | None]]) -> list[Lease]:
        """Leases that share every block of their sources: see `Branches.fork`."""
        return self._branches.fork(forks)

    def truncate(self, cuts: Sequence[tuple[Lease, int]]) -> list[int]:
        """Leases go back to fewer tokens: see `Branches.truncate`."""
        return self._branches.truncate(cuts)

    def suspend(self, lease: Lease, num_tokens: int, access: Access) -> None:
        """Give the lease's places up; its first `num_tokens`, the private tail too, are kept in the
        tiers below until `resume`, with the lease's own reference (I3).

        Raises LeaseError, or OutOfBlocks if they have no room, and nothing has changed.
        """
        self._branches.check_back(lease, num_tokens, "suspend")
        self.loads.access = access
        self._suspension.suspend(lease, num_tokens, access)

    def resume(self, lease: Lease, access: Access) -> None:
        """Bring a suspended lease back: `hit` is then what it has of its tokens, in place or on
        its way. It has no room for more.

        Raises LeaseError or OutOfBlocks, nothing changed.
        """
        if lease.released or lease.away is None:
            raise LeaseError("the lease is not suspended")
        self.loads.access = access
        self._suspension.resume(lease, access)

    def advise(
        self, hashes: Sequence[BlockHash], access: Access, levels: Iterable[int] | None = None
    ) -> None:
        """Something was said of a path, without a use: every tier hears it, or those `levels`."""
        stop = len(hashes) * self.layout.hash_step
        for group, size in enumerate(self._sizes):
            path = list(self.match.names(group, hashes, 0, stop // size))
            if stop % size:
                path.append(hashes[-1])  # a published tail
            for level in range(len(self.chain.tiers)) if levels is None else levels:
                self.chain.tiers[level].pools[group].advise(path, access)

    # -- what nobody waits for -------------------------------------------------------------------

    def reclaim(self, limit: int) -> list[Copy]:
        """Make cold blocks clean ahead, at most `limit` a pool; returns the copies begun."""
        self.ahead.clean(limit, self.loads.access)
        return self.loads.emit()

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
        groups = range(len(self._sizes))
        hit = self.match.hit(hashes, num_tokens, start)
        found = [self.match.find(group, hashes, hit, start) for group in groups]
        parts = [self.match.find_part(group, hashes, hit) for group in groups]
        self._pin(found, parts)  # of the hit nothing gives way to the rest of it
        for group, blocks in enumerate(found):
            used = [(level, block) for _, level, block in blocks]
            used += [part] if (part := parts[group]) is not None else []
            above = [tier.pools[group] for tier in self.chain.tiers[:2]]
            below = [(lv, b) for lv, b in used if b.key and not any(p.get(b.key) for p in above)]
            self.chain.fetch(group, below[:limit], access)
        self._pin(found, parts, undo=True)
        return self.loads.emit()

    def save(self, unsaved: Sequence[tuple[int, int, Block]]) -> None:
        """Copy some of `chain.unsaved()` into the coldest tier; they stay where they are too."""
        self.chain.save(unsaved, self.loads.access)
        self.loads.emit()

    # -- parts of an acquire -----------------------------------------------------------------------

    def _pin(self, found: Found, parts: Parts, *, undo: bool = False) -> None:
        for group, (blocks, part) in enumerate(zip(found, parts, strict=True)):
            pools = [tier.pools[group] for tier in self.chain.tiers]
            calls = [pool.unpin if undo else pool.pin for pool in pools]
            for _, level, block in blocks:
                calls[level](block)
            if part is not None:
                level, block = part
                calls[level](block)

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
        lease.loading.append(set())
        far = [(lv, b) for _, lv, b in found if lv > 1] if lease.level == 0 else []
        landing = self.chain.landing_places(group, far)
        for index, level, source in found:
            block = source
            if level != lease.level:
                block = room.pop()
                self.chain.load(group, level, source, block, landing, access, lease.level)
            if block.state is State.LOADING:
                self.loads.wait(lease, group, block)
            table[index] = block
        lease.tables.append([*table, *room])

    def _take_part(self, lease: Lease, group: int, level: int, source: Block) -> None:
        """The hit ends inside a pinned block: the lease gets a copy, which it goes on to write."""
        target = lease.tables[group][lease.hit // self._sizes[group]]
        assert target is not None, "the hit's last block is the lease's own"
        assert source.key is not None, "only a named block is found"
        lease.tails[group] = source.key
        copy = self.chain.copy_on_write(group, level, source, lease.level, target)
        self.loads.wait_for_copy(lease, copy)

    def _path(self, lease: Lease, group: int, upto: int, start: int = 0) -> list[BlockHash]:
        """The names of a group's blocks, of tokens `start` to `upto`, that a request has used."""
        size = self._sizes[group]
        first = max(first_block(lease.hit, self.layout.window(group), size), -(-start // size))
        path = list(self.match.names(group, lease.hashes, first, upto // size))
        if (tail := lease.tails.get(group)) is not None and tail not in path:
            path.append(tail)
        return path

    def _touch_elsewhere(self, lease: Lease, found: Found, parts: Parts, access: Access) -> None:
        """A request uses its hit where it lies; its own tier is touched at release."""
        for group, (blocks, part) in enumerate(zip(found, parts, strict=True)):
            levels = [level for _, level, _ in blocks]
            levels += [part[0]] if part is not None else []
            path = self._path(lease, group, lease.hit)
            self.chain.hit(group, path, levels, access, lease.level)

    # -- parts of a release ------------------------------------------------------------------------

    def _let_go(self, lease: Lease, access: Access, *, quarantine: bool) -> list[tuple[int, Block]]:
        if lease.released:
            raise LeaseError("the lease is released already")
        lease.released, frozen = True, []
        for group, pool in enumerate(self._pools[lease.level]):
            pool.touch(path := self._path(lease, group, lease.committed), access)
            if lease.forked:  # whoever lent it the beginning tells of that
                path = self._path(lease, group, lease.committed, lease.forked)
            self.chain.used(group, path, access)
        if access.hints.tells_worth:
            others = [at for at in range(len(self.chain.tiers)) if at != lease.level]
            self.advise(lease.hashes, access, others)
        for group, table in enumerate(lease.tables):
            held = table + [block for of, block in lease.parked if of == group]
            if quarantine:
                own = [block for block in held if block and block.state is State.PRIVATE]
                held = [block for block in held if block and block.state is not State.PRIVATE]
                for block in own:
                    self.loads.forget(lease, group, block)
                    self._pools[lease.level][group].quarantine(block)
                frozen += [(group, block) for block in own]
            self.loads.drop_all(lease, group, held)
        self._suspension.drop(lease)
        return frozen


def _levels(found: Found, parts: Parts) -> list[int]:
    levels = [level for blocks in found for _, level, _ in blocks]
    return levels + [part[0] for part in parts if part is not None]
