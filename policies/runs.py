"""Runs: the keys that one request used and no later one has, and the class that each is of.

    run   one request's; its keys have their last use in common
    part  of a run: keys of one class, for they were used equally often
    node  one key, resident or remembered, and the part that it is of

Plain state, which `policies.learned` changes.
"""

from policies.base import Key

OPEN, SUPERSEDED, OVER = range(3)  # what became of the sequence of a run
MOST = 3  # uses that count
NUM_CLASSES = (MOST + 1) * 2 * 3 * 4


def gap_of(rested: float | None) -> int:
    """How long a sequence had rested: not at all, for it is new, or shorter, or longer."""
    if rested is None:
        return 0
    return 1 if rested < 15 else 2 if rested < 90 else 3


def kind_of(of: int) -> int:
    """The fate of a class."""
    return of // 4 % 3


class Part:
    """Keys of one run and one class."""

    __slots__ = ("count", "of", "run", "slot", "tail", "uses")

    def __init__(self, run: "Run", uses: int, tail: bool) -> None:
        self.run, self.uses, self.tail = run, uses, tail
        self.count, self.slot = 0, -1
        self.of = run.class_of(self)


class Run:
    """What one request used and no later one has."""

    __slots__ = ("fate", "gap", "leaf", "parts", "time")

    def __init__(self, time: float, gap: int = 0, fate: int = OPEN) -> None:
        self.time, self.gap, self.fate = time, gap, fate
        self.parts: list[Part] = []
        self.leaf: Node | None = None

    def class_of(self, part: Part) -> int:
        return ((part.uses * 2 + part.tail) * 3 + self.fate) * 4 + self.gap


class Node:
    """What is known of a key."""

    __slots__ = ("forks", "key", "leaf_of", "parent", "part", "resident")

    def __init__(self, key: Key, part: Part) -> None:
        self.key, self.part = key, part
        self.parent: Key | None = None
        self.resident = True
        self.forks, self.leaf_of = 0, -1
