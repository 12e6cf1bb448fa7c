"""A pool's policy gives way to another while the pool serves: its residents change hands in pieces.

    old   |hot . . . . . |  -> the coldest, a piece at a time ->  |. . . cold|   new
    late  |what came or was used meanwhile|   -> told to the new one when the old one is empty ->

Until then the three are one order: first the new policy's keys, then the old one's, then the late
ones. So the new policy meets every key as if all had come in the old order, however often they are
used meanwhile, and it ends, for what it has to hand over only grows less. It is a policy like
others: it knows no block.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, islice

from policies.base import Access, EvictionPolicy, Key


class Handover(EvictionPolicy):
    """Both policies as one. `old` holds what is resident, `new` nothing yet; `parent_of` says which
    key precedes a resident one."""

    def __init__(
        self, old: EvictionPolicy, new: EvictionPolicy, parent_of: Callable[[Key], Key | None]
    ) -> None:
        super().__init__(old.capacity)
        self.new, self.judges_ends = new, new.judges_ends
        self._old, self._parent_of = old, parent_of
        self._handed: set[Key] = set()  # the new one's
        self._fresh: set[Key] = set()  # neither's yet
        self._late: OrderedDict[Key, Access | None] = OrderedDict()  # by their last use; None: none
        self._emptied = False  # the old one
        new.resize(self.capacity)

    def hand(self, n: int, access: Access) -> bool:
        """Hand the next `n` keys over, or tell of as many late ones; whether any is left."""
        if self._emptied:
            for run in self._runs(n):
                self._tell(run, access)
            return bool(self._late)
        piece = list(islice(self._old.residents(), n))
        for key in piece:
            self._old.remove(key)
            self.new.insert(key, self._parent_of(key), access)
        self._handed.update(piece)
        self._emptied = len(piece) < n
        return not self._emptied or bool(self._late)

    def _runs(self, n: int) -> list[list[Key]]:
        """Take `n` of the late keys, the first first, in runs of one sequence each, tail first."""
        runs: list[list[Key]] = []
        for key in list(islice(self._late, n)):
            if runs and self._parent_of(runs[-1][-1]) == key:
                runs[-1].append(key)
            else:
                runs.append([key])
        return runs

    def _tell(self, run: list[Key], access: Access) -> None:
        path, last = [], access
        for key in reversed(run):
            if key in self._fresh:
                self._fresh.remove(key)
                self._handed.add(key)
                self.new.insert(key, self._parent_of(key), access)
            if (used := self._late.pop(key)) is not None:
                path.append(key)
                last = used
        if path:
            self.new.touch(path, Access(access.time, last.hints))

    def resize(self, capacity: int) -> None:
        super().resize(capacity)
        self._old.resize(capacity)
        self.new.resize(capacity)

    def tick(self, time: float) -> None:
        self._old.tick(time)
        self.new.tick(time)

    def insert(self, key: Key, parent: Key | None, access: Access) -> None:
        if self._emptied:
            self._handed.add(key)
            self.new.insert(key, parent, access)
        else:
            self._fresh.add(key)
            self._late[key] = None

    def touch(self, path: Sequence[Key], access: Access) -> None:
        at_once = []
        for key in reversed(path):
            if self._emptied and key not in self._late:
                at_once.append(key)
            else:
                self._late[key] = access
                self._late.move_to_end(key)
        if at_once:
            self.new.touch(at_once[::-1], access)

    def advise(self, path: Sequence[Key], access: Access) -> None:
        known = [key for key in path if key in self._handed and key not in self._late]
        self.new.advise(known, access)  # what is still the old one's it will not decide about

    def remove(self, key: Key) -> None:
        if (holder := self._forget(key)) is not None:
            holder.remove(key)

    def evict(self, key: Key) -> None:
        if (holder := self._forget(key)) is not None:
            holder.evict(key)

    def victims(self) -> Iterator[Key]:
        known = chain(self.new.victims(), self._old.victims())
        return chain((key for key in known if key not in self._late), self._late)

    def _forget(self, key: Key) -> EvictionPolicy | None:
        """A key goes: who of the two knows it."""
        self._late.pop(key, None)
        if key in self._fresh:
            self._fresh.remove(key)
            return None
        if key in self._handed:
            self._handed.remove(key)
            return self.new
        return self._old
