"""Belady's rule: what is used again last goes first. It has to be told the future.

So it serves to replay what has been, not a daemon. It knows the times of all uses, and of keys that
are used again at once, the same request's, gives up the one that came later in its sequence first.
"""

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from policies.base import Access, EvictionPolicy, Key
from policies.ranking import Ranking


class Belady(EvictionPolicy):
    """Gives up first what is never used again, then what is used again last."""

    def __init__(self, capacity: int, future: Mapping[Key, Sequence[float]]) -> None:
        """`future`: by key, the times of all its uses, rising."""
        super().__init__(capacity)
        self._future = future
        self._ranking: Ranking[Key] = Ranking()

    def insert(self, key: Key, parent: Key | None, access: Access) -> None:
        self._foresee(key, access)

    def touch(self, path: Sequence[Key], access: Access) -> None:
        for key in reversed(path):  # of equals, who is ranked first goes first: the tail
            self._foresee(key, access)

    def remove(self, key: Key) -> None:
        self._ranking.discard(key)

    def victims(self) -> Iterator[Key]:
        return iter(self._ranking)

    def state(self) -> Mapping[str, Any]:
        return {"keys": [[key, rank] for rank, _, key in self._ranking.entries()]}

    def restore(self, state: Mapping[str, Any]) -> None:
        for key, rank in state["keys"]:
            self._ranking.set(key, rank)

    def _foresee(self, key: Key, access: Access) -> None:
        times = self._future.get(key, ())
        at = bisect_right(times, access.time)
        self._ranking.set(key, -times[at] if at < len(times) else float("-inf"))
