"""The best that any cache could have done with a trace, knowing it to its end.

Belady's rule over paths: what is used again last goes first, of one request the tail first, and
what is never used again is not kept at all. A parent is used again no later than its child, so what
is kept of a path is always a beginning of it, and it is enough to count: how many blocks that are
kept are used next by which request.
"""

import heapq
from collections import Counter
from collections.abc import Sequence

from tierd.daemon.trace import Trace


class Optimum:
    """The optimum of one trace, for any capacity."""

    def __init__(self, trace: Trace) -> None:
        following = [-1] * len(trace.names)
        following_of: list[Counter[int]] = []
        for at in range(len(trace.requests) - 1, -1, -1):
            counts: Counter[int] = Counter()
            rest = trace.requests[at].num_asked
            for first, count in trace.requests[at].runs:
                counts.update(following[first : first + count])
                asked = min(rest, count)
                # What is generated is made there anyhow: nothing need be kept for it.
                following[first : first + count] = [at] * asked + [-1] * (count - asked)
                rest -= asked
            del counts[-1]
            following_of.append(counts)
        # By request: how many of its blocks are used next by which later one.
        self._next: Sequence[Counter[int]] = following_of[::-1]
        self._num_accesses = trace.num_accesses

    def hit_rate(self, capacity: int) -> float:
        """Of blocks, in a cache of `capacity` of them, over the whole trace from empty."""
        return sum(self.hits(capacity)) / self._num_accesses

    def hits(self, capacity: int) -> list[int]:
        """Blocks of each request that are there, in a cache of `capacity` of them."""
        kept, total, hits = [0] * len(self._next), 0, list[int]()
        latest: list[int] = []  # a heap of requests that something is kept for, negative
        for at, following in enumerate(self._next):
            hits.append(kept[at])
            total -= kept[at]
            kept[at] = 0
            for later, count in following.items():
                if not kept[later]:
                    heapq.heappush(latest, -later)
                kept[later] += count
                total += count
            while total > capacity:
                last = -latest[0]
                dropped = min(kept[last], total - capacity)
                kept[last] -= dropped
                total -= dropped
                if not kept[last]:
                    heapq.heappop(latest)
        return hits
