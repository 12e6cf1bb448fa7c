"""Learned reuse: give up the leaf whose place is worth least, by when its like were used again.

Only leaves go, keys without a resident child, so that no sequence loses its middle. The class of a
key is

    how often it was used (never, once, more) x last of its request x fate (open, superseded, over)
    x how long its sequence had rested before (new, or a third of all) x how much its request added

and what a key of a class is worth so long after its use is learned by `policies.hazard`, from all
keys, those that are gone too, for a while. What one request used and no later one has is
*superseded*, all at once, if a later request turned off before it, and *over* if an engine said so;
a priority doubles or halves what a request's keys are worth.

No unit or number here is one workload's: rests and additions are told apart by thirds of those
before, and what was learned weighs half after so many more requests and so many times more keys
than the pool holds, whichever takes longer.
"""

from collections.abc import Iterator, Mapping, Sequence
from heapq import heapify, heappop, heappush
from itertools import count, islice
from math import ldexp
from typing import Any

from policies.base import Access, EvictionPolicy, Key
from policies.hazard import Hazards
from policies.leaves import Leaves, Rank
from policies.ranking import Ranking
from policies.stretch import BASES, KINDS, OPEN, OVER, SUPERSEDED, Run, Stretch
from policies.stretches import Stretches
from policies.thirds import Thirds

_FEW = 5  # ways to go on, of a key; of more, none supersedes another
_GHOSTS = 4  # keys remembered beyond the resident ones, as a multiple of the capacity
_LEAST_GHOSTS = 16384
_FORGET = 64  # keys that are forgotten at once, at most
_LESSON = 16  # requests between two lessons; each is a step of one
_HALF_REQUESTS, _HALF_FILLS = 4096, 8

# What `victims` may yield next: worth, last use, something to tell equals apart, the leaf, and what
# comes after it of its class.
_Entry = tuple[float, int, Stretch]
_Offer = tuple[float, float, int, Stretch, tuple[Rank, Ranking[Stretch] | Iterator[_Entry]] | None]


