"""When keys of a class are used again, learned online, and what it is worth to hold one.

An observation begins at a use and ends at the next one, or when nobody looks any more. Ages are cut
into half octaves; of a class, the *hazard* of one is the share of those that came so far that were
used again in it. Survival is S(a); the worth of holding a key of age a is Gittins' index,

    max over b > a of  P(used again by b) / E[time held until then]
                     = (S(a) - S(b)) / (D(b) - D(a))        with D(a) the integral of S up to a

so what is used again soon or not at all is worth more than what is surely used again, but late.
Classes that were seen little lean on what is known of all. Counts halve now and then: the past
fades. It knows no keys; its memory is fixed.
"""

from array import array
from collections.abc import Mapping
from math import log2
from typing import Any

import numpy as np

_SHORTEST = 0.5  # seconds: the end of the first age
NUM_AGES = 40
_EDGES = np.concatenate([[0.0], _SHORTEST * 2.0 ** (np.arange(NUM_AGES) / 2)])
_WIDTHS = np.diff(_EDGES)
_LEAN = 20.0  # observations that what is known of all counts for
_EDGE_LIST = _EDGES.tolist()


def age_of(seconds: float) -> int:
    """Which of the ages a time since the last use is in."""
    if seconds < _SHORTEST:
        return 0
    return min(NUM_AGES - 1, 1 + int(2 * log2(seconds / _SHORTEST)))


class Hazards:
    """The hazards of `num_classes` classes, from at most `most` observations under way."""

    def __init__(self, num_classes: int, most: int) -> None:
        self._num_classes = num_classes
        size = num_classes * NUM_AGES
        self._reused, self._entered, self._left = ([0.0] * size for _ in range(3))
        self._begun = array("d", bytes(8 * most))  # by slot: when
        self._class = array("i", [-1] * most)  # by slot: of which class; -1: none
        self._free = list(range(most))
        self._worth = [[1.0] * (NUM_AGES + 1) for _ in range(num_classes)]

    def begin(self, of: int, time: float) -> int:
        """Observe a key of a class that is used now; returns the observation, -1: no room for it."""
        if not self._free:
            return -1
        slot = self._free.pop()
        self._begun[slot], self._class[slot] = time, of
        self._entered[of * NUM_AGES] += 1
        return slot

    def reuse(self, slot: int, of: int, time: float) -> None:
        """It is used again, and from now on of that class."""
        at = self._class[slot] * NUM_AGES + age_of(time - self._begun[slot])
        self._reused[at] += 1
        self._left[at] += 1
        self._begun[slot], self._class[slot] = time, of
        self._entered[of * NUM_AGES] += 1

    def change(self, slot: int, of: int, time: float) -> None:
        """It is of another class from now on, without a use."""
        age = age_of(time - self._begun[slot])
        self._left[self._class[slot] * NUM_AGES + age] += 1
        self._entered[of * NUM_AGES + age] += 1
        self._class[slot] = of

    def end(self, slot: int, time: float) -> None:
        """Nobody looks any more."""
        self._left[self._class[slot] * NUM_AGES + age_of(time - self._begun[slot])] += 1
        self._class[slot] = -1
        self._free.append(slot)

    def worth(self, of: int, seconds: float) -> float:
        """What it is worth to hold a key of a class so long after its last use."""
        age, worth = age_of(seconds), self._worth[of]
        if not 0 < age < NUM_AGES - 2:
            return worth[age]
        part = (seconds - _EDGE_LIST[age]) / (_EDGE_LIST[age + 1] - _EDGE_LIST[age])
        return worth[age] + part * (worth[age + 1] - worth[age])

    def learn(self, time: float) -> None:
        """Take account of all that was observed: below a millisecond."""
        shape = (self._num_classes, NUM_AGES)
        reused = np.array(self._reused).reshape(shape)
        entered = np.array(self._entered).reshape(shape)
        left = np.array(self._left).reshape(shape) + self._open(time)
        risk = np.cumsum(entered, 1)
        risk[:, 1:] -= np.cumsum(left, 1)[:, :-1]
        everywhere = (reused.sum(0) + 0.01) / (risk.sum(0) + 1)
        hazard = np.minimum(0.999, (reused + _LEAN * everywhere) / (risk + _LEAN))
        seen = np.flatnonzero(entered.sum(1))
        for of, worth in zip(seen.tolist(), _gittins(hazard[seen]).tolist(), strict=True):
            self._worth[of] = worth

    def _open(self, time: float) -> Any:
        """Observations under way, by class and age."""
        classes = np.frombuffer(self._class, np.int32)
        slots = np.flatnonzero(classes >= 0)
        since = np.maximum(time - np.frombuffer(self._begun)[slots], 0)
        ages = np.searchsorted(_EDGES[1:-1], since, "right")
        at = classes[slots] * NUM_AGES + ages
        counts = np.bincount(at, minlength=self._num_classes * NUM_AGES)
        return counts.reshape(self._num_classes, NUM_AGES)


def _gittins(hazard: Any) -> Any:
    """Gittins' index at the beginning of each age, and 0 at the end of the last: shape
    `[classes, ages + 1]`."""
    count = len(hazard)
    alive = np.concatenate([np.ones((count, 1)), np.cumprod(1 - hazard, 1)], 1)
    held = (alive[:, :-1] + alive[:, 1:]) / 2 * _WIDTHS
    until = np.concatenate([np.zeros((count, 1)), np.cumsum(held, 1)], 1)
    gained = alive[:, :-1, None] - alive[:, None, 1:]
    waited = until[:, None, 1:] - until[:, :-1, None]
    later = np.triu(np.ones((NUM_AGES, NUM_AGES), bool))
    rate = np.where(later & (waited > 0), gained / np.where(waited > 0, waited, 1.0), 0.0)
    return np.concatenate([rate.max(2), np.zeros((count, 1))], 1)
