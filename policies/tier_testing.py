"""The promises of admission and placement policies as tests, shipped for whoever writes one.

Subclass `AdmissionPolicyTests` or `PlacementPolicyTests`, supply `make`, and pytest runs them all
on your policy. What is worth a write, and where a copy should be, is the policy's own affair. Needs
pytest and hypothesis.
"""

import tracemalloc
from abc import ABC, abstractmethod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.base import Access, AdmissionPolicy, Hints, Key, PlacementPolicy

_KEYS = list(range(40))
_TOLD = st.tuples(st.sampled_from(("used", "used", "gave_up")), st.integers(0, 39), st.booleans())


class AdmissionPolicyTests(ABC):
    """The conformance suite of `AdmissionPolicy`.

    Requests are paths of a tree of numbers: n's parent is (n - 1) // 2.
    """

    @abstractmethod
    def make(self, memory: int) -> AdmissionPolicy:
        """A new policy of the kind under test, that remembers some `memory` keys and no more."""

    def test_every_key_has_its_answer_whether_it_was_used_or_not(self) -> None:
        policy = self.make(100)
        policy.used([0, 1, 3], Access(1.0))
        for keys in ([], [3], [3, 1, 99, 0], _KEYS):
            answers = policy.worth(keys, Access(2.0))
            assert len(answers) == len(keys)
            assert all(type(answer) is bool for answer in answers)

    def test_a_key_has_the_answer_that_it_has_alone(self) -> None:
        policy = self.make(100)
        for number in (3, 4, 3, 17):
            policy.used(_branch(number), Access(float(number)))
        alone = [policy.worth([key], Access(50.0))[0] for key in _KEYS]
        assert list(policy.worth(_KEYS, Access(50.0))) == alone

    def test_asking_changes_nothing(self) -> None:
        # Made here, not a decorated method: hypothesis objects to one test run by many classes.
        @settings(deadline=None, database=None)
        @given(st.integers(1, 40), st.lists(_TOLD, max_size=60))
        def check(memory: int, told: list[tuple[str, int, bool]]) -> None:
            asked, silent = self.make(memory), self.make(memory)
            for time, (what, number, asks) in enumerate(told):
                access = Access(float(100 * time))
                for policy in (asked, silent):
                    getattr(policy, what)(_branch(number), access)
                if asks:
                    asked.worth(_KEYS, access)
            end = Access(100.0 * len(told) + 50)
            assert list(asked.worth(_KEYS, end)) == list(silent.worth(_KEYS, end))

        check()

    def test_the_head_of_a_path_may_be_left_out(self) -> None:
        policy = self.make(100)
        policy.used([3, 7], Access(0.0))
        policy.used([0, 1, 3, 7, 15], Access(1.0))
        policy.used([15], Access(2.0))
        assert len(policy.worth([0, 15], Access(3.0))) == 2

    def test_what_it_never_heard_of_may_be_given_up(self) -> None:
        policy = self.make(100)
        policy.gave_up([5, 6], Access(0.0))
        policy.gave_up([], Access(1.0))
        assert len(policy.worth([5], Access(1.0))) == 1

    def test_hints_are_taken(self) -> None:
        hints = Hints("s", closed=True, priority=1, returns_at=9.0, will_need=True, dont_need=True)
        policy = self.make(100)
        for time in (1.0, 1.0, 2.0):  # and so are requests of one time
            policy.used([0, 1, 3], Access(time, hints))
        assert len(policy.worth([3], Access(2.0, hints))) == 1

    @pytest.mark.parametrize(
        "keys",
        [[7, -1, 2**80], [b"", b"\x00" * 16, b"\xff" * 16], [(0, b"a"), (1, b"a"), ("x", None)]],
        ids=["ints", "bytes", "tuples"],
    )
    def test_keys_are_opaque(self, keys: list[Key]) -> None:
        policy = self.make(100)
        policy.used(keys, Access(0.0))
        policy.used(keys[:2], Access(1.0))
        policy.gave_up(keys[:1], Access(2.0))
        assert len(policy.worth(keys, Access(3.0))) == 3

    def test_what_it_remembers_is_bounded(self) -> None:
        policy, kept = self.make(1000), list[int]()
        tracemalloc.start()
        try:
            for number in range(3000):
                access = Access(60.0 * number)
                policy.used([(number, at) for at in range(20)], access)
                policy.worth([(number - 10, 5)], access)
                policy.gave_up([(number - 30, 5)], access)
                if number in (999, 2999):
                    kept.append(tracemalloc.get_traced_memory()[0])
        finally:
            tracemalloc.stop()
        grown = kept[1] - kept[0]
        assert grown < 500_000, f"{grown} bytes more after 40,000 more keys, for 1,000"


class PlacementPolicyTests(ABC):
    """The conformance suite of `PlacementPolicy`."""

    @abstractmethod
    def make(self) -> PlacementPolicy:
        """A policy of the kind under test."""

    def test_it_is_pure(self) -> None:
        one, other = self.make(), self.make()
        first = _answers(one)
        assert _answers(one) == first
        assert _answers(other) == first

    def test_it_says_yes_or_no(self) -> None:
        policy = self.make()
        for level in range(4):
            assert type(policy.writes_through(level)) is bool
            for capacity, above in ((0, 0), (0, 5), (5, 1), (1, 10**9), (10**9, 1)):
                assert type(policy.keeps(level, capacity, above)) is bool

    def test_a_hit_counts_in_tiers_that_there_are_below_the_top(self) -> None:
        policy = self.make()
        for num_levels in range(1, 5):
            for level in range(num_levels):
                assert set(policy.touches(level, num_levels)) <= set(range(1, num_levels))


def _answers(policy: PlacementPolicy) -> list[object]:
    keeps = [policy.keeps(level, n, m) for level in range(4) for n in (1, 9) for m in (1, 5, 9)]
    touches = [set(policy.touches(level, 4)) for level in range(4)]
    return [*keeps, *touches, *map(policy.writes_through, range(4))]


def _branch(number: int) -> list[int]:
    path = [number]
    while path[-1] > 0:
        path.append((path[-1] - 1) // 2)
    return path[::-1]