class Learned(EvictionPolicy):
    """Gives up first the leaf that is worth least."""

    judges_ends = True

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._leaves = Leaves()
        self._stretches = Stretches(self._leaves)
        self._hazards = Hazards(BASES, KINDS)
        self._gaps, self._fresh = Thirds(), Thirds()
        self._arriving: Stretch | None = None  # of keys that came just now, not observed yet
        self._now, self._num_requests = 0.0, 0
        self._half_lives = [0.0, 0.0]  # not told yet: by requests, by keys that they added

    def tick(self, time: float) -> None:
        self._now = max(self._now, time)

    def insert(self, key: Key, parent: Key | None, access: Access) -> None:
        here, stretches = self._arriving, self._stretches
        if key in stretches.at:
            stretches.come_back(key)
        elif (
            here is None
            or here.run.time != access.time
            or not stretches.lengthen(here, key, parent)
        ):
            self._observe_arrived()
            self._now = max(self._now, access.time)
            self._arriving = stretches.begin(key, parent, Run(access.time))

    def touch(self, path: Sequence[Key], access: Access) -> None:
        if not path:
            return
        now = self._now = max(self._now, access.time)
        if self._stretches.at[path[-1]] is self._arriving:
            self._arriving = None  # no more than a part of this use
        self._observe_arrived()
        stretches = self._stretches.cover(path)
        known, fresh = len(stretches), 0
        while known and not stretches[known - 1].uses:
            known -= 1
            fresh += len(stretches[known].keys)
        last = stretches[known - 1] if known else None
        gap = 0 if last is None else 1 + self._gaps.place(now - last.run.time)
        run = Run(now, gap, self._fresh.place(fresh))
        run.priority = access.hints.priority
        if access.hints.closed or access.hints.dont_need:
            run.fate = OVER
        turned = last.run if last is not None and fresh and last.forks <= _FEW else None
        self._pass_by(fresh)
        run.bits = self._hazards.bits(len(path))
        self._use(stretches, run)
        if turned is not None and turned.fate == OPEN:
            self._condemn(turned, SUPERSEDED)

    def advise(self, path: Sequence[Key], access: Access) -> None:
        """Take what is said of the request that ended where `path` does, if none went on since."""
        hints, at = access.hints, self._stretches.at
        if hints.will_need:
            self.touch(self._stretches.resident_in(path), access)
            return
        end = next((at[key] for key in reversed(path) if key in at), None)
        if end is not None and end.tail:
            self._now = max(self._now, access.time)
            end.run.priority = hints.priority or end.run.priority
            over = hints.closed or hints.dont_need
            self._condemn(end.run, OVER if over else end.run.fate)

    def remove(self, key: Key) -> None:
        stretch = self._stretches.isolate(key)
        self._look_away(stretch, 1, used=False)
        self._stretches.drop(stretch)

    def evict(self, key: Key) -> None:
        stretches = self._stretches
        stretches.go(key)
        if stretches.num_gone > max(_GHOSTS * self.capacity, _LEAST_GHOSTS):
            stretch, count = stretches.forget(_FORGET)
            self._look_away(stretch, count, used=False)

    def victims(self) -> Iterator[Key]:
        gone: dict[Key, int] = {}
        front: list[_Offer] = []
        for rank, ranking in self._leaves.rankings():
            last, _, leaf = ranking.first()
            front.append((self._worth(rank, last), last, len(front), leaf, (rank, ranking)))
        heapify(front)
        tickets = count(len(front))
        while front:
            _, _, ticket, stretch, more = heappop(front)
            if more is not None:
                self._offer_next(front, ticket, *more)
            gone_already = len(stretch.keys) - stretch.held
            yield from islice(reversed(stretch.keys), gone_already, None)
            if (below := self._stretches.bared(stretch, gone)) is not None:
                time = below.run.time
                worth = self._worth((below.class_of, below.run.priority), time)
                heappush(front, (worth, time, next(tickets), below, None))

    def state(self) -> Mapping[str, Any]:
        """What is resident and what was learned; not what is remembered of keys that are gone."""
        self._observe_arrived()
        runs: dict[Run, int] = {}
        stretches = []
        for stretch in self._stretches.resident():
            number = runs.setdefault(stretch.run, len(runs))
            whole = stretch.held == len(stretch.keys)
            keys, forks = stretch.keys[: stretch.held], stretch.forks if whole else 1
            stretches.append([keys, stretch.parent, forks, number, stretch.uses, stretch.tail])
        return {
            "runs": [[run.time, run.gap, run.fresh, run.fate, run.priority] for run in runs],
            "stretches": stretches,
            "leaves": self._leaves.state(),
            "now": self._now,
            "gaps": self._gaps.state(),
            "fresh": self._fresh.state(),
            "hazards": self._hazards.state(self._now),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        runs = [Run(*facts) for facts in state["runs"]]
        for keys, parent, forks, number, uses, tail in state["stretches"]:
            stretch = Stretch(list(keys), len(keys), parent, runs[number])
            stretch.forks, stretch.uses, stretch.tail = forks, uses, tail
            self._stretches.adopt(stretch)
        self._leaves.restore(state["leaves"], self._stretches.at)
        self._now = state["now"]
        self._gaps, self._fresh = Thirds(state["gaps"]), Thirds(state["fresh"])
        self._hazards.restore(state["hazards"])

    def _offer_next(
        self,
        front: list[_Offer],
        ticket: int,
        rank: Rank,
        leaves: Ranking[Stretch] | Iterator[_Entry],
    ) -> None:
        """The leaf that comes next of a class."""
        if isinstance(leaves, Ranking):
            leaves = leaves.entries()
            next(leaves)
        if (entry := next(leaves, None)) is not None:
            last, _, leaf = entry
            heappush(front, (self._worth(rank, last), last, ticket, leaf, (rank, leaves)))

    def _worth(self, rank: Rank, last: float) -> float:
        of, priority = rank
        worth = self._hazards.worth(of, self._now - last)
        return ldexp(worth, priority) if priority else worth

    def _use(self, stretches: Sequence[Stretch], run: Run) -> None:
        """All of a path is used by `run`, and by no other any more."""
        for stretch in stretches:
            self._look_away(stretch, len(stretch.keys), used=True)
            stretch.move(run)
        path = self._stretches.join(stretches)
        if len(path[-1].keys) > 1:
            path[-1:] = self._stretches.split(path[-1], len(path[-1].keys) - 1)
        path[-1].tail = True
        for stretch in path:
            self._observe(stretch)
            if self._leaves.has(stretch):
                self._leaves.sprout(stretch)
        if self._stretches.is_leaf(path[-1]):
            self._leaves.sprout(path[-1])

    def _condemn(self, run: Run, fate: int) -> None:
        """What is left of a run has another fate from now on, or another priority."""
        run.fate = fate
        for stretch in run.stretches:
            if stretch.of not in (-1, to := stretch.class_of):
                count, of = len(stretch.keys), stretch.of
                self._hazards.change(of, to, count, run.bits, run.time, self._now)
                stretch.of = to
            if self._leaves.has(stretch):
                self._leaves.sprout(stretch)

    def _observe(self, stretch: Stretch) -> None:
        stretch.of, run = stretch.class_of, stretch.run
        self._hazards.begin(stretch.of, len(stretch.keys), run.bits, run.time)

    def _observe_arrived(self) -> None:
        """Keys came, and nobody has used them."""
        if (here := self._arriving) is not None and here.held:
            here.run.bits = self._hazards.bits(len(here.keys))
            self._observe(here)
        self._arriving = None

    def _look_away(self, stretch: Stretch, count: int, *, used: bool) -> None:
        """`count` of its keys are not observed any more."""
        if stretch.of >= 0:
            run = stretch.run
            self._hazards.end(stretch.of, count, run.bits, run.time, self._now, used=used)

    def _pass_by(self, fresh: int) -> None:
        """One more request, with so many keys that nobody had used: forget a little, and learn."""
        lives = self._half_lives
        lives[0] += 1 / _HALF_REQUESTS
        lives[1] += fresh / (_HALF_FILLS * max(1, self.capacity))
        self._num_requests += 1
        self._hazards.pass_by(gone := min(lives))
        self._half_lives = [life - gone for life in lives]
        self._hazards.go_on()
        if self._num_requests % _LESSON == 0:
            self._hazards.learn(self._now)
