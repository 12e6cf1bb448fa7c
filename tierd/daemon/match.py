"""Which tokens of a prompt a chain of tiers already has: the hit, and the blocks that serve it.

A hit of L tokens needs all blocks of [0, L) of full-attention groups, and of a sliding-window
group only those its window still sees:

    tokens          0                    L - W          L
    full attention  |######|######|######|######|######|
    sliding window  |......|......|...###|######|######|      first_block(L, W)

Pure reading: nothing here changes a pool, or knows what a hit is for.
"""

from collections.abc import Sequence

from tierd.block import Block, BlockHash
from tierd.daemon.tier import Tier
from tierd.errors import LeaseError
from tierd.layout import KVLayout


def first_block(hit: int, window: int | None, size: int) -> int:
    """The first block that a hit of `hit` tokens needs: all, or those the window still sees."""
    return 0 if window is None else max(0, hit - window) // size


def check_names(hashes: Sequence[BlockHash]) -> None:
    """Raise LeaseError unless every name of a chain is another, as in every true chain."""
    if len(set(hashes)) != len(hashes):
        raise LeaseError("a prompt names a block twice")


class PrefixMatch:
    """The hits of one namespace's chain of tiers."""

    def __init__(self, layout: KVLayout, tiers: Sequence[Tier]) -> None:
        self._layout, self._tiers = layout, tiers
        self._sizes = [group.block_size for group in layout.groups]

    def hit(self, hashes: Sequence[BlockHash], num_tokens: int) -> int:
        """Tokens of the longest usable hit of a prompt of `num_tokens`. Changes nothing.

        It ends where every group ends a block, leaves one token to compute, and needs all blocks
        of full-attention groups but only the window's of sliding-window groups.
        """
        step = self._layout.alignment
        hit = (num_tokens - 1) // step * step
        windows = []
        for group, size in enumerate(self._sizes):
            window = self._layout.window(group)
            if window is None:
                hit = min(hit, self._reach(group, hashes, hit) * size)
            else:
                windows.append((group, size, window))
        hit = hit // step * step
        runs = [(size, window, self._runs(g, hashes, hit)) for g, size, window in windows]
        while hit and not all(
            run[hit // size - 1] >= hit // size - first_block(hit, window, size)
            for size, window, run in runs
        ):
            hit -= step
        return hit

    def names(
        self, group: int, hashes: Sequence[BlockHash], start: int, stop: int
    ) -> Sequence[BlockHash]:
        """The names of blocks `start` to `stop` of a group: the hashes at their ends."""
        ratio = self._sizes[group] // self._layout.hash_step
        return hashes[(start + 1) * ratio - 1 : stop * ratio : ratio]

    def find(
        self, group: int, hashes: Sequence[BlockHash], hit: int
    ) -> list[tuple[int, int, Block]]:
        """`(index, level, block)`, hottest copy, of every block of a group that `hit` needs."""
        size = self._sizes[group]
        first, found = first_block(hit, self._layout.window(group), size), []
        for index, key in enumerate(self.names(group, hashes, first, hit // size), first):
            for level, tier in enumerate(self._tiers):
                if block := tier.pools[group].get(key):
                    found.append((index, level, block))
                    break
        assert len(found) == hit // size - first, "a matched block is gone"
        return found

    def _reach(self, group: int, hashes: Sequence[BlockHash], hit: int) -> int:
        """Leading blocks of the group, up to `hit` tokens, that some tier holds."""
        pools = [tier.pools[group] for tier in self._tiers]
        names = self.names(group, hashes, 0, hit // self._sizes[group])
        for index, key in enumerate(names):
            if not any(pool.get(key) for pool in pools):
                return index
        return len(names)

    def _runs(self, group: int, hashes: Sequence[BlockHash], hit: int) -> list[int]:
        """For each block up to `hit` tokens: the length of the run of known blocks that it ends."""
        pools = [tier.pools[group] for tier in self._tiers]
        run, runs = 0, []
        for key in self.names(group, hashes, 0, hit // self._sizes[group]):
            run = run + 1 if any(pool.get(key) for pool in pools) else 0
            runs.append(run)
        return runs
