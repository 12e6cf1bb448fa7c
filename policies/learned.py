"""Learned reuse: give up the leaf whose place is worth least, by when its like were used again.

Only leaves go, keys without a resident child, so that no sequence loses its middle. All keys that
one request used and no later one has are a *run*: they have their last use in common, and if a later
request turned off before them they are *superseded*, all at once. A key's class is

    how often it was used (1, 2, more) x last of its request x fate (open, superseded, closed)
    x how long its sequence had rested before (new, or by octaves)

and what a key of a class is worth so long after its use is learned by `policies.hazard`, from a
sample of keys, those that are gone too, for a while. Of hints it takes `closed` and `dont_need`.
Nothing here is a number of one workload's.
"""

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from heapq import heappop, heappush
from typing import Any

from policies.base import Access, EvictionPolicy, Key
from policies.hazard import Hazards
from policies.ranking import Ranking

_OPEN, _SUPERSEDED, _CLOSED = range(3)
_NUM_GAPS = 4
_NUM_CLASSES = 3 * 2 * 3 * _NUM_GAPS
_FEW = 5  # ways to go on, of a key; of more, none supersedes another
_OBSERVED = 8192  # keys, at most
_GHOSTS = 4  # keys remembered beyond the resident ones, as a multiple of the capacity
_LEARN = 128  # requests between two lessons


class _Run:
    __slots__ = ("fate", "gap", "leaf", "observed", "tail", "time")

    def __init__(self, time: float, gap: int = 0, fate: int = _OPEN) -> None:
        self.time, self.gap, self.fate = time, gap, fate
        self.tail: Key = None
        self.leaf: _Node | None = None
        self.observed: list[_Node] = []


class _Node:
    __slots__ = ("forks", "key", "kids", "leaf_of", "parent", "resident", "run", "slot", "uses")

    def __init__(self, key: Key, run: _Run) -> None:
        self.key, self.run = key, run
        self.parent: Key | None = None
        self.resident = True
        self.uses = self.kids = self.forks = 0
        self.slot = self.leaf_of = -1


