"""Adaptive replacement cache (Megiddo, Modha 2003): recency and frequency, balanced by regret.

    seen once:  recent   | its ghosts        |recent| + |its ghosts| <= capacity
    seen again: frequent | its ghosts        all four <= 2 * capacity

A miss that finds a ghost shows which of the two was too small, and moves `target`, the size that
`recent` should have. Ghosts are bounded. It knows no path and no time.
"""

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from policies.base import Access, EvictionPolicy, Key


class ARC(EvictionPolicy):
    """Gives up first from `recent` while that is above its target, else from `frequent`."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._recent: OrderedDict[Key, bool] = OrderedDict()  # whether it was used
        self._frequent: OrderedDict[Key, None] = OrderedDict()
        self._recent_ghosts: OrderedDict[Key, None] = OrderedDict()
        self._frequent_ghosts: OrderedDict[Key, None] = OrderedDict()
        self._target = 0.0

    def insert(self, key: Key, parent: Key | None, access: Access) -> None:
        recent, frequent = len(self._recent_ghosts), len(self._frequent_ghosts)
        if key in self._recent_ghosts:
            self._target = min(self.capacity, self._target + max(1.0, frequent / recent))
            del self._recent_ghosts[key]
            self._frequent[key] = None
        elif key in self._frequent_ghosts:
            self._target = max(0.0, self._target - max(1.0, recent / frequent))
            del self._frequent_ghosts[key]
            self._frequent[key] = None
        else:
            if len(self._recent) + len(self._recent_ghosts) >= self.capacity:
                self._forget(self._recent_ghosts)
            elif self._total() >= 2 * self.capacity:
                self._forget(self._frequent_ghosts)
            self._recent[key] = False

    def touch(self, path: Sequence[Key], access: Access) -> None:
        for key in reversed(path):
            if key in self._frequent:
                self._frequent.move_to_end(key)
            elif self._recent[key]:
                del self._recent[key]
                self._frequent[key] = None
            else:  # the use that brought it
                self._recent[key] = True
                self._recent.move_to_end(key)

    def remove(self, key: Key) -> None:
        if key in self._recent:
            del self._recent[key]
        else:
            del self._frequent[key]

    def evict(self, key: Key) -> None:
        ghosts = self._recent_ghosts if key in self._recent else self._frequent_ghosts
        self.remove(key)
        ghosts[key] = None
        while self._total() > 2 * self.capacity and (self._frequent_ghosts or self._recent_ghosts):
            self._forget(self._frequent_ghosts or self._recent_ghosts)

    def _total(self) -> int:
        resident = len(self._recent) + len(self._frequent)
        return resident + len(self._recent_ghosts) + len(self._frequent_ghosts)

    @staticmethod
    def _forget(ghosts: OrderedDict[Key, None]) -> None:
        if ghosts:
            ghosts.popitem(last=False)

    def victims(self) -> Iterator[Key]:
        surplus = len(self._recent)
        recent, frequent = iter(self._recent), iter(self._frequent)
        while surplus and surplus > self._target:
            yield next(recent)
            surplus -= 1
        yield from frequent
        yield from recent

    def state(self) -> Mapping[str, Any]:
        return {
            "recent": [[key, used] for key, used in self._recent.items()],
            "frequent": list(self._frequent),
            "recent_ghosts": list(self._recent_ghosts),
            "frequent_ghosts": list(self._frequent_ghosts),
            "target": self._target,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        self._recent.update(state["recent"])
        self._frequent.update(dict.fromkeys(state["frequent"]))
        self._recent_ghosts.update(dict.fromkeys(state["recent_ghosts"]))
        self._frequent_ghosts.update(dict.fromkeys(state["frequent_ghosts"]))
        self._target = state["target"]
