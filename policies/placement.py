"""Where copies are kept along the tiers: kept below, dropped there first, or written down at once.

    inclusive      a copy below stays until it is the coldest there; a hit counts wherever it lies
    exclusive      a copy below goes first, where the tiers above are not small beside it
    write-through  as inclusive, and what is new is written down at once

They know no block and no byte.
"""

from collections.abc import Collection

from policies.base import PlacementPolicy


class Inclusive(PlacementPolicy):
    """Clean copies stay below: giving a block up on top then moves no bytes."""

    def keeps(self, level: int, capacity: int, above: int) -> bool:
        return True

    def touches(self, level: int, num_levels: int) -> Collection[int]:
        return range(1, num_levels)

    def writes_through(self, level: int) -> bool:
        return False


class Exclusive(Inclusive):
    """Of what is above, the copy below gives way first: the tiers hold more between them, and bytes
    go up and down again instead."""

    def __init__(self, ratio: float = 1.0) -> None:
        """`ratio`: only in a tier at most so many times as large as those above it. Raises
        ValueError."""
        if isinstance(ratio, bool) or not isinstance(ratio, int | float) or not ratio > 0:
            raise ValueError(f"ratio = {ratio!r} is not a number above 0")
        self._ratio = ratio

    def keeps(self, level: int, capacity: int, above: int) -> bool:
        return capacity > self._ratio * above


class WriteThrough(Inclusive):
    """What is new is written down at once, as far as `levels` say."""

    def __init__(self, depth: int = 1) -> None:
        """`depth`: how many tiers down. Raises ValueError."""
        if type(depth) is not int or depth < 1:
            raise ValueError(f"depth = {depth!r} is not an integer above 0")
        self._depth = depth

    def writes_through(self, level: int) -> bool:
        return level < self._depth
