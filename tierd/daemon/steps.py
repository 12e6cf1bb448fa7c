"""Steps: every lease of a batch goes on, all in one plan.

    committed ---> freeze up to here ---> room: places up to here

Blocks that became full are committed under their names, or the half-filled tail too where the step
publishes; what a sliding window has passed is given back; new places are reserved, and a block that
others hold too is replaced by a copy before the lease may write it (I5). It plans like the cache,
whose part it is.
"""

from collections.abc import Sequence
from typing import NamedTuple

from policies.base import NO_HINTS, Access
from tierd.block import Block, BlockHash, State
from tierd.daemon.ahead import Ahead
from tierd.daemon.chain import TierChain
from tierd.daemon.lease import Lease
from tierd.daemon.loads import Loads
from tierd.daemon.match import PrefixMatch, first_block, num_blocks
from tierd.errors import LeaseError, OutOfBlocks


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


class Steps:
    """Takes the steps of one cache's leases."""

    def __init__(self, chain: TierChain, ahead: Ahead, match: PrefixMatch, loads: Loads) -> None:
        self._chain, self._ahead, self._match, self._loads = chain, ahead, match, loads
        self._layout = chain.layout
        self._sizes = [group.block_size for group in chain.layout.groups]

    def advance(self, steps: Sequence[Step], access: Access) -> list[list[Added]]:
        """Go on with every lease of a batch, all of one level, by its `Step`.

        A block that others hold too is replaced by a copy before the lease may write it. Returns
        what was added, by step and group. All or nothing: raises LeaseError or OutOfBlocks and
        nothing has changed.
        """
        for step in steps:
            self._check_commit(step)
        if len({id(step.lease) for step in steps}) != len(steps):
            raise LeaseError("a lease is named twice in one message")
        level = steps[0].lease.level if steps else 0
        assert all(step.lease.level == level for step in steps), "a batch is of one engine"
        for step in steps:  # whoever asks for more has heard what it lost
            self._unpark(step.lease)
        starts = [
            [self._start(step.lease, group, step.room) for group in range(len(self._sizes))]
            for step in steps
        ]
        need = [
            sum(
                max(0, num_blocks(step.room, size) - start[g])
                for step, start in zip(steps, starts, strict=True)
            )
            for g, size in enumerate(self._sizes)
        ]
        try:
            rooms = self._chain.reserve(level, need, access)
        except OutOfBlocks:
            self._chain.counts.out_of_blocks += 1
            raise
        added = []
        for step, start in zip(steps, starts, strict=True):
            lease = step.lease
            new = []
            for g, size in enumerate(self._sizes):
                count = max(0, num_blocks(step.room, size) - start[g])
                new.append(self._extend(lease, g, start[g], [rooms[g].pop() for _ in range(count)]))
            lease.room = max(lease.room, step.room)
            self._commit(step, access)
            added.append(new)
        self._loads.emit()
        return added

    def _check_commit(self, step: Step) -> None:
        lease, committed, granule = step.lease, step.committed, self._layout.hash_step
        lease.check_here()
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

    def _unpark(self, lease: Lease) -> None:
        parked, lease.parked = lease.parked, []
        for group, block in parked:
            self._loads.drop(lease, group, block)  # it may still be filled

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
            copy = self._chain.copy_on_write(group, lease.level, shared, lease.level, new[0])
            self._loads.wait_for_copy(lease, copy)
        table[start:] = new
        return Added(start, new)

    def _commit(self, step: Step, access: Access) -> None:
        lease, hashes = step.lease, step.lease.hashes
        hashes.extend(step.hashes)
        if lease.hints is not NO_HINTS:
            access = Access(access.time, lease.hints)
        for group, size in enumerate(self._sizes):
            pool, table = self._chain.tiers[lease.level].pools[group], lease.tables[group]
            start, stop = lease.committed // size, step.committed // size
            parent = self._match.names(group, hashes, start - 1, start)[0] if start else None
            for index, key in enumerate(self._match.names(group, hashes, start, stop), start):
                block = table[index]
                assert block is not None, f"block {index} of group {group} is out of the window"
                pool.commit(block, key, parent, access, self._match.inner(group, hashes, index))
                parent = key
            self._ahead.committed(lease.level, group, table[start:stop])
        lease.committed = max(lease.committed, step.committed)
        if step.publish:
            self._publish_tails(lease, lease.committed, access)
        self._slide(lease)

    def _publish_tails(self, lease: Lease, length: int, access: Access) -> None:
        """Freeze the partly filled blocks too, as far as granules are full, and with them the
        length: whoever goes on, the lease itself too, writes a copy."""
        granule = self._layout.hash_step
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
                pool = self._chain.tiers[lease.level].pools[group]
                pool.commit(block, key, parent, access, inner)
            lease.tails[group] = key
        self._loads.cut(lease, length)

    def _slide(self, lease: Lease) -> None:
        """Give back the blocks that no later token sees."""
        for group, size in enumerate(self._sizes):
            table = lease.tables[group]
            for index in range(first_block(lease.committed, self._layout.window(group), size)):
                if (block := table[index]) is not None:
                    table[index] = None
                    self._loads.drop(lease, group, block)
