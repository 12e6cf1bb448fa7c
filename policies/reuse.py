"""The chance that a key is used again, by its class and by how long it was not: learned online.

An *observation* is of keys of one class that were used together; it begins at that use, and each
key leaves it at its next one. Ages are cut into half octaves; of a class, the *hazard* of an age is
the share of those that came so far that were used again in it. What is known of all classes stands
in where a class was seen little, scaled by how much more or less often it was used than they were.

Ages that nobody has reached yet are taken to be like the oldest known, or better, up to the time
that people take to go on: else a cache that is new would hold that nothing ever comes back. What
was learned long ago, counted in observations, fades. It knows no keys.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from math import log2

NUM_AGES = 40
_SHORTEST = 0.5  # seconds: the end of the first age
_EDGES = [_SHORTEST * 2.0 ** (age / 2) for age in range(NUM_AGES)]  # the end of each
_PATIENCE = 600.0  # seconds that people may take to go on
_PRIOR = 0.05  # the hazard of an age up to then, while nothing is known
_LEAN = 20.0  # keys that what was known before counts for
_FADE = 2.0**20  # keys of a class that were observed when all that is known of it counts half
_MOST = 0.95  # a hazard


def age_of(seconds: float) -> int:
    """Which of the ages a time since the last use is in."""
    if seconds < _SHORTEST:
        return 0
    return min(NUM_AGES - 1, 1 + int(2 * log2(seconds / _SHORTEST)))


@dataclass(slots=True, eq=False)
class Observation:
    """`count` keys of class `of` that have not been used since `begun`."""

    of: int
    begun: float
    count: int = 0
    age: int = 0


class Reuse:
    """What is known of `num_classes` classes."""

    def __init__(self, num_classes: int) -> None:
        # By class and age: keys that came to it, and those of them that were used in it.
        self._came = [[0.0] * NUM_AGES for _ in range(num_classes)]
        self._used = [[0.0] * NUM_AGES for _ in range(num_classes)]
        self._ageing: list[deque[Observation]] = [deque() for _ in range(NUM_AGES - 1)]
        self._common = self._of_all()
        self._alive: dict[int, Sequence[float]] = {}  # by class, of those asked for

    def tick(self, now: float) -> None:
        """It is `now`: what is under observation grows older."""
        for age, (ageing, edge) in enumerate(zip(self._ageing, _EDGES, strict=False)):
            while ageing and now - ageing[0].begun >= edge:
                observation = ageing.popleft()
                if observation.count:
                    self._enter(observation, age + 1)

    def begin(self, observation: Observation) -> None:
        """Observe so many keys, which are used now."""
        self._alive.clear()
        self._enter(observation, 0)

    def _enter(self, observation: Observation, age: int) -> None:
        observation.age = age
        self._came[observation.of][age] += observation.count
        if age < len(self._ageing):
            self._ageing[age].append(observation)

    def used(self, observation: Observation, count: int) -> None:
        """So many of its keys are used again now."""
        observation.count -= count
        self._used[observation.of][observation.age] += count

    def change(self, observation: Observation, of: int) -> None:
        """What is left of it is of another class from now on, without a use."""
        observation.of = of
        self._came[of][observation.age] += observation.count

    def learn(self) -> None:
        """Take account of what was observed meanwhile: of all classes, and of what is long ago."""
        for came, used in zip(self._came, self._used, strict=True):
            if came[0] > _FADE:
                came[:] = [count / 2 for count in came]
                used[:] = [count / 2 for count in used]
        self._common = self._of_all()
        self._alive.clear()

    def chance(self, of: int, age: int, until: int) -> float:
        """The chance that a key of a class that has come to `age` is used again before the end of
        age `until`."""
        if (alive := self._alive.get(of)) is None:
            alive = self._alive[of] = self._survival(of)
        return 1 - alive[until + 1] / alive[age]

    def _of_all(self) -> Sequence[float]:
        """The hazards of all classes together."""
        hazards, hazard = list[float](), _PRIOR
        came, used = (map(sum, zip(*by, strict=True)) for by in (self._came, self._used))
        for edge, num_came, num_used in zip(_EDGES, came, used, strict=True):
            prior = max(hazard, _PRIOR) if edge < _PATIENCE else hazard
            hazard = (num_used + _LEAN * prior) / (num_came + _LEAN)
            hazards.append(hazard)
        return hazards

    def _survival(self, of: int) -> Sequence[float]:
        """The part of a class that is not used before the beginning of each age, and of the end."""
        came, used, common = self._came[of], self._used[of], self._common
        expected = sum(num * hazard for num, hazard in zip(came, common, strict=True))
        ratio = (sum(used) + 1) / (expected + 1)
        alive = [1.0]
        for num_came, num_used, hazard in zip(came, used, common, strict=True):
            likely = (num_used + _LEAN * min(_MOST, ratio * hazard)) / (num_came + _LEAN)
            alive.append(alive[-1] * (1 - min(_MOST, likely)))
        return alive
