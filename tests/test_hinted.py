"""What engines say, obeyed for a policy that knows nothing of it: lanes before and behind."""

from collections.abc import Sequence

import pytest

from policies.base import NO_HINTS, Access, EvictionPolicy, Hints, Key
from policies.hinted import Hinted
from policies.lru import LRU
from policies.s3fifo import S3FIFO
from policies.testing import PolicyTests
from policies.wtinylfu import WTinyLFU

A, B = Hints("a"), Hints("b")


class TestHintedLRU(PolicyTests):
    def make(self, capacity: int) -> Hinted:
        return Hinted(LRU(capacity))


class TestHintedS3FIFO(PolicyTests):
    def make(self, capacity: int) -> Hinted:
        return Hinted(S3FIFO(capacity))


class TestHintedWTinyLFU(PolicyTests):
    def make(self, capacity: int) -> Hinted:
        return Hinted(WTinyLFU(capacity))


class Judge(LRU):
    """Does something of its own about ends."""

    judges_ends = True

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.heard: list[tuple[list[Key], Hints]] = []

    def advise(self, path: Sequence[Key], access: Access) -> None:
        self.heard.append((list(path), access.hints))


class TestHintedJudge(PolicyTests):
    def make(self, capacity: int) -> Hinted:
        return Hinted(Judge(capacity))


def ask(policy: EvictionPolicy, path: str, hints: Hints = NO_HINTS) -> None:
    """One request: what is not resident comes, then all of it is used."""
    resident = set(policy.victims())
    for parent, key in zip(["", *path], path, strict=False):
        if key not in resident:
            policy.insert(key, parent or None, Access(0.0, hints))
    policy.touch(list(path), Access(0.0, hints))


def advise(policy: EvictionPolicy, path: str, hints: Hints) -> None:
    policy.advise(list(path), Access(0.0, hints))


def order(policy: EvictionPolicy) -> str:
    return "".join(map(str, policy.victims()))


def filled(*requests: tuple[str, Hints], capacity: int = 20) -> Hinted:
    policy = Hinted(LRU(capacity))
    for path, hints in requests:
        ask(policy, path, hints)
    return policy


CLOSED_A, CLOSED_B = Hints("a", closed=True), Hints("b", closed=True)


def test_a_closed_session_goes_before_what_is_older_its_tail_first() -> None:
    policy = filled(("xy", NO_HINTS), ("abc", A))
    advise(policy, "abc", CLOSED_A)
    assert order(policy) == "cbayx"


def test_a_request_that_closes_its_session_does_so_when_it_is_over() -> None:
    policy = filled(("xy", NO_HINTS), ("ab", A))
    ask(policy, "abc", CLOSED_A)
    assert order(policy) == "cbayx"


def test_a_prefix_that_another_session_has_used_keeps_its_place() -> None:
    policy = filled(("sa", A), ("sb", B))
    advise(policy, "sa", CLOSED_A)
    assert order(policy) == "abs"
    advise(policy, "sb", CLOSED_B)
    assert order(policy) == "abs"  # s was not b's alone either


def test_a_request_without_hints_is_another_user_too() -> None:
    policy = filled(("sa", A), ("s", NO_HINTS), ("xy", B))
    advise(policy, "sa", CLOSED_A)
    assert order(policy) == "asyx"


def test_what_was_there_before_a_session_used_it_is_not_its_own() -> None:
    policy = filled(("s", NO_HINTS), ("sa", A), ("x", NO_HINTS))
    advise(policy, "sa", CLOSED_A)
    assert order(policy) == "asx"


def test_what_a_closed_session_left_is_as_used_once_somebody_uses_it() -> None:
    policy = filled(("ab", A), ("xy", NO_HINTS))
    advise(policy, "ab", CLOSED_A)
    ask(policy, "a")
    assert order(policy) == "byxa"


def test_a_session_that_opens_again_has_its_own_again() -> None:
    policy = filled(("xy", NO_HINTS), ("ab", A))
    advise(policy, "ab", CLOSED_A)
    ask(policy, "ab", A)
    assert order(policy) == "yxba"
    advise(policy, "ab", CLOSED_A)
    assert order(policy) == "bayx"


def test_of_several_closed_sessions_the_one_closed_first_goes_first() -> None:
    policy = filled(("ab", A), ("cd", B), ("x", NO_HINTS))
    advise(policy, "cd", CLOSED_B)
    advise(policy, "ab", CLOSED_A)
    assert order(policy) == "dcbax"


def test_a_key_that_left_and_came_back_is_no_ones_by_its_past() -> None:
    policy = filled(("a", A))
    policy.evict("a")
    ask(policy, "ab", B)
    advise(policy, "a", CLOSED_A)
    assert order(policy) == "ba"


