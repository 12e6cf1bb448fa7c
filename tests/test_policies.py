"""Policies: the conformance suite on each of ours, and what is particular to each."""

import random
import re
from collections.abc import Hashable, Iterator, Sequence
from itertools import islice

import pytest

from policies.arc import ARC
from policies.base import NO_HINTS, Access, EvictionPolicy, Hints, LayerShape, SizingFacts
from policies.belady import Belady
from policies.block_size import Hierarchical, Uniform
from policies.fifo import FIFO
from policies.gdsf import GDSF
from policies.learned import Learned
from policies.lfu import LFU
from policies.lru import LRU
from policies.lru2 import LRU2
from policies.s3fifo import S3FIFO
from policies.sieve import Sieve
from policies.size_testing import FACTS, BlockSizePolicyTests
from policies.slru import SLRU
from policies.testing import PolicyTests
from policies.wtinylfu import WTinyLFU


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


class TestFIFO(PolicyTests):
    def make(self, capacity: int) -> FIFO:
        return FIFO(capacity)

    def test_uses_count_for_nothing(self) -> None:
        assert order(FIFO(3), "a", "b", "ab", "c") == "abc"


class TestLFU(PolicyTests):
    def make(self, capacity: int) -> LFU:
        return LFU(capacity)

    def test_what_was_used_least_goes_first_then_what_was_used_longest_ago(self) -> None:
        assert order(LFU(3), "a", "b", "c", "a", "b", "a") == "cba"


class TestSLRU(PolicyTests):
    def make(self, capacity: int) -> SLRU:
        return SLRU(capacity)

    def test_what_was_used_again_outlives_what_is_newer(self) -> None:
        assert order(SLRU(4), "a", "b", "a", "c", "d") == "bcda"

    def test_what_overflows_is_on_probation_again(self) -> None:
        assert order(SLRU(4, protected=0.25), "a", "b", "a", "b", "c") == "acb"


class TestARC(PolicyTests):
    def make(self, capacity: int) -> ARC:
        return ARC(capacity)

    def test_a_ghost_that_comes_back_gives_its_side_more_room(self) -> None:
        policy = ARC(2)
        assert order(policy, "a", "b") == "ab"
        policy.evict("a")
        assert order(policy, "c") == "bc"
        policy.evict("b")
        assert order(policy, "b") == "bc"  # |recent| = 1 = target
        policy.insert("d", None, Access(9.0))
        policy.touch(["d"], Access(9.0))
        assert list(policy.victims()) == ["c", "b", "d"]


class TestS3FIFO(PolicyTests):
    def make(self, capacity: int) -> S3FIFO:
        return S3FIFO(capacity)

    def test_what_was_used_often_leaves_the_small_queue_for_the_main_one(self) -> None:
        policy = S3FIFO(4, small=0.25)
        order(policy, "x")
        policy.evict("x")
        assert order(policy, "a", "b", "a", "a", "c", "d") == "bcda"
        policy.evict("b")
        assert list(policy.victims()) == ["c", "d", "a"]

    def test_a_ghost_comes_back_into_the_main_queue(self) -> None:
        policy = S3FIFO(2, small=0.5)
        assert order(policy, "a", "b") == "ab"
        policy.evict("a")
        assert order(policy, "a", "c", "d") == "cdba"

    def test_until_something_is_given_up_what_is_too_much_for_small_goes_to_main(self) -> None:
        policy = S3FIFO(4, small=0.25)
        assert order(policy, "a", "b", "c") == "abc"
        policy.evict("a")
        assert order(policy, "d", "e") == "debc"


class TestSieve(PolicyTests):
    def make(self, capacity: int) -> Sieve:
        return Sieve(capacity)

    def test_the_hand_spares_once_what_was_used_again(self) -> None:
        policy = Sieve(3)
        assert order(policy, "a", "b", "c", "a") == "bca"
        policy.evict("b")
        assert order(policy, "d") == "cda"

    def test_the_hand_goes_on_from_where_it_was(self) -> None:
        policy = Sieve(4)
        order(policy, "a", "b", "c", "d", "a", "b")
        policy.evict("c")
        assert order(policy, "a", "e") == "deba"

    def test_a_hand_that_gave_up_the_newest_begins_again_at_the_oldest(self) -> None:
        policy = Sieve(3)
        assert order(policy, "a", "b", "c", "a", "b") == "cab"
        policy.evict("c")
        assert order(policy, "d") == "abd"


class TestLRU2(PolicyTests):
    def make(self, capacity: int) -> LRU2:
        return LRU2(capacity)

    def test_the_last_use_but_one_counts(self) -> None:
        assert order(LRU2(4), "a", "b", "b", "a", "c", "d", "a") == "cdba"

    def test_a_key_that_comes_back_has_been_used_before(self) -> None:
        policy = LRU2(2)
        order(policy, "a", "b")
        policy.evict("a")
        assert order(policy, "a", "c") == "bca"


class TestWTinyLFU(PolicyTests):
    def make(self, capacity: int) -> WTinyLFU:
        return WTinyLFU(capacity)

    def test_of_two_that_would_go_it_is_the_one_asked_for_less(self) -> None:
        policy = WTinyLFU(2)
        assert order(policy, "a", "a", "a", "b", "c")[0] == "b"
        policy.evict("b")
        assert order(policy, "d", "d", "d", "d", "d", "e")[0] == "c"


