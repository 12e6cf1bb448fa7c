"""Rounds: things measured in turn, so that whoever else has the machine disturbs all of them."""

import time
from collections.abc import Callable, Mapping
from statistics import median

Measure = Callable[[], float]


class Rounds:
    """What each measure gave in each round. The first round only warms up."""

    def __init__(self, measures: Mapping[str, Measure], number: int) -> None:
        self.values: dict[str, list[float]] = {name: [] for name in measures}
        for turn in range(number + 1):
            for name in list(measures)[:: 1 if turn % 2 else -1]:
                value = measures[name]()
                if turn:
                    self.values[name].append(value)

    def median(self, name: str) -> float:
        return median(self.values[name])

    def best(self, name: str) -> float:
        """The least: of times whose floor is what matters, and who else ran only adds to."""
        return min(self.values[name])

    def ratio(self, name: str, other: str) -> float:
        """The median over the rounds of one measure's value divided by another's."""
        pairs = zip(self.values[name], self.values[other], strict=True)
        return median(mine / theirs for mine, theirs in pairs)


def seconds(function: Callable[[], object]) -> float:
    begin = time.perf_counter()
    function()
    return time.perf_counter() - begin


def percentile(values: list[float], part: float) -> float:
    """The value that `part` (0 to 1) of all do not exceed."""
    return sorted(values)[min(len(values) - 1, int(part * len(values)))]
