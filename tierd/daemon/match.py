"""Which tokens of a prompt a chain of tiers already has: the hit, and the blocks that serve it.

A hit of L tokens, a whole number of granules, needs all of [0, L) of full-attention groups, and of
a sliding-window group only what its window still sees. Where L falls inside a block, any block
serves that begins with the same granules, and maybe goes on otherwise:

    tokens          0                    L - W       L
    full attention  |######|######|######|######|###...|
    sliding window  |......|......|...###|######|###...|      first_block(L, W)

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
        self._ratios = [size // layout.hash_step for size in self._sizes]

    def hit(self, hashes: Sequence[BlockHash], num_tokens: int) -> int:
        """Tokens of the longest usable hit of a prompt of `num_tokens`. Changes nothing.

        It is a whole number of granules, leaves one token to compute, and needs all tokens of
        full-attention groups but only the window's of sliding-window groups.
        """
        step = self._layout.hash_step
        hit = (num_tokens - 1) // step * step
        windows = []
        for group in range(len(self._sizes)):
            if self._layout.window(group) is None:
                hit = self._reach(group, hashes, hit)
            else:
                windows.append(group)
        runs = {group: self._runs(group, hashes, hit) for group in windows}
        while hit and not all(self._sees(g, hashes, hit, runs[g]) for g in windows):
            hit -= step
        return hit

    def names(
        self, group: int, hashes: Sequence[BlockHash], start: int, stop: int
    ) -> Sequence[BlockHash]:
        """The names of blocks `start` to `stop` of a group: the hashes at their ends."""
        ratio = self._ratios[group]
        return hashes[(start + 1) * ratio - 1 : stop * ratio : ratio]

    def inner(self, group: int, hashes: Sequence[BlockHash], index: int) -> Sequence[BlockHash]:
        """The names of the granules inside block `index` of a group, without that at its end."""
        ratio = self._ratios[group]
        return hashes[index * ratio : (index + 1) * ratio - 1] if ratio > 1 else ()

    def find(
        self, group: int, hashes: Sequence[BlockHash], hit: int
    ) -> list[tuple[int, int, Block]]:
        """`(index, level, block)`, hottest copy, of every whole block of a group in `hit`."""
        size = self._sizes[group]
        first, found = first_block(hit, self._layout.window(group), size), []
        for index, key in enumerate(self.names(group, hashes, first, hit // size), first):
            for level, tier in enumerate(self._tiers):
                if block := tier.pools[group].get(key):
                    found.append((index, level, block))
                    break
        assert len(found) == hit // size - first, "a matched block is gone"
        return found

    def find_part(
        self, group: int, hashes: Sequence[BlockHash], hit: int
    ) -> tuple[int, Block] | None:
        """`(level, block)`, hottest copy, whose first tokens the hit needs; None if it ends where
        a block does."""
        if hit % self._sizes[group] == 0:
            return None
        part = self._covering(group, hashes, hit)
        assert part is not None, "a matched block is gone"
        return part

    def _reach(self, group: int, hashes: Sequence[BlockHash], hit: int) -> int:
        """Leading tokens of the group, whole granules up to `hit`, that some tier holds."""
        pools = [tier.pools[group] for tier in self._tiers]
        ratio, step, whole = self._ratios[group], self._layout.hash_step, 0
        for key in self.names(group, hashes, 0, hit // self._sizes[group]):
            if not any(pool.get(key) for pool in pools):
                break
            whole += 1
        most = min(hit // step, (whole + 1) * ratio - 1)
        for granules in range(most, whole * ratio, -1):
            if any(pool.covering(hashes[granules - 1]) for pool in pools):
                return granules * step
        return whole * ratio * step

    def _runs(self, group: int, hashes: Sequence[BlockHash], hit: int) -> list[int]:
        """For each block up to `hit` tokens: the length of the run of known blocks that it ends."""
        pools = [tier.pools[group] for tier in self._tiers]
        run, runs = 0, []
        for key in self.names(group, hashes, 0, hit // self._sizes[group]):
            run = run + 1 if any(pool.get(key) for pool in pools) else 0
            runs.append(run)
        return runs

    def _sees(
        self, group: int, hashes: Sequence[BlockHash], hit: int, runs: Sequence[int]
    ) -> bool:
        """Whether some tier holds all that the group's window sees before `hit`."""
        size = self._sizes[group]
        whole, first = hit // size, first_block(hit, self._layout.window(group), size)
        if whole > first and runs[whole - 1] < whole - first:
            return False
        return hit % size == 0 or self._covering(group, hashes, hit) is not None

    def _covering(
        self, group: int, hashes: Sequence[BlockHash], hit: int
    ) -> tuple[int, Block] | None:
        """`(level, block)`, hottest, that begins with the prompt's tokens from a block's start to
        `hit`. A pool that knows a name inside a block need not know the earlier ones still."""
        size, step = self._sizes[group], self._layout.hash_step
        end = (hit // size + 1) * self._ratios[group]
        for level, tier in enumerate(self._tiers):
            for name in hashes[hit // step - 1 : end]:
                if block := tier.pools[group].covering(name):
                    return level, block
        return None
