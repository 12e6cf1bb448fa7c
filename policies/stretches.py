"""The stretches of a pool: of every key that is resident or remembered, the one that it is in.

Invariant: stretches share no key; in each, a key's parent is the one before it; and a key that a
resident one goes on from outside its stretch is the last of it. Who is a leaf it tells `leaves`.
Keys that are gone are remembered until they are forgotten, in the order in which they went. It
knows no classes, and of runs only that a stretch has one.
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence

from policies.base import Key
from policies.leaves import Leaves
from policies.stretch import Run, Stretch


class Stretches:
    """Which keys are known, and who goes on from whom."""

    def __init__(self, leaves: Leaves) -> None:
        self.at: dict[Key, Stretch] = {}
        self.num_gone = 0  # keys that are remembered
        self._leaves = leaves
        self._gone: OrderedDict[Stretch, None] = OrderedDict()  # those that have such keys
        self._kids: dict[Key, int] = {}  # resident stretches that go on from a key, if any do

    # -- keys that come and go -------------------------------------------------------------------

    def lengthen(self, stretch: Stretch, key: Key, parent: Key | None) -> bool:
        """Put a new key at the end of a stretch of resident ones, if it goes on from there and from
        nowhere else; False, and nothing has changed, if not."""
        kids = self._kids
        if not stretch.is_last(parent) or parent in kids or key in kids:
            return False
        stretch.keys.append(key)
        stretch.held += 1
        self.at[key] = stretch
        return True

    def begin(self, key: Key, parent: Key | None, run: Run) -> Stretch:
        """A new key, resident, in a stretch of its own."""
        self.at[key] = new = Stretch([key], 1, parent, run)
        self._attach(new)
        if (before := self.at.get(parent)) is not None:
            before.forks += 1
        return new

    def come_back(self, key: Key) -> None:
        """A key that was gone is resident again."""
        stretch = self.at[key]
        if stretch.keys[stretch.held] != key:
            _, stretch = self.split(stretch, stretch.keys.index(key))
        stretch.held += 1
        self.num_gone -= 1
        if stretch.held == len(stretch.keys):
            del self._gone[stretch]
        if stretch.held == 1:
            self._attach(stretch)
        elif not self.is_leaf(stretch):
            self._leaves.wither(stretch)

    def go(self, key: Key) -> None:
        """A resident key is gone, and remembered."""
        stretch = self.at[key]
        if stretch.keys[stretch.held - 1] != key:
            stretch = self.isolate(key)
        stretch.held -= 1
        self.num_gone += 1
        self._gone[stretch] = None
        if not stretch.held:
            self._detach(stretch)
        elif not self._leaves.has(stretch):
            self._leaves.sprout(stretch)

    def isolate(self, key: Key) -> Stretch:
        """Give a key a stretch of its own."""
        stretch = self.at[key]
        if stretch.keys[-1] != key:
            stretch, _ = self.split(stretch, stretch.keys.index(key) + 1)
        if len(stretch.keys) > 1:
            _, stretch = self.split(stretch, len(stretch.keys) - 1)
        return stretch

    def drop(self, stretch: Stretch) -> None:
        """Its keys are gone, and not remembered."""
        if stretch.held:
            self._detach(stretch)
        self.num_gone -= len(stretch.keys) - stretch.held
        self._gone.pop(stretch, None)
        del stretch.run.stretches[stretch]
        for key in stretch.keys:
            del self.at[key]
        stretch.held = 0

    def forget(self, most: int) -> tuple[Stretch, int]:
        """Forget keys of the stretch whose first one went before all others', at most so many:
        which it is, and how many they were."""
        stretch = next(iter(self._gone))
        count = min(most, len(stretch.keys) - stretch.held)
        if count == len(stretch.keys):
            self.drop(stretch)
            return stretch, count
        self.num_gone -= count
        for key in stretch.keys[-count:]:
            del self.at[key]
        del stretch.keys[-count:]
        if stretch.held == len(stretch.keys):
            del self._gone[stretch]
        return stretch, count

    # -- paths -----------------------------------------------------------------------------------

    def cover(self, path: Sequence[Key]) -> list[Stretch]:
        """The stretches of a path's resident keys, cut so that they have no others."""
        found: list[Stretch] = []
        at, start, stop = self.at, 0, len(path)
        while start < stop:
            stretch = at[path[start]]
            if stretch.keys[0] != path[start]:
                _, stretch = self.split(stretch, stretch.keys.index(path[start]))
            keys = stretch.keys
            count = min(stretch.held, stop - start)
            if path[start + count - 1] != keys[count - 1]:  # they part somewhere, and for good
                count = _agree(path, start, keys, count)
            if count < len(keys):
                stretch, _ = self.split(stretch, count)
            found.append(stretch)
            start += count
        return found

    def join(self, path: Sequence[Stretch]) -> list[Stretch]:
        """The same path, in as few stretches as it can be: of equal uses, where nothing else ever
        went on. They are of one run, all resident."""
        joined = list(path[:1])
        for stretch in path[1:]:
            before = joined[-1]
            parts = before.forks > 1 or self._kids.get(before.keys[-1]) != 1
            if parts or before.uses != stretch.uses or stretch.parent != before.keys[-1]:
                joined.append(stretch)
                continue
            listed = self._leaves.has(stretch)
            self._leaves.wither(stretch)
            del self._kids[before.keys[-1]]
            moved = min(before.keys, stretch.keys, key=len)
            joined[-1] = before.join(stretch)
            for key in moved:
                self.at[key] = joined[-1]
            if listed:
                self._leaves.sprout(joined[-1])
        return joined

    def split(self, stretch: Stretch, at: int) -> tuple[Stretch, Stretch]:
        """Cut a stretch in two, `0 < at < len(keys)`: its head, and what goes on from it."""
        listed = self._leaves.has(stretch)
        self._leaves.wither(stretch)
        head, tail, new = stretch.cut(at)
        for key in new.keys:
            self.at[key] = new
        if stretch in self._gone:
            for part in (head, tail):
                if part.held < len(part.keys):
                    self._gone[part] = None
                else:
                    self._gone.pop(part, None)
        if tail.held:
            self._kids[head.keys[-1]] = 1
        if listed:
            self._leaves.sprout(tail if tail.held else head)
        return head, tail

    def resident_in(self, path: Sequence[Key]) -> list[Key]:
        """The keys of a path that are resident."""
        found = dict.fromkeys(self.at[key] for key in path if key in self.at)
        resident = {key for stretch in found for key in stretch.keys[: stretch.held]}
        return [key for key in path if key in resident]

    def is_leaf(self, stretch: Stretch) -> bool:
        """Whether it holds a key, and no resident one goes on from the last of them."""
        return stretch.held > 0 and stretch.keys[stretch.held - 1] not in self._kids

    def bared(self, stretch: Stretch, gone: dict[Key, int]) -> Stretch | None:
        """What it goes on from, if that is resident and with it the last that does has gone; `gone`
        counts them."""
        if (parent := stretch.parent) is None:
            return None
        gone[parent] = gone.get(parent, 0) + 1
        before = self.at.get(parent)
        if before is None or gone[parent] < self._kids[parent] or not before.is_last(parent):
            return None
        return before

    def resident(self) -> Iterator[Stretch]:
        """Every stretch that holds a key."""
        seen: dict[Stretch, None] = dict.fromkeys(self.at.values())
        return (stretch for stretch in seen if stretch.held)

    def adopt(self, stretch: Stretch) -> None:
        """Take up a stretch of resident keys that another life had; its leaves know."""
        for key in stretch.keys:
            self.at[key] = stretch
        if stretch.parent is not None:
            self._kids[stretch.parent] = self._kids.get(stretch.parent, 0) + 1

    def _attach(self, stretch: Stretch) -> None:
        """It holds its first key now."""
        if (parent := stretch.parent) is not None:
            before = self.at.get(parent)
            if before is not None and before.keys[-1] != parent:
                before, _ = self.split(before, before.keys.index(parent) + 1)
            self._kids[parent] = self._kids.get(parent, 0) + 1
            if before is not None and before.is_last(parent):
                self._leaves.wither(before)
        if self.is_leaf(stretch):
            self._leaves.sprout(stretch)

    def _detach(self, stretch: Stretch) -> None:
        """It holds none any more."""
        self._leaves.wither(stretch)
        if (parent := stretch.parent) is None:
            return
        self._kids[parent] -= 1
        if not self._kids[parent]:
            del self._kids[parent]
            before = self.at.get(parent)
            if before is not None and before.is_last(parent):
                self._leaves.sprout(before)


def _agree(path: Sequence[Key], start: int, keys: Sequence[Key], count: int) -> int:
    """How many keys `path` from `start` on and `keys` have in common at their beginning, one at
    least and less than `count`: a path that has left a stretch does not come back to it."""
    least, most = 1, count - 1
    while least < most:
        middle = (least + most + 1) // 2
        if path[start + middle - 1] == keys[middle - 1]:
            least = middle
        else:
            most = middle - 1
    return least
