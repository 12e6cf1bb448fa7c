"""SIEVE (Zhang et al., NSDI 2024): a queue, a bit a key, and a hand that spares what was used.

The hand goes from the oldest to the newest and begins again; who has the bit loses it and is passed
over, who has not is given up. So the queue is cut in two at the hand, and each part is in order:

    oldest | passed, the hand came by | ahead, the hand has yet to come | newest

What the pool cannot give up is passed over as well. It knows no path and no time.
"""

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

from policies.base import Access, EvictionPolicy, Key

_NEW, _UNUSED, _USED = -1, 0, 1  # not used at all; by whom it came; again since the hand came by


class Sieve(EvictionPolicy):
    """Gives up first what was not used again since the hand came by."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._passed: OrderedDict[Key, int] = OrderedDict()
        self._ahead: OrderedDict[Key, int] = OrderedDict()

    def insert(self, key: Key, parent: Key | None, access: Access) -> None:
        self._ahead[key] = _NEW

    def touch(self, path: Sequence[Key], access: Access) -> None:
        for key in path:
            queue = self._ahead if key in self._ahead else self._passed
            queue[key] = min(queue[key] + 1, _USED)

    def remove(self, key: Key) -> None:
        if key in self._ahead:
            del self._ahead[key]
            self._begin_again()
        else:
            del self._passed[key]

    def evict(self, key: Key) -> None:
        if key not in self._ahead:
            self._pass_all()
            self._ahead, self._passed = self._passed, OrderedDict()
        if self._ahead[key] == _USED:  # so the hand has been all around before
            self._pass_all()
            self._ahead, self._passed = self._passed, OrderedDict()
        while (first := next(iter(self._ahead))) != key:
            self._passed[first] = min(self._ahead.pop(first), _UNUSED)
        del self._ahead[key]
        self._begin_again()

    def victims(self) -> Iterator[Key]:
        for used in (False, True):
            for queue in (self._ahead, self._passed):
                yield from (key for key, bit in queue.items() if (bit == _USED) is used)

    def residents(self) -> Iterator[Key]:
        return chain(self._ahead, self._passed)  # used or not

    def state(self) -> Mapping[str, Any]:
        return {
            "passed": [[key, bit] for key, bit in self._passed.items()],
            "ahead": [[key, bit] for key, bit in self._ahead.items()],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        self._passed.update(state["passed"])
        self._ahead.update(state["ahead"])

    def _begin_again(self) -> None:
        """A hand that went past the newest is back at the oldest before another one comes."""
        if not self._ahead:
            self._ahead, self._passed = self._passed, OrderedDict()

    def _pass_all(self) -> None:
        for key, bit in self._ahead.items():
            self._passed[key] = min(bit, _UNUSED)
