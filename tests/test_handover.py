"""A policy that gives way to another, in pieces: together they keep every promise of a policy."""

from collections.abc import Iterator, Sequence
from itertools import cycle, permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.base import Access, EvictionPolicy, Key
from policies.learned import Learned
from policies.lru import LRU
from policies.s3fifo import S3FIFO
from policies.sieve import Sieve
from policies.testing import PolicyTests
from policies.wtinylfu import WTinyLFU
from tierd.daemon.handover import Handover

KINDS = (LRU, Learned, S3FIFO, Sieve, WTinyLFU)


class Handing(EvictionPolicy):
    """Hands two keys over whenever three things have happened, and begins again with a new policy
    of the other kind when all are handed over."""

    def __init__(self, kinds: Sequence[type[EvictionPolicy]], capacity: int) -> None:
        super().__init__(capacity)
        self._kinds, self._parents, self._happened = cycle(kinds), dict[Key, Key | None](), 0
        self._inner = self._next(next(self._kinds)(capacity))

    def _next(self, old: EvictionPolicy) -> Handover:
        return Handover(old, next(self._kinds)(0), self._parents.__getitem__)

    def _hand(self, access: Access) -> None:
        self._happened += 1
        if self._happened % 3 == 0 and not self._inner.hand(2, access):
            self._inner = self._next(self._inner.new)

    def resize(self, capacity: int) -> None:
        super().resize(capacity)
        self._inner.resize(capacity)

    def insert(self, key: Key, parent: Key | None, access: Access) -> None:
        self._parents[key] = parent
        self._inner.insert(key, parent, access)
        self._hand(access)

    def touch(self, path: Sequence[Key], access: Access) -> None:
        self._inner.touch(path, access)
        self._hand(access)

    def remove(self, key: Key) -> None:
        self._inner.remove(key)
        del self._parents[key]

    def evict(self, key: Key) -> None:
        self._inner.evict(key)
        del self._parents[key]

    def victims(self) -> Iterator[Key]:
        return self._inner.victims()


class TestHandingOver(PolicyTests):
    test_a_state_restores_the_order = None  # none is saved meanwhile

    def make(self, capacity: int) -> EvictionPolicy:
        return Handing((LRU, S3FIFO), capacity)


class TestHandingOverFromAHand(TestHandingOver):
    def make(self, capacity: int) -> EvictionPolicy:
        return Handing((Sieve, WTinyLFU), capacity)


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
        pair.touch([steps], Access(50.0))
        assert sorted(pair.victims()) == list(range(40))  # type: ignore[type-var]
    assert steps > 40 // 3
    assert list(first.victims()) == []
    assert sorted(pair.new.victims()) == list(range(40))  # type: ignore[type-var]
    assert pair.new.capacity == 40


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["insert", "touch"]), st.integers(0, 30)), max_size=60))
def test_the_new_policy_meets_all_in_the_order_in_which_it_came(
    operations: list[tuple[str, int]],
) -> None:
    """One of the same kind then has the order that the old one would have by now."""
    plain, old, new = LRU(40), LRU(40), LRU(0)
    for key in range(10):
        plain.insert(key, None, Access(0.0))
        old.insert(key, None, Access(0.0))
    pair, held = Handover(old, new, lambda key: None), set[Key](range(10))
    for operation, key in operations:
        if operation == "insert" and key not in held:
            held.add(key)
            for policy in (plain, pair):
                policy.insert(key, None, Access(1.0))
        elif operation == "touch":
            for policy in (plain, pair):
                policy.touch([k for k in (key, key + 1) if k in held], Access(1.0))
        if list(old.victims())[1:]:  # the last is handed over when nothing more happens
            pair.hand(1, Access(1.0))
        assert list(pair.victims()) == list(plain.victims())
    while pair.hand(2, Access(2.0)):
        assert set(pair.victims()) == held
    assert list(new.victims()) == list(plain.victims())


def test_what_goes_while_keys_change_hands_is_remembered_by_who_has_it() -> None:
    old, new = S3FIFO(8, small=0.5), S3FIFO(8, small=0.5)
    old.insert(99, None, Access(0.0))
    old.evict(99)  # the first that goes ends the start, when it lets half of all in at once
    for key in range(8):
        old.insert(key, None, Access(0.0))
    pair = Handover(old, new, lambda key: None)
    pair.hand(4, Access(1.0))
    for key in list(pair.victims())[:5]:
        pair.evict(key)
    assert (new.state()["ghosts"], old.state()["ghosts"]) == ([0, 1, 2, 3], [99, 4])
