"""The tiered cache of one namespace: what an engine asks, planned at once.

Every method is a synchronous plan over all layer groups and tiers, all or nothing: it finds what
it needs without changing anything, then changes every pool at once, then emits copies. There is no
lock: what is not there yet is *loading*, and others may wait for the same load. The bytes are moved
by the `Transfer` it was given; with one that moves none this class is the simulator.

It knows no socket, no file, no clock and no byte.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from policies.base import Access
from tierd.block import Block, BlockHash, State
from tierd.daemon.chain import TierChain
from tierd.daemon.compaction import Compaction
from tierd.daemon.copy import Copy, Transfer
from tierd.daemon.lease import Lease
from tierd.daemon.loads import Loads
from tierd.daemon.match import PrefixMatch, check_names, first_block
from tierd.daemon.suspension import Suspension
from tierd.daemon.tier import Tier
from tierd.errors import LeaseError, OutOfBlocks
from tierd.layout import KVLayout

Notify = Callable[[Lease], None]
Found = Sequence[Sequence[tuple[int, int, Block]]]  # by group: `(index, level, block)`
Parts = Sequence[tuple[int, Block] | None]  # by group: `(level, block)` that begins like the hit


class Step(NamedTuple):
    """One lease's part of an `advance`: freeze tokens up to `committed`, whole blocks of them or,
    to `publish`, whole granules; then make room for `room` tokens. `hashes` are those of the
    granules after the ones known."""

    lease: Lease
    committed: int
    hashes: Sequence[BlockHash] = ()
    room: int = 0
    publish: bool = False


class Added(NamedTuple):
    """What an `advance` changed in one table: these blocks are in it from index `start` on."""

    start: int
    blocks: list[Block]


class TieredCache:
    """A chain of tiers, hottest first. Only this class decides what moves along it."""

    def __init__(self, layout: KVLayout, tiers: Sequence[Tier], transfer: Transfer) -> None:
        self.layout = layout
        self.chain = TierChain(layout, tiers)
        self.match = PrefixMatch(layout, tiers)
        self.loads = Loads(self.chain, transfer)
        self.compaction = Compaction(self.chain, self.loads)
        self._suspension = Suspension(self.chain, self.loads)
        self._pools = tiers[0].pools
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
    ) -> Lease:
        """Lease places for `room` tokens, the longest hit of a prompt of `num_tokens` in place or
        on its way; at most `most` tokens of it.

        Raises OutOfBlocks, nothing changed, if the top tier cannot hold it; LeaseError if a hash
        is named twice.
        """
        check_names(hashes)
        self.loads.access = access
        hit = self.match.hit(hashes, num_tokens if most is None else min(num_tokens, most + 1))
        groups = range(len(self._sizes))
        found = [self.match.find(group, hashes, hit) for group in groups]
        parts = [self.match.find_part(group, hashes, hit) for group in groups]
        self._pin(found, parts)
        need = [
            sum(level > 0 for _, level, _ in blocks) + _blocks(room, size) - hit // size
            for blocks, size in zip(found, self._sizes, strict=True)
        ]
        try:
            rooms = self.chain.reserve(0, need, access)
        except OutOfBlocks:
            self._unpin(found, parts)
            self.chain.counts.out_of_blocks += 1
            raise
        lease = Lease(list(hashes), [], [], hit, committed=hit, room=room, notify=notify)
        lease.access, lease.asked = access, num_tokens
        for group, (blocks, places) in enumerate(zip(found, rooms, strict=True)):
            self._fill(lease, group, blocks, places, access)
            if (part := parts[group]) is not None:
                self._take_part(lease, group, *part)
        self._touch(lease, range(1, len(self.chain.tiers)), lease.hit, access)
        self.chain.counts.asked(num_tokens, hit, _levels(found, parts))
        self.loads.emit()
        return lease

    def advance(self, steps: Sequence[Step], access: Access) -> list[list[Added]]:
        """Go on with every lease of a batch, by its `Step`.

        A block that others hold too is replaced by a copy before the lease may write it. Returns
        what was added, by step and group. All or nothing: raises LeaseError or OutOfBlocks and
        nothing has changed.
        """
        self.loads.access = access
        for step in steps:
            self._check_commit(step)
        if len({id(step.lease) for step in steps}) != len(steps):
            raise LeaseError("a lease is named twice in one message")
        for step in steps:  # whoever asks for more has heard what it lost
            self._unpark(step.lease)
        starts = [
            [self._start(step.lease, group, step.room) for group in range(len(self._sizes))]
            for step in steps
        ]
        need = [
            sum(
                max(0, _blocks(step.room, size) - start[g])
                for step, start in zip(steps, starts, strict=True)
            )
            for g, size in enumerate(self._sizes)
        ]
        try:
            rooms = self.chain.reserve(0, need, access)
        except OutOfBlocks:
            self.chain.counts.out_of_blocks += 1
            raise
        added = []
        for step, start in zip(steps, starts, strict=True):
            lease = step.lease
            new = []
            for g, size in enumerate(self._sizes):
                count = max(0, _blocks(step.room, size) - start[g])
                new.append(self._extend(lease, g, start[g], [rooms[g].pop() for _ in range(count)]))
            lease.room = max(lease.room, step.room)
            self._commit(step, access)
            added.append(new)
        self.loads.emit()
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

    # -- sequences that branch, go back, and rest ------------------------------------------------

    def fork(self, forks: Sequence[tuple[Lease, int, Notify | None]]) -> list[Lease]:
        """For each `(source, num_tokens, notify)`: a lease of the first `num_tokens` of `source`,
        which shares every block with it, the partly filled tail too. It has no room: whoever goes
        on copies what is shared first.

        Costs no block. All or nothing: raises LeaseError and nothing has changed.
        """
        alike = Counter((source, num_tokens) for source, num_tokens, _ in forks)
        for source, num_tokens in alike:
            self._check_back(source, num_tokens, "fork")
        shared = {of: self._share(*of, times) for of, times in alike.items()}
        self.chain.counts.forks += len(forks)
        return [self._fork(of, n, *shared[of, n], notify) for of, n, notify in forks]

    def _share(
        self, source: Lease, num_tokens: int, times: int
    ) -> tuple[list[list[Block | None]], list[Block]]:
        """Pin what so many forks have of a lease: their tables, and which blocks are borrowed."""
        tables = [
            table[: _blocks(num_tokens, size)]
            for table, size in zip(source.tables, self._sizes, strict=True)
        ]
        for pool, table in zip(self._pools, tables, strict=True):
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
            source.hashes[: num_tokens // self.layout.hash_step],
            [list(table) for table in tables],
            [set() for _ in tables],
            min(source.hit, num_tokens),
            min(source.committed, num_tokens),
            num_tokens,
            borrowed=set(borrowed),
            tails=dict(source.tails),
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
            self._check_back(lease, num_tokens, "truncate")
        return [self._truncate(*cut) for cut in cuts]

    def _truncate(self, lease: Lease, num_tokens: int) -> int:
        rest = [
            block
            for table, size in zip(lease.tables, self._sizes, strict=True)
            for block in table[num_tokens // size :]
        ]
        # Whoever forked it has borrowed its blocks up to some length, which may be a longer one.
        if not all(block and lease.may_write(block) and block.ref_cnt == 1 for block in rest):
            self._cut(lease, num_tokens)
            for table, size in zip(lease.tables, self._sizes, strict=True):
                shared = [b for b in table[num_tokens // size :] if b and b.ref_cnt > 1]
                lease.borrowed.update(shared)
        del lease.hashes[num_tokens // self.layout.hash_step :]
        lease.hit, lease.committed = min(lease.hit, num_tokens), min(lease.committed, num_tokens)
        return lease.room

    def suspend(self, lease: Lease, num_tokens: int, access: Access) -> None:
        """Give the lease's places in the top tier up; its first `num_tokens`, the private tail too,
        are kept in the tiers below until `resume`, with the lease's own reference (I3).

        Raises LeaseError, or OutOfBlocks if they have no room, and nothing has changed.
        """
        self._check_back(lease, num_tokens, "suspend")
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

    # -- what nobody waits for -------------------------------------------------------------------

    def reclaim(self, limit: int) -> list[Copy]:
        """Make cold blocks clean ahead, at most `limit` a pool; returns the copies begun."""
        for level in range(len(self.chain.tiers) - 1):
            for group in range(len(self._sizes)):
                self.chain.clean_ahead(level, group, limit, self.loads.access)
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
        self._unpin(found, parts)
        return self.loads.emit()

    def save(self, unsaved: Sequence[tuple[int, int, Block]]) -> None:
        """Copy some of `chain.unsaved()` into the coldest tier; they stay where they are too."""
        self.chain.save(unsaved, self.loads.access)
        self.loads.emit()

    # -- parts of an acquire -----------------------------------------------------------------------

    def _pin(self, found: Found, parts: Parts) -> None:
        for group, (blocks, part) in enumerate(zip(found, parts, strict=True)):
            pins = [tier.pools[group].pin for tier in self.chain.tiers]
            for _, level, block in blocks:
                pins[level](block)
            if part is not None:
                level, block = part
                pins[level](block)

    def _unpin(self, found: Found, parts: Parts) -> None:
        for group, (blocks, part) in enumerate(zip(found, parts, strict=True)):
            unpins = [tier.pools[group].unpin for tier in self.chain.tiers]
            for _, level, block in blocks:
                unpins[level](block)
            if part is not None:
                level, block = part
                unpins[level](block)

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
        landing = self.chain.landing_places(group, [(lv, b) for _, lv, b in found if lv > 1])
        for index, level, source in found:
            block = source
            if level > 0:
                block = room.pop()
                self.chain.load(group, level, source, block, landing, access)
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
        copy = self.chain.copy_on_write(group, level, source, 0, target)
        self.loads.wait_for_copy(lease, copy)

    def _touch(self, lease: Lease, levels: Iterable[int], upto: int, access: Access) -> None:
        """A request uses its hit in every tier that holds it; the top one is touched at release."""
        for group, size in enumerate(self._sizes):
            first = first_block(lease.hit, self.layout.window(group), size)
            path = list(self.match.names(group, lease.hashes, first, upto // size))
            if (tail := lease.tails.get(group)) is not None and tail not in path:
                path.append(tail)
            for level in levels:
                self.chain.tiers[level].pools[group].touch(path, access)

    # -- parts of an advance -----------------------------------------------------------------------

    def _check_held(self, lease: Lease) -> None:
        if lease.released:
            raise LeaseError("the lease is released")
        if lease.away is not None:
            raise LeaseError("the lease is suspended")
        if not lease.ready:
            raise LeaseError("the lease is not ready: its hit is still on its way")

    def _check_back(self, lease: Lease, num_tokens: int, verb: str) -> None:
        """Raise LeaseError unless the lease has `num_tokens` in place."""
        self._check_held(lease)
        if not 0 <= num_tokens <= lease.room:
            raise LeaseError(f"cannot {verb} {num_tokens} tokens of a lease of {lease.room}")
        for group, size in enumerate(self._sizes):
            if (window := self.layout.window(group)) is None:
                continue
            first = first_block(num_tokens, window, size)
            if None in lease.tables[group][first : _blocks(num_tokens, size)]:
                raise LeaseError(
                    f"cannot {verb} {num_tokens} tokens: the window of {window} tokens of "
                    f"group {group} has slid past"
                )

    def _check_commit(self, step: Step) -> None:
        lease, committed, granule = step.lease, step.committed, self.layout.hash_step
        if lease.released:
            raise LeaseError("the lease is released")
        if lease.away is not None:
            raise LeaseError("the lease is suspended")
        if committed <= lease.committed and not step.hashes and not step.publish:
            return
        if not lease.ready:
            raise LeaseError("the lease may not commit before all its groups are ready")
        if committed > (most := max(lease.room, step.room)):
            raise LeaseError(f"cannot commit {committed} tokens, the lease has room for {most}")
        if len(lease.hashes) + len(step.hashes) < committed // granule:
            raise LeaseError(f"hashes are missing to commit {committed} tokens")
        if step.publish:
            self._check_tails(lease, max(committed, lease.committed))

    def _check_tails(self, lease: Lease, length: int) -> None:
        """A partly filled block is frozen only by who writes it: others would be surprised."""
        for group, size in enumerate(self._sizes):
            if length % size and length // size < len(lease.tables[group]):
                tail = lease.tables[group][length // size]
                if tail is not None and tail.state is State.PRIVATE and not lease.may_write(tail):
                    raise LeaseError("a fork has to be extended before its tail is published")

    def _start(self, lease: Lease, group: int, room: int) -> int:
        """From which block on an extension of the lease to `room` tokens brings new places: after
        the last one, or with it, if others hold it and it is not full."""
        table = lease.tables[group]
        shared = lease.room % self._sizes[group] and not lease.may_write(table[-1])
        return len(table) - 1 if shared and room > lease.room else len(table)

    def _extend(self, lease: Lease, group: int, start: int, new: list[Block]) -> Added:
        """Put reserved blocks into a table; the first may take the place of a shared one."""
        table = lease.tables[group]
        if start == len(table) and table and lease.may_write(table[-1]):
            lease.borrowed.discard(table[-1])  # whoever lent it is gone: it is this lease's now
        if start < len(table):
            shared = table[start]
            assert shared is not None, f"block {start} of group {group} is out of the window"
            lease.borrowed.discard(shared)  # the copy takes over the lease's pin
            copy = self.chain.copy_on_write(group, 0, shared, 0, new[0])
            self.loads.wait_for_copy(lease, copy)
        table[start:] = new
        return Added(start, new)

    def _commit(self, step: Step, access: Access) -> None:
        lease, hashes = step.lease, step.lease.hashes
        hashes.extend(step.hashes)
        for group, size in enumerate(self._sizes):
            pool, table = self._pools[group], lease.tables[group]
            start, stop = lease.committed // size, step.committed // size
            parent = self.match.names(group, hashes, start - 1, start)[0] if start else None
            for index, key in enumerate(self.match.names(group, hashes, start, stop), start):
                block = table[index]
                assert block is not None, f"block {index} of group {group} is out of the window"
                pool.commit(block, key, parent, access, self.match.inner(group, hashes, index))
                parent = key
        lease.committed = max(lease.committed, step.committed)
        if step.publish:
            self._publish_tails(lease, lease.committed, access)
        self._slide(lease)

    def _publish_tails(self, lease: Lease, length: int, access: Access) -> None:
        """Freeze the partly filled blocks too, as far as granules are full, and with them the
        length: whoever goes on, the lease itself too, writes a copy."""
        granule = self.layout.hash_step
        for group, size in enumerate(self._sizes):
            index, granules = length // size, length // granule
            if length % size < granule:
                continue
            first, key = index * size // granule, lease.hashes[granules - 1]
            block = lease.tables[group][index]
            assert block is not None, f"block {index} of group {group} is out of the window"
            if block.state is State.PRIVATE:
                parent = lease.hashes[first - 1] if first else None
                inner = lease.hashes[first : granules - 1]
                self._pools[group].commit(block, key, parent, access, inner)
            lease.tails[group] = key
        self._cut(lease, length)

    def _cut(self, lease: Lease, room: int) -> None:
        """Let go of every place past `room` tokens."""
        for group, size in enumerate(self._sizes):
            kept = _blocks(room, size)
            gone = lease.tables[group][kept:]
            del lease.tables[group][kept:]
            self.loads.drop_all(lease, group, gone)
        lease.room = room

    def _slide(self, lease: Lease) -> None:
        """Give back the blocks that no later token sees."""
        for group, size in enumerate(self._sizes):
            table = lease.tables[group]
            for index in range(first_block(lease.committed, self.layout.window(group), size)):
                if (block := table[index]) is not None:
                    table[index] = None
                    self.loads.drop(lease, group, block)

    # -- parts of a release ------------------------------------------------------------------------

    def _let_go(self, lease: Lease, access: Access, *, quarantine: bool) -> list[tuple[int, Block]]:
        if lease.released:
            raise LeaseError("the lease is released already")
        lease.released, frozen = True, []
        self._touch(lease, (0,), lease.committed, access)
        for group, table in enumerate(lease.tables):
            held = table + [block for of, block in lease.parked if of == group]
            if quarantine:
                own = [block for block in held if block and block.state is State.PRIVATE]
                held = [block for block in held if block and block.state is not State.PRIVATE]
                for block in own:
                    self.loads.forget(lease, group, block)
                    self._pools[group].quarantine(block)
                frozen += [(group, block) for block in own]
            self.loads.drop_all(lease, group, held)
        self._suspension.drop(lease)
        return frozen

    def _unpark(self, lease: Lease) -> None:
        parked, lease.parked = lease.parked, []
        for group, block in parked:
            self.loads.drop(lease, group, block)  # it may still be filled


def _levels(found: Found, parts: Parts) -> list[int]:
    levels = [level for blocks in found for _, level, _ in blocks]
    return levels + [part[0] for part in parts if part is not None]


def _blocks(num_tokens: int, size: int) -> int:
    """Blocks that hold `num_tokens`."""
    return -(-num_tokens // size)