class Learned(EvictionPolicy):
    """Gives up first the leaf that is worth least."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._nodes: dict[Key, _Node] = {}
        self._ghosts: OrderedDict[Key, None] = OrderedDict()
        self._leaves: list[Ranking[Key]] = [Ranking() for _ in range(_NUM_CLASSES)]
        self._kids: dict[Key, int] = {}
        self._hazards = Hazards(_NUM_CLASSES, _OBSERVED)
        self._arrived = _Run(0.0)
        self._now = 0.0
        self._requests = self._met = 0

    def insert(self, key: Key, parent: Key | None, access: Access) -> None:
        if self._arrived.time != access.time:
            self._arrived = _Run(access.time)
            self._now = max(self._now, access.time)
        node = self._nodes.get(key)
        if node is None:
            self._nodes[key] = node = _Node(key, self._arrived)
            self._met += 1
            if self._met % (1 + 4 * self.capacity // _OBSERVED) == 0:
                node.slot = -2
            before = self._nodes.get(parent)
            if before is not None:
                before.forks += 1
        else:
            del self._ghosts[key]
            node.resident = True
        node.parent = parent
        if parent is not None:
            self._kids[parent] = self._kids.get(parent, 0) + 1
            before = self._nodes.get(parent)
            if before is not None and before.leaf_of >= 0:
                self._leaves[before.leaf_of].discard(parent)
                before.leaf_of = -1
        if key not in self._kids:
            self._sprout(node)

    def touch(self, path: Sequence[Key], access: Access) -> None:
        now = self._now = max(self._now, access.time)
        nodes = [self._nodes[key] for key in path]
        if not nodes:
            return
        known = len(nodes)
        while known and not nodes[known - 1].uses:
            known -= 1
        run, turned = _Run(now), None
        if known:
            last = nodes[known - 1]
            rested = now - last.run.time
            run.gap = 1 if rested < 15 else 2 if rested < 90 else 3
            if known < len(nodes) and last.forks <= _FEW:
                turned = last.run
        if access.hints.closed or access.hints.dont_need:
            run.fate = _CLOSED
        run.tail = path[-1]
        for node in nodes:
            if node.uses < 3:
                node.uses += 1
            node.run = run
            if node.slot != -1:
                self._observe(node, now)
        self._sprout(nodes[-1])
        if turned is not None:  # what is left of it: the branch that was not taken
            self._supersede(turned, _SUPERSEDED)
        self._requests += 1
        if self._requests % _LEARN == 0:
            self._hazards.learn(now)

    def remove(self, key: Key) -> None:
        self._leave(self._nodes[key])
        self._forget(key)

    def evict(self, key: Key) -> None:
        self._leave(self._nodes[key])
        self._ghosts[key] = None
        while len(self._ghosts) > _GHOSTS * self.capacity:
            self._forget(self._ghosts.popitem(last=False)[0])

    def victims(self) -> Iterator[Key]:
        front: list[tuple[float, float, int, _Node, Iterator[Any] | None]] = []
        gone: dict[Key, int] = {}
        serial = 0
        for leaves in self._leaves:
            if len(leaves):
                self._push(front, leaves.entries(), serial)
                serial += 1
        while front:
            _, _, at, node, more = heappop(front)
            if more is not None:
                self._push(front, more, at)
            while True:
                yield node.key
                parent = node.parent
                before = self._nodes.get(parent)
                if before is None or not before.resident:
                    break
                kids = gone[parent] = gone.get(parent, 0) + 1
                if kids < self._kids[parent]:
                    break
                run = node.run
                if before.run is not run or before.uses != node.uses or node.key == run.tail:
                    serial += 1
                    last = before.run.time
                    worth = self._hazards.worth(self._class(before), self._now - last)
                    heappush(front, (worth, last, 100 + serial, before, None))
                    break
                node = before

    def _push(self, front: Any, entries: Iterator[Any], at: int) -> None:
        for last, _, key in entries:
            node = self._nodes[key]
            worth = self._hazards.worth(node.leaf_of, self._now - last)
            heappush(front, (worth, last, at, node, entries))
            return

    def _class(self, node: _Node) -> int:
        run = node.run
        tail = node.key is run.tail or node.key == run.tail
        return ((max(node.uses - 1, 0) * 2 + tail) * 3 + run.fate) * _NUM_GAPS + run.gap

    def _sprout(self, node: _Node) -> None:
        """A key has become a leaf, or is one of another run now."""
        if node.key in self._kids:
            return
        of = self._class(node)
        if node.leaf_of not in (-1, of):
            self._leaves[node.leaf_of].discard(node.key)
        node.leaf_of = of
        node.run.leaf = node
        self._leaves[of].set(node.key, node.run.time)

    def _supersede(self, run: _Run, fate: int) -> None:
        if run.fate != _OPEN:
            return
        run.fate = fate
        leaf = run.leaf
        if leaf is not None and leaf.run is run and leaf.leaf_of >= 0:
            self._sprout(leaf)
        for node in run.observed:
            if node.run is run and node.slot >= 0:
                self._hazards.change(node.slot, self._class(node), self._now)

    def _observe(self, node: _Node, now: float) -> None:
        of = self._class(node)
        if node.slot >= 0:
            self._hazards.reuse(node.slot, of, now)
        else:
            node.slot = self._hazards.begin(of, now)
        node.run.observed.append(node)

    def _leave(self, node: _Node) -> None:
        node.resident = False
        if node.leaf_of >= 0:
            self._leaves[node.leaf_of].discard(node.key)
            node.leaf_of = -1
        parent = node.parent
        if parent is None:
            return
        if self._kids[parent] > 1:
            self._kids[parent] -= 1
            return
        del self._kids[parent]
        before = self._nodes.get(parent)
        if before is not None and before.resident:
            self._sprout(before)

    def _forget(self, key: Key) -> None:
        node = self._nodes.pop(key)
        if node.slot >= 0:
            self._hazards.end(node.slot, self._now)
            node.slot = -1
