"""Admission policies: the conformance suite on each of ours, and what is particular to each."""

import re
from collections.abc import Sequence

import pytest

from policies.admission import All, SecondHit
from policies.base import Access, AdmissionPolicy, Hints, Key
from policies.promising import Promising
from policies.reuse import NUM_AGES, Observation, Reuse, age_of
from policies.tier_testing import AdmissionPolicyTests


def asked(policy: AdmissionPolicy, keys: Sequence[Key], time: float) -> list[bool]:
    return list(policy.worth(keys, Access(time)))


class TestAll(AdmissionPolicyTests):
    def make(self, memory: int) -> All:
        return All()

    def test_everything_is_worth_it(self) -> None:
        assert asked(All(), "ab", 0.0) == [True, True]


class TestSecondHit(AdmissionPolicyTests):
    def make(self, memory: int) -> SecondHit:
        return SecondHit(memory)

    def test_what_two_requests_used_is_worth_it(self) -> None:
        policy = SecondHit()
        policy.used("abc", Access(0.0))
        policy.used("abd", Access(1.0))
        assert asked(policy, "abcdx", 2.0) == [True, True, False, False, False]

    def test_what_was_used_longest_ago_is_forgotten_and_of_a_path_the_end(self) -> None:
        policy = SecondHit(memory=3)
        policy.used("abcd", Access(0.0))
        policy.used("abcd", Access(1.0))
        assert asked(policy, "abcd", 2.0) == [True, True, True, False]
        policy.used("xyz", Access(2.0))
        assert asked(policy, "abcx", 2.0) == [False] * 4


