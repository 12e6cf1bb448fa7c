"""One tier's memory, cut into extents; an extent has at most one owner (a pool).

    extents   |   0   |   1   |   2   |   3   |          block id = offset // block bytes
    owner     |   A   |   A   |   B   | free  |
    A's blocks|  0  |  1  |  2  | x                      x: not whole inside A's run, so no id

Adjacent extents of one owner share the block across their edge, so the waste is under one block a
run. Extents may be *withheld*, so that nobody gets them: the others are the arena's size, which so
may change. This is arithmetic: the memory itself is the daemon's.
"""

from collections import Counter
from collections.abc import Hashable
from itertools import groupby
from typing import Final

EXTENT_NBYTES = 2 << 20
_WITHHELD: Final = object()  # the owner of what nobody gets


class Arena:
    """Extents of `nbytes` of memory, given out in runs."""

    def __init__(self, nbytes: int, extent_nbytes: int = EXTENT_NBYTES) -> None:
        self.extent_nbytes = extent_nbytes
        self._owners: list[Hashable | None] = [None] * (nbytes // extent_nbytes)
        self._num_free = len(self._owners)
        self._num_held: Counter[Hashable] = Counter()
        self._limit = len(self._owners)  # extents that are not to be withheld
        self._dry: list[int] = []  # withheld since they were last asked for

    @property
    def step(self) -> int:
        """Extents of a run: few long ones instead of many short ones, less is lost at edges."""
        return max(1, self._num_extents // 16)

    @property
    def nbytes(self) -> int:
        return self._num_extents * self.extent_nbytes

    @property
    def nbytes_over(self) -> int:
        """What is still to be withheld: its owners have to give it back first."""
        return (self._num_extents - self._limit) * self.extent_nbytes

    @property
    def _num_extents(self) -> int:
        return len(self._owners) - self._num_held[_WITHHELD]

    def resize(self, nbytes: int) -> list[tuple[int, int]]:
        """Withhold all but `nbytes`, the free extents at once and others as they are given back, or
        give withheld ones out again: the runs `(first, past the last)` of these."""
        self._limit = min(nbytes // self.extent_nbytes, len(self._owners))
        self._withhold(range(len(self._owners)))
        back: list[int] = []
        for extent, owner in enumerate(self._owners):
            if owner is _WITHHELD and self._num_extents < self._limit:
                self._owners[extent] = None
                self._num_held[_WITHHELD] -= 1
                back.append(extent)
        self._num_free += len(back)
        self._dry = [extent for extent in self._dry if self._owners[extent] is _WITHHELD]
        return _runs(back)

    def in_use(self, first: int, last: int) -> list[tuple[int, int]]:
        """Runs of extents from `first` to before `last` that are not withheld."""
        return _runs([e for e in range(first, last) if self._owners[e] is not _WITHHELD])

    def withheld(self) -> list[tuple[int, int]]:
        """Runs of extents that were withheld since the last call."""
        dry, self._dry = self._dry, []
        return _runs(sorted(dry))

    def _withhold(self, extents: range) -> None:
        """Withhold those that are free, the last first, as far as the size is too large."""
        for extent in reversed(extents):
            if self._num_extents <= self._limit:
                return
            if self._owners[extent] is None:
                self._owners[extent] = _WITHHELD
                self._num_held[_WITHHELD] += 1
                self._num_free -= 1
                self._dry.append(extent)

    @property
    def nbytes_free(self) -> int:
        return self._num_free * self.extent_nbytes

    def grow(self, owner: Hashable, block_nbytes: int) -> list[int] | None:
        """Give `owner` another run of extents: the block ids it gained, None if none fit."""
        if not self._num_free:
            return None
        least = self.least(block_nbytes)
        for start, room in self._openings(owner, least):
            take = min(room, max(self.step, least))
            before = {
                block_id
                for edge in (start, start + take)  # it may close a gap between two runs
                for block_id in self._ids(owner, block_nbytes, edge)
            }
            for extent in range(start, start + take):
                self._owners[extent] = owner
            self._num_free -= take
            self._num_held[owner] += take
            if gained := [i for i in self._ids(owner, block_nbytes, start) if i not in before]:
                return gained
            self.give_back(owner, start, start + take)
        return None

    def held(self, owner: Hashable) -> int:
        """Bytes of the extents of `owner`."""
        return self._num_held[owner] * self.extent_nbytes

    def least(self, block_nbytes: int) -> int:
        """Extents of a run that holds a whole block wherever it begins."""
        extents = -(-block_nbytes // self.extent_nbytes)
        # Blocks are aligned to their own size, runs are not.
        return 2 * extents if self.extent_nbytes % block_nbytes else extents

    def runs(self, owner: Hashable) -> list[tuple[int, int]]:
        """`(first, past the last)` extent of each run of `owner`."""
        runs, start = [], 0
        for same, extents in groupby(self._owners):
            stop = start + sum(1 for _ in extents)
            if same == owner:
                runs.append((start, stop))
            start = stop
        return runs

    def touching(self, start: int, stop: int, block_nbytes: int) -> range:
        """The block ids that lie in extents `start` to `stop`, if only in part."""
        first, last = start * self.extent_nbytes, stop * self.extent_nbytes
        return range(first // block_nbytes, -(-last // block_nbytes))

    def give_back(self, owner: Hashable, start: int, stop: int) -> None:
        """`owner` gives its extents `start` to `stop` back, and with them every block `touching`
        them."""
        assert all(of == owner for of in self._owners[start:stop]), "these extents are another's"
        self._owners[start:stop] = [None] * (stop - start)
        self._num_free += stop - start
        self._num_held[owner] -= stop - start
        self._withhold(range(start, stop))

    def release(self, owner: Hashable) -> None:
        """Take back every extent of `owner`."""
        for start, stop in self.runs(owner):
            self.give_back(owner, start, stop)

    def _openings(self, owner: Hashable, least: int) -> list[tuple[int, int]]:
        """`(first extent, length)` of free runs: those that continue a run of `owner` first."""
        runs, start = [], 0
        while start < len(self._owners):
            stop = start + 1
            while stop < len(self._owners) and self._owners[stop] == self._owners[start]:
                stop += 1
            if self._owners[start] is None:
                runs.append((start, stop - start))
            start = stop
        follows = [run for run in runs if run[0] and self._owners[run[0] - 1] == owner]
        return (
            follows
            + [run for run in runs if run not in follows and run[1] >= least]
            + [run for run in runs if run not in follows and run[1] < least]
        )

    def _ids(self, owner: Hashable, block_nbytes: int, near: int) -> range:
        """Blocks whole inside the run of `owner` that holds, or ends before, extent `near`."""
        first = last = near
        while first and self._owners[first - 1] == owner:
            first -= 1
        while last < len(self._owners) and self._owners[last] == owner:
            last += 1
        return self._whole(first, last, block_nbytes)

    def _whole(self, first: int, last: int, block_nbytes: int) -> range:
        """Blocks whole inside extents `first` to `last`."""
        start, stop = first * self.extent_nbytes, last * self.extent_nbytes
        return range(-(-start // block_nbytes), stop // block_nbytes)


def _runs(extents: list[int]) -> list[tuple[int, int]]:
    """Ascending extents as runs `(first, past the last)`."""
    runs: list[tuple[int, int]] = []
    for extent in extents:
        if runs and runs[-1][1] == extent:
            runs[-1] = runs[-1][0], extent + 1
        else:
            runs.append((extent, extent + 1))
    return runs
