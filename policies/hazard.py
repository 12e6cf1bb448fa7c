"""When keys of a class are used again, learned online, and what it is worth to hold one.

An observation begins at a use and ends at the next one, or when nobody looks any more. Ages are cut
into half octaves; of a class, the *hazard* of one is the share of those that came so far that were
used again in it. Survival is S(a); the worth of holding a key of age a is Gittins' index,

    max over b > a of  P(used again by b) / E[time held until then]
                     = (S(a) - S(b)) / (D(b) - D(a))        with D(a) the integral of S up to a

so what is used again soon or not at all is worth more than what is surely used again, but late.
A class leans on its base, and a base on its kind, as far as little was seen of it. What was seen
long ago weighs less: weights grow with what `pass_by` is told, and only their ratios count.

Observations under way are kept as *cohorts*, those that began in the same while: how many there are
of each class. Old cohorts become one, so their number is fixed. It knows no keys.
"""

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from math import inf, log2
from typing import Any

import numpy as np
import numpy.typing as npt

_SHORTEST = 0.5  # seconds: the end of the first age
NUM_AGES = 40
_EDGES = np.concatenate([[0.0], _SHORTEST * 2.0 ** (np.arange(NUM_AGES) / 2)])
_WIDTHS = np.diff(_EDGES)
_LATER = np.arange(NUM_AGES)[:, None] <= np.arange(NUM_AGES)  # which ages end after one begins
_EDGE_LIST: list[float] = _EDGES.tolist()
_ENDS = _EDGE_LIST[1:-1]  # of all ages but the last
_LEAN = 5.0  # observations that what is known of a class's base, or its kind, counts for
_COHORTS = 128
_STEP = 16  # classes whose worth is computed in one go
_REBASE = 256.0  # doublings of the weights after which they are written anew

_Table = npt.NDArray[np.float64]


def age_of(seconds: float) -> int:
    """Which of the ages a time since the last use is in."""
    return bisect_right(_ENDS, seconds)


