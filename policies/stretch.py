"""Stretches: keys in a row that the same requests used, and what is known of them together.

    run      what one request used and no later one has: its keys have their last use in common
    stretch  keys of one run, each the parent of the next, all used equally often

A stretch holds the resident ones first, then those that are gone and still remembered. Whatever has
more than one way to go on is the last of its stretch, so that a sequence is a few stretches,
however long it is. Plain state and plain moves; what a stretch is worth it does not know.
"""

from policies.base import Key

OPEN, SUPERSEDED, OVER = range(3)  # what became of the sequence of a run
MOST = 2  # uses that count
_FATES, _GAPS, _FRESH = 3, 4, 3  # how many of each

# By class, the class that is coarser by what a request added; by base, the fate.
BASES = [of // _FRESH for of in range((MOST + 1) * 2 * _FATES * _GAPS * _FRESH)]
KINDS = [base // _GAPS % _FATES for base in range(len(BASES) // _FRESH)]


class Run:
    """What one request used and no later one has."""

    __slots__ = ("bits", "fate", "fresh", "gap", "priority", "stretches", "time")

    def __init__(
        self, time: float, gap: int = 0, fresh: int = 0, fate: int = OPEN, priority: int = 0
    ) -> None:
        self.time, self.gap, self.fresh, self.fate = time, gap, fresh, fate
        self.priority = priority
        self.bits = 0.0  # log 2 of what an observation of one of its keys weighs
        self.stretches: dict[Stretch, None] = {}


class Stretch:
    """Keys in a row; the first `held` of them are resident."""

    __slots__ = ("forks", "held", "keys", "listed", "of", "parent", "run", "tail", "uses")

    def __init__(self, keys: list[Key], held: int, parent: Key | None, run: Run) -> None:
        self.keys, self.held, self.parent, self.run = keys, held, parent, run
        self.uses, self.tail = 0, False
        self.forks = 0  # ways to go on after its last key, ever
        self.of = -1  # the class it is observed in
        self.listed: tuple[int, int] | None = None  # the leaves it is among: class and priority
        run.stretches[self] = None

    @property
    def class_of(self) -> int:
        """The class it is of now."""
        run = self.run
        base = ((self.uses * 2 + self.tail) * _FATES + run.fate) * _GAPS + run.gap
        return base * _FRESH + run.fresh

    def move(self, run: Run) -> None:
        """Its keys were used once more, by `run`."""
        del self.run.stretches[self]
        self.run = run
        run.stretches[self] = None
        self.uses, self.tail = min(self.uses + 1, MOST), False

    def is_last(self, key: Key | None) -> bool:
        """Whether `key` is resident and the last of it."""
        return self.held == len(self.keys) and self.keys[-1] == key

    def cut(self, at: int) -> "tuple[Stretch, Stretch, Stretch]":
        """In two, `0 < at < len(keys)`: head, tail, and the new one of them, the shorter."""
        whole, keys, held, forks = self, self.keys, self.held, self.forks
        new = Stretch(keys[:at] if 2 * at <= len(keys) else keys[at:], 0, self.parent, self.run)
        new.uses, new.of = self.uses, self.of
        if 2 * at <= len(keys):
            head, tail = new, whole
            del keys[:at]
        else:
            head, tail = whole, new
            del keys[at:]
        head.held, tail.held = min(held, at), max(0, held - at)
        head.forks, tail.forks = 1, forks
        tail.parent = head.keys[-1]
        return head, tail, new

    def join(self, after: "Stretch") -> "Stretch":
        """Become one with what goes on from it: the longer of the two, with all keys."""
        if len(after.keys) <= len(self.keys):
            left, gone = self, after
            self.keys += after.keys
            self.forks = after.forks
        else:
            left, gone = after, self
            after.keys[:0] = self.keys
            after.parent = self.parent
        left.held = len(left.keys)
        del gone.run.stretches[gone]
        return left
