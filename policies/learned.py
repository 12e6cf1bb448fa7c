"""Learned reuse: give up the leaf whose place is worth least, by when its like were used again.

Only leaves go, keys without a resident child, so that no sequence loses its middle. All keys that
one request used and no later one has are a *run*: they have their last use in common, and if a
later request turned off before them they are *superseded*, all at once. A key's class is

    how often it was used (0, 1, 2, more) x last of its request x fate (open, superseded, closed)
    x how long its sequence had rested before (new, or by octaves)

and what a key of a class is worth so long after its use is learned by `policies.hazard`, from a
sample of keys, those that are gone too, for a while. Of hints it takes `closed` and `dont_need`.
The few numbers here were chosen on traces of several workloads; nothing decays what was learned.
"""

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from heapq import heappop, heappush
from itertools import count
from typing import Any

from policies.base import Access, EvictionPolicy, Key
from policies.hazard import Hazards
from policies.ranking import Ranking
from policies.runs import (
    MOST,
    NUM_CLASSES,
    OPEN,
    OVER,
    SUPERSEDED,
    Node,
    Part,
    Run,
    gap_of,
    kind_of,
)

_FEW = 5  # ways to go on, of a key; of more, none supersedes another
_OBSERVED = 8192  # parts of runs, at most
_GHOSTS = 4  # keys remembered beyond the resident ones, as a multiple of the capacity
_LEAST_GHOSTS = 16384
_LEARN = 32  # requests between two lessons


# What `victims` may yield next: worth, last use, something to tell equals apart, and the leaves of
# its class that come after it.
_Entries = Iterator[tuple[float, int, Key]]
_Offer = tuple[float, float, int, Node, _Entries | None]


