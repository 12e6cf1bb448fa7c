"""The loads of one cache: which leases wait for which bytes, and what becomes of them.

A block's bytes come once, however many wait for them. If they come, the leases are told, group by
group; if not, each gets a shorter hit, with private places where the hit was (I6). The last to
leave cancels the load. It knows no requests: what to load is decided elsewhere.
"""

from collections.abc import Sequence

from policies.base import Access
from tierd.block import Block, State
from tierd.daemon.chain import TierChain
from tierd.daemon.copy import Copy, Outcome, Place, Transfer
from tierd.daemon.lease import Lease
from tierd.daemon.match import first_block, num_blocks
from tierd.daemon.pool import BlockPool
from tierd.errors import OutOfBlocks


class Loads:
    """Who waits for what; `settle` is what the transfer calls."""

    def __init__(self, chain: TierChain, transfer: Transfer) -> None:
        self._chain, self._transfer, self._layout = chain, transfer, chain.layout
        self._sizes = [group.block_size for group in chain.layout.groups]
        self._waiters: dict[Block, list[tuple[Lease, int]]] = {}
        self._filling: dict[Block, Copy] = {}  # private places, and the copy that counts
        self._moving: set[Copy] = set()  # within a pool
        self.access = Access(0.0)  # the latest

    @property
    def idle(self) -> bool:
        """Whether nobody waits for anything."""
        return not self._waiters and not self._filling and not self._moving

    def emit(self) -> list[Copy]:
        """Have the planned copies carried out; returns them."""
        if copies := self._chain.take():
            self._transfer.submit(copies, self.settle)
        return copies

    def wait(self, lease: Lease, group: int, block: Block) -> None:
        """The lease uses a loading block."""
        lease.loading[group].add(block)
        self._waiters.setdefault(block, []).append((lease, group))

    def wait_for_copy(self, lease: Lease, copy: Copy) -> None:
        """The lease's own place is being filled, below its level while it is being suspended."""
        self._filling[copy.dst] = copy
        if copy.dst_level == lease.level:
            self.wait(lease, copy.group, copy.dst)
        else:
            self._waiters[copy.dst] = [(lease, copy.group)]

    def move(self, copy: Copy) -> None:
        """`copy` goes from one place of a pool to another of it; nobody waits for it."""
        self._moving.add(copy)

    def drop(self, lease: Lease, group: int, block: Block, level: int | None = None) -> None:
        """A lease lets go of a block at its level, or at another; the last to wait for a load into
        the top tier cancels it. Further down the bytes may be wanted all the same."""
        own, level = self._filling.get(block), lease.level if level is None else level
        self.forget(lease, group, block)
        lease.borrowed.discard(block)
        self._chain.tiers[level].pools[group].unpin(block)
        useless = own is not None or (level == 0 and block.state is State.LOADING)
        if useless and block.ref_cnt == 0:
            self._transfer.cancel(Place(level, group, block.block_id))

    def drop_all(self, lease: Lease, group: int, blocks: Sequence[Block | None]) -> None:
        """A lease lets go of blocks at its level."""
        if lease.loading and lease.loading[group]:
            for block in blocks:
                if block is not None:
                    self.drop(lease, group, block)
        else:  # it waits for none of them: there may be thousands, and nothing is to be cancelled
            lease.borrowed.difference_update(blocks)
            self._chain.tiers[lease.level].pools[group].unpin_all(blocks)

    def cut(self, lease: Lease, room: int) -> None:
        """A lease lets go of every place past `room` tokens."""
        for group, size in enumerate(self._sizes):
            kept = num_blocks(room, size)
            gone = lease.tables[group][kept:]
            del lease.tables[group][kept:]
            self.drop_all(lease, group, gone)
        lease.room = room

    def forget(self, lease: Lease, group: int, block: Block) -> None:
        """The lease waits for the block no longer."""
        waiters = self._waiters.get(block, [])
        if (lease, group) in waiters:
            waiters.remove((lease, group))
            if not waiters:
                del self._waiters[block]
                self._filling.pop(block, None)
        if lease.loading:
            lease.loading[group].discard(block)

    def settle(self, copy: Copy, outcome: Outcome) -> None:
        """A copy has ended: its target is readable, or its waiters get a shorter hit (I6)."""
        tiers, counts = self._chain.tiers, self._chain.counts
        src_pool = tiers[copy.src_level].pools[copy.group]
        if outcome is Outcome.LOST and copy.key is not None and copy.src.key == copy.key:
            counts.lost += 1
            src_pool.forget(copy.src)
        if copy.holds_src:
            src_pool.unpin(copy.src)
        if outcome not in (Outcome.DONE, Outcome.CANCELLED):
            counts.failed += 1
        if copy in self._moving:
            self._moving.remove(copy)
            _move(src_pool, copy, outcome)
            return
        if not copy.private:
            pool = tiers[copy.dst_level].pools[copy.group]
            (pool.landed if outcome is Outcome.DONE else pool.failed)(copy.dst)
        elif self._filling.get(copy.dst) is not copy:
            return  # whoever wanted it has gone, and the place may be another's
        else:
            del self._filling[copy.dst]
        waiters = self._waiters.pop(copy.dst, [])
        if outcome is Outcome.DONE:
            for lease, group in waiters:
                self._arrived(lease, group, copy.dst)
        else:
            self._shorten(waiters, copy.dst)

    def _arrived(self, lease: Lease, group: int, block: Block) -> None:
        if lease.away is None:
            lease.loading[group].discard(block)
            if not lease.loading[group]:
                _tell(lease)

    def _shorten(self, waiters: Sequence[tuple[Lease, int]], failed: Block) -> None:
        """Cut the hits of all who waited for `failed`, then give each private places instead."""
        cut = []
        for lease, group in waiters:
            if lease.away is not None:
                _spoil(lease, group, failed)
                continue
            lease.loading[group].discard(failed)
            if failed in (table := lease.tables[group]):  # else it is parked already
                start = table.index(failed) * self._sizes[group]
                cut.append((lease, self._roll_back(lease, start)))
        for lease, missing in cut:
            self._refill(lease, missing)
            lease.shortened = True
            _tell(lease)

    def _roll_back(self, lease: Lease, limit: int) -> list[list[int]]:
        """Let go of what the lease did not write past its new hit, at most `limit` tokens.

        Returns the table positions left empty, by group.
        """
        step = self._layout.alignment
        hit = min(limit, lease.hit) // step * step  # it may have been cut further already
        while hit and not self._covers(lease, hit):
            hit -= step
        old, lease.hit, lease.committed = lease.hit, hit, hit
        missing: list[list[int]] = []
        for group, size in enumerate(self._sizes):
            table = lease.tables[group]
            missing.append(list(range(hit // size, old // size)))
            # What it came back to may end in a block that is not its own: it would write there.
            if old % size and hit < old and not lease.may_write(table[old // size]):
                missing[group].append(old // size)
            for index in missing[group]:
                block, table[index] = table[index], None
                if block is not None:
                    self.drop(lease, group, block)
        return missing

    def _covers(self, lease: Lease, hit: int) -> bool:
        """Whether the lease holds what a hit of `hit` tokens needs of its window groups."""
        return all(
            None
            not in lease.tables[g][first_block(hit, self._layout.window(g), size) : hit // size]
            for g, size in enumerate(self._sizes)
        )

    def _refill(self, lease: Lease, missing: Sequence[Sequence[int]]) -> None:
        """Put private places where the hit was; where too few are left, the room ends there."""
        try:
            need = [len(gaps) for gaps in missing]
            rooms = self._chain.reserve(lease.level, need, self.access)
        except OutOfBlocks:
            self._chain.counts.out_of_blocks += 1
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
        self.emit()


def _move(pool: BlockPool, copy: Copy, outcome: Outcome) -> None:
    """A block has been copied within its pool: it moves, unless somebody holds it meanwhile."""
    src, still = copy.src, copy.src.state is State.COMMITTED and copy.src.key == copy.key
    if outcome is Outcome.DONE and still and src.ref_cnt == 0:
        pool.relocate(src, copy.dst)
    else:
        pool.unpin(copy.dst)


def _spoil(lease: Lease, group: int, block: Block) -> None:
    assert lease.away is not None, "the lease is suspended"
    for entry in lease.away[group]:
        if entry is not None and entry.block is block:
            entry.lost = True


def _tell(lease: Lease) -> None:
    if lease.notify is not None:
        lease.notify(lease)
