"""W-TinyLFU (Einziger et al. 2017): who comes in has to have been asked for more than who goes.

    insert -> window -overflow, if asked for more-> probation -used again-> protected

Counts are of all keys ever asked for, resident or not, and halve regularly, so that they age and
stay few. It knows no path and no time.
"""

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from policies.base import Access, EvictionPolicy, Key
from policies.slru import SLRU

_SAMPLE = 10  # uses counted between two halvings, as a multiple of the capacity


class WTinyLFU(EvictionPolicy):
    """Gives up, of the window's oldest and the main part's first, what was asked for less."""

    def __init__(self, capacity: int, window: float = 0.01, protected: float = 0.8) -> None:
        """`window`: its part of the capacity; `protected`: of the rest; 0 to 1. Raises
        ValueError."""
        super().__init__(capacity)
        if not 0 <= window <= 1:
            raise ValueError(f"window = {window!r} is not a number from 0 to 1")
        self._part = window
        self._window: OrderedDict[Key, None] = OrderedDict()
        self._main = SLRU(capacity, protected)
        self._in_main: set[Key] = set()
        self._counts: dict[Key, int] = {}
        self._counted = 0

    def resize(self, capacity: int) -> None:
        super().resize(capacity)
        self._main.resize(int((1 - self._part) * capacity))

    def insert(self, key: Key, parent: Key | None, access: Access) -> None:
        self._window[key] = None
        resident = len(self._window) + len(self._in_main)
        while resident <= self.capacity and len(self._window) > self._most:
            self._admit(next(iter(self._window)), access)  # nobody has to go for it

    def touch(self, path: Sequence[Key], access: Access) -> None:
        for key in reversed(path):
            self._counts[key] = self._counts.get(key, 0) + 1
            if key in self._window:
                self._window.move_to_end(key)
        self._main.touch([key for key in path if key in self._in_main], access)
        self._counted += len(path)
        if self._counted > _SAMPLE * self.capacity:
            self._counts = {key: n // 2 for key, n in self._counts.items() if n > 1}
            self._counted //= 2

    def remove(self, key: Key) -> None:
        if key in self._window:
            del self._window[key]
        else:
            self._main.remove(key)
            self._in_main.remove(key)

    def evict(self, key: Key) -> None:
        was_in_main = key in self._in_main
        self.remove(key)
        if was_in_main and len(self._window) > self._most:
            self._admit(next(iter(self._window)), Access(0.0))

    def victims(self) -> Iterator[Key]:
        window, main = iter(self._window), self._main.victims()
        surplus = len(self._window) - self._most
        new, old = next(window, None), next(main, None)
        left = len(self._window) + len(self._in_main)
        taken_new, taken_old = 0, 0
        while left:
            more_new = taken_new < len(self._window)
            more_old = taken_old < len(self._in_main)
            contest = more_new and surplus > 0 and self._asked(new) > self._asked(old)
            if more_old and (contest or not more_new or surplus <= 0):
                yield old
                old, taken_old = next(main, None), taken_old + 1
            else:
                yield new
                new, taken_new = next(window, None), taken_new + 1
                surplus -= 1
            left -= 1

    def state(self) -> Mapping[str, Any]:
        return {
            "window": list(self._window),
            "main": self._main.state(),
            "counts": [[key, count] for key, count in self._counts.items()],
            "counted": self._counted,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        self._window.update(dict.fromkeys(state["window"]))
        self._main.restore(state["main"])
        self._in_main.update(self._main.victims())
        self._counts.update(state["counts"])
        self._counted = state["counted"]

    @property
    def _most(self) -> int:
        """Keys in the window at most."""
        return max(1, int(self._part * self.capacity))

    def _asked(self, key: Key) -> int:
        return self._counts.get(key, 0)

    def _admit(self, key: Key, access: Access) -> None:
        del self._window[key]
        self._in_main.add(key)
        self._main.insert(key, None, access)
        self._main.touch([key], access)  # a use again, from here on
