"""Copies down that nobody waits for: cold blocks made clean ahead, and new ones written through.

What lies below already can be evicted at once, so that a request need not wait for a copy (the
kernel's kswapd is the model). The blocks stay where they are, and are not pinned: a request that
needs a place takes it at once, and its new owner waits for the copy, as for any other demotion.

A tier may give up at once what comes down to it. Then copying it again would never end: whatever
was copied down ahead is not copied again so, until so many others were.
"""

from collections import OrderedDict, deque
from collections.abc import Sequence
from itertools import pairwise

from policies.base import Access
from tierd.block import Block, BlockHash, State
from tierd.daemon.chain import TierChain

_MOST = 256  # blocks a pool keeps clean, however large it is
_REMEMBERED = 4 * _MOST  # of those copied down, a pool
_MOST_NEW = 65536  # that wait to be written through, a pool; those that come too late are not


class Ahead:
    """Plans such copies along one chain. A tier's watermarks say how many places it keeps."""

    def __init__(self, chain: TierChain) -> None:
        self._chain = chain
        pools = [
            (lv, group) for lv, tier in enumerate(chain.tiers) for group in range(len(tier.pools))
        ]
        # All by level and group.
        self._enough = {of: -1 for of in pools}  # see `lags`
        self._copied = {of: OrderedDict[BlockHash, None]() for of in pools}
        self._new = {of: deque[tuple[Block, BlockHash]](maxlen=_MOST_NEW) for of in pools}

    def keep(self, level: int, watermarks: tuple[float, float]) -> None:
        """Other watermarks from now on, for one tier."""
        self._chain.tiers[level].watermarks = watermarks
        self._enough = dict.fromkeys(self._enough, -1)

    def committed(self, level: int, group: int, blocks: Sequence[Block | None]) -> None:
        """Blocks are new at a level: write those that have a name through, if the placement says
        so."""
        chain = self._chain
        if level + 1 < len(chain.tiers) and chain.placement.writes_through(level):
            self._new[level, group].extend(
                (block, block.key) for block in blocks if block and block.key
            )

    def lags(self) -> bool:
        """Whether there is something to write through, or so many places were taken since `clean`
        last looked that it should again.

        A place taken below counts too: what gave way to it there may have been our clean copy.
        """
        return any(self._new.values()) or any(
            pool.num_taken + below.num_taken > self._enough[level, group]
            for level, (tier, colder) in enumerate(pairwise(self._chain.tiers))
            for group, (pool, below) in enumerate(zip(tier.pools, colder.pools, strict=True))
        )

    def clean(self, limit: int, access: Access) -> None:
        """Plan copies down, at most `limit` a pool and kind."""
        for level, tier in enumerate(self._chain.tiers[:-1]):
            for group in range(len(tier.pools)):
                self._write_through(level, group, limit, access)
                self._clean(level, group, limit, access)

    def _write_through(self, level: int, group: int, limit: int, access: Access) -> None:
        new, below = self._new[level, group], self._chain.tiers[level + 1].pools[group]
        blocks = list[Block]()
        while new and len(blocks) < limit:
            block, key = new.popleft()
            readable = block.state in (State.COMMITTED, State.LOADING)
            if block.key == key and readable and below.get(key) is None:
                blocks.append(block)
        worthy = self._chain.victims.worthy(level + 1, group, blocks, access)
        self._chain.copy_down(level, group, worthy, level + 1, access, pin=True)
        self.committed(level + 1, group, [below.get(b.key) for b in worthy if b.key])

    def _clean(self, level: int, group: int, limit: int, access: Access) -> None:
        """Copy the coldest blocks that the tier below lacks down, if fewer places than the low
        watermark are free or can be evicted without a copy; up to the high one."""
        tier, pool = self._chain.tiers[level], self._chain.tiers[level].pools[group]
        low, high = (min(_MOST, int(mark * pool.capacity)) for mark in tier.watermarks)
        below, copied = self._chain.tiers[level + 1].pools[group], self._copied[level, group]
        at_hand, dirty = pool.num_free, list[Block]()
        for block in pool.evictable():
            if at_hand + len(dirty) >= high:
                break
            if block.key and below.get(block.key) is None and block.key not in copied:
                dirty.append(block)
            else:
                at_hand += 1
        worthy = self._chain.victims.worthy(level + 1, group, dirty, access)
        at_hand += len(dirty) - len(worthy)
        self._enough[level, group] = pool.num_taken + below.num_taken + at_hand - low
        if at_hand < low:
            chosen = worthy[:limit]
            self._chain.copy_down(level, group, chosen, level + 1, access, pin=False)
            copied.update((block.key, None) for block in chosen if block.key)
            while len(copied) > _REMEMBERED:
                copied.popitem(last=False)
