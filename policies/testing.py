"""The promises of policies as tests, shipped for whoever writes one.

Subclass `PolicyTests` (eviction) or `PrefetchPolicyTests`, supply `make`, and pytest runs them all
on your policy. They check what the daemon relies on and nothing else: which key goes first is the
policy's own affair, so is what it remembers of keys that are gone. Needs pytest and hypothesis.
"""

import random
import tracemalloc
from abc import ABC, abstractmethod
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.base import NO_HINTS, Access, EvictionPolicy, Hints, Key, PrefetchPolicy

_OPERATIONS = (
    *("insert", "insert", "insert", "touch", "touch", "advise", "evict", "remove"),
    *("resize", "peek"),
)
_SAID = (
    *[NO_HINTS] * 4,
    *[Hints(session) for session in "ab"],
    *[Hints(session, closed=True) for session in "ab"],
    *[Hints("a", priority=3), Hints("b", priority=-2), Hints("a", returns_at=9.0)],
    *[Hints("b", will_need=True), Hints("a", dont_need=True)],
    *[Hints(priority=-1), Hints(priority=1), Hints(will_need=True), Hints(dont_need=True)],
)


class PolicyTests(ABC):
    """The conformance suite of `EvictionPolicy`."""

    @abstractmethod
    def make(self, capacity: int) -> EvictionPolicy:
        """A new policy of the kind under test, with nothing resident."""

    @pytest.fixture
    def policy(self) -> EvictionPolicy:
        """Five keys in one sequence, 1 to 5, used once."""
        return self._filled([1, 2, 3, 4, 5])

    def test_an_empty_policy_has_no_victims(self) -> None:
        assert list(self.make(8).victims()) == []

    def test_every_resident_key_is_a_victim_exactly_once(self, policy: EvictionPolicy) -> None:
        assert sorted(policy.victims()) == [1, 2, 3, 4, 5]  # type: ignore[type-var]

    def test_every_resident_key_is_told_of_exactly_once(self, policy: EvictionPolicy) -> None:
        assert sorted(policy.residents()) == [1, 2, 3, 4, 5]  # type: ignore[type-var]

    def test_a_key_that_was_never_used_is_a_victim_too(self) -> None:
        policy = self.make(8)
        policy.insert(1, None, Access(0.0))
        assert list(policy.victims()) == [1]

    def test_asking_for_victims_changes_nothing(self, policy: EvictionPolicy) -> None:
        before = list(policy.victims())
        next(policy.victims())
        half = policy.victims()
        assert [next(half), next(half)] == before[:2]
        assert list(policy.victims()) == before

    def test_victims_are_found_only_as_they_are_asked_for(self) -> None:
        policy = self._filled(list(range(20_000)))
        victims = policy.victims()
        assert isinstance(victims, Iterator)
        tracemalloc.start()
        try:
            next(policy.victims())
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert peak < 40_000, f"{peak} bytes to find the first of 20,000 victims"

    def test_an_evicted_key_is_no_longer_a_victim(self, policy: EvictionPolicy) -> None:
        first, *others = policy.victims()
        policy.evict(first)
        assert set(policy.victims()) == set(others)

    def test_any_victim_may_be_evicted_not_only_the_first(self, policy: EvictionPolicy) -> None:
        *others, last = policy.victims()
        policy.evict(last)
        assert set(policy.victims()) == set(others)

    def test_a_removed_key_is_no_longer_a_victim(self, policy: EvictionPolicy) -> None:
        policy.remove(3)
        assert set(policy.victims()) == {1, 2, 4, 5}

    @pytest.mark.parametrize("leave", ["evict", "remove"])
    def test_a_key_that_left_may_come_back(self, policy: EvictionPolicy, leave: str) -> None:
        getattr(policy, leave)(5)
        policy.insert(5, 4, Access(2.0))
        policy.touch([1, 2, 3, 4, 5], Access(2.0))
        assert set(policy.victims()) == {1, 2, 3, 4, 5}
        assert len(list(policy.victims())) == 5

    def test_a_parent_need_not_be_resident(self) -> None:
        policy = self.make(8)
        policy.insert(2, 1, Access(0.0))
        policy.touch([2], Access(0.0))
        assert list(policy.victims()) == [2]

    def test_touching_a_path_keeps_the_resident_keys(self, policy: EvictionPolicy) -> None:
        policy.touch([1, 2, 3], Access(2.0))
        policy.touch([], Access(3.0))
        assert set(policy.victims()) == {1, 2, 3, 4, 5}

    @pytest.mark.parametrize("capacity", [1, 5, 1000])
    def test_resizing_gives_nothing_up_by_itself(
        self, policy: EvictionPolicy, capacity: int
    ) -> None:
        policy.resize(capacity)
        assert policy.capacity == capacity
        assert set(policy.victims()) == {1, 2, 3, 4, 5}
        policy.insert(6, 5, Access(2.0))
        assert set(policy.victims()) == {1, 2, 3, 4, 5, 6}

    @pytest.mark.parametrize(
        "keys",
        [[7, -1, 2**80], [b"", b"\x00" * 16, b"\xff" * 16], [(0, b"a"), (1, b"a"), ("x", None)]],
        ids=["ints", "bytes", "tuples"],
    )
    def test_keys_are_opaque(self, keys: list[Key]) -> None:
        policy = self._filled(keys)
        assert set(policy.victims()) == set(keys)
        for key in keys:
            policy.evict(key)
        assert list(policy.victims()) == []

    def test_time_alone_adds_and_takes_nothing(self, policy: EvictionPolicy) -> None:
        policy.tick(1e6)
        assert sorted(policy.victims()) == [1, 2, 3, 4, 5]  # type: ignore[type-var]

    def test_hints_are_taken(self, policy: EvictionPolicy) -> None:
        hints = Hints("s", closed=True, priority=1, returns_at=9.0, will_need=True, dont_need=True)
        policy.insert(6, 5, Access(2.0, hints))
        policy.touch([1, 2, 3, 4, 5, 6], Access(2.0, hints))
        assert set(policy.victims()) == {1, 2, 3, 4, 5, 6}

    @pytest.mark.parametrize("said", sorted(set(_SAID), key=repr), ids=str)
    def test_whatever_is_said_of_a_path_adds_and_takes_nothing(
        self, policy: EvictionPolicy, said: Hints
    ) -> None:
        for path in ([1, 2, 3, 4, 5], [2, 4], []):
            policy.advise(path, Access(2.0, said))
            assert sorted(policy.victims()) == [1, 2, 3, 4, 5]  # type: ignore[type-var]
        policy.touch([1, 2, 3], Access(3.0))
        assert sorted(policy.victims()) == [1, 2, 3, 4, 5]  # type: ignore[type-var]

    def test_what_was_said_of_a_key_can_be_said_where_it_goes(self, policy: EvictionPolicy) -> None:
        before = list(policy.victims())
        below = self.make(8)
        for key in before:
            below.insert(key, None, Access(2.0, policy.said(key)))
        assert set(below.victims()) == set(before)
        assert list(policy.victims()) == before

    def test_what_it_remembers_of_keys_that_are_gone_is_bounded(self) -> None:
        policy, kept = self.make(100), list[int]()
        policy.resize(100)
        tracemalloc.start()
        try:
            for number in range(60_000):
                if number >= 100:
                    policy.evict(next(policy.victims()))
                key = str(number)
                access = Access(float(number), _SAID[number % len(_SAID)])
                policy.insert(key, str(number - 1) if number % 10 else None, access)
                policy.touch([key], access)
                if number in (19_999, 59_999):
                    kept.append(tracemalloc.get_traced_memory()[0])
        finally:
            tracemalloc.stop()
        grown = kept[1] - kept[0]
        assert grown < 3_000_000, f"{grown} bytes more after 40,000 more keys, for 100"

    def test_a_state_restores_the_order(self) -> None:
        # Made here, not a decorated method: see below.
        @settings(deadline=None, database=None, report_multiple_bugs=False)
        @given(st.lists(st.sampled_from(_OPERATIONS), max_size=60), st.randoms())
        def check(operations: list[str], rng: random.Random) -> None:
            model = _Model(self.make(8), rng)
            for time, operation in enumerate(operations):
                getattr(model, operation)(model.access(time))
            state = model.policy.state()
            before = list(model.policy.victims())
            copy = self.make(8)
            copy.resize(model.policy.capacity)
            copy.restore(state)
            assert list(copy.victims()) == before
            model.touch(Access(99.0))
            assert list(copy.victims()) == before, "they share what they remember"
            model.policy = copy
            for time, operation in enumerate(operations, 100):
                getattr(model, operation)(model.access(time))
                assert set(model.policy.victims()) == model.resident, f"after {operation}"

        check()

    def test_a_state_is_made_of_plain_values_and_keys(self, policy: EvictionPolicy) -> None:
        policy.evict(next(policy.victims()))
        _check_plain(policy.state())

    def test_it_agrees_with_a_set_under_random_operations(self) -> None:
        # Made here, not a decorated method: hypothesis objects to one test run by many classes.
        @settings(deadline=None, database=None, report_multiple_bugs=False)
        @given(
            st.integers(1, 12), st.lists(st.sampled_from(_OPERATIONS), max_size=80), st.randoms()
        )
        def check(capacity: int, operations: list[str], rng: random.Random) -> None:
            model = _Model(self.make(capacity), rng)
            for time, operation in enumerate(operations):
                getattr(model, operation)(model.access(time))
                victims = list(model.policy.victims())
                assert len(victims) == len(set(victims)), f"{operation}: a victim came twice"
                assert set(victims) == model.resident, f"after {operation}"

        check()

    def _filled(self, keys: list[Key]) -> EvictionPolicy:
        """A policy with `keys` resident as one sequence, head first, used once."""
        policy = self.make(len(keys))
        for parent, key in zip([None, *keys], keys, strict=False):
            policy.insert(key, parent, Access(0.0))
        policy.touch(keys, Access(1.0))
        return policy


