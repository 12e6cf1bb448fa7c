"""Placement policies: the conformance suite on each of ours, and what each makes of the tiers."""

from collections.abc import Collection
from itertools import count

import pytest

from policies.admission import SecondHit
from policies.base import Key, PlacementPolicy
from policies.placement import Exclusive, Inclusive, WriteThrough
from policies.tier_testing import PlacementPolicyTests
from tests.rig import DEVICE, HOST, NOW, SSD, Rig
from tierd.block import State
from tierd.daemon.copy import Outcome


class TestInclusive(PlacementPolicyTests):
    def make(self) -> Inclusive:
        return Inclusive()


class TestExclusive(PlacementPolicyTests):
    def make(self) -> Exclusive:
        return Exclusive()

    def test_a_large_tier_keeps_its_copies(self) -> None:
        policy = Exclusive(ratio=2)
        assert policy.keeps(1, 201, 100)
        assert not policy.keeps(1, 200, 100)

    @pytest.mark.parametrize("ratio", [0, -1, "x", True, None, float("nan")])
    def test_the_ratio_is_a_positive_number(self, ratio: object) -> None:
        with pytest.raises(ValueError, match="is not a number above 0"):
            Exclusive(ratio=ratio)  # type: ignore[arg-type]


class TestWriteThrough(PlacementPolicyTests):
    def make(self) -> WriteThrough:
        return WriteThrough()

    @pytest.mark.parametrize("depth", [0, -1, 1.0, "1", True, None])
    def test_the_depth_is_a_positive_integer(self, depth: object) -> None:
        with pytest.raises(ValueError, match="is not an integer above 0"):
            WriteThrough(depth=depth)  # type: ignore[arg-type]


class Random(Inclusive):
    """Never says the same twice."""

    def __init__(self) -> None:
        self._calls = count()

    def keeps(self, level: int, capacity: int, above: int) -> bool:
        return next(self._calls) % 7 == 0


class Topmost(Inclusive):
    def touches(self, level: int, num_levels: int) -> Collection[int]:
        return range(num_levels)


@pytest.mark.parametrize(
    ("broken", "test"),
    [
        (Random, "test_it_is_pure"),
        (Topmost, "test_a_hit_counts_in_tiers_that_there_are_below_the_top"),
    ],
)
def test_the_conformance_suite_catches_a_broken_placement_policy(
    broken: type[PlacementPolicy], test: str
) -> None:
    class Suite(PlacementPolicyTests):
        def make(self) -> PlacementPolicy:
            return broken()

    with pytest.raises(AssertionError):
        getattr(Suite(), test)()


def twice(
    *capacities: int, placement: PlacementPolicy, before: PlacementPolicy | None = None
) -> Rig:
    """`a` was promoted from a full host tier, where it is the hottest; `x` and `y` are colder.

    `before`: the placement until just before.
    """
    rig = Rig(*capacities, placement=before or placement)
    if before is not None:
        rig.cache.chain.place_by(placement)
    for name in ("x", "y", "a"):
        rig.place(HOST, name)
    lease = rig.acquire("a")
    rig.transfer.run()
    rig.release(lease)
    assert rig.found(DEVICE) == {"a"}
    return rig


def demote(rig: Rig, name: str) -> None:
    """A block of the device tier has to go down."""
    (block,) = rig.place(DEVICE, name)
    rig.cache.chain.evict(DEVICE, 0, [block], NOW)
    rig.cache.loads.emit()


@pytest.mark.parametrize(
    ("device", "placement", "left"),
    [
        (4, Inclusive(), {"a", "n", "y"}),
        (4, Exclusive(), {"x", "y", "n"}),
        (2, Exclusive(), {"a", "n", "y"}),  # beside it the host tier is large
    ],
)
def test_what_lies_above_too_goes_first_below_if_the_placement_says_so(
    device: int, placement: PlacementPolicy, left: set[str]
) -> None:
    rig = twice(device, 3, 8, placement=placement)
    demote(rig, "n")
    assert rig.found(HOST) == left
    assert rig.found(DEVICE) == {"a"}
    # What else the device has needs no place on the SSD; the only copy of something does.
    assert rig.found(SSD) == (set() if "x" in left else {"x"})
    assert rig.cache.chain.counts.dropped == 0


@pytest.mark.parametrize(
    ("before", "after", "left"),
    [(Inclusive(), Exclusive(), {"x", "y", "n"}), (Exclusive(), Inclusive(), {"a", "n", "y"})],
)
def test_another_placement_decides_from_then_on(
    before: PlacementPolicy, after: PlacementPolicy, left: set[str]
) -> None:
    rig = twice(4, 3, 8, placement=after, before=before)
    demote(rig, "n")
    assert rig.found(HOST) == left


