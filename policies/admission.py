"""What is worth writing to SSD: everything, or what was used twice.

What is likely used again is `policies.promising`'s affair. They know no block, no byte and no
tier; how many keys they remember is bounded.
"""

from collections import OrderedDict
from collections.abc import Sequence

from policies.base import Access, AdmissionPolicy, Key


class All(AdmissionPolicy):
    """Everything is."""

    def used(self, path: Sequence[Key], access: Access) -> None:
        pass

    def worth(self, keys: Sequence[Key], access: Access) -> Sequence[bool]:
        return [True] * len(keys)


class SecondHit(AdmissionPolicy):
    """What at least two requests used: right where most of a prompt never comes back, and wrong for
    conversations, whose next turn then finds nothing."""

    def __init__(self, memory: int = 2**18) -> None:
        """`memory`: keys remembered, those used last. Raises ValueError."""
        self._memory = checked_memory(memory)
        self._again: OrderedDict[Key, bool] = OrderedDict()  # whether it was used twice

    def used(self, path: Sequence[Key], access: Access) -> None:
        again = self._again
        for key in reversed(path):  # so that the memory gives up a path's end before its head
            again[key] = key in again
            again.move_to_end(key)
        while len(again) > self._memory:
            again.popitem(last=False)

    def worth(self, keys: Sequence[Key], access: Access) -> Sequence[bool]:
        return [self._again.get(key, False) for key in keys]


def checked_memory(memory: int) -> int:
    """A number of keys to remember. Raises ValueError."""
    if type(memory) is not int or not 1 <= memory <= 2**24:
        raise ValueError(f"memory = {memory!r} is not an integer from 1 to {2**24}")
    return memory
