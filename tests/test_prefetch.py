"""Prefetch policies: the conformance suite on each of ours, and what is particular to each."""

import re
from collections.abc import Iterator, Sequence

import pytest

from policies.base import Access, Key, PrefetchPolicy
from policies.prefetch import Next, Nothing
from policies.testing import PrefetchPolicyTests

NOW = Access(0.0)


class TestNothing(PrefetchPolicyTests):
    def make(self, memory: int) -> Nothing:
        return Nothing()

    def test_it_never_guesses(self) -> None:
        policy = Nothing()
        policy.record("abc", NOW)
        assert list(policy.wanted("a")) == []


class TestNext(PrefetchPolicyTests):
    def make(self, memory: int) -> Next:
        return Next(memory=memory)

    def test_a_path_is_guessed_to_go_on_as_it_did_before(self) -> None:
        assert list(recorded("abcd").wanted("ab")) == [["c", "d"]]

    def test_of_a_path_that_ends_in_something_new_nothing_is_guessed(self) -> None:
        assert list(recorded("abcd").wanted("abx")) == []
        assert list(recorded("abcd").wanted("abcd")) == []

    def test_the_latest_way_comes_first(self) -> None:
        assert list(recorded("abx", "aby").wanted("ab")) == [["y"], ["x"]]
        assert list(recorded("abx", "aby", "abx").wanted("ab")) == [["x"], ["y"]]

    def test_beyond_the_first_key_a_guess_follows_the_latest_way(self) -> None:
        assert list(recorded("abcx", "abcy").wanted("a")) == [["b", "c", "y"]]

    def test_a_guess_ends_at_the_depth(self) -> None:
        policy = Next(depth=2)
        policy.record("abcdef", NOW)
        assert list(policy.wanted("a")) == [["b", "c"]]

    def test_so_many_branches_are_kept(self) -> None:
        policy = Next(branches=2)
        for tail in "xyz":
            policy.record("a" + tail, NOW)
        assert list(policy.wanted("a")) == [["z"], ["y"]]

    def test_a_path_in_pieces_is_learnt_as_a_whole_one(self) -> None:
        policy = Next()
        policy.record("cdef", NOW)
        policy.record("abc", NOW)
        assert list(policy.wanted("a")) == [list("bcdef")]

    def test_the_memory_gives_up_what_was_used_longest_ago_and_of_a_path_the_end(self) -> None:
        policy = Next(memory=3)
        policy.record("abcd", NOW)
        policy.record("xy", NOW)
        assert list(policy.wanted("a")) == [["b", "c"]]
        assert list(policy.wanted("c")) == []
        assert list(policy.wanted("x")) == [["y"]]

    @pytest.mark.parametrize("name", ["depth", "branches", "memory"])
    @pytest.mark.parametrize("value", [0, -1, 2.0, "2", True, None, 2**40])
    def test_an_option_is_a_positive_integer(self, name: str, value: object) -> None:
        with pytest.raises(ValueError, match=f"^{name} = {re.escape(repr(value))} is not an int"):
            Next(**{name: value})  # type: ignore[arg-type]


class Inventive(Next):
    """Guesses what nobody ever asked for."""

    def wanted(self, path: Sequence[Key]) -> Iterator[Sequence[Key]]:
        yield [-7]


class Greedy(Next):
    """Forgets a guess once it is made: asking changes something."""

    def wanted(self, path: Sequence[Key]) -> Iterator[Sequence[Key]]:
        yield from super().wanted(path)
        self._ways.clear()


class Hoarder(Next):
    """Never forgets."""

    def __init__(self, memory: int) -> None:
        super().__init__(memory=2**24)


@pytest.mark.parametrize(
    ("broken", "test"),
    [
        (Inventive, "test_what_is_wanted_goes_on_from_the_end_as_requests_did"),
        (Inventive, "test_a_new_policy_wants_nothing"),
        (Greedy, "test_what_is_wanted_goes_on_from_the_end_as_requests_did"),
        (Hoarder, "test_what_it_remembers_is_bounded"),
    ],
)
def test_the_conformance_suite_catches_a_broken_prefetch_policy(
    broken: type[Next], test: str
) -> None:
    class Suite(PrefetchPolicyTests):
        def make(self, memory: int) -> PrefetchPolicy:
            return broken(memory=memory)

    with pytest.raises(AssertionError):
        getattr(Suite(), test)()


def recorded(*paths: str) -> Next:
    policy = Next(branches=2)
    for path in paths:
        policy.record(path, NOW)
    return policy
