"""Thirds: whether a number is small, middling or large among those before it.

So a policy tells short from long without a unit, or a number that suits one workload. It goes by
the last few hundred; its memory is fixed.
"""

from bisect import bisect_right
from collections import deque
from collections.abc import Sequence

_LAST = 512
_EVERY = 32  # numbers between two looks at them


class Thirds:
    """Cuts numbers into three parts, of which each had as many lately."""

    def __init__(self, numbers: Sequence[float] = ()) -> None:
        self._last = deque(numbers, _LAST)
        self._cuts: list[float] = []
        self._left = 0  # numbers until the next look
        self._look()

    def place(self, number: float) -> int:
        """0, 1 or 2; it is one of those before the next."""
        third = bisect_right(self._cuts, number)
        self._last.append(number)
        self._left -= 1
        if self._left <= 0:
            self._look()
        return third

    def state(self) -> list[float]:
        """The numbers it goes by."""
        return list(self._last)

    def _look(self) -> None:
        self._left = min(_EVERY, len(self._last))
        if self._last:
            ranked = sorted(self._last)
            self._cuts = [ranked[len(ranked) // 3], ranked[2 * len(ranked) // 3]]
