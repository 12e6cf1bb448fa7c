"""Which tokens of a prompt a chain of tiers already has: the hit, and the blocks that serve it.

A hit of L tokens needs all blocks of [0, L) of full-attention groups, and of a sliding-window
group only those its window still sees:

    tokens          0                    L - W          L
    full attention  |######|######|######|######|######|
    sliding window  |......|......|...###|######|######|      first_block(L, W)

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


def check_names(hashes: Sequence[BlockHash]) -> None:
    """Raise LeaseError unless every name of a chain is another, as in every true chain."""
    if len(set(hashes)) != len(hashes):
        raise LeaseError("a prompt names a block twice")


class PrefixMatch:
    """The hits of one namespace's chain of tiers."""

    def __init__(self, layout: KVLayout, tiers: Sequence[Tier]) -> None:
        self._layout, self._tiers = layout, tiers
        self._sizes = [group.block_size for group in layout.groups]

    def hit(self, hashes: Sequence[BlockHash], num_tokens: int, start: int = 0) -> int:
        """Tokens of the longest usable hit of a prompt of `num_tokens`. Changes nothing.

        What lies before `start` is taken for known.
        """
        return next(self.hits(hashes, num_tokens, start))

    def hits(self, hashes: Sequence[BlockHash], num_tokens: int, start: int = 0) -> Iterator[int]:
        """Tokens of every usable hit, the longest first, down to 0.

        It ends where every group ends a block, leaves one token to compute, and needs all blocks
        of full-attention groups but only the window's of sliding-window groups.
        """
        step = self._layout.alignment
        hit = (num_tokens - 1) // step * step
        windows = []
        for group, size in enumerate(self._sizes):
            window = self._layout.window(group)
            if window is None:
                hit = min(hit, self._reach(group, hashes, start, hit) * size)
            else:
                windows.append((group, size, window))
        hit = hit // step * step
        runs = [(size, window, self._runs(g, hashes, start, hit)) for g, size, window in windows]
        if not runs:
            yield from range(hit, -1, -step)
            return
        while hit:
            if all(
                run[hit // size - 1] >= hit // size - first_block(hit, window, size)
                for size, window, run in runs
            ):
                yield hit
            hit -= step
        yield 0

    def on_top(self, hashes: Sequence[BlockHash], hit: int) -> bool:
        """Whether all that a usable `hit` needs is in the top tier, or on its way there."""
        for group, size in enumerate(self._sizes):
            get = self._tiers[0].pools[group].get
            first = first_block(hit, self._layout.window(group), size)
            names = self.names(group, hashes, first, hit // size)
            if not all(get(key) is not None for key in names):
                return False
        return True

    def below(self, hashes: Sequence[BlockHash], hits: Sequence[int]) -> npt.NDArray[np.int64]:
        """Bytes that each of some usable `hits`, the longest first, has below the top tier.

        Shape `[levels, len(hits)]`: by level of the hottest copy; row 0 is 0.
        """
        ends = np.asarray(hits)
        found = np.zeros((len(self._tiers), len(hits)), np.int64)
        for group, size in enumerate(self._sizes):
            levels = self._levels(group, hashes, hits[0] // size)
            window = self._layout.window(group)
            first = 0 * ends if window is None else np.maximum(0, ends - window) // size
            for level in range(1, len(self._tiers)):
                count = np.concatenate([[0], np.cumsum(levels == level)])
                nbytes = self._layout.block_nbytes(group)
                found[level] += (count[ends // size] - count[first]) * nbytes
        return found

    def lookup(self, first: int, hashes: Sequence[BlockHash]) -> bytes:
        """For each granule of a prompt from granule `first` on: the level that serves it, a byte.

        Where several groups end a block there, it is the coldest of their hottest copies, which may
        be on their way; `NOWHERE` if one of them has none, or if no block ends there.
        """
        served = [-1] * len(hashes)
        for group, size in enumerate(self._sizes):
            ratio = size // self._layout.hash_step
            finds = [tier.pools[group].get for tier in self._tiers]
            for at in range(-(first + 1) % ratio, len(hashes), ratio):
                key, level = hashes[at], 0
                for find in finds:
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
        ratio = self._sizes[group] // self._layout.hash_step
        return hashes[(start + 1) * ratio - 1 : stop * ratio : ratio]

    def find(
        self, group: int, hashes: Sequence[BlockHash], hit: int, start: int = 0
    ) -> list[tuple[int, int, Block]]:
        """`(index, level, block)`, hottest copy, of every block of a group that `hit` needs from
        `start` on."""
        size, found = self._sizes[group], []
        first = max(first_block(hit, self._layout.window(group), size), start // size)
        first = min(first, hit // size)
        gets = list(enumerate(tier.pools[group].get for tier in self._tiers))
        for index, key in enumerate(self.names(group, hashes, first, hit // size), first):
            for level, get in gets:
                if (block := get(key)) is not None:
                    found.append((index, level, block))
                    break
        assert len(found) == hit // size - first, "a matched block is gone"
        return found

    def _levels(self, group: int, hashes: Sequence[BlockHash], count: int) -> npt.NDArray[np.int64]:
        """The hottest level of each of the first `count` blocks of a group, -1 where none is."""
        names = self.names(group, hashes, 0, count)
        levels = np.full(len(names), -1)
        for level in range(len(self._tiers) - 1, -1, -1):  # so that the hottest stays
            get = self._tiers[level].pools[group].get
            levels[[get(key) is not None for key in names]] = level
        return levels

    def _reach(self, group: int, hashes: Sequence[BlockHash], start: int, hit: int) -> int:
        """Leading blocks of the group, up to `hit` tokens, that some tier holds."""
        gets = [tier.pools[group].get for tier in self._tiers]
        first, stop = start // self._sizes[group], hit // self._sizes[group]
        for index, key in enumerate(self.names(group, hashes, first, stop), first):
            for get in gets:  # a third of the time of any(): every request waits for this
                if get(key) is not None:
                    break
            else:
                return index
        return stop

    def _runs(self, group: int, hashes: Sequence[BlockHash], start: int, hit: int) -> list[int]:
        """For each block up to `hit` tokens: the length of the run of known blocks that it ends."""
        pools = [tier.pools[group] for tier in self._tiers]
        run = start // self._sizes[group]
        runs = list(range(1, run + 1))
        for key in self.names(group, hashes, run, hit // self._sizes[group]):
            run = run + 1 if any(pool.get(key) for pool in pools) else 0
            runs.append(run)
        return runs
