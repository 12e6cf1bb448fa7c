"""Greedy-dual (Cao, Irani 1997), with frequency: uses times what it costs to compute again.

    rank(key) = age + uses * (1 + slope * depth)

where `age` is the rank of what was given up last, so that what is unused falls behind. A token deep
in its sequence costs more, for it attends to all before it: `depth` counts keys from the head, as
far as parents are resident. All keys are of one size.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from policies.base import Access, EvictionPolicy, Key
from policies.ranking import Ranking


class GDSF(EvictionPolicy):
    """Gives up first what was used least, for what it costs, counted from when it came."""

    def __init__(self, capacity: int, slope: float = 0.002) -> None:
        """`slope`: how much more each key costs than that before it, as a part of what the first
        one costs; at least 0. Raises ValueError."""
        super().__init__(capacity)
        if not slope >= 0:
            raise ValueError(f"slope = {slope!r} is not a number of at least 0")
        self._slope = slope
        self._depths: dict[Key, int] = {}
        self._uses: dict[Key, int] = {}
        self._ranking: Ranking[Key] = Ranking()
        self._age = 0.0

    def insert(self, key: Key, parent: Key | None, access: Access) -> None:
        self._depths[key] = self._depths.get(parent, -1) + 1
        self._uses[key] = 0
        self._ranking.set(key, self._age)

    def touch(self, path: Sequence[Key], access: Access) -> None:
        for key in reversed(path):
            self._uses[key] = uses = self._uses[key] + 1
            cost = 1 + self._slope * self._depths[key]
            self._ranking.set(key, self._age + uses * cost)

    def remove(self, key: Key) -> None:
        self._ranking.discard(key)
        del self._depths[key], self._uses[key]

    def evict(self, key: Key) -> None:
        self._age = max(self._age, self._ranking.rank(key))
        self.remove(key)

    def victims(self) -> Iterator[Key]:
        return iter(self._ranking)

    def state(self) -> Mapping[str, Any]:
        entries = self._ranking.entries()
        keys = [[key, rank, self._depths[key], self._uses[key]] for rank, _, key in entries]
        return {"keys": keys, "age": self._age}

    def restore(self, state: Mapping[str, Any]) -> None:
        for key, rank, depth, uses in state["keys"]:
            self._depths[key], self._uses[key] = depth, uses
            self._ranking.set(key, rank)
        self._age = state["age"]