def test_a_copy_that_is_being_read_stays() -> None:
    rig = Rig(4, 2, 8, placement=Exclusive())
    for name in ("x", "a"):
        rig.place(HOST, name)
    lease = rig.acquire("a")  # its load is under way
    demote(rig, "n")
    assert rig.found(HOST) == {"a", "n"}
    assert rig.transfer.routes[0] == ("a", HOST, DEVICE)
    rig.transfer.run()
    assert lease.ready


def test_a_copy_stays_until_the_one_above_has_come_all_the_way() -> None:
    rig = Rig(4, 4, 2, placement=Exclusive())
    for name in ("a", "x"):
        rig.place(SSD, name)
    rig.acquire("a")
    rig.transfer.end(rig.transfer.copies[0])  # in host memory, and on its way from there
    (block,) = rig.place(HOST, "n")
    rig.cache.chain.evict(HOST, 0, [block], NOW)
    assert rig.found(SSD) == {"a", "n"}  # `x` was the coldest
    rig.transfer.run()
    assert rig.found(DEVICE) == {"a"}


def test_giving_up_a_duplicate_says_nothing_of_how_long_a_tier_can_hold() -> None:
    admission = SecondHit()
    lost: list[Key] = []
    admission.gave_up = lambda keys, access: lost.extend(keys)  # type: ignore[method-assign]
    rig = Rig(4, 2, placement=Exclusive(), admission=admission)
    for name in ("x", "a"):
        rig.place(HOST, name)
    lease = rig.acquire("a")
    rig.transfer.run()
    rig.release(lease)
    for name in "nm":
        admission.used(name.encode().split(), NOW)
        admission.used(name.encode().split(), NOW)
        demote(rig, name)
        rig.transfer.run()
    assert rig.found(HOST) == {"n", "m"}
    assert lost == [b"x"]


def test_a_copy_whose_twin_above_never_came_is_no_duplicate() -> None:
    rig = Rig(4, 2, 8, placement=Exclusive())
    for name in ("x", "a"):
        rig.place(HOST, name)
    rig.acquire("a")
    rig.transfer.end(rig.transfer.copies[0], Outcome.FAILED)
    demote(rig, "n")
    assert rig.found(HOST) == {"a", "n"}


def test_what_leaves_the_tier_above_is_not_lost_with_its_copy_below() -> None:
    rig = twice(2, 3, 8, placement=Exclusive(ratio=9))
    rig.acquire("n")  # `a` has to go: its copy below is the only one from now on
    assert rig.found(HOST) == {"x", "y", "a"}
    demoted = Rig(2, 3, 8, placement=Exclusive(ratio=9))
    for name in ("x", "y", "a"):
        demoted.place(HOST, name)
    lease = demoted.acquire("a")
    demoted.transfer.run()
    demoted.release(lease)
    demoted.place(DEVICE, "n")
    victims = demoted.pool(DEVICE).victims(2)  # both at once: one needs room, one lies below
    demoted.cache.chain.evict(DEVICE, 0, victims, NOW)
    assert demoted.found(HOST) | demoted.found(SSD) == {"x", "y", "a", "n"}


def test_a_use_counts_only_in_the_tiers_that_the_placement_names() -> None:
    class Own(Inclusive):
        def touches(self, level: int, num_levels: int) -> Collection[int]:
            return {level} - {0}

    for placement, coldest in ((Inclusive(), b"x"), (Own(), b"a")):
        rig = Rig(4, 4, placement=placement)
        rig.place(DEVICE, "a")
        for name in ("ab", "x"):
            rig.place(HOST, name)
        rig.release(rig.acquire("ab"))  # `a` is found on the device, `ab` below
        rig.transfer.run()
        first, *_ = rig.pool(HOST).evictable()
        assert first.key == coldest


@pytest.mark.parametrize(("depth", "below"), [(1, {HOST}), (2, {HOST, SSD})])
def test_what_is_new_is_written_through_while_nobody_waits(depth: int, below: set[int]) -> None:
    rig = Rig(8, 8, 8, placement=WriteThrough(depth))
    lease = rig.acquire("ab")
    assert not rig.cache.ahead.lags() or not rig.cache.reclaim(16)
    rig.commit(lease)
    assert rig.cache.ahead.lags()
    while rig.cache.reclaim(1):
        rig.transfer.run()
    assert {level for level in (HOST, SSD) if rig.found(level) == {"a", "ab"}} == below
    assert not rig.cache.ahead.lags()
    rig.release(lease)
    assert all(block.ref_cnt == 0 for tier in rig.tiers for block in tier.pools[0])
    assert rig.pool(HOST).counts[State.COMMITTED] == 2


def test_what_left_before_it_was_written_through_is_forgotten() -> None:
    rig = Rig(2, 8, placement=WriteThrough())
    rig.write("a")
    rig.cache.chain.evict(DEVICE, 0, rig.pool(DEVICE).victims(1), NOW)
    rig.cache.loads.emit()
    assert rig.cache.reclaim(16) == []
