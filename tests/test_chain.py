"""What moves along the tiers: up for a hit, down to make room, and to the coldest at the end."""

from collections.abc import Iterator, Sequence

import pytest

from policies.base import Access, AdmissionPolicy, Key
from policies.lru import LRU
from tests.rig import DEVICE, HOST, NOW, SSD, Rig, chain
from tierd.block import BlockHash, State
from tierd.daemon.cache import TieredCache
from tierd.daemon.copy import Outcome
from tierd.daemon.pool import BlockPool
from tierd.daemon.steps import Step


@pytest.mark.parametrize("at_once", [False, True])
def test_a_hit_in_host_memory_is_copied_up_and_stays_below(at_once: bool) -> None:
    rig = Rig(8, 8, 8, at_once=at_once)
    rig.place(HOST, "ab")
    lease = rig.acquire("ab")
    assert (lease.hit, lease.ready) == (4, at_once)
    rig.transfer.run()
    assert rig.transfer.routes == [("a", HOST, DEVICE), ("ab", HOST, DEVICE)]
    assert lease.ready
    assert [block.key for block in lease.tables[0][:2]] == chain("ab")
    assert [block.parent for block in lease.tables[0][:2]] == [None, b"a"]
    assert rig.found(HOST) == rig.found(DEVICE) == {"a", "ab"}
    assert {block.ref_cnt for block in rig.pool(HOST)} == {0}
    assert rig.told == [lease]


def test_a_block_from_the_ssd_lands_in_host_memory_and_stays_there() -> None:
    rig = Rig(8, 8, 8)
    rig.place(SSD, "a")
    lease = rig.acquire("a")
    assert rig.transfer.routes == [("a", SSD, HOST), ("a", HOST, DEVICE)]
    rig.transfer.run()
    assert lease.ready
    assert rig.found(SSD) == rig.found(HOST) == rig.found(DEVICE) == {"a"}
    assert all(block.ref_cnt == 0 for level in (HOST, SSD) for block in rig.pool(level))


class Clock(LRU):
    """Remembers when it was asked for victims."""

    def __init__(self) -> None:
        super().__init__(0)
        self.time, self.asked = -1.0, list[float]()

    def tick(self, time: float) -> None:
        self.time = time

    def victims(self) -> Iterator[Key]:
        self.asked.append(self.time)
        return super().victims()


def test_a_policy_knows_how_late_it_is_when_it_is_asked_for_victims() -> None:
    rig = Rig(2, 2)
    clocks = [Clock(), Clock()]
    for tier, clock in zip(rig.tiers, clocks, strict=True):
        tier.pools = [BlockPool(clock)]
        tier.pools[0].grow(range(2))
    cache = TieredCache(rig.layout, rig.tiers, rig.transfer)
    for time, prompt in enumerate(("ab", "cd", "ef")):
        lease = cache.acquire(chain(prompt), 5, 4, Access(float(time)))
        cache.advance([Step(lease, 4)], Access(float(time)))
        cache.release(lease, Access(float(time)))
        rig.transfer.run()
    assert clocks[0].asked[-1] == clocks[1].asked[-1] == 2.0


@pytest.mark.parametrize(("clean", "routes"), [(True, 2), (False, 1)])
def test_a_landing_place_is_free_or_clean_and_never_the_only_copy(clean: bool, routes: int) -> None:
    rig = Rig(8, 1, 8)
    rig.place(HOST, "x")
    rig.place(SSD, "a")
    if clean:
        rig.place(SSD, "x")
    rig.acquire("a")
    assert len(rig.transfer.routes) == routes
    assert rig.found(HOST) == ({"a"} if clean else {"x"})


def test_a_hit_is_touched_in_every_tier_below_that_holds_it() -> None:
    rig = Rig(8, 8)
    rig.place(HOST, "ab")
    rig.place(HOST, "x")
    rig.acquire("ab")
    rig.transfer.run()
    assert [block.key for block in rig.pool(HOST).evictable()] == [b"x", b"ab", b"a"]


