"""Policies: the conformance suite on each of ours, and what is particular to each."""

import re
from collections.abc import Hashable, Iterator, Sequence

import pytest

from policies.base import Access, EvictionPolicy, LayerShape, SizingFacts
from policies.block_size import Hierarchical, Uniform
from policies.lru import LRU
from policies.size_testing import FACTS, BlockSizePolicyTests
from policies.testing import PolicyTests


class TestLRU(PolicyTests):
    def make(self, capacity: int) -> LRU:
        return LRU(capacity)

    def test_an_inserted_key_is_the_newest(self) -> None:
        assert list(lru("a", "b", "c").victims()) == ["a", "b", "c"]

    def test_a_path_is_given_up_tail_first(self) -> None:
        policy = lru("a", "b", "c")
        policy.touch(["a", "b", "c"], Access(1.0))
        assert list(policy.victims()) == ["c", "b", "a"]

    def test_a_parent_of_two_branches_outlives_both(self) -> None:
        policy = lru("root", "left", "right")
        policy.touch(["root", "left"], Access(1.0))
        policy.touch(["root", "right"], Access(2.0))
        assert list(policy.victims()) == ["left", "right", "root"]

    def test_what_was_not_used_goes_before_what_was(self) -> None:
        policy = lru("a", "b", "c")
        policy.touch(["a"], Access(1.0))
        assert list(policy.victims()) == ["b", "c", "a"]

    def test_a_key_that_comes_back_is_new_again(self) -> None:
        policy = lru("a", "b")
        policy.evict("a")
        policy.insert("a", None, Access(1.0))
        assert list(policy.victims()) == ["b", "a"]

    def test_the_time_of_an_access_does_not_matter(self) -> None:
        policy = lru("a", "b")
        policy.touch(["a"], Access(9.0))
        policy.touch(["b"], Access(1.0))
        assert list(policy.victims()) == ["a", "b"]


class Eager(LRU):
    """Lists every key at once: breaks the promise that victims are found lazily."""

    def victims(self) -> Iterator[Hashable]:
        return iter(list(super().victims()))


class Forgetful(LRU):
    """Drops what it yields: breaks the promise that victims() changes nothing."""

    def victims(self) -> Iterator[Hashable]:
        while self._order:
            yield self._order.popitem(last=False)[0]


class Hoarder(LRU):
    """Never lets a key go."""

    def evict(self, key: Hashable) -> None:
        pass


@pytest.mark.parametrize(
    ("broken", "test"),
    [
        (Eager, "test_victims_are_found_only_as_they_are_asked_for"),
        (Forgetful, "test_it_agrees_with_a_set_under_random_operations"),
        (Hoarder, "test_it_agrees_with_a_set_under_random_operations"),
    ],
)
def test_the_conformance_suite_catches_a_broken_policy(
    broken: type[EvictionPolicy], test: str
) -> None:
    class Suite(PolicyTests):
        def make(self, capacity: int) -> EvictionPolicy:
            return broken(capacity)

    with pytest.raises((AssertionError, KeyError)):
        getattr(Suite(), test)()


ANY = FACTS["three tiers"]


class TestUniform(BlockSizePolicyTests):
    def make(self, num_layers: int) -> Uniform:
        return Uniform()


class TestHierarchical(BlockSizePolicyTests):
    def make(self, num_layers: int) -> Hierarchical:
        return Hierarchical({"0": 32, f"1-{num_layers}": 64} if num_layers > 1 else {"0": 32})


class Moody(Uniform):
    """Chooses something else each time."""

    def sizes(self, layers: Sequence[LayerShape], facts: SizingFacts) -> list[int]:
        self.size += 1
        return super().sizes(layers, facts)


class Secretive(Uniform):
    """Goes by facts and does not say so."""

    def sizes(self, layers: Sequence[LayerShape], facts: SizingFacts) -> list[int]:
        return [len(facts.routes)] * len(layers)


class Careless(Uniform):
    """Forgets the last layer."""

    def sizes(self, layers: Sequence[LayerShape], facts: SizingFacts) -> list[int]:
        return super().sizes(layers[:-1], facts)


@pytest.mark.parametrize("broken", [Moody, Secretive, Careless])
def test_the_conformance_suite_catches_a_broken_block_size_policy(broken: type[Uniform]) -> None:
    class Suite(BlockSizePolicyTests):
        def make(self, num_layers: int) -> Uniform:
            return broken()

    suite = Suite()
    with pytest.raises(AssertionError):  # noqa: PT012  # any of them
        suite.test_every_layer_gets_a_whole_number_of_tokens(layers(3), ANY)
        suite.test_equal_facts_have_an_equal_answer(ANY)
        suite.test_only_one_that_says_so_goes_by_facts()


def test_uniform_gives_every_layer_the_same_size() -> None:
    assert Uniform().sizes(layers(3), ANY) == [16, 16, 16]
    assert Uniform(size=64).sizes(layers(2), ANY) == [64, 64]


def test_hierarchical_gives_each_range_its_size_and_the_rest_the_default() -> None:
    policy = Hierarchical({"0-1": 64, "3": 1, "5-9": 4096}, default=32)
    assert policy.sizes(layers(7), ANY) == [64, 64, 32, 1, 32, 4096, 4096]


def test_hierarchical_goes_by_the_index_of_a_layer_not_by_its_position() -> None:
    assert Hierarchical({"2": 64}).sizes(layers(4)[2:], ANY) == [64, 16]


@pytest.mark.parametrize("size", [0, -1, 4097, 16.0, "16", True, None])
def test_a_block_size_is_an_integer_from_1_to_4096(size: int) -> None:
    allowed = re.escape(f"{size!r} is not an integer from 1 to 4096")
    with pytest.raises(ValueError, match=f"^size = {allowed}"):
        Uniform(size)
    with pytest.raises(ValueError, match=f"'0-3'.*{allowed}"):
        Hierarchical({"0-3": size})
    with pytest.raises(ValueError, match=f"^default = {allowed}"):
        Hierarchical({}, default=size)


@pytest.mark.parametrize("name", ["", "x", "1-", "-1", "1-2-3", "0 - 9", "1.5", "٣"])
def test_a_range_that_cannot_be_read_is_named(name: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"layer range {name!r} is neither")):
        Hierarchical({name: 16})


def test_a_range_that_ends_before_it_begins_is_named() -> None:
    with pytest.raises(ValueError, match="'9-0' ends before it begins"):
        Hierarchical({"9-0": 16})


@pytest.mark.parametrize("other", ["9-12", "4", "0-20", "0-0", "00-09"])
def test_ranges_that_overlap_are_both_named(other: str) -> None:
    with pytest.raises(ValueError, match=f"'0-9' and '{other}' overlap"):
        Hierarchical({"0-9": 16, other: 32})


def test_a_range_that_matches_no_layer_is_named() -> None:
    with pytest.raises(ValueError, match="'30-39' matches none of the 30 layers"):
        Hierarchical({"0-9": 16, "30-39": 32}).sizes(layers(30), ANY)


def lru(*keys: str) -> LRU:
    policy = LRU(len(keys))
    for key in keys:
        policy.insert(key, None, Access(0.0))
    return policy


def layers(count: int) -> Sequence[LayerShape]:
    return [LayerShape(index, nbytes_per_token=1024, window=None) for index in range(count)]
