"""Victims: the blocks of a pool whose places are given away, and which of them must go down first.

What a policy would give up first goes, but rather a block that need not be copied down: because it
lies below already, or in a hotter tier too, or is not worth a write. Nothing is changed here.
"""

from collections.abc import Sequence
from itertools import islice

from policies.base import Access
from tierd.block import Block, State
from tierd.daemon.duplicates import Duplicates
from tierd.daemon.tier import Tier
from tierd.errors import OutOfBlocks

_LOOK_AHEAD = 32  # blocks that may be passed over because they are still to be copied


class Victims:
    """Finds them along one chain."""

    def __init__(self, tiers: Sequence[Tier], duplicates: Duplicates) -> None:
        self._tiers, self._duplicates = tiers, duplicates

    def choose(self, level: int, group: int, n: int, access: Access) -> list[Block]:
        """The blocks to evict so that `n` places are free. Raises OutOfBlocks if too few."""
        pool = self._tiers[level].pools[group]
        wanted = max(0, n - pool.num_free)
        if not wanted or level + 1 == len(self._tiers):
            return self.first(level, group, wanted)
        # The new owner of a place would have to wait for the copy of what was there.
        clean, dirty = self._duplicates.first(level, group, wanted), list[Block]()
        chosen = set(clean)
        for block in pool.evictable():
            if len(clean) >= wanted or len(clean) + len(dirty) == wanted + _LOOK_AHEAD:
                break
            if block not in chosen:
                is_clean = self._is_clean(level, group, block, access)
                (clean if is_clean else dirty).append(block)
        if len(clean) + len(dirty) < wanted:
            raise OutOfBlocks(f"need {wanted} blocks to evict")
        return clean + dirty[: wanted - len(clean)]

    def first(self, level: int, group: int, n: int) -> list[Block]:
        """The `n` blocks to give up first, copied or not. Raises OutOfBlocks if too few."""
        pool = self._tiers[level].pools[group]
        if not (first := self._duplicates.first(level, group, n)):
            return pool.victims(n)
        chosen = set(first)
        others = (block for block in pool.evictable() if block not in chosen)
        found = [*first, *islice(others, n - len(first))]
        if len(found) < n:
            raise OutOfBlocks(f"need {n} blocks to evict, {len(found)} are not in use")
        return found

    def _is_clean(self, level: int, group: int, block: Block, access: Access) -> bool:
        """Whether a block can be evicted without a copy down."""
        if (lower := self.below(level, group, block)) is not None:
            return lower.state is State.COMMITTED
        return not self.worthy(level + 1, group, [block], access)

    def below(self, level: int, group: int, block: Block) -> Block | None:
        """The copy of a block in the hottest tier below `level` that has one, or is to have it."""
        if block.key is not None:
            for tier in self._tiers[level + 1 :]:
                if (lower := tier.pools[group].get(block.key)) is not None:
                    return lower
        return None

    def worthy(
        self, level: int, group: int, blocks: Sequence[Block], access: Access
    ) -> Sequence[Block]:
        """Those of named blocks that are worth writing to `level`."""
        admissions = self._tiers[level].admissions
        if not admissions or not blocks:
            return blocks
        answers = admissions[group].worth([block.key for block in blocks], access)
        return [block for block, worth in zip(blocks, answers, strict=True) if worth]