def test_a_victim_goes_one_tier_down_and_its_victim_another() -> None:
    rig = Rig(2, 1, 8)
    rig.write("a")
    rig.place(HOST, "x")
    rig.acquire("y", room=4)
    assert rig.transfer.routes == [("x", HOST, SSD), ("a", DEVICE, HOST)]
    assert (rig.found(HOST), rig.found(SSD)) == ({"a"}, {"x"})
    rig.transfer.run()
    assert rig.pool(HOST).counts[State.COMMITTED] == rig.pool(SSD).counts[State.COMMITTED] == 1
    assert rig.cache.chain.counts.demoted == 2


def test_demoting_what_lies_below_already_moves_no_bytes() -> None:
    rig = Rig(2, 8)
    rig.write("a")
    rig.place(HOST, "a")
    rig.acquire("y", room=4)
    assert rig.transfer.copies == []
    assert rig.cache.chain.counts.dropped == 0


def test_where_not_all_fit_below_the_hottest_go_there() -> None:
    rig = Rig(4, 1)
    rig.write("abc")
    rig.acquire("y", room=8)
    assert rig.transfer.routes == [("a", DEVICE, HOST)]  # given up last, so the hottest
    assert rig.cache.chain.counts.dropped == 2


def test_a_demotion_that_fails_is_a_block_less_and_nobodys_error() -> None:
    rig = Rig(2, 2)
    rig.write("a")
    lease = rig.acquire("y", room=4)
    rig.transfer.end(rig.transfer.copies[0], Outcome.FAILED)
    assert (rig.found(HOST), rig.pool(HOST).num_free, lease.ready) == (set(), 2, True)


def test_a_paused_tier_takes_nothing_and_still_serves() -> None:
    rig = Rig(2, 4, 4)
    rig.place(HOST, "x")
    rig.place(SSD, "q")
    rig.tiers[HOST].paused = True
    rig.tiers[HOST].grow = rig.tiers[SSD].grow = lambda group: pytest.fail("a paused tier grows")
    rig.write("a")
    lease = rig.acquire("x")
    assert (lease.hit, rig.transfer.routes) == (2, [("x", HOST, DEVICE)])
    rig.transfer.run()
    rig.release(lease)
    assert rig.acquire("q").hit == 2
    assert rig.transfer.routes[1:] == [("q", SSD, DEVICE)]  # without landing on the way
    assert rig.found(HOST) == {"x"}
    assert rig.cache.chain.counts.dropped == 1


def test_saving_copies_the_hottest_first_and_keeps_them_where_they_are() -> None:
    rig = Rig(3, 4, 8)
    rig.place(HOST, "x")
    rig.place(HOST, "ab", first=1)  # a clean copy of what the device has too
    rig.place(SSD, "q")
    rig.write("ab")
    unsaved = rig.cache.chain.unsaved()
    assert [block.key for _, _, block in unsaved] == [b"a", b"ab", b"x"]
    rig.cache.save(unsaved)
    assert [name for name, _, to in rig.transfer.routes if to == SSD] == ["a", "ab", "x"]
    rig.transfer.run()
    assert rig.found(SSD) == {"a", "ab", "x", "q"}
    assert (rig.found(DEVICE), rig.found(HOST)) == ({"a", "ab"}, {"x", "ab"})
    assert all(block.ref_cnt == 0 for tier in rig.tiers for block in tier.pools[0])
    assert rig.cache.chain.unsaved() == []


def test_where_not_all_can_be_saved_the_coldest_are_left_out() -> None:
    rig = Rig(3, 4, 2)
    rig.place(HOST, "xyz")
    rig.write("ab")
    assert [block.key for _, _, block in rig.cache.chain.unsaved()] == [b"a", b"ab"]


def test_a_paused_tier_saves_nothing() -> None:
    rig = Rig(4, 4)
    rig.write("ab")
    rig.tiers[HOST].paused = True
    rig.cache.save(rig.cache.chain.unsaved())
    assert rig.transfer.copies == []


def test_what_a_lease_holds_is_saved_too() -> None:
    rig = Rig(4, 4)
    lease = rig.acquire("ab")
    rig.commit(lease)
    rig.cache.save(rig.cache.chain.unsaved())
    rig.transfer.run()
    assert rig.found(HOST) == {"a", "ab"}
    rig.cache.release(lease, NOW)
    assert {block.ref_cnt for block in rig.pool(DEVICE)} == {0}


