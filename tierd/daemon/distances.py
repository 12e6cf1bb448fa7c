"""Stack distances: what LRU hits of a trace, at every capacity, from one pass.

LRU of any capacity holds the top of one and the same stack. A request puts its path on top, head
first, so that what is left of an earlier request is always the rest of its path, in one piece:

    top | path of the last request | rest of the one before | rest of .. |

A path's blocks are hit in a few such pieces; each is as deep as all that lies above it. Where a
request kept nothing of what it asked for, a cache does not learn what the stack does.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from tierd.daemon.runs import Run
from tierd.daemon.trace import Trace


class StackDistances:
    """Those of one trace, one capacity for all groups and no tier below."""

    def __init__(self, trace: Trace) -> None:
        owners = np.full(len(trace.names), -1)  # by block: the last request that used it
        left = _Sums(len(trace.requests))  # by request: blocks that no later one has used
        steps = np.zeros(len(trace.names) + 2, np.int64)
        for at, request in enumerate(trace.requests):
            path, rest = _path(request.runs), request.num_asked
            pieces = _pieces(owners[path])
            for owner, count in pieces:
                above = left.total - left.upto(owner)
                steps[above + 1] += (hit := min(rest, count)) > 0
                steps[above + 1 + hit] -= hit > 0
                rest -= hit
            for owner, count in pieces:
                left.add(owner, -count)
            owners[path] = at
            left.add(at, len(path))
        self._hits = np.cumsum(np.cumsum(steps))
        self._num_accesses = trace.num_accesses

    def hit_rate(self, capacity: int) -> float:
        """Of blocks, in a cache of `capacity` of them, over the whole trace from empty."""
        return float(self._hits[min(capacity, len(self._hits) - 1)]) / self._num_accesses


class _Sums:
    """Numbers of which the sums of the first are asked for (a Fenwick tree)."""

    def __init__(self, count: int) -> None:
        self.total = 0
        self._tree = [0] * (count + 1)

    def add(self, at: int, number: int) -> None:
        self.total += number
        at += 1
        while at < len(self._tree):
            self._tree[at] += number
            at += at & -at

    def upto(self, at: int) -> int:
        """The sum of all up to `at`, which counts."""
        found, at = 0, at + 1
        while at:
            found += self._tree[at]
            at &= at - 1
        return found


def _path(runs: Sequence[Run]) -> npt.NDArray[np.int64]:
    return np.concatenate([np.arange(first, first + count) for first, count in runs])


def _pieces(owners: npt.NDArray[np.int64]) -> list[tuple[int, int]]:
    """`(owner, how many blocks in a row)`, without those that nobody has used."""
    cuts = np.flatnonzero(np.diff(owners)) + 1
    starts = [0, *cuts.tolist()]
    stops = [*cuts.tolist(), len(owners)]
    pairs = zip(starts, stops, strict=True)
    return [(int(owners[a]), b - a) for a, b in pairs if owners[a] >= 0]
