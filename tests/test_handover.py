"""A policy that gives way to another, in pieces: together they keep every promise of a policy."""

from itertools import permutations

import pytest

from policies.base import Access, EvictionPolicy, Key
from policies.learned import Learned
from policies.lru import LRU
from policies.s3fifo import S3FIFO
from policies.sieve import Sieve
from policies.testing import PolicyTests
from policies.wtinylfu import WTinyLFU
from tierd.daemon.handover import Handover

KINDS = (LRU, Learned, S3FIFO, Sieve, WTinyLFU)


class Handing(Handover):
    """Hands a key over whenever a second one has come."""

    def __init__(self, old: EvictionPolicy, new: EvictionPolicy) -> None:
        self.parents: dict[Key, Key | None] = {}
        self._came = 0
        super().__init__(old, new, self.parents.__getitem__)

    def insert(self, key: Key, parent: Key | None, access: Access) -> None:
        self.parents[key] = parent
        super().insert(key, parent, access)
        self._came += 1
        if self._came % 2:
            self.hand(1, access)

    def remove(self, key: Key) -> None:
        super().remove(key)
        del self.parents[key]

    def evict(self, key: Key) -> None:
        super().evict(key)
        del self.parents[key]


class TestHandingOver(PolicyTests):
    def make(self, capacity: int) -> EvictionPolicy:
        return Handing(LRU(capacity), S3FIFO(capacity))


class TestHandingOverFromAHand(PolicyTests):
    def make(self, capacity: int) -> EvictionPolicy:
        return Handing(Sieve(capacity), WTinyLFU(capacity))


@pytest.mark.parametrize(("old", "new"), list(permutations(KINDS, 2)))
def test_every_key_changes_hands_once(old: type[EvictionPolicy], new: type[EvictionPolicy]) -> None:
    first = old(40)
    for key in range(40):
        first.insert(key, key - 1 if key else None, Access(float(key)))
        first.touch(range(key + 1), Access(float(key)))
    pair = Handover(first, new(0), lambda key: key - 1 if key else None)  # type: ignore[operator]
    steps = 0
    while pair.hand(3, Access(50.0)):
        steps += 1
        assert sorted(pair.victims()) == list(range(40))  # type: ignore[type-var]
    assert steps == 40 // 3
    assert list(first.victims()) == []
    assert sorted(pair.new.victims()) == list(range(40))  # type: ignore[type-var]
    assert pair.new.capacity == 40


def test_what_goes_while_keys_change_hands_is_remembered_by_who_has_it() -> None:
    old, new = S3FIFO(8), S3FIFO(8)
    for key in range(8):
        old.insert(key, None, Access(0.0))
    pair = Handover(old, new, lambda key: None)
    pair.hand(4, Access(1.0))
    for key in list(pair.victims())[:5]:
        pair.evict(key)
    assert (new.state()["ghosts"], old.state()["ghosts"]) == ([0, 1, 2, 3], [4])
