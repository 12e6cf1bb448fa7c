"""LRU-2 (O'Neil et al. 1993): the order of last uses but one, so that one use proves nothing.

What was used once goes first, by recency. Last uses are remembered for as many keys again as fit:
one that comes back has been used twice. It knows no path; of time only the order.
"""

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

from policies.base import Access, EvictionPolicy, Key
from policies.ranking import Ranking


class LRU2(EvictionPolicy):
    """Gives up first what was used once, then what has the oldest last use but one."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._once: OrderedDict[Key, int] = OrderedDict()  # number of the use; 0: none yet
        self._last: dict[Key, int] = {}  # number of the last use of what was used again
        self._again: Ranking[Key] = Ranking()  # by the number of the last use but one
        self._ghosts: OrderedDict[Key, int] = OrderedDict()  # number of the last use
        self._uses = 0

    def insert(self, key: Key, parent: Key | None, access: Access) -> None:
        self._once[key] = self._ghosts.pop(key, 0)

    def touch(self, path: Sequence[Key], access: Access) -> None:
        for key in reversed(path):
            self._uses += 1
            if (last := self._last.get(key)) is not None:
                self._again.set(key, last)
                self._last[key] = self._uses
            elif last := self._once[key]:
                del self._once[key]
                self._again.set(key, last)
                self._last[key] = self._uses
            else:
                self._once[key] = self._uses
                self._once.move_to_end(key)

    def remove(self, key: Key) -> None:
        if key in self._once:
            del self._once[key]
        else:
            self._again.discard(key)
            del self._last[key]

    def evict(self, key: Key) -> None:
        last = self._once[key] if key in self._once else self._last[key]
        self.remove(key)
        self._ghosts[key] = last
        while len(self._ghosts) > self.capacity:
            self._ghosts.popitem(last=False)

    def victims(self) -> Iterator[Key]:
        return chain(self._once, self._again)

    def state(self) -> Mapping[str, Any]:
        return {
            "once": [[key, use] for key, use in self._once.items()],
            "again": [[key, rank, self._last[key]] for rank, _, key in self._again.entries()],
            "ghosts": [[key, last] for key, last in self._ghosts.items()],
            "uses": self._uses,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        self._once.update(state["once"])
        for key, rank, last in state["again"]:
            self._again.set(key, rank)
            self._last[key] = last
        self._ghosts.update(state["ghosts"])
        self._uses = state["uses"]