class Learned(EvictionPolicy):
    """Gives up first the leaf that is worth least."""

    judges_ends = True

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._nodes: dict[Key, Node] = {}  # ghosts too
        self._ghosts: OrderedDict[Key, None] = OrderedDict()
        self._kids: dict[Key, int] = {}  # resident ones, of keys that may not be
        self._leaves: list[Ranking[Key]] = [Ranking() for _ in range(NUM_CLASSES)]
        self._hazards = Hazards([kind_of(of) for of in range(NUM_CLASSES)], _OBSERVED)
        self._arrived = Part(Run(0.0), 0, False)
        self._sprouting: Node | None = None
        self._now, self._requests = 0.0, 0

    def tick(self, time: float) -> None:
        self._now = max(self._now, time)

    def insert(self, key: Key, parent: Key | None, access: Access) -> None:
        if self._arrived.run.time != access.time:
            self._now = max(self._now, access.time)
            self._arrived = Part(Run(self._now), 0, False)
        before = self._nodes.get(parent)
        node = self._nodes.get(key)
        if node is None:
            self._nodes[key] = node = Node(key, self._arrived)
            self._arrive(self._arrived)
            if before is not None:
                before.forks += 1
        else:
            del self._ghosts[key]
            node.resident = True
        node.parent = parent
        if parent is not None:
            self._kids[parent] = self._kids.get(parent, 0) + 1
            if before is not None:
                self._wither(before)
        self._sprout(node)

    def touch(self, path: Sequence[Key], access: Access) -> None:
        if not path:
            return
        now = self._now = max(self._now, access.time)
        nodes = [self._nodes[key] for key in path]
        known = len(nodes)
        while known and not nodes[known - 1].part.uses:
            known -= 1
        run, turned = Run(now), None
        if known:
            last = nodes[known - 1]
            run.gap = gap_of(now - last.part.run.time)
            if known < len(nodes) and last.forks <= _FEW:
                turned = last.part.run
        if access.hints.closed or access.hints.dont_need:
            run.fate = OVER
        self._use(nodes, run)
        self._sprout(nodes[-1])
        if turned is not None and turned.fate == OPEN:
            self._end(turned, SUPERSEDED)
        self._requests += 1
        if self._requests % _LEARN == 0:
            self._hazards.learn(now)

    def advise(self, path: Sequence[Key], access: Access) -> None:
        if path and (access.hints.closed or access.hints.dont_need):
            self._end(self._nodes[path[-1]].part.run, OVER)

    def remove(self, key: Key) -> None:
        self._leave(self._nodes[key])
        self._forget(key)

    def evict(self, key: Key) -> None:
        self._leave(self._nodes[key])
        self._ghosts[key] = None
        while len(self._ghosts) > max(_GHOSTS * self.capacity, _LEAST_GHOSTS):
            self._forget(self._ghosts.popitem(last=False)[0])

    def victims(self) -> Iterator[Key]:
        self._settle()
        front: list[_Offer] = []
        gone: dict[Key, int] = {}
        tickets = count(NUM_CLASSES)
        for at, leaves in enumerate(self._leaves):
            if len(leaves):
                self._offer(front, leaves.entries(), at)
        while front:
            _, _, at, node, more = heappop(front)
            if more is not None:  # then `at` is a class
                self._offer(front, more, at)
            below: Node | None = node
            while below is not None:
                yield below.key
                below = self._bared(below, gone)
                if below is not None and below.part is not node.part:
                    run = below.part.run
                    worth = self._hazards.worth(below.part.of, self._now - run.time)
                    heappush(front, (worth, run.time, next(tickets), below, None))
                    below = None

    def state(self) -> Mapping[str, Any]:
        """What is resident and what was learned; not what is remembered of keys that are gone."""
        self._settle()
        runs: dict[Run, int] = {}
        keys = []
        for key, node in self._nodes.items():
            if node.resident:
                part, number = node.part, runs.setdefault(node.part.run, len(runs))
                keys.append([key, node.parent, node.forks, number, part.uses, part.tail])
        return {
            "runs": [[run.time, run.gap, run.fate] for run in runs],
            "keys": keys,
            "leaves": [list(leaves) for leaves in self._leaves],
            "now": self._now,
            "hazards": self._hazards.state(self._now),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        runs = [Run(*facts) for facts in state["runs"]]
        parts: dict[tuple[int, int, bool], Part] = {}
        for key, parent, forks, number, uses, tail in state["keys"]:
            part = parts.get((number, uses, tail))
            if part is None:
                part = parts[number, uses, tail] = Part(runs[number], uses, tail)
                part.run.parts.append(part)
            part.count += 1
            self._nodes[key] = node = Node(key, part)
            node.parent, node.forks = parent, forks
            if parent is not None:
                self._kids[parent] = self._kids.get(parent, 0) + 1
        for of, leaves in enumerate(state["leaves"]):
            for key in leaves:
                node = self._nodes[key]
                self._leaves[of].set(key, node.part.run.time)
                node.leaf_of, node.part.run.leaf = of, node
        self._now = state["now"]
        self._hazards.restore(state["hazards"])

    def _settle(self) -> None:
        """Enter the leaf that is left to be."""
        if self._sprouting is not None:
            self._enter(self._sprouting)
            self._sprouting = None

    def _offer(
        self, front: list[_Offer], entries: Iterator[tuple[float, int, Key]], at: int
    ) -> None:
        """The oldest leaf of a class that was not offered yet."""
        if (entry := next(entries, None)) is not None:
            last, _, key = entry
            worth = self._hazards.worth(at, self._now - last)
            heappush(front, (worth, last, at, self._nodes[key], entries))

    def _bared(self, node: Node, gone: dict[Key, int]) -> Node | None:
        """The parent, if with `node` the last of its children has gone."""
        if (parent := node.parent) is None:
            return None
        gone[parent] = gone.get(parent, 0) + 1
        before = self._nodes.get(parent)
        if before is None or not before.resident or gone[parent] < self._kids[parent]:
            return None
        return before

    def _use(self, nodes: Sequence[Node], run: Run) -> None:
        """Put nodes into a new run, in parts by how often they were used."""
        old, taken, new = nodes[0].part, 0, None
        parts: dict[int, Part] = {}
        for node in nodes:
            if (part := node.part) is not old or new is None:
                if taken:
                    self._shrink(old, taken, used=True)
                old, taken, uses = part, 0, min(part.uses + 1, MOST)
                new = parts.get(uses)
                if new is None:
                    new = parts[uses] = Part(run, uses, False)
            node.part = new
            new.count += 1
            taken += 1
        self._shrink(old, taken, used=True)
        assert new is not None
        new.count -= 1
        nodes[-1].part = tail = Part(run, new.uses, True)
        tail.count = 1
        run.parts = [part for part in (*parts.values(), tail) if part.count]
        for part in run.parts:
            part.slot = self._hazards.begin(part.of, part.count, run.time)

    def _arrive(self, part: Part) -> None:
        """One more key that nobody has used yet."""
        part.count += 1
        if part.slot >= 0:
            self._hazards.join(part.slot)
        elif part.count == 1:
            part.run.parts.append(part)
            part.slot = self._hazards.begin(part.of, 1, part.run.time)

    def _shrink(self, part: Part, count: int, *, used: bool) -> None:
        part.count -= count
        if part.slot >= 0:
            self._hazards.end(part.slot, count, self._now, used=used)
        if not part.count:
            run, part.slot = part.run, -1
            run.parts.remove(part)
            if not run.parts:
                run.leaf = None

    def _end(self, run: Run, fate: int) -> None:
        """What is left of a run is of another fate now."""
        run.fate = fate
        for part in run.parts:
            part.of = run.class_of(part)
            if part.slot >= 0:
                self._hazards.change(part.slot, part.of, self._now)
        leaf = run.leaf
        if leaf is not None and leaf.part.run is run and leaf.leaf_of >= 0:
            self._sprout(leaf)

    def _sprout(self, node: Node) -> None:
        """A key may have become a leaf, or be of another class now. It is entered when the next one
        has: in most paths it is no leaf for long."""
        if node.key in self._kids:
            return
        before, self._sprouting = self._sprouting, node
        if before is not None and before is not node:
            self._enter(before)

    def _enter(self, node: Node) -> None:
        part = node.part
        if node.leaf_of not in (-1, part.of):
            self._leaves[node.leaf_of].discard(node.key)
        node.leaf_of, part.run.leaf = part.of, node
        self._leaves[part.of].set(node.key, part.run.time)

    def _wither(self, node: Node) -> None:
        """A key is no leaf any more."""
        if node is self._sprouting:
            self._sprouting = None
        if node.leaf_of >= 0:
            self._leaves[node.leaf_of].discard(node.key)
            node.leaf_of = -1

    def _leave(self, node: Node) -> None:
        node.resident = False
        self._wither(node)
        if (parent := node.parent) is None:
            return
        self._kids[parent] -= 1
        if not self._kids[parent]:
            del self._kids[parent]
            before = self._nodes.get(parent)
            if before is not None and before.resident:
                self._sprout(before)

    def _forget(self, key: Key) -> None:
        node = self._nodes.pop(key)
        self._shrink(node.part, 1, used=False)
