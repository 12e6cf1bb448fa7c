"""A pool's policy gives way to another while the pool serves: its residents change hands in pieces.

    old   |hot . . . . . |  -> the coldest, a piece at a time ->  |. . . cold|   new

Until all have, the two are one order: the new policy's keys go first, then the old one's. What is
used meanwhile goes back to the old one, to be handed over in its turn, so that the new policy meets
every key as if it had come in the old order. It is a policy like others: it knows no block.
"""

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
        self.new = new
        self._old, self._parent_of = old, parent_of
        self._handed: set[Key] = set()  # the keys that are the new one's
        new.resize(self.capacity)

    def hand(self, n: int, access: Access) -> bool:
        """Hand the next `n` keys over; whether any is left."""
        piece = list(islice(self._old.victims(), n))
        for key in piece:
            self._old.remove(key)
            self.new.insert(key, self._parent_of(key), access)
        self._handed.update(piece)
        return len(piece) == n

    def resize(self, capacity: int) -> None:
        super().resize(capacity)
        self._old.resize(capacity)
        self.new.resize(capacity)

    def tick(self, time: float) -> None:
        self._old.tick(time)
        self.new.tick(time)

    def insert(self, key: Key, parent: Key | None, access: Access) -> None:
        self._old.insert(key, parent, access)

    def touch(self, path: Sequence[Key], access: Access) -> None:
        for key in reversed(path):  # as if they came in the order in which they would go
            if key in self._handed:
                self._handed.remove(key)
                self.new.remove(key)
                self._old.insert(key, self._parent_of(key), access)
        self._old.touch(path, access)

    def remove(self, key: Key) -> None:
        self._holder(key).remove(key)
        self._handed.discard(key)

    def evict(self, key: Key) -> None:
        self._holder(key).evict(key)
        self._handed.discard(key)

    def victims(self) -> Iterator[Key]:
        return chain(self.new.victims(), self._old.victims())

    def _holder(self, key: Key) -> EvictionPolicy:
        return self.new if key in self._handed else self._old