class Hazards:
    """The hazards of some classes. One observation is of several keys of one class, used at once;
    its weight is given by its `bits`, log 2, as `bits` said when it began."""

    def __init__(self, bases: Sequence[int], kinds: Sequence[int]) -> None:
        """`bases`: the base of each class, in order; `kinds`: the kind of each base; 0, 1, .."""
        self._bases, self._kinds = np.array(bases), np.array(kinds)
        self._first = np.searchsorted(self._bases, np.arange(len(kinds)))  # class of each base
        self._of_kind = [np.flatnonzero(self._kinds == kind) for kind in range(max(kinds) + 1)]
        size = 8 * len(bases) * NUM_AGES
        self._reused, self._entered, self._left = (array("d", bytes(size)) for _ in range(3))
        # After when each cohort began, and by it and class how much is under way.
        self._since = [-inf]
        self._cohorts = array("d", bytes(8 * len(bases)))
        self._worth = [[0.0] * (NUM_AGES + 1) for _ in bases]
        self._doublings, self._base = 0.0, 0.0  # of the weights: so far, and what 1 stands for
        self._lesson: Iterator[None] = iter(())

    def bits(self, count: int) -> float:
        """Log 2 of what an observation weighs that begins now, for each of its keys: all keys of a
        request together the root of their number, or a few long ones were all there is."""
        return self._doublings - log2(count) / 2

    def pass_by(self, share: float) -> None:
        """So much of a half-life has gone by."""
        self._doublings += share
        if self._doublings - self._base > _REBASE:
            for table in (self._reused, self._entered, self._left, self._cohorts):
                np.frombuffer(table)[:] *= 2.0**-_REBASE
            self._base += _REBASE

    def begin(self, of: int, count: int, bits: float, time: float) -> None:
        """Observe `count` keys of a class, used now."""
        weight = count * 2.0 ** (bits - self._base)
        self._entered[of * NUM_AGES] += weight
        self._cohorts[self._at(of, time)] += weight

    def end(
        self, of: int, count: int, bits: float, begun: float, time: float, *, used: bool
    ) -> None:
        """`count` keys observed since `begun` are used again, or nobody looks any more."""
        weight = count * 2.0 ** (bits - self._base)
        at = of * NUM_AGES + age_of(time - begun)
        self._left[at] += weight
        if used:
            self._reused[at] += weight
        self._cohorts[self._at(of, begun)] -= weight

    def change(self, of: int, to: int, count: int, bits: float, begun: float, time: float) -> None:
        """They are of another class from now on, without a use."""
        self.end(of, count, bits, begun, time, used=False)
        weight = count * 2.0 ** (bits - self._base)
        self._entered[to * NUM_AGES + age_of(time - begun)] += weight
        self._cohorts[self._at(to, begun)] += weight

    def worth(self, of: int, seconds: float) -> float:
        """What it is worth to hold a key of a class so long after its last use."""
        age, worth = age_of(seconds), self._worth[of]
        if not 0 < age < NUM_AGES - 2:
            return worth[age]
        part = (seconds - _EDGE_LIST[age]) / (_EDGE_LIST[age + 1] - _EDGE_LIST[age])
        return worth[age] + part * (worth[age + 1] - worth[age])

    def learn(self, time: float) -> None:
        """Begin a lesson, unless one is under way: take account of all that was observed."""
        if next(self._lesson, True):
            self._open_cohort(time)
            self._lesson = self._learn(time)
            next(self._lesson)

    def go_on(self) -> None:
        """Go on with the lesson: compute what it makes of the worth of a few classes."""
        next(self._lesson, None)

    def state(self, time: float) -> Mapping[str, Any]:
        """What was learned; observations under way end here."""
        left = np.frombuffer(self._left) + self._open(time).ravel()
        return {
            "reused": self._reused.tolist(),
            "entered": self._entered.tolist(),
            "left": left.tolist(),
            "worth": [list(worth) for worth in self._worth],
            "doublings": self._doublings - self._base,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        self._reused = array("d", state["reused"])
        self._entered, self._left = array("d", state["entered"]), array("d", state["left"])
        self._worth = [list(worth) for worth in state["worth"]]
        self._doublings = state["doublings"]

    def _learn(self, time: float) -> Iterator[None]:
        """A lesson, in steps."""
        reused, risk, seen = self._seen(time)
        yield
        reused, risk = _smooth(reused), _smooth(risk)
        yield
        hazard, of_kind = self._hazards(reused, risk)
        yield
        rows = _gittins(of_kind).tolist()
        for of in set(range(len(self._bases))).difference(seen):
            self._worth[of] = rows[self._kinds[self._bases[of]]]
        yield
        for at in range(0, len(seen), _STEP):
            some = seen[at : at + _STEP]
            for of, worth in zip(some, _gittins(hazard[some]).tolist(), strict=True):
                self._worth[of] = worth
            yield

    def _seen(self, time: float) -> tuple[_Table, _Table, list[int]]:
        """Of each class and age, what was used again and what came so far; and which classes were
        seen at all."""
        shape = (len(self._bases), NUM_AGES)
        tables = (self._reused, self._entered, self._left)
        reused, entered, left = (np.frombuffer(table).reshape(shape) for table in tables)
        risk = np.cumsum(entered, 1)
        risk[:, 1:] -= np.cumsum(left + self._open(time), 1)[:, :-1]
        return reused.copy(), np.maximum(risk, 0), np.flatnonzero(entered.any(1)).tolist()

    def _hazards(self, reused: _Table, risk: _Table) -> tuple[_Table, _Table]:
        """The hazard of each class and of each kind, by age."""
        lean = _LEAN * 2.0 ** (self._doublings - self._base)
        # Not a matrix product: for one so small, many threads would wait for each other.
        base_reused, base_risk = (np.add.reduceat(t, self._first) for t in (reused, risk))
        kind_reused, kind_risk = (
            np.array([table[bases].sum(0) for bases in self._of_kind])
            for table in (base_reused, base_risk)
        )
        kind = kind_reused / (kind_risk + 1e-9 * lean)
        base = (base_reused + lean * kind[self._kinds]) / (base_risk + lean)
        return (reused + lean * base[self._bases]) / (risk + lean), kind

    def _open(self, time: float) -> _Table:
        """What is under observation, by class and age."""
        under_way = np.frombuffer(self._cohorts).reshape(-1, len(self._bases))
        ages = [age_of(time - since) for since in self._since]  # the oldest first
        first = [at for at, age in enumerate(ages) if not at or age != ages[at - 1]]
        found = np.zeros((NUM_AGES, len(self._bases)))
        found[[ages[at] for at in first]] = np.add.reduceat(under_way, first)
        return found.T

    def _at(self, of: int, begun: float) -> int:
        """Where in `_cohorts` what began then is counted."""
        return max(0, bisect_left(self._since, begun) - 1) * len(self._worth) + of

    def _open_cohort(self, time: float) -> None:
        """What begins after now is of another cohort. If there are too many, the two become one
        that differ least, for their age."""
        if time <= self._since[-1]:
            return
        size = len(self._bases)
        if len(self._since) == _COHORTS:
            since = np.array(self._since[1:])
            at = 2 + int(np.argmin((since[2:] - since[:-2]) / (time - since[:-2])))
            gone = np.array(self._cohorts[at * size : (at + 1) * size])
            np.frombuffer(self._cohorts)[(at - 1) * size : at * size] += gone
            del self._since[at], self._cohorts[at * size : (at + 1) * size]
        self._since.append(time)
        self._cohorts.frombytes(bytes(8 * size))


def _smooth(table: _Table) -> _Table:
    """Each age has some of what its neighbours have, an octave either way: how long rests last is
    no matter of half an octave, and of long ones few are seen."""
    for _ in range(2):
        padded = np.pad(table, ((0, 0), (1, 1)), "edge")
        table = (padded[:, :-2] + 2 * table + padded[:, 2:]) / 4
    return table


def _gittins(hazard: _Table) -> _Table:
    """Gittins' index at the beginning of each age, and 0 at the end of the last: shape
    `[classes, ages + 1]`."""
    hazard = np.minimum(hazard, 0.999)
    first = np.ones((len(hazard), 1))
    alive = np.concatenate([first, np.cumprod(1 - hazard, 1)], 1)
    held = (alive[:, :-1] + alive[:, 1:]) / 2 * _WIDTHS
    until = np.concatenate([0 * first, np.cumsum(held, 1)], 1)
    gained = alive[:, :-1, None] - alive[:, None, 1:]
    waited = until[:, None, 1:] - until[:, :-1, None]
    rate = np.divide(gained, waited, out=np.zeros_like(gained), where=_LATER & (waited > 0))
    return np.concatenate([rate.max(2), 0 * first], 1)
