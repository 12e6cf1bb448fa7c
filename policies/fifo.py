"""First in, first out: the order of arrival. Uses count for nothing.

It knows no path: a sequence arrives head first, so it is given up from its head, after which its
rest serves nobody. It is here to be compared with.
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence

from policies.base import Access, EvictionPolicy, Key


class FIFO(EvictionPolicy):
    """Gives up first what came first."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._order: OrderedDict[Key, None] = OrderedDict()  # see policies.lru

    def insert(self, key: Key, parent: Key | None, access: Access) -> None:
        self._order[key] = None

    def touch(self, path: Sequence[Key], access: Access) -> None:
        pass

    def remove(self, key: Key) -> None:
        del self._order[key]

    def victims(self) -> Iterator[Key]:
        return iter(self._order)