def test_a_request_of_no_session_that_is_not_needed_goes_first_but_for_what_others_use() -> None:
    once = Hints(dont_need=True)
    policy = filled(("s", NO_HINTS), ("x", NO_HINTS), ("sab", once))
    assert order(policy) == "baxs"
    ask(policy, "sab", once)  # it was not the first to use them
    assert order(policy) == "xbas"


def test_a_higher_priority_is_given_up_later_whenever_it_was_used() -> None:
    policy = filled(("a", Hints(priority=2)), ("b", Hints(priority=1)), ("x", NO_HINTS), ("y", A))
    assert order(policy) == "xyba"
    ask(policy, "a", Hints(priority=1))
    assert order(policy) == "xyba"
    ask(policy, "z")
    ask(policy, "b")
    assert order(policy) == "xyzba"


def test_a_lower_priority_goes_first_but_for_what_others_use() -> None:
    policy = filled(("s", NO_HINTS), ("x", NO_HINTS), ("sa", Hints("a", priority=-1)))
    assert order(policy) == "axs"
    ask(policy, "sab", Hints("a", priority=-3))
    assert order(policy) == "baxs"
    ask(policy, "sa")
    assert order(policy) == "bxas"


def test_keys_above_the_others_are_half_of_what_fits_at_most() -> None:
    policy = filled(("abc", Hints(priority=1)), ("xyz", NO_HINTS), capacity=6)
    assert order(policy) == "zyxcba"
    ask(policy, "d", Hints(priority=2))
    assert order(policy) == "zyxcbad"  # c was used longest ago of the lowest: it is as new
    ask(policy, "w")
    assert order(policy) == "zyxcwbad"
    policy.resize(2)
    ask(policy, "v")
    ask(policy, "e", Hints(priority=2))
    assert order(policy)[-1] == "e"
    assert len(order(policy)) == 10


def test_what_is_wanted_soon_counts_as_used() -> None:
    policy = filled(("ab", A), ("xy", NO_HINTS))
    advise(policy, "ab", Hints(will_need=True))
    assert order(policy) == "yxba"
    advise(policy, "a", Hints("a", closed=True))
    assert order(policy) == "yxba"  # the one who wants it is not its session


def test_a_word_about_nothing_changes_nothing() -> None:
    policy = filled(("ab", A), ("xy", NO_HINTS))
    advise(policy, "ab", Hints("a", returns_at=9.0))
    advise(policy, "", CLOSED_A)
    advise(policy, "ab", CLOSED_B)
    assert order(policy) == "bayx"


def test_what_was_said_goes_along_to_where_a_key_goes() -> None:
    above, below = filled(("a", A), ("s", A), ("s", B), ("p", Hints(priority=3))), Hinted(LRU(20))
    advise(above, "a", CLOSED_A)
    ask(below, "xy")
    for key in "asp":
        below.insert(key, None, Access(0.0, above.said(key)))
    assert order(below) == "ayxsp"
    ask(below, "a", A)
    advise(below, "as", CLOSED_A)
    assert order(below) == "ayxsp"


def test_what_is_given_up_at_a_word_is_no_ghost() -> None:
    """S3-FIFO lets what comes back soon after it went into its main queue at once."""
    policy = Hinted(S3FIFO(4, small=0.5))
    ask(policy, "z")
    policy.evict("z")  # the first that goes ends the start, when it lets all that come in at once
    ask(policy, "a", A)
    advise(policy, "a", CLOSED_A)
    policy.evict("a")
    ask(policy, "bcd")
    ask(policy, "a")
    assert order(policy) == "bcda"


def test_a_policy_that_judges_ends_hears_of_them_and_keeps_its_order() -> None:
    judge = Judge(20)
    policy = Hinted(judge)
    for path, hints in (("x", NO_HINTS), ("ab", A), ("p", Hints(priority=1))):
        ask(policy, path, hints)
    advise(policy, "ab", CLOSED_A)
    assert judge.heard == [(["a", "b"], CLOSED_A)]
    assert order(policy) == "xbap"


@pytest.mark.parametrize("leave", ["evict", "remove"])
def test_nothing_is_kept_of_keys_that_left(leave: str) -> None:
    policy = filled(("ab", A), ("cd", Hints("b", priority=2)), ("e", Hints(dont_need=True)))
    advise(policy, "ab", CLOSED_A)
    for key in order(policy):
        getattr(policy, leave)(key)
    for key in "abcde":
        policy.insert(key, None, Access(9.0))
    assert {policy.said(key) for key in "abcde"} == {NO_HINTS}
    assert order(policy) == "abcde"
