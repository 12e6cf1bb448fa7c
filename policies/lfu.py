"""Least frequently used: the number of uses while resident, and of equal ones the least recent.

It forgets what it gives up, and never ages: what was used much once stays.
"""

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from policies.base import Access, EvictionPolicy, Key


class LFU(EvictionPolicy):
    """Gives up first what was used least often."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._uses: dict[Key, int] = {}
        self._orders: dict[int, OrderedDict[Key, None]] = {}  # by uses, the least recent first

    def insert(self, key: Key, parent: Key | None, access: Access) -> None:
        self._put(key, 0)

    def touch(self, path: Sequence[Key], access: Access) -> None:
        for key in reversed(path):
            uses = self._uses[key]
            self.remove(key)
            self._put(key, uses + 1)

    def remove(self, key: Key) -> None:
        uses = self._uses.pop(key)
        order = self._orders[uses]
        del order[key]
        if not order:
            del self._orders[uses]

    def victims(self) -> Iterator[Key]:
        for uses in sorted(self._orders):
            yield from self._orders[uses]

    def state(self) -> Mapping[str, Any]:
        return {"uses": [[uses, list(self._orders[uses])] for uses in sorted(self._orders)]}

    def restore(self, state: Mapping[str, Any]) -> None:
        for uses, keys in state["uses"]:
            for key in keys:
                self._put(key, uses)

    def _put(self, key: Key, uses: int) -> None:
        self._uses[key] = uses
        self._orders.setdefault(uses, OrderedDict())[key] = None
