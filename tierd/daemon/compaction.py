"""Compaction: a range of a pool's places is emptied, so that it can be given back.

    before   |A . . b| |C D E .|      b, the colder of the two, is evicted; A moves
    after    |. . . .| |C D E A|

Blocks move to free places elsewhere in the pool; where too few are free, the coldest of all go
first, as in any other eviction. A pinned block does not move, nor does one that somebody finds
meanwhile: the range then stays. Places leave the pool as they become free, so that nobody takes
them. It plans like the cache, whose part it is.
"""

from collections.abc import Collection
from dataclasses import dataclass, field

from policies.base import Access
from tierd.block import Block, State
from tierd.daemon.chain import TierChain
from tierd.daemon.copy import Place
from tierd.daemon.loads import Loads


@dataclass(slots=True)
class Vacancy:
    """A range of places on its way out of a pool."""

    level: int
    group: int
    left: list[Block]  # still in the pool
    gone: list[Block] = field(default_factory=list)

    @property
    def places(self) -> list[Place]:
        blocks = self.left + self.gone
        return [Place(self.level, self.group, block.block_id) for block in blocks]


class Compaction:
    """Empties ranges of one cache's pools, one of a pool at a time."""

    def __init__(self, chain: TierChain, loads: Loads) -> None:
        self._chain, self._loads = chain, loads

    def begin(self, level: int, group: int, ids: Collection[int], access: Access) -> Vacancy | None:
        """Begin to empty the places `ids`; None, and nothing has changed, if some are in use or
        the pool has not enough others to hold what is used."""
        pool = self._chain.tiers[level].pools[group]
        blocks = [block for block in map(pool.at, ids) if block is not None]
        live = [b for b in blocks if b.state is not State.FREE]
        if any(b.state is not State.COMMITTED or b.ref_cnt for b in live):
            return None
        inside, cold = set(blocks), list[Block]()
        room = pool.num_free - (len(blocks) - len(live))  # free places elsewhere
        moving = len(live)
        for block in pool.evictable():
            if moving <= room:
                break
            cold.append(block)
            moving, room = (moving - 1, room) if block in inside else (moving, room + 1)
        if moving > room:
            return None
        self._chain.evict(level, group, cold, access)
        vacancy = Vacancy(level, group, blocks)
        self._leave(vacancy)
        for source in list(vacancy.left):
            (target,) = pool.allocate(1)
            pool.pin(source)
            self._loads.move(self._chain.copy_within(group, level, source, target))
        self._loads.emit()
        return vacancy

    def end(self, vacancy: Vacancy) -> bool:
        """The copies have ended: whether the whole range is out of the pool. If not, `undo` it."""
        self._leave(vacancy)
        return not vacancy.left

    def undo(self, vacancy: Vacancy) -> None:
        """The range stays: what has left the pool is free in it again."""
        pool = self._chain.tiers[vacancy.level].pools[vacancy.group]
        pool.grow(b.block_id for b in vacancy.gone if pool.at(b.block_id) is None)
        vacancy.gone.clear()

    def _leave(self, vacancy: Vacancy) -> None:
        """Take the free places of the range out of the pool; where a block has moved from is out
        of it already."""
        pool = self._chain.tiers[vacancy.level].pools[vacancy.group]
        free = [block for block in vacancy.left if block.state is State.FREE]
        pool.shrink(b.block_id for b in free if pool.at(b.block_id) is b)
        vacancy.gone += free
        vacancy.left = [block for block in vacancy.left if block.state is not State.FREE]
