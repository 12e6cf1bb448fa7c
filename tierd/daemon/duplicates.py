"""Blocks of a tier that a hotter one has too, where those are to give way first.

A block is entered when it is promoted, and looked at again when room is needed: whether it is there
still, held by nobody, and really in a hotter tier. Nobody takes it out when it goes, so that some
of what is entered is stale; of each pool it remembers as many names as that has places.
"""

from collections import OrderedDict
from collections.abc import Sequence

from policies.base import PlacementPolicy
from tierd.block import Block, BlockHash, State
from tierd.daemon.tier import Tier

_LOOK_AHEAD = 32  # held or still arriving above, that may be passed over


class Duplicates:
    """What lies in two tiers, by level and group."""

    def __init__(self, tiers: Sequence[Tier], placement: PlacementPolicy) -> None:
        self._tiers, self._placement = tiers, placement
        self._names: dict[tuple[int, int], OrderedDict[BlockHash, None]] = {}

    def add(self, level: int, group: int, block: Block) -> None:
        """The named block is being copied up from `level`."""
        if block.key is None or self._kept(level, group):
            return
        names = self._names.setdefault((level, group), OrderedDict())
        names[block.key] = None
        names.move_to_end(block.key)
        if len(names) > self._tiers[level].pools[group].capacity:
            names.popitem(last=False)

    def holds(self, level: int, group: int, block: Block) -> bool:
        """Whether a block of that level is one, so that it may go and nothing is lost."""
        if block.key is None or block.key not in self._names.get((level, group), ()):
            return False
        above = self._above(level, group, block.key)
        return above is not None and above.state is State.COMMITTED

    def leaving(self, level: int, group: int, blocks: Sequence[Block]) -> None:
        """Named blocks are about to be evicted from `level`: their copies further below are
        duplicates no longer, unless a hotter tier has them still."""
        lower = [names for (lv, g), names in self._names.items() if g == group and lv > level]
        for block in blocks if lower else ():
            if block.key and self._above(level, group, block.key) is None:
                for names in lower:
                    names.pop(block.key, None)

    def first(self, level: int, group: int, n: int) -> list[Block]:
        """At most `n` that may go, those promoted last first: above they will stay the longest."""
        names, found, stale = self._names.get((level, group)), list[Block](), list[BlockHash]()
        if not n or not names or self._kept(level, group):
            return found
        passed = 0
        for name in reversed(names):
            block = self._tiers[level].pools[group].get(name)
            above = self._above(level, group, name)
            if block is None or above is None:
                stale.append(name)
            elif block.ref_cnt or not block.state is above.state is State.COMMITTED:
                passed += 1
            else:
                found.append(block)
            if len(found) == n or passed + len(stale) == n + _LOOK_AHEAD:
                break
        for name in stale:
            del names[name]
        return found

    def _kept(self, level: int, group: int) -> bool:
        capacities = [tier.pools[group].capacity for tier in self._tiers[: level + 1]]
        return self._placement.keeps(level, capacities[level], sum(capacities[:level]))

    def _above(self, level: int, group: int, name: BlockHash) -> Block | None:
        for tier in self._tiers[:level]:
            if (block := tier.pools[group].get(name)) is not None:
                return block
        return None
