"""Segmented LRU: what was used again is kept apart from what came and was used once.

    insert -> probation -used again-> protected
                        <-overflow---

It knows no path and no time.
"""

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

from policies.base import Access, EvictionPolicy, Key


class SLRU(EvictionPolicy):
    """Gives up first what is on probation, the least recently used first."""

    def __init__(self, capacity: int, protected: float = 0.8) -> None:
        """`protected`: the part of the capacity for what was used again, 0 to 1. Raises
        ValueError."""
        super().__init__(capacity)
        if not 0 <= protected <= 1:
            raise ValueError(f"protected = {protected!r} is not a number from 0 to 1")
        self._part = protected
        self._probation: OrderedDict[Key, bool] = OrderedDict()  # whether it was used
        self._protected: OrderedDict[Key, None] = OrderedDict()

    def insert(self, key: Key, parent: Key | None, access: Access) -> None:
        self._probation[key] = False

    def touch(self, path: Sequence[Key], access: Access) -> None:
        for key in reversed(path):
            if key in self._protected:
                self._protected.move_to_end(key)
            elif self._probation[key]:
                del self._probation[key]
                self._protected[key] = None
            else:  # the use that brought it
                self._probation[key] = True
                self._probation.move_to_end(key)
        while len(self._protected) > self._part * self.capacity:
            key, _ = self._protected.popitem(last=False)
            self._probation[key] = True

    def remove(self, key: Key) -> None:
        if key in self._protected:
            del self._protected[key]
        else:
            del self._probation[key]

    def victims(self) -> Iterator[Key]:
        return chain(self._probation, self._protected)

    def state(self) -> Mapping[str, Any]:
        return {
            "probation": [[key, used] for key, used in self._probation.items()],
            "protected": list(self._protected),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        self._probation.update(state["probation"])
        self._protected.update(dict.fromkeys(state["protected"]))
