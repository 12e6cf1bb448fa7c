"""Which tokens of a prompt a chain of tiers already has: the hit, and the blocks that serve it.

A hit of L tokens, a whole number of granules, needs all of [0, L) of full-attention groups, and of
a sliding-window group only what its window still sees. Where L falls inside a block, any block
serves that begins with the same granules, and maybe goes on otherwise. Of several copies of a
block that one is taken which is nearest to the level where it is wanted:

    tokens          0                    L - W       L
    full attention  |######|######|######|######|###...|
    sliding window  |......|......|...###|######|###...|      first_block(L, W)

Pure reading: nothing here changes a pool, or knows what a hit is for.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from tierd.block import Block, BlockHash
from tierd.daemon.tier import Tier
from tierd.errors import LeaseError
from tierd.layout import KVLayout
from tierd.protocol import NOWHERE


def first_block(hit: int, window: int | None, size: int) -> int:
    """The first block that a hit of `hit` tokens needs: all, or those the window still sees."""
    return 0 if window is None else max(0, hit - window) // size


def num_blocks(num_tokens: int, size: int) -> int:
    """Blocks that hold `num_tokens`."""
    return -(-num_tokens // size)


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
        levels = range(len(tiers))
        self._nearest = [sorted(levels, key=lambda at: (abs(at - level), at)) for level in levels]

    def hit(self, hashes: Sequence[BlockHash], num_tokens: int, start: int = 0) -> int:
        """Tokens of the longest usable hit of a prompt of `num_tokens`. Changes nothing.

        What lies before `start` is taken for known.
        """
        return next(self.hits(hashes, num_tokens, start))

    def hits(self, hashes: Sequence[BlockHash], num_tokens: int, start: int = 0) -> Iterator[int]:
        """Tokens of every usable hit, the longest first, down to 0.

        It is a whole number of granules, leaves one token to compute, and needs all tokens of
        full-attention groups but only the window's of sliding-window groups.
        """
        step = self._layout.hash_step
        hit = (num_tokens - 1) // step * step
        windows = []
        for group in range(len(self._sizes)):
            if self._layout.window(group) is None:
                hit = self._reach(group, hashes, start, hit)
            else:
                windows.append(group)
        if not windows:
            yield from range(hit, -1, -step)
            return
        runs = {group: self._runs(group, hashes, start, hit) for group in windows}
        while hit:
            if all(self._sees(group, hashes, hit, runs[group]) for group in windows):
                yield hit
            hit -= step
        yield 0

    def in_place(self, hashes: Sequence[BlockHash], hit: int, level: int = 0) -> bool:
        """Whether all that a usable `hit` needs is at `level`, or on its way there."""
        for group, size in enumerate(self._sizes):
            get = self._tiers[level].pools[group].get
            first = first_block(hit, self._layout.window(group), size)
            names = self.names(group, hashes, first, hit // size)
            if not all(get(key) is not None for key in names):
                return False
            part = self.find_part(group, hashes, hit, level)
            if part is not None and part[0] != level:
                return False
        return True

    def elsewhere(
        self, hashes: Sequence[BlockHash], hits: Sequence[int], level: int = 0
    ) -> npt.NDArray[np.int64]:
        """Bytes that each of some usable `hits`, the longest first, has not at `level`.

        Shape `[levels, len(hits)]`: by level of the nearest copy; row `level` is 0.
        """
        ends = np.asarray(hits)
        found = np.zeros((len(self._tiers), len(hits)), np.int64)
        for group, size in enumerate(self._sizes):
            levels = self._levels(group, hashes, hits[0] // size, level)
            if (part := self.find_part(group, hashes, hits[0], level)) is not None:
                levels = np.append(levels, part[0])
            window = self._layout.window(group)
            first = 0 * ends if window is None else np.maximum(0, ends - window) // size
            for at in self._nearest[level][1:]:
                count = np.concatenate([[0], np.cumsum(levels == at)])
                nbytes = self._layout.block_nbytes(group)
                found[at] += (count[-(-ends // size)] - count[first]) * nbytes
        return found

    def lookup(self, first: int, hashes: Sequence[BlockHash]) -> bytes:
        """For each granule of a prompt from granule `first` on: the level that serves it, a byte.

        Of several groups it is the coldest of their hottest copies, which may be on their way;
        `NOWHERE` if one of them has none.
        """
        served = [-1] * len(hashes)
        for group, ratio in enumerate(self._ratios):
            pools = [tier.pools[group] for tier in self._tiers]
            finds = [pool.get if ratio == 1 else pool.covering for pool in pools]
            ends = [pool.get for pool in pools]
            for at, key in enumerate(hashes):
                level = 0
                for find in finds if (first + at + 1) % ratio else ends:
                    if find(key) is not None:
                        break
                    level += 1
                served[at] = max(served[at], level)
        levels = range(len(self._tiers))
        return bytes([level if level in levels else NOWHERE for level in served])

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
        self, group: int, hashes: Sequence[BlockHash], hit: int, start: int = 0, level: int = 0
    ) -> list[tuple[int, int, Block]]:
        """`(index, level, block)`, the copy nearest to `level`, of every whole block of a group
        that `hit` needs from `start` on."""
        size, found = self._sizes[group], []
        first = max(first_block(hit, self._layout.window(group), size), start // size)
        first = min(first, hit // size)
        gets = [(at, self._tiers[at].pools[group].get) for at in self._nearest[level]]
        for index, key in enumerate(self.names(group, hashes, first, hit // size), first):
            for at, get in gets:
                if (block := get(key)) is not None:
                    found.append((index, at, block))
                    break
        assert len(found) == hit // size - first, "a matched block is gone"
        return found

    def find_part(
        self, group: int, hashes: Sequence[BlockHash], hit: int, level: int = 0
    ) -> tuple[int, Block] | None:
        """`(level, block)`, the copy nearest to `level`, whose first tokens the hit needs; None if
        it ends where a block does."""
        if hit % self._sizes[group] == 0:
            return None
        part = self._covering(group, hashes, hit, level)
        assert part is not None, "a matched block is gone"
        return part

    def _levels(
        self, group: int, hashes: Sequence[BlockHash], count: int, level: int
    ) -> npt.NDArray[np.int64]:
        """Where the copy nearest to `level` is of each of the first `count` blocks of a group, -1
        for none."""
        names = self.names(group, hashes, 0, count)
        levels = np.full(len(names), -1)
        for at in reversed(self._nearest[level]):  # so that the nearest stays
            get = self._tiers[at].pools[group].get
            levels[[get(key) is not None for key in names]] = at
        return levels

    def _reach(self, group: int, hashes: Sequence[BlockHash], start: int, hit: int) -> int:
        """Leading tokens of the group, whole granules up to `hit`, that some tier holds."""
        size, ratio = self._sizes[group], self._ratios[group]
        gets = [tier.pools[group].get for tier in self._tiers]
        whole, stop = start // size, hit // size
        for key in self.names(group, hashes, whole, stop):
            for get in gets:  # a third of the time of any(): every request waits for this
                if get(key) is not None:
                    break
            else:
                break
            whole += 1
        step = self._layout.hash_step
        for granules in range(min(hit // step, (whole + 1) * ratio - 1), whole * ratio, -1):
            if any(tier.pools[group].covering(hashes[granules - 1]) for tier in self._tiers):
                return granules * step
        return whole * size

    def _runs(self, group: int, hashes: Sequence[BlockHash], start: int, hit: int) -> list[int]:
        """For each block up to `hit` tokens: the length of the run of known blocks that it ends."""
        pools = [tier.pools[group] for tier in self._tiers]
        run = start // self._sizes[group]
        runs = list(range(1, run + 1))
        for key in self.names(group, hashes, run, hit // self._sizes[group]):
            run = run + 1 if any(pool.get(key) for pool in pools) else 0
            runs.append(run)
        return runs

    def _sees(self, group: int, hashes: Sequence[BlockHash], hit: int, runs: Sequence[int]) -> bool:
        """Whether some tier holds all that the group's window sees before `hit`."""
        size = self._sizes[group]
        whole, first = hit // size, first_block(hit, self._layout.window(group), size)
        if whole > first and runs[whole - 1] < whole - first:
            return False
        return hit % size == 0 or self._covering(group, hashes, hit) is not None

    def _covering(
        self, group: int, hashes: Sequence[BlockHash], hit: int, level: int = 0
    ) -> tuple[int, Block] | None:
        """`(level, block)`, nearest to `level`, that begins with the prompt's tokens from a block's
        start to `hit`. A pool that knows a name inside a block need not know the earlier ones."""
        size, step = self._sizes[group], self._layout.hash_step
        end = (hit // size + 1) * self._ratios[group]
        for at in self._nearest[level]:
            for name in hashes[hit // step - 1 : end]:
                if block := self._tiers[at].pools[group].covering(name):
                    return at, block
        return None
