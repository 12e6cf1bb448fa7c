"""Least recently used: the order of last uses, and the simplest policy worth having.

A request touches its path from the tail to the head, so after a use a parent is never older than
its child, and a sequence is given up from its end. It knows no path, no time and no frequency.
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence

from policies.base import Access, EvictionPolicy, Key


class LRU(EvictionPolicy):
    """Gives up first what has gone unused for longest."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        # Not a dict: finding a dict's first key takes ever longer as keys before it are deleted.
        self._order: OrderedDict[Key, None] = OrderedDict()

    def insert(self, key: Key, parent: Key | None, access: Access) -> None:
        self._order[key] = None

    def touch(self, path: Sequence[Key], access: Access) -> None:
        for key in reversed(path):
            self._order.move_to_end(key)

    def remove(self, key: Key) -> None:
        del self._order[key]

    def victims(self) -> Iterator[Key]:
        return iter(self._order)
