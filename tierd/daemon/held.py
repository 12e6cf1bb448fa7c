"""A policy that is being read elsewhere: what happens meanwhile is noted, and told afterwards.

    inserted, touched, removed, evicted  ->  noted  ->  told in the same order, some at a time

Until all is told, who was noted goes last of all, the latest last. It is a policy like others: it
knows no block, and not who reads.
"""

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain

from policies.base import Access, EvictionPolicy, Key


class Held(EvictionPolicy):
    """`policy` does not change until `tell`, but for the time that it is told."""

    def __init__(self, policy: EvictionPolicy) -> None:
        super().__init__(policy.capacity)
        self.policy, self.judges_ends = policy, policy.judges_ends
        next(policy.victims(), None)  # what a policy puts off until it is asked is done now
        # What to call, who came or was used by that, and who left.
        self._notes: deque[tuple[Callable[[], None], Sequence[Key], Key | None]] = deque()
        self._number = 0  # of the first note
        self._noted: OrderedDict[Key, int] = OrderedDict()  # residents: the number of the last note
        self._gone: Counter[Key] = Counter()  # by how often it left, but was not told of

    def tell(self, n: int) -> int:
        """Tell the policy of the next `n` notes; returns how many are left."""
        while self._notes and n:
            call, came, left = self._notes.popleft()
            call()
            for key in came:
                if self._noted.get(key) == self._number:
                    del self._noted[key]
            if left is not None:
                self._gone[left] -= 1
                if not self._gone[left]:
                    del self._gone[left]
            self._number += 1
            n -= 1
        return len(self._notes)

    def resize(self, capacity: int) -> None:
        super().resize(capacity)
        self._notes.append((partial(self.policy.resize, capacity), (), None))

    def tick(self, time: float) -> None:
        self.policy.tick(time)

    def insert(self, key: Key, parent: Key | None, access: Access) -> None:
        self._came([key], partial(self.policy.insert, key, parent, access))

    def touch(self, path: Sequence[Key], access: Access) -> None:
        self._came(path, partial(self.policy.touch, path, access))

    def advise(self, path: Sequence[Key], access: Access) -> None:
        self._notes.append((partial(self.policy.advise, path, access), (), None))

    def remove(self, key: Key) -> None:
        self._left(key, partial(self.policy.remove, key))

    def evict(self, key: Key) -> None:
        self._left(key, partial(self.policy.evict, key))

    def victims(self) -> Iterator[Key]:
        noted, gone = self._noted, self._gone
        known = (key for key in self.policy.victims() if key not in noted and key not in gone)
        return chain(known, noted)

    def _came(self, path: Sequence[Key], call: Callable[[], None]) -> None:
        number = self._number + len(self._notes)
        self._notes.append((call, path, None))
        for key in reversed(path):
            self._noted[key] = number
            self._noted.move_to_end(key)

    def _left(self, key: Key, call: Callable[[], None]) -> None:
        self._notes.append((call, (), key))
        self._noted.pop(key, None)
        self._gone[key] += 1
