"""Compaction: blocks move out of places that are leaving their pool, to free ones elsewhere.

    before   |A . . b| |C D E .|      b, the colder of the two, is evicted; A moves
    after    |. . . .| |C D E A|

Where too few are free, the coldest of all may be made to go first, as in any other eviction. A
pinned block does not move, nor does one that somebody finds meanwhile. It plans like the cache,
whose part it is.
"""

from collections.abc import Iterable

from policies.base import Access
from tierd.block import Block, State
from tierd.daemon.chain import TierChain
from tierd.daemon.loads import Loads
from tierd.daemon.pool import BlockPool


class Compaction:
    """Moves blocks within one cache's pools."""

    def __init__(self, chain: TierChain, loads: Loads) -> None:
        self._chain, self._loads = chain, loads

    def move(
        self, level: int, group: int, ids: Iterable[int], access: Access, *, evict: bool
    ) -> bool:
        """Begin to move what lies in the places `ids`, which are leaving, and nobody holds.

        `evict`: the coldest of the pool go where too few places are free. False, and nothing has
        changed, if they have no room.
        """
        pool = self._chain.tiers[level].pools[group]
        found = [block for block in map(pool.at, ids) if block is not None]
        moving = [b for b in found if b.state is State.COMMITTED and not b.ref_cnt]
        if len(moving) > pool.num_free:
            cold = _coldest(pool, moving) if evict else None
            if cold is None:
                return False
            gone = [block.block_id for block in cold if pool.is_leaving(block)]
            self._chain.evict(level, group, cold, access)
            pool.leave(gone)
        for source in moving:
            if source.state is State.COMMITTED:
                (target,) = pool.allocate(1)
                pool.pin(source)
                self._loads.move(self._chain.copy_within(group, level, source, target))
        self._loads.emit()
        return True


def _coldest(pool: BlockPool, moving: list[Block]) -> list[Block] | None:
    """What has to be evicted so that the rest of `moving` has room; None if that is too little."""
    inside, left, room, cold = set(moving), len(moving), pool.num_free, list[Block]()
    for block in pool.idle():
        if left <= room:
            break
        cold.append(block)
        if block in inside:
            left -= 1
        elif not pool.is_leaving(block):
            room += 1
    return cold if left <= room else None