class TestGDSF(PolicyTests):
    def make(self, capacity: int) -> GDSF:
        return GDSF(capacity)

    def test_what_is_deep_in_its_sequence_costs_more_and_stays(self) -> None:
        policy = GDSF(3, slope=1.0)
        for key, parent in (("a", None), ("b", "a"), ("c", "b")):
            policy.insert(key, parent, Access(0.0))
        policy.touch(["a", "b", "c"], Access(0.0))
        assert list(policy.victims()) == ["a", "b", "c"]

    def test_what_is_unused_falls_behind(self) -> None:
        policy = GDSF(3)
        assert order(policy, "a", "a", "b") == "ba"
        policy.evict("b")
        order(policy, "c", "c")
        assert order(policy, "d") == "adc"


class TestLearned(PolicyTests):
    def make(self, capacity: int) -> Learned:
        return Learned(capacity)

    def test_before_it_has_learned_it_is_lru_over_leaves(self) -> None:
        policy = Learned(8)
        assert order(policy, "ab", "ac", "d") == "bcad"

    def test_a_parent_never_goes_before_its_child(self) -> None:
        rng, policy = random.Random(7), Learned(200)
        resident = set[int]()
        for time in range(3000):
            path = _branch(rng.randrange(2000))
            for victim in list(islice((k for k in policy.victims() if k not in path), 12)):
                if len(resident) + len(path) > 200:
                    policy.evict(victim)
                    resident -= {victim}
            for key in path:
                if key not in resident:
                    policy.insert(key, (key - 1) // 2 if key else None, Access(float(time)))
                    resident.add(key)
            policy.touch(path, Access(float(time)))
            seen = set[int]()
            for parent in policy.victims():
                assert isinstance(parent, int)
                children = {2 * parent + 1, 2 * parent + 2}
                assert not children & (resident - seen), "a child is left behind"
                seen.add(parent)

    def test_it_learns_that_what_is_asked_once_is_not_asked_again(self) -> None:
        policy, time = Learned(40), 0.0
        for turn in range(600):
            for path in (["a", "b"], [f"once {turn}"]):
                request(policy, path, time := time + 1.0, room=40)
        request(policy, ["a", "b"], time + 1.0, room=40)
        for extra in range(60):  # LRU would give up a and b after 39 of these
            request(policy, [f"more {extra}"], time + 1.0, room=40)
        assert {"a", "b"} <= set(policy.victims())

    def test_a_session_that_is_closed_is_learned_to_be_over(self) -> None:
        policy, time = Learned(40), 0.0
        for turn in range(600):
            request(policy, [f"s{turn}"], time := time + 1.0, room=40)
            closes = turn % 2 == 0
            hints = Hints(closed=closes)
            request(policy, [f"s{turn}", f"t{turn}"], time := time + 1.0, room=40, hints=hints)
            if not closes:
                request(policy, [f"s{turn}", f"t{turn}", f"u{turn}"], time := time + 1.0, room=40)
        request(policy, ["open"], time := time + 1.0, room=40)
        request(policy, ["shut"], time := time + 1.0, room=40)
        request(policy, ["open", "x"], time := time + 1.0, room=40)
        request(policy, ["shut", "y"], time := time + 1.0, room=40, hints=Hints(closed=True))
        victims = list(policy.victims())
        assert victims.index("y") < victims.index("x")

    def test_what_it_learned_outlives_a_restart(self) -> None:
        policy, time = Learned(40), 0.0
        for turn in range(300):
            for path in (["a", "b"], [f"once {turn}"]):
                request(policy, path, time := time + 1.0, room=40)
        heir = Learned(40)
        heir.restore(policy.state())
        for extra in range(60):
            for one in (policy, heir):
                request(one, [f"more {extra}"], time + 1.0, room=40)
        assert list(heir.victims()) == list(policy.victims())
        assert {"a", "b"} <= set(heir.victims())


class TestBelady(PolicyTests):
    def make(self, capacity: int) -> Belady:
        return Belady(capacity, {key: [2.0 * key + 3, 60.0] for key in range(0, 40, 2)})

    def test_what_is_used_last_goes_first_and_of_equals_the_tail(self) -> None:
        policy = Belady(4, {"a": [1.0, 5.0], "b": [1.0, 3.0], "c": [1.0, 5.0], "d": [1.0]})
        for key, parent in (("a", None), ("b", "a"), ("c", "b"), ("d", "c")):
            policy.insert(key, parent, Access(1.0))
        policy.touch(["a", "b", "c", "d"], Access(1.0))
        assert list(policy.victims()) == ["d", "c", "a", "b"]


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


def order(policy: EvictionPolicy, *requests: str) -> str:
    """Requests, a letter a key, come one after the other; what would then be given up, in order."""
    for time, request in enumerate(requests):
        resident = set(policy.victims())
        for parent, key in zip([None, *request], request, strict=False):
            if key not in resident:
                policy.insert(key, parent, Access(float(time)))
        policy.touch(list(request), Access(float(time)))
    return "".join(map(str, policy.victims()))


def request(
    policy: EvictionPolicy, path: list[str], time: float, *, room: int, hints: Hints = NO_HINTS
) -> None:
    """One request for `path`, in a pool of `room` keys, which gives up what it must."""
    resident, access = set(policy.victims()), Access(time, hints)
    new = [key for key in path if key not in resident]
    spare = [key for key in policy.victims() if key not in path]
    for key in spare[: max(0, len(resident) + len(new) - room)]:
        policy.evict(key)
    for parent, key in zip([None, *path], path, strict=False):
        if key in new:
            policy.insert(key, parent, access)
    policy.touch(path, access)


def _branch(number: int) -> list[int]:
    path = [number]
    while path[-1]:
        path.append((path[-1] - 1) // 2)
    return path[::-1]


def layers(count: int) -> Sequence[LayerShape]:
    return [LayerShape(index, nbytes_per_token=1024, window=None) for index in range(count)]
