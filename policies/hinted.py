"""A policy's order, and before and behind it what engines said: a policy need not know of hints.

    over | priority -128 .. -1 |   the policy's own order   | priority 1 .. 127
    goes first                                                        goes last

What is said of a key takes it out of the policy's order, into a *lane*; in a lane, what was used
longest ago goes first. A key that one session alone has used since it came is its *own*, and only
these does it concern that a session is closed, does not need them, or has a priority below 0: what
others use too keeps its place. Lanes above 0 hold half of what is resident at most. While nothing
is said nothing is kept here.
"""

from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

from policies.base import NO_HINTS, Access, EvictionPolicy, Hints, Key

_OVER = -1000  # the lane of what its session does not need any more; the others are priorities
_NOBODY = ""  # owns what a request of no session brought, until that has used it


class Hinted(EvictionPolicy):
    """Obeys hints for `policy`, which holds nothing yet and is this one's from now on."""

    def __init__(self, policy: EvictionPolicy) -> None:
        super().__init__(policy.capacity)
        self.policy = policy
        self._lanes: dict[int, OrderedDict[Key, None]] = {}
        self._lane_of: dict[Key, int] = {}  # not of what is in the policy's order
        self._raised = 0  # keys in lanes above 0
        self._owners: dict[Key, str] = {}
        self._met: tuple[Hints, str | None, int] = NO_HINTS, None, 0  # see `_meet`

    def resize(self, capacity: int) -> None:
        super().resize(capacity)
        self.policy.resize(capacity)

    def tick(self, time: float) -> None:
        self.policy.tick(time)

    def insert(self, key: Key, parent: Key | None, access: Access) -> None:
        if access.hints is not NO_HINTS:
            hints, owner, lane = self._met
            if access.hints is not hints:  # a request brings many keys
                _, owner, lane = self._met = self._meet(access.hints)
            if owner is not None:
                self._owners[key] = owner
            if lane:
                self._enter(key, lane)
                self._lower(access)
                return
        self.policy.insert(key, parent, access)

    def touch(self, path: Sequence[Key], access: Access) -> None:
        hints, owners = access.hints, self._owners
        if not owners and not self._lane_of and hints.priority <= 0:
            self.policy.touch(path, access)
            return
        who, own = hints.session or _NOBODY, set[Key]()
        if self._lane_of or hints.priority or self._ends(hints):
            own = {key for key in path if owners.get(key) == who}
        others = [key for key in path if owners.get(key, who) != who] if who else path
        for key in others:
            owners.pop(key, None)
        if own or self._lane_of or hints.priority > 0:
            path = self._sort(path, own, access, used=True)
        self.policy.touch(path, access)

    def advise(self, path: Sequence[Key], access: Access) -> None:
        hints = access.hints
        if hints.will_need:
            self.touch(path, access)
            return
        own = {k for k in path if hints.session and self._owners.get(k) == hints.session}
        rest = self._sort(path, own, access, used=False)
        self.policy.advise(rest, access)

    def said(self, key: Key) -> Hints:
        owner, lane = self._owners.get(key), self._lane_of.get(key, 0)
        if owner is None and not lane:
            return self.policy.said(key)
        over = lane == _OVER
        return Hints(owner or None, priority=0 if over else lane, dont_need=over)

    def remove(self, key: Key) -> None:
        self._owners.pop(key, None)
        if not self._leave(key):
            self.policy.remove(key)

    def evict(self, key: Key) -> None:
        self._owners.pop(key, None)
        if not self._leave(key):
            self.policy.evict(key)

    def victims(self) -> Iterator[Key]:
        if not self._lanes:
            return self.policy.victims()
        lanes = sorted(self._lanes)
        first = (self._lanes[lane] for lane in lanes if lane < 0)
        last = (self._lanes[lane] for lane in lanes if lane > 0)
        return chain(chain.from_iterable(first), self.policy.victims(), chain.from_iterable(last))

    def state(self) -> Mapping[str, Any]:
        return {
            "policy": self.policy.state(),
            "lanes": [[lane, list(keys)] for lane, keys in self._lanes.items()],
            "owners": [[key, owner] for key, owner in self._owners.items()],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        self.policy.restore(state["policy"])
        for lane, keys in state["lanes"]:
            for key in keys:
                self._enter(key, lane)
        self._owners.update(state["owners"])

    def _ends(self, hints: Hints) -> bool:
        """Whether what is a session's own goes first from now on."""
        return (hints.closed or hints.dont_need) and not self.policy.judges_ends

    def _meet(self, hints: Hints) -> tuple[Hints, str | None, int]:
        """What a key that comes with `hints` is to have: an owner, if it may matter later whose it
        is, and a lane."""
        if self.policy.judges_ends:
            owned = hints.priority < 0
        else:
            owned = hints.session is not None or hints.dont_need or hints.priority < 0
        owner = (hints.session or _NOBODY) if owned else None
        return hints, owner, _OVER if self._ends(hints) else hints.priority

    def _sort(
        self, path: Sequence[Key], own: Collection[Key], access: Access, *, used: bool
    ) -> Sequence[Key]:
        """Put each key of a path where it belongs now; returns those that the policy orders."""
        hints, lane_of = access.hints, self._lane_of
        concerned: Sequence[int] = range(len(path))
        # Of a mere use: paths are long, lanes are not.
        if not hints.priority and not self._ends(hints):
            concerned = [at for at, key in enumerate(path) if key in lane_of]
        in_lanes = set[Key]()
        for at in reversed(concerned):  # the tail first, so that it goes first
            key = path[at]
            before = lane_of.get(key, 0)
            lane = self._lane(before, key in own, hints, used=used)
            if lane:
                in_lanes.add(key)
            if lane == before:
                if lane and used:
                    self._lanes[lane].move_to_end(key)
                continue
            if not self._leave(key):
                self.policy.remove(key)
            if lane:
                self._enter(key, lane)
            else:
                self.policy.insert(key, path[at - 1] if at else None, access)
        self._lower(access)
        return [key for key in path if key not in in_lanes] if in_lanes else path

    def _lane(self, before: int, own: bool, hints: Hints, *, used: bool) -> int:
        """Where a key belongs after a use, or a word, of a path that it is on; 0: to the policy."""
        if own and self._ends(hints):
            return _OVER
        if hints.priority > 0:
            return max(before, hints.priority)
        if own and hints.priority < 0:
            return hints.priority
        if used and before < 0 and (before == _OVER or not own):
            return 0
        return before

    def _enter(self, key: Key, lane: int) -> None:
        self._lane_of[key] = lane
        self._lanes.setdefault(lane, OrderedDict())[key] = None
        self._raised += lane > 0

    def _leave(self, key: Key) -> bool:
        """Take a key out of its lane, if it is in one."""
        if not self._lane_of or (lane := self._lane_of.pop(key, None)) is None:
            return False
        del self._lanes[lane][key]
        if not self._lanes[lane]:
            del self._lanes[lane]
        self._raised -= lane > 0
        return True

    def _lower(self, access: Access) -> None:
        """Of keys above the others' order only half of what fits may stay: the rest is as new."""
        while self._raised > self.capacity // 2:
            lane = min(lane for lane in self._lanes if lane > 0)
            key = next(iter(self._lanes[lane]))
            self._leave(key)
            self.policy.insert(key, None, access)
