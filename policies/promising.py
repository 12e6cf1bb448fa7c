"""Learned admission: worth writing is what is likely used again while the tier could hold it.

Keys that one request used together, equally often, are a *part* of its run, and of one class:

    how often they were used (1, 2, more) x last of the request x fate (open, superseded, closed)
    x how long the sequence had rested before (it is new, shorter, longer)

Superseded is what a later request turned off before. How likely a class is used again, so long
after its last use, `policies.reuse` learns from every use, whether its keys were written or not: a
wrong refusal is found out. How long the tier could hold a key is seen from what it gives up.
"""

from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from itertools import repeat

from policies.admission import checked_memory
from policies.base import Access, AdmissionPolicy, Key
from policies.reuse import NUM_AGES, Observation, Reuse, age_of

_OPEN, _SUPERSEDED, _OVER = range(3)
_MOST_USES = 3
_RESTS = (15.0, 90.0)  # seconds: a tool's answer, a person's, and longer
_NUM_RESTS = len(_RESTS) + 2
_NUM_CLASSES = _MOST_USES * 2 * 3 * _NUM_RESTS
_FEW = 5  # ways to go on, of a key; of more, none supersedes another
_LEARN = 16  # requests between two lessons
_SMOOTH = 0.01  # weight of one key that was given up


class _Part(Observation):
    """Keys of one run that were used equally often."""

    __slots__ = ("run", "tail", "uses")

    def __init__(self, run: "_Run", uses: int, tail: bool) -> None:
        self.run, self.uses, self.tail = run, uses, tail
        super().__init__(self.class_of(), run.time)

    def class_of(self) -> int:
        kind = ((self.uses - 1) * 2 + self.tail) * 3 + self.run.fate
        return kind * _NUM_RESTS + self.run.rest


class _Run:
    """What one request used and no later one has."""

    __slots__ = ("fate", "parts", "rest", "time")

    def __init__(self, time: float, rest: int, fate: int) -> None:
        self.time, self.rest, self.fate = time, rest, fate
        self.parts: dict[tuple[int, bool], _Part] = {}

    def part(self, uses: int, tail: bool) -> _Part:
        if (part := self.parts.get((uses, tail))) is None:
            part = self.parts[uses, tail] = _Part(self, uses, tail)
        return part


class Promising(AdmissionPolicy):
    """Worth writing is what is used again with a probability of at least `least`."""

    def __init__(self, least: float = 0.05, memory: int = 2**18) -> None:
        """`least`: a write is worth it if so large a part of what is written is used again;
        `memory`: keys remembered, those used last. Raises ValueError."""
        if isinstance(least, bool) or not isinstance(least, int | float) or not 0 <= least <= 1:
            raise ValueError(f"least = {least!r} is not a number from 0 to 1")
        self._least, self._memory = least, checked_memory(memory)
        self._parts: OrderedDict[Key, _Part] = OrderedDict()
        self._forks: dict[Key, int] = {}  # later requests that turned off after a key
        self._reuse = Reuse(_NUM_CLASSES)
        self._requests = 0
        self._held: float | None = None  # how long after its use a key is given up, if any was
        self._gave_up = 0.0  # when one last was

    def used(self, path: Sequence[Key], access: Access) -> None:
        if not path:
            return
        now = access.time
        self._reuse.tick(now)
        before = list(map(self._parts.get, path))
        known = next((n for n in range(len(path), 0, -1) if before[n - 1] is not None), 0)
        run, turned = self._begin(path, before, known, access)
        for part, keys in _alike(path, before):
            uses = 1
            if part is not None:
                self._reuse.used(part, len(keys))
                uses = min(_MOST_USES, part.uses + 1)
            self._put(keys, run.part(uses, False))
        tail = self._parts[path[-1]]
        tail.count -= 1
        self._put(path[-1:], run.part(tail.uses, True))
        for begun in run.parts.values():
            if begun.count:
                self._reuse.begin(begun)
        if turned is not None:
            self._supersede(turned)
        while len(self._parts) > self._memory:
            key, part = self._parts.popitem(last=False)
            part.count -= 1
            self._forks.pop(key, None)
        self._requests += 1
        if self._requests % _LEARN == 0:
            self._reuse.learn()

    def worth(self, keys: Sequence[Key], access: Access) -> Sequence[bool]:
        now, until = access.time, NUM_AGES - 1
        if self._held is not None:  # what is coldest there has grown older since
            until = age_of(self._held + now - self._gave_up)
        return [self._promises(self._parts.get(key), now, until) for key in keys]

    def _promises(self, part: _Part | None, now: float, until: int) -> bool:
        if part is None:  # who knows
            return True
        age = age_of(now - part.begun)
        return age <= until and self._reuse.chance(part.of, age, until) >= self._least

    def gave_up(self, keys: Sequence[Key], access: Access) -> None:
        self._gave_up = access.time
        for part in map(self._parts.get, keys):
            if part is not None:
                held = access.time - part.begun
                last = held if self._held is None else self._held
                self._held = last + _SMOOTH * (held - last)

    def _begin(
        self, path: Sequence[Key], before: Sequence[_Part | None], known: int, access: Access
    ) -> tuple[_Run, _Run | None]:
        """The run of a request of whose path the first `known` keys were used before; and the run
        that it turned off from, if it did."""
        over = access.hints.closed or access.hints.dont_need
        rest, turned = 0, None
        if known and (last := before[known - 1]) is not None:
            rested = access.time - last.begun
            rest = 1 + sum(rested >= edge for edge in _RESTS)
            if known < len(path):
                key = path[known - 1]
                forks = self._forks[key] = self._forks.get(key, 0) + 1
                turned = last.run if forks <= _FEW else None
        return _Run(access.time, rest, _OVER if over else _OPEN), turned

    def _put(self, keys: Sequence[Key], part: _Part) -> None:
        part.count += len(keys)
        self._parts.update(zip(keys, repeat(part)))
        # From the end, so that the memory gives that up first. Paths are long: no loop is quicker.
        deque(map(self._parts.move_to_end, reversed(keys)), maxlen=0)

    def _supersede(self, run: _Run) -> None:
        """A request turned off before what is left of a run."""
        if run.fate != _OPEN:
            return
        run.fate = _SUPERSEDED
        for part in run.parts.values():
            if part.count:
                self._reuse.change(part, part.class_of())


def _alike(
    path: Sequence[Key], before: Sequence[_Part | None]
) -> Iterator[tuple[_Part | None, Sequence[Key]]]:
    """The keys of a path from its end, those together that were of one part."""
    stop = len(path)
    while stop:
        part, start = before[stop - 1], stop - 1
        while start and before[start - 1] is part:
            start -= 1
        yield part, path[start:stop]
        stop = start
