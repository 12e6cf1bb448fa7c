"""When keys of a class are used again, learned online, and what it is worth to hold one.

An observation begins at a use and ends at the next one, or when nobody looks any more. Ages are cut
into half octaves; of a class, the *hazard* of one is the share of those that came so far that were
used again in it. Survival is S(a); the worth of holding a key of age a is Gittins' index,

    max over b > a of  P(used again by b) / E[time held until then]
                     = (S(a) - S(b)) / (D(b) - D(a))        with D(a) the integral of S up to a

so what is used again soon or not at all is worth more than what is surely used again, but late.
Classes that were seen little lean on what is known of their kind. It knows no keys; its memory is
fixed.
"""

from array import array
from collections.abc import Mapping, Sequence
from math import log2
from typing import Any

import numpy as np
import numpy.typing as npt

_SHORTEST = 0.5  # seconds: the end of the first age
NUM_AGES = 40
_EDGES = np.concatenate([[0.0], _SHORTEST * 2.0 ** (np.arange(NUM_AGES) / 2)])
_WIDTHS = np.diff(_EDGES)
_LEAN = 20.0  # observations that what is known of all counts for
_EDGE_LIST: list[float] = _EDGES.tolist()


def age_of(seconds: float) -> int:
    """Which of the ages a time since the last use is in."""
    if seconds < _SHORTEST:
        return 0
    return min(NUM_AGES - 1, 1 + int(2 * log2(seconds / _SHORTEST)))


class Hazards:
    """The hazards of some classes, from at most `most` observations under way.

    One observation is of several keys, which are used at the same time and are of one class.
    """

    def __init__(self, kinds: Sequence[int], most: int) -> None:
        """`kinds`: of each class, those of one kind lean on each other; 0, 1, .."""
        self._num_classes = num_classes = len(kinds)
        self._kind = np.array(kinds)
        self._kin = (self._kind == np.arange(max(kinds) + 1)[:, None]).astype(float)
        size = num_classes * NUM_AGES
        self._reused, self._entered, self._left = (array("q", bytes(8 * size)) for _ in range(3))
        # By slot: when it began, of which class it is, and how many keys are left of it.
        self._begun = array("d", bytes(8 * most))
        self._class, self._count = array("q", bytes(8 * most)), array("q", bytes(8 * most))
        self._free = list(range(most))
        self._worth = [[1.0] * (NUM_AGES + 1) for _ in range(num_classes)]

    def begin(self, of: int, count: int, time: float) -> int:
        """Observe `count` keys of a class, used now; returns the slot, -1: there is no room."""
        if not self._free:
            return -1
        slot = self._free.pop()
        self._begun[slot], self._class[slot], self._count[slot] = time, of, count
        self._entered[of * NUM_AGES] += count
        return slot

    def join(self, slot: int) -> None:
        """One key more, in time."""
        self._count[slot] += 1
        self._entered[self._class[slot] * NUM_AGES] += 1

    def end(self, slot: int, count: int, time: float, *, used: bool) -> None:
        """`count` of its keys are used again, or nobody looks any more."""
        at = self._class[slot] * NUM_AGES + age_of(time - self._begun[slot])
        self._left[at] += count
        if used:
            self._reused[at] += count
        self._count[slot] -= count
        if not self._count[slot]:
            self._free.append(slot)

    def change(self, slot: int, of: int, time: float) -> None:
        """What is left of it is of another class from now on, without a use."""
        age, count = age_of(time - self._begun[slot]), self._count[slot]
        self._left[self._class[slot] * NUM_AGES + age] += count
        self._entered[of * NUM_AGES + age] += count
        self._class[slot] = of

    def worth(self, of: int, seconds: float) -> float:
        """What it is worth to hold a key of a class so long after its last use."""
        age, worth = age_of(seconds), self._worth[of]
        if not 0 < age < NUM_AGES - 2:
            return worth[age]
        part = (seconds - _EDGE_LIST[age]) / (_EDGE_LIST[age + 1] - _EDGE_LIST[age])
        return worth[age] + part * (worth[age + 1] - worth[age])

    def learn(self, time: float) -> None:
        """Take account of all that was observed: about a millisecond."""
        shape = (self._num_classes, NUM_AGES)
        counts = (self._reused, self._entered, self._left)
        reused, entered, left = (np.frombuffer(c, np.int64).reshape(shape) for c in counts)
        left = left + self._open(time)
        risk = np.cumsum(entered, 1)
        risk[:, 1:] -= np.cumsum(left, 1)[:, :-1]
        common = (self._kin @ reused + 0.01) / (self._kin @ risk + 1)
        hazard = np.minimum(0.999, (reused + _LEAN * common[self._kind]) / (risk + _LEAN))
        seen = np.flatnonzero(entered.sum(1))
        worths = _gittins(np.vstack([np.minimum(0.999, common), hazard[seen]])).tolist()
        self._worth = [worths[kind] for kind in self._kind]
        for of, worth in zip(seen.tolist(), worths[len(common) :], strict=True):
            self._worth[of] = worth

    def state(self, time: float) -> Mapping[str, Any]:
        """What was learned; observations under way end here."""
        left = np.frombuffer(self._left, np.int64) + self._open(time).ravel()
        return {
            "reused": self._reused.tolist(),
            "entered": self._entered.tolist(),
            "left": left.tolist(),
            "worth": [list(worth) for worth in self._worth],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        self._reused = array("q", state["reused"])
        self._entered, self._left = array("q", state["entered"]), array("q", state["left"])
        self._worth = [list(worth) for worth in state["worth"]]

    def _open(self, time: float) -> npt.NDArray[np.int64]:
        """Keys under observation, by class and age."""
        counts = np.frombuffer(self._count, np.int64)
        slots = np.flatnonzero(counts)
        since = time - np.frombuffer(self._begun)[slots]
        ages = np.searchsorted(_EDGES[1:-1], since, "right")
        at = np.frombuffer(self._class, np.int64)[slots] * NUM_AGES + ages
        found = np.bincount(at, counts[slots], self._num_classes * NUM_AGES)
        return found.reshape(self._num_classes, NUM_AGES).astype(np.int64)


def _gittins(hazard: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Gittins' index at the beginning of each age, and 0 at the end of the last: shape
    `[classes, ages + 1]`."""
    count = len(hazard)
    alive = np.concatenate([np.ones((count, 1)), np.cumprod(1 - hazard, 1)], 1)
    held = (alive[:, :-1] + alive[:, 1:]) / 2 * _WIDTHS
    until = np.concatenate([np.zeros((count, 1)), np.cumsum(held, 1)], 1)
    worth = np.zeros((count, NUM_AGES + 1))
    for age in range(NUM_AGES):  # one at a time: all at once is four times as slow
        gained = alive[:, age, None] - alive[:, age + 1 :]
        waited = until[:, age + 1 :] - until[:, age, None]
        rate = np.divide(gained, waited, out=np.zeros_like(gained), where=waited > 0)
        worth[:, age] = rate.max(1)
    return worth
