"""S3-FIFO (Yang et al., SOSP 2023): three queues; what is not used again soon never sees the main.

    insert -> small -used again-> main -unused-> gone
                    -otherwise--> ghosts, whose return goes to main at once

Hands pass over what was used (it goes on, its count falls) and what the pool cannot give up. It
knows no path and no time.
"""

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import Any

from policies.base import Access, EvictionPolicy, Key

_MOST = 3  # uses that count


class S3FIFO(EvictionPolicy):
    """Gives up first what is in the small queue too long, then what is unused in the main one."""

    def __init__(self, capacity: int, small: float = 0.1, again: int = 2) -> None:
        """`small`: the small queue's part of the capacity, 0 to 1; `again`: uses after the first
        that let a key into the main queue. Raises ValueError."""
        super().__init__(capacity)
        if not 0 <= small <= 1:
            raise ValueError(f"small = {small!r} is not a number from 0 to 1")
        if type(again) is not int or not 1 <= again <= _MOST:
            raise ValueError(f"again = {again!r} is not an integer from 1 to {_MOST}")
        self._part, self._again = small, again
        self._filling = True  # nothing has been given up: what is too much for small goes to main
        # By key: uses after that which brought it (-1 until then), none above 3.
        self._small: OrderedDict[Key, int] = OrderedDict()
        self._main: OrderedDict[Key, int] = OrderedDict()
        self._ghosts: OrderedDict[Key, None] = OrderedDict()

    def insert(self, key: Key, parent: Key | None, access: Access) -> None:
        queue = self._small
        if key in self._ghosts:
            del self._ghosts[key]
            queue = self._main
        elif self._filling and len(self._small) >= self._room():
            queue = self._main
        queue[key] = -1

    def touch(self, path: Sequence[Key], access: Access) -> None:
        for key in path:
            queue = self._small if key in self._small else self._main
            queue[key] = min(queue[key] + 1, _MOST)

    def remove(self, key: Key) -> None:
        if key in self._small:
            del self._small[key]
        else:
            del self._main[key]

    def evict(self, key: Key) -> None:
        self._filling = False
        if key not in self._small:
            while (first := next(iter(self._main))) != key:
                self._main[first] = max(self._main.pop(first) - 1, 0)
            del self._main[key]
            return
        while (first := next(iter(self._small))) != key:
            uses = self._small.pop(first)
            if uses >= self._again:
                self._main[first] = 0
            else:
                self._small[first] = uses
        del self._small[key]
        self._ghosts[key] = None
        while len(self._ghosts) > int((1 - self._part) * self.capacity):
            self._ghosts.popitem(last=False)

    def victims(self) -> Iterator[Key]:
        small, seen = len(self._small), 0
        for key, uses in self._small.items():
            if self._main and small < self._room():
                break
            seen += 1
            small -= 1
            if uses < self._again:
                yield key
        yield from self._unused(0)
        yield from (key for key, uses in islice(self._small.items(), seen) if uses >= self._again)
        for uses in range(1, _MOST + 1):
            yield from self._unused(uses)
        yield from islice(self._small, seen, None)

    def _room(self) -> int:
        """Keys that the small queue is meant to have."""
        return int(self._part * self.capacity)

    def _unused(self, uses: int) -> Iterator[Key]:
        """What the hand finds in the main queue the time that `uses` have been taken off."""
        return (key for key, count in self._main.items() if max(count, 0) == uses)

    def residents(self) -> Iterator[Key]:
        return chain(self._small, self._main)  # used or not

    def state(self) -> Mapping[str, Any]:
        return {
            "small": [[key, uses] for key, uses in self._small.items()],
            "main": [[key, uses] for key, uses in self._main.items()],
            "ghosts": list(self._ghosts),
            "filling": self._filling,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        self._small.update(state["small"])
        self._main.update(state["main"])
        self._ghosts.update(dict.fromkeys(state["ghosts"]))
        self._filling = state["filling"]
