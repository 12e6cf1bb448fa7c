"""One tier's memory, cut into extents; an extent has at most one owner (a pool).

    extents   |   0   |   1   |   2   |   3   |          block id = offset // block bytes
    owner     |   A   |   A   |   B   | free  |
    A's blocks|  0  |  1  |  2  | x                      x: not whole inside A's run, so no id

Adjacent extents of one owner share the block across their edge, so the waste is under one block a
run. This is arithmetic: the memory itself is the daemon's.
"""

from collections import Counter
from collections.abc import Hashable
from itertools import groupby

EXTENT_NBYTES = 2 << 20


class Arena:
    """Extents of `nbytes` of memory, given out in runs."""

    def __init__(self, nbytes: int, extent_nbytes: int = EXTENT_NBYTES) -> None:
        self.extent_nbytes = extent_nbytes
        self._owners: list[Hashable | None] = [None] * (nbytes // extent_nbytes)
        self._num_free = len(self._owners)
        self._num_held: Counter[Hashable] = Counter()
        # Few long runs instead of many short ones: less is lost at their edges.
        self.step = max(1, len(self._owners) // 16)

    @property
    def nbytes(self) -> int:
        return len(self._owners) * self.extent_nbytes

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
