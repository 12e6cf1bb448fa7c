"""A ranking: keys by a number, the least first, read lazily and without changing it.

A heap whose entries grow stale when a key is ranked anew; stale ones are passed over, and swept out
once there are as many as others. Ties go to who was ranked first.
"""

import heapq
from collections.abc import Iterator
from typing import Generic, TypeVar

_Key = TypeVar("_Key")
_Entry = tuple[float, int, _Key]

_SLACK = 64  # stale entries that are not worth a sweep


class Ranking(Generic[_Key]):
    """Keys, each with one rank."""

    def __init__(self) -> None:
        self._entries: dict[_Key, _Entry[_Key]] = {}
        self._heap: list[_Entry[_Key]] = []
        self._serial = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: _Key) -> bool:
        return key in self._entries

    def rank(self, key: _Key) -> float:
        return self._entries[key][0]

    def set(self, key: _Key, rank: float) -> None:
        """Give a key its rank, in place of the one it has."""
        self._serial += 1
        self._entries[key] = entry = (rank, self._serial, key)
        heapq.heappush(self._heap, entry)
        self._drop_stale()
        if len(self._heap) > 2 * len(self._entries) + _SLACK:
            self._heap = list(self._entries.values())
            heapq.heapify(self._heap)

    def discard(self, key: _Key) -> None:
        self._entries.pop(key, None)
        self._drop_stale()

    def first(self) -> _Entry[_Key]:
        """`(rank, serial, key)` of the least; there must be one."""
        return self._heap[0]

    def _drop_stale(self) -> None:
        """Keep the first entry a true one: who reads finds it at once."""
        heap, entries = self._heap, self._entries
        while heap and entries.get(heap[0][2]) is not heap[0]:
            heapq.heappop(heap)

    def entries(self) -> Iterator[_Entry[_Key]]:
        """Yield `(rank, serial, key)`, the least first. Valid until the next change."""
        heap, entries = self._heap, self._entries
        # A heap read in order without taking it apart: what comes next is a child of what came.
        front = [(heap[0], 0)] if heap else []
        while front:
            entry, index = heapq.heappop(front)
            if entries.get(entry[2]) is entry:
                yield entry
            for child in (2 * index + 1, 2 * index + 2):
                if child < len(heap):
                    heapq.heappush(front, (heap[child], child))

    def __iter__(self) -> Iterator[_Key]:
        return (key for _, _, key in self.entries())