class TestPromising(AdmissionPolicyTests):
    def make(self, memory: int) -> Promising:
        return Promising(memory=memory)

    def test_a_new_one_takes_everything(self) -> None:
        policy = Promising()
        policy.used("abc", Access(0.0))
        assert asked(policy, "abcx", 100.0) == [True] * 4

    def test_where_only_the_beginning_comes_back_the_rest_is_soon_refused(self) -> None:
        policy = Promising()
        now = questions(policy, 100)
        assert asked(policy, [("q", 99, at) for at in range(20)], now) == [False] * 20
        assert asked(policy, [("system", at) for at in range(20)], now) == [True] * 20

    def test_where_sequences_go_on_what_was_used_once_is_worth_it(self) -> None:
        policy = Promising()
        now = conversations(policy, 400)
        assert asked(policy, [("c", 399, at) for at in range(8)], now) == [True] * 8

    def test_conversations_among_questions_are_told_apart_by_how_often_they_were_used(self) -> None:
        policy = Promising(least=0.2)
        for number in range(300):
            time = 60.0 * number
            policy.used([("q", number, at) for at in range(20)], Access(time))
            turn = number % 10
            policy.used([("c", number // 10, at) for at in range(2 * turn + 2)], Access(time + 1))
        now = 300 * 60.0
        assert asked(policy, [("q", 299, 0), ("q", 298, 7)], now) == [False] * 2
        assert asked(policy, [("c", 29, 0), ("c", 29, 2)], now) == [True] * 2

    def test_a_new_tier_gives_people_time_to_come_back(self) -> None:
        policy = Promising()
        for number in range(50):  # within a minute nobody could
            policy.used([(number, at) for at in range(20)], Access(float(number)))
        assert all(asked(policy, [(number, 3) for number in range(50)], 50.0))

    def test_what_is_over_is_no_better_than_others_like_it(self) -> None:
        policy = Promising()
        closed = Hints(closed=True)
        for number in range(400):
            path = [("c", number // 4, at) for at in range(4 + 4 * (number % 4))]
            hints = closed if number % 4 == 3 else Hints()
            policy.used(path, Access(30.0 * number, hints))
        now = 400 * 30.0
        assert asked(policy, [("c", 99, 5)], now) == [False]
        policy.used([("c", 100, at) for at in range(4)], Access(now))
        assert asked(policy, [("c", 100, 2)], now + 20) == [True]

    def test_a_branch_that_a_later_request_turned_off_from_is_refused(self) -> None:
        policy, now = Promising(), 0.0
        for number in range(400):  # each asks, then asks again otherwise, and goes on from there
            now = 60.0 * number
            base = [("c", number, at) for at in range(4)]
            drafts, finals = ([(way, number, at) for at in range(4)] for way in ("draft", "final"))
            policy.used([*base, *drafts], Access(now))
            policy.used([*base, *finals], Access(now + 20))
            if number < 399:
                policy.used([*base, *finals, ("end", number)], Access(now + 40))
        # Both had been left alone for as long, when the one went on.
        assert asked(policy, [("draft", 399, 1)], now + 21) == [False]
        assert asked(policy, [("final", 399, 1)], now + 39) == [True]

    def test_how_long_a_sequence_had_rested_tells_whether_it_goes_on(self) -> None:
        policy, now = Promising(least=0.2), 0.0
        for number in range(400):
            now = 600.0 * number
            quick, slow = ([(kind, number, at) for at in range(12)] for kind in ("quick", "slow"))
            policy.used(quick[:4], Access(now))
            policy.used(slow[:4], Access(now + 1))
            policy.used(quick[:8], Access(now + 5))
            policy.used(slow[:8], Access(now + 201))  # and that is all there ever is
            if number < 399:
                policy.used(quick, Access(now + 250))
        assert asked(policy, [("quick", 399, 5)], now + 230) == [True]
        assert asked(policy, [("slow", 399, 5)], now + 231) == [False]

    def test_a_refusal_that_was_wrong_is_found_out(self) -> None:
        policy = Promising()
        now = questions(policy, 100)
        assert asked(policy, [("q", 99, 3)], now) == [False]
        for number in range(100):  # from now on they ask again, hours later
            policy.used([("q", number, at) for at in range(20)], Access(now + 60 * number))
        for number in range(100, 140):
            policy.used([("q", number, at) for at in range(20)], Access(now + 60 * number))
        assert asked(policy, [("q", 139, 3)], now + 140 * 60) == [True]

    def test_a_tier_that_holds_nothing_so_long_is_not_written_to_and_tried_again_later(
        self,
    ) -> None:
        policy = Promising(least=0.2)
        now = 0.0
        for number in range(200):  # each comes back once, an hour later
            now = 60.0 * number
            policy.used([("p", number, at) for at in range(10)], Access(now))
            if number >= 60:
                policy.used([("p", number - 60, at) for at in range(10)], Access(now + 1))
        keys = [("p", 195, at) for at in range(10)]
        assert asked(policy, keys, now) == [True] * 10
        for number in range(145, 190):  # what it gives up was used ten minutes ago
            policy.gave_up([("p", number, 0)], Access(60.0 * (number + 10)))
        policy.gave_up([("p", 190, 0)], Access(now + 60))
        assert asked(policy, keys, now + 60) == [False] * 10
        assert asked(policy, keys, now + 3000) == [True] * 10  # none was given up since

    @pytest.mark.parametrize("least", [-0.1, 1.1, "x", True, None])
    def test_the_least_is_a_probability(self, least: object) -> None:
        with pytest.raises(ValueError, match=f"^least = {re.escape(repr(least))} is not a number"):
            Promising(least=least)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [SecondHit, Promising])
@pytest.mark.parametrize("memory", [0, -1, 2.0, "2", True, 2**40])
def test_the_memory_is_a_positive_integer(kind: type, memory: object) -> None:
    with pytest.raises(ValueError, match=f"^memory = {re.escape(repr(memory))} is not an integer"):
        kind(memory=memory)


def questions(policy: AdmissionPolicy, count: int) -> float:
    """Requests with one beginning and an end of their own, a minute apart; returns when it is."""
    system = [("system", at) for at in range(20)]
    for number in range(count):
        policy.used([*system, *(("q", number, at) for at in range(20))], Access(60.0 * number))
    return 60.0 * count


def conversations(policy: AdmissionPolicy, count: int) -> float:
    """Each of three turns, a minute apart."""
    for number in range(count):
        for turn in range(3):
            path = [("c", number - turn, at) for at in range(8 + 8 * turn)]
            policy.used(path, Access(60.0 * number + turn))
    return 60.0 * count


class TestReuse:
    def test_of_what_is_used_at_once_the_chance_is_high_and_of_the_rest_low(self) -> None:
        reuse = Reuse(2)
        for number in range(200):
            reuse.tick(100.0 * number)
            soon, never = Observation(0, 100.0 * number, 10), Observation(1, 100.0 * number, 10)
            reuse.begin(soon)
            reuse.begin(never)
            reuse.tick(100.0 * number + 5)
            reuse.used(soon, 10)
        reuse.tick(30_000.0)
        reuse.learn()
        assert reuse.chance(0, 0, NUM_AGES - 1) > 0.9
        assert reuse.chance(1, 0, age_of(1000.0)) < 0.05

    def test_a_chance_grows_with_the_time_it_has(self) -> None:
        reuse = Reuse(1)
        chances = [reuse.chance(0, 5, until) for until in range(5, NUM_AGES)]
        assert chances == sorted(chances)
        assert 0 < chances[0] < chances[-1] < 1

    def test_what_was_learned_long_ago_fades(self) -> None:
        reuse = Reuse(1)

        def observe(count: int, *, used: bool) -> None:
            for _ in range(count):
                now = reuse.now = getattr(reuse, "now", 0.0) + 10
                reuse.tick(now)
                many = Observation(0, now, 2**12)
                reuse.begin(many)
                if used:
                    reuse.used(many, 2**12)
                reuse.learn()

        observe(2000, used=True)
        before = reuse.chance(0, 0, 0)
        observe(4000, used=False)
        assert before > 0.9
        assert reuse.chance(0, 0, 0) < 0.1


class Forgetful(SecondHit):
    """Answers for one key too few."""

    def worth(self, keys: Sequence[Key], access: Access) -> Sequence[bool]:
        return super().worth(keys[1:], access)


class Touchy(SecondHit):
    """Takes a question for a use."""

    def worth(self, keys: Sequence[Key], access: Access) -> Sequence[bool]:
        answers = super().worth(keys, access)
        self.used(keys, access)
        return answers


class Hoarder(SecondHit):
    """Never forgets."""

    def __init__(self, memory: int) -> None:
        super().__init__(2**24)


@pytest.mark.parametrize(
    ("broken", "test"),
    [
        (Forgetful, "test_every_key_has_its_answer_whether_it_was_used_or_not"),
        (Touchy, "test_asking_changes_nothing"),
        (Hoarder, "test_what_it_remembers_is_bounded"),
    ],
)
def test_the_conformance_suite_catches_a_broken_admission_policy(
    broken: type[SecondHit], test: str
) -> None:
    class Suite(AdmissionPolicyTests):
        def make(self, memory: int) -> AdmissionPolicy:
            return broken(memory)

    with pytest.raises(AssertionError):
        getattr(Suite(), test)()
