"""Runs: consecutive ids, `(first, how many)`, and the tree that the paths of requests form of them.

A conversation's path is a run a turn, so runs are few where ids are many. An id says nothing here
but what it is equal to.
"""

from bisect import bisect_right
from collections.abc import Iterable, Sequence

Run = tuple[int, int]


def joined(ids: Iterable[int]) -> list[Run]:
    """Ids in order, as runs of consecutive ones: `(first, how many)`."""
    runs: list[Run] = []
    first = stop = -1
    for number in ids:
        if number != stop:
            if stop > first:
                runs.append((first, stop - first))
            first = number
        stop = number + 1
    if stop > first:
        runs.append((first, stop - first))
    return runs


def beginning(runs: Sequence[Run], count: int) -> list[Run]:
    """The first `count` ids of some runs."""
    found = []
    for first, length in runs:
        if count <= 0:
            break
        found.append((first, min(length, count)))
        count -= length
    return found


def disjoint(runs: Sequence[Run]) -> bool:
    """Whether no id comes twice, as in every true chain."""
    stop = -1
    for first, count in sorted(runs):
        if first < stop:
            return False
        stop = first + count
    return True


class PathTree:
    """Runs of consecutive ids, each after an id of an earlier one, or at the root."""

    def __init__(self) -> None:
        self._firsts: list[int] = []
        self._afters: list[int | None] = []

    def add(self, first: int, after: int | None) -> None:
        """Another run, of the ids from `first` on: above all there are."""
        self._firsts.append(first)
        self._afters.append(after)

    def path(self, last: int | None) -> list[Run]:
        """`(which run, how many of its ids)` of the path that ends with the id `last`."""
        found = []
        while last is not None:
            run = bisect_right(self._firsts, last) - 1
            found.append((run, last - self._firsts[run] + 1))
            last = self._afters[run]
        return found[::-1]