class Only(AdmissionPolicy):
    """Only what is named is worth writing; remembers what it was told."""

    def __init__(self, *worthy: str) -> None:
        self._worthy = {name.encode() for name in worthy}
        self.told: list[list[Key]] = []
        self.lost: list[Key] = []

    def used(self, path: Sequence[Key], access: Access) -> None:
        self.told.append(list(path))

    def worth(self, keys: Sequence[Key], access: Access) -> Sequence[bool]:
        return [key in self._worthy for key in keys]

    def gave_up(self, keys: Sequence[Key], access: Access) -> None:
        self.lost += keys


def test_what_is_not_worth_a_write_is_dropped_where_it_is() -> None:
    rig = Rig(8, 2, 8, admission=Only("x"))
    for name in ("x", "y"):
        rig.place(HOST, name)
    for name in ("a", "b"):
        rig.place(DEVICE, name)
    rig.cache.chain.evict(DEVICE, 0, rig.pool(DEVICE).victims(2), NOW)
    rig.cache.loads.emit()
    # The host tier is no SSD: nobody asks what is worth a copy to it.
    assert sorted(rig.transfer.routes) == [("a", 0, 1), ("b", 0, 1), ("x", 1, 2)]
    assert (rig.cache.chain.counts.dropped, rig.cache.chain.counts.refused) == (1, 1)


def test_what_is_not_worth_a_write_gives_way_before_what_would_have_to_be_copied() -> None:
    rig = Rig(2, 8, admission=Only("x"))
    for name in ("x", "y"):
        rig.place(DEVICE, name)
    rig.acquire("", num_tokens=1)
    assert rig.found(DEVICE) == {"x"}
    assert rig.transfer.routes == []


def test_what_is_not_worth_a_write_is_at_hand_without_one() -> None:
    rig = Rig(4, 8, admission=Only("b", "d"), at_once=True)
    rig.tiers[DEVICE].watermarks = (0.75, 0.75)
    for name in "abcd":
        rig.place(DEVICE, name)
    assert [copy.key for copy in rig.cache.reclaim(16)] == [b"b"]  # with `a` and `c` that is three
    assert rig.cache.reclaim(16) == []
    assert not rig.cache.ahead.lags()


def test_saving_at_the_end_asks_nobody_what_is_worth_it() -> None:
    rig = Rig(4, 4, admission=Only())
    rig.write("ab")
    rig.cache.save(rig.cache.chain.unsaved())
    rig.transfer.run()
    assert rig.found(HOST) == {"a", "ab"}


def test_a_suspended_lease_asks_nobody_what_is_worth_it() -> None:
    rig = Rig(4, 4, admission=Only())
    lease = rig.acquire("ab")
    rig.commit(lease)
    rig.cache.suspend(lease, 5, NOW)
    rig.transfer.run()
    assert rig.pool(HOST).counts[State.FREE] == 1
    rig.cache.resume(lease, NOW)
    rig.transfer.run()
    assert lease.hit == 5


def test_the_admission_of_a_tier_hears_of_whole_paths_and_a_fork_tells_only_what_is_its_own() -> (
    None
):
    admission = Only()
    rig = Rig(8, 8, admission=admission)
    rig.write("ab")
    lease = rig.acquire("abc")
    rig.commit(lease)
    (fork,) = rig.cache.fork([(lease, 6, None)])
    step = Step(fork, 8, [BlockHash(b"abcd")], room=8)
    rig.cache.advance([step], NOW)
    rig.release(lease)
    rig.release(fork)
    assert admission.told == [chain("ab"), chain("abc"), [b"abcd"]]


def test_a_tier_tells_its_admission_what_it_gives_up_for_want_of_room() -> None:
    admission = Only("a", "b", "c")
    rig = Rig(4, 2, admission=admission)
    for name in "abc":
        (block,) = rig.place(DEVICE, name)
        rig.cache.chain.evict(DEVICE, 0, [block], NOW)
        rig.cache.loads.emit()
        rig.transfer.run()
    assert admission.lost == [b"a"]