class _Model:
    """A policy, the set of keys it should hold, and a tree of 40 keys: n's parent is (n - 1)//2."""

    def __init__(self, policy: EvictionPolicy, rng: random.Random) -> None:
        self.policy = policy
        self.resident: set[int] = set()
        self._rng = rng

    def access(self, time: int) -> Access:
        """At some time, with or without hints."""
        return Access(float(time), self._rng.choice(_SAID))

    def insert(self, access: Access) -> None:
        key = self._rng.randrange(40)
        if key not in self.resident:
            self.policy.insert(key, (key - 1) // 2 if key else None, access)
            self.resident.add(key)

    def touch(self, access: Access) -> None:
        self.policy.touch(self._path(), access)

    def advise(self, access: Access) -> None:
        self.policy.advise(self._path(), access)

    def evict(self, access: Access) -> None:
        """As a pool does: skip some victims, which are pinned, and give up the next."""
        pinned = self._rng.randrange(3)
        for key in list(self.policy.victims())[pinned : pinned + 1]:
            self.policy.evict(key)
            self.resident.remove(key)  # type: ignore[arg-type]

    def remove(self, access: Access) -> None:
        if self.resident:
            key = self._rng.choice(sorted(self.resident))
            self.policy.remove(key)
            self.resident.remove(key)

    def resize(self, access: Access) -> None:
        self.policy.resize(self._rng.randrange(1, 24))

    def peek(self, access: Access) -> None:
        """Look at one victim, and let the iterator go."""
        next(self.policy.victims(), None)

    def _path(self) -> list[int]:
        """The resident keys on the way to some key."""
        path, key = [], self._rng.randrange(40)
        while key >= 0:
            path.append(key)
            key = (key - 1) // 2
        return [key for key in reversed(path) if key in self.resident]


def _check_plain(value: object) -> None:
    if isinstance(value, dict):
        assert all(type(key) is str for key in value), "dicts have text for keys"
        for part in value.values():
            _check_plain(part)
    elif isinstance(value, list):
        for part in value:
            _check_plain(part)
    else:
        assert value is None or type(value) in (bool, int, float, str), f"{value!r} is not plain"


class PrefetchPolicyTests(ABC):
    """The conformance suite of `PrefetchPolicy`.

    Requests are paths of a tree of numbers: n's parent is (n - 1) // 2.
    """

    @abstractmethod
    def make(self, memory: int) -> PrefetchPolicy:
        """A new policy of the kind under test, that remembers some `memory` keys and no more."""

    def test_a_new_policy_wants_nothing(self) -> None:
        assert list(self.make(8).wanted([1, 2])) == []
        assert list(self.make(8).wanted([])) == []

    def test_what_is_wanted_goes_on_from_the_end_as_requests_did(self) -> None:
        # Made here, not a decorated method: hypothesis objects to one test run by many classes.
        @settings(deadline=None, database=None)
        @given(st.integers(1, 40), st.lists(st.integers(0, 40), max_size=40), st.integers(0, 40))
        def check(memory: int, requests: list[int], asked: int) -> None:
            policy, told = self.make(memory), set[int]()
            for time, number in enumerate(requests):
                policy.record(_branch(number), Access(float(time)))
                told.update(_branch(number))
            before = [list(keys) for keys in policy.wanted(_branch(asked))]
            for keys in before:
                assert keys, "nothing is no guess"
                for parent, key in zip([asked, *keys], keys, strict=False):
                    assert key in told
                    assert (key - 1) // 2 == parent
            assert [list(keys) for keys in policy.wanted(_branch(asked))] == before, "it changed"

        check()

    def test_guesses_are_made_only_as_they_are_asked_for(self) -> None:
        assert isinstance(self.make(8).wanted([1]), Iterator)

    @pytest.mark.parametrize("keys", [[7, -1, 2**80], [b"", b"\x00", b"\xff"], ["x", None, (0,)]])
    def test_keys_of_a_guess_are_opaque(self, keys: list[Key]) -> None:
        policy = self.make(8)
        policy.record(keys, Access(0.0))
        for guess in policy.wanted(keys[:1]):
            assert set(guess) <= set(keys)

    def test_what_it_remembers_is_bounded(self) -> None:
        policy = self.make(1000)
        tracemalloc.start()
        try:
            for start in range(0, 100_000, 100):
                policy.record([object() for _ in range(100)], Access(float(start)))
            kept = tracemalloc.get_traced_memory()[0]
        finally:
            tracemalloc.stop()
        assert kept < 1_000_000, f"{kept} bytes are kept, of 100,000 keys, for 1,000"


def _branch(number: int) -> list[int]:
    path = [number]
    while path[-1] > 0:
        path.append((path[-1] - 1) // 2)
    return path[::-1]
