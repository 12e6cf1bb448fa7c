"""Forks, truncation, published tails and suspended leases as the planner sees them."""

import pytest

from tests.rig import DEVICE, HOST, NOW, SSD, WINDOWED, Rig, chain
from tierd.block import BlockHash, State
from tierd.daemon.copy import Outcome
from tierd.daemon.lease import Lease
from tierd.daemon.steps import Step
from tierd.errors import LeaseError, OutOfBlocks
from tierd.layout import KVLayout, LayerGroup

HALVES = KVLayout("m", 1, 1, 1, "float32", (LayerGroup((0,), 4),), granule=2)
PART = "abcx"  # of WINDOWED: its first three granules end inside the second block of group 0


def known(rig: Rig) -> None:
    rig.place(DEVICE, "abcd", group=0)
    rig.place(DEVICE, "abcd", group=1)


def fork(rig: Rig, lease: Lease, num_tokens: int) -> Lease:
    return rig.cache.fork([(lease, num_tokens, rig.told.append)])[0]


def extend(rig: Rig, lease: Lease, room: int) -> None:
    rig.cache.advance([Step(lease, 0, room=room)], NOW)


def test_a_place_that_is_filled_again_waits_for_its_own_copy() -> None:
    rig = Rig((3, 6), layout=WINDOWED)
    known(rig)
    first = rig.acquire(PART, 7)
    (old,) = rig.transfer.copies
    rig.transfer.begun.add(old)
    rig.release(first)  # the copy goes on, into a place that is nobody's
    second = rig.acquire(PART, 7)
    new = rig.transfer.copies[-1]
    assert new.dst is old.dst
    rig.transfer.end(old)
    assert not second.ready
    rig.transfer.end(new)
    assert second.ready


def test_a_part_that_does_not_arrive_shortens_the_hit_to_before_its_block() -> None:
    rig = Rig(6, layout=HALVES)
    rig.place(DEVICE, "abcd")
    lease = rig.acquire(PART)
    assert lease.hit == 6
    rig.transfer.end(rig.transfer.copies[0], Outcome.FAILED)
    assert (lease.hit, lease.ready, lease.shortened) == (4, True, True)
    assert all(lease.tables[0])
    rig.release(lease)
    assert {block.ref_cnt for pool in rig.tiers[DEVICE].pools for block in pool} == {0}


def test_a_second_failure_does_not_lengthen_the_hit_again() -> None:
    rig = Rig((6, 8), (6, 8), layout=WINDOWED)
    rig.place(HOST, "abcd", group=0)
    rig.place(HOST, "abcd", group=1)
    lease = rig.acquire(PART)
    whole, part, *_ = rig.transfer.copies
    assert (whole.key, part.key) == (b"ab", b"abcd")
    rig.transfer.end(whole, Outcome.FAILED)
    assert lease.hit == 0
    rig.transfer.end(part, Outcome.FAILED)
    assert lease.hit == 0


def test_a_fork_may_not_be_made_of_what_is_not_there_yet() -> None:
    rig = Rig(8, 8)
    rig.place(HOST, "ab")
    lease = rig.acquire("ab")
    before = rig.snapshot()
    with pytest.raises(LeaseError, match="not ready"):
        fork(rig, lease, 2)
    assert rig.snapshot() == before


@pytest.mark.parametrize("num_tokens", [-1, 6])
def test_a_fork_is_of_tokens_that_the_lease_has_room_for(num_tokens: int) -> None:
    rig = Rig(8)
    lease = rig.acquire("ab")
    with pytest.raises(LeaseError, match=f"cannot fork {num_tokens} tokens of a lease of 5"):
        fork(rig, lease, num_tokens)


def test_a_fork_that_finds_no_place_for_its_copy_has_lost_nothing() -> None:
    rig = Rig(3)
    lease = rig.acquire("ab")
    child = fork(rig, lease, 5)
    before = rig.snapshot()
    with pytest.raises(OutOfBlocks):
        extend(rig, child, 6)
    assert rig.snapshot() == before
    rig.release(lease)
    extend(rig, child, 6)  # it is the last that holds it
    assert rig.transfer.copies == []


def test_what_a_fork_has_is_copied_before_its_source_writes_there_again() -> None:
    rig = Rig(8, at_once=True)
    lease = rig.acquire("ab")
    child = fork(rig, lease, 5)
    assert rig.cache.truncate([(lease, 4)]) == [4]
    assert len(lease.tables[0]) == 2
    extend(rig, lease, 5)
    assert lease.tables[0][2] is not child.tables[0][2]


def test_a_truncation_within_what_is_its_own_keeps_the_room() -> None:
    rig = Rig(8)
    lease = rig.acquire("ab", room=12)
    assert rig.cache.truncate([(lease, 3)]) == [12]
    assert lease.hashes == chain("a")


def test_a_suspended_lease_keeps_what_it_has_from_eviction() -> None:
    rig = Rig(3, 3, at_once=True)
    lease = rig.acquire("ab")
    rig.commit(lease)
    rig.cache.suspend(lease, 5, NOW)
    assert rig.pool(HOST).counts[State.PRIVATE] == 1
    rig.write("xy")
    rig.write("uv")  # there is no place below for these: what is suspended does not give way
    rig.cache.resume(lease, NOW)
    assert (lease.hit, lease.room, lease.ready) == (5, 5, True)
    assert [block.key for block in lease.tables[0]] == [*chain("ab"), None]


def test_what_is_on_top_still_is_taken_there_when_a_lease_comes_back() -> None:
    rig = Rig(8, 8, at_once=True)
    lease = rig.acquire("ab")
    rig.commit(lease)
    blocks = lease.tables[0][:2]
    rig.cache.suspend(lease, 4, NOW)
    number = len(rig.transfer.copies)
    rig.cache.resume(lease, NOW)
    assert lease.tables[0] == blocks
    assert len(rig.transfer.copies) == number


@pytest.mark.parametrize(("fails", "hit"), [(b"a", 0), (b"ab", 2), (None, 4)])
def test_what_did_not_get_below_is_a_shorter_hit(fails: bytes | None, hit: int) -> None:
    rig = Rig(3, 8)
    lease = rig.acquire("ab")
    rig.commit(lease)
    rig.cache.suspend(lease, 5, NOW)
    for copy in list(rig.transfer.pending):
        rig.transfer.end(copy, Outcome.FAILED if copy.key == fails else Outcome.DONE)
    rig.write("xyz"[:2])  # so that nothing of it is left on top
    rig.cache.resume(lease, NOW)
    rig.transfer.run()
    assert (lease.hit, lease.room) == (hit, hit)
    rig.release(lease)
    assert {block.ref_cnt for tier in rig.tiers for block in tier.pools[0]} == {0}


def test_where_host_memory_is_full_of_what_is_held_a_lease_goes_to_the_ssd() -> None:
    rig = Rig(8, 1, 8, at_once=True)
    (held,) = rig.pool(HOST).allocate(1)
    lease = rig.acquire("ab")
    rig.cache.suspend(lease, 5, NOW)
    assert rig.pool(SSD).counts[State.PRIVATE] == 3
    assert held.state is State.PRIVATE


def test_a_suspension_without_room_below_changes_nothing() -> None:
    rig = Rig(8, 2)
    lease = rig.acquire("ab")
    before = rig.snapshot()
    with pytest.raises(OutOfBlocks, match="tier 'host'"):
        rig.cache.suspend(lease, 5, NOW)
    assert rig.snapshot() == before


def test_a_published_tail_is_found_and_whoever_goes_on_copies_it() -> None:
    rig = Rig((8, 8), layout=WINDOWED, at_once=True)
    lease = rig.acquire("abc", 6)
    rig.cache.advance([Step(lease, 6, publish=True)], NOW)
    assert (lease.room, lease.committed) == (6, 6)
    tail = lease.tables[0][1]
    assert (tail.key, tail.state, list(tail.inner)) == (b"abc", State.COMMITTED, [])
    assert rig.acquire("abcz").hit == 6
    extend(rig, lease, 8)
    assert lease.tables[0][1] is not tail


def test_only_who_writes_a_tail_publishes_it() -> None:
    rig = Rig((8, 8), layout=WINDOWED, at_once=True)
    lease = rig.acquire("abc", 6)
    child = fork(rig, lease, 6)
    with pytest.raises(LeaseError, match="extended before its tail is published"):
        rig.cache.advance([Step(child, 6, publish=True)], NOW)
    extend(rig, child, 7)
    rig.cache.advance([Step(child, 6, publish=True)], NOW)
    assert child.tables[0][1].key == BlockHash(b"abc")
    assert lease.tables[0][1].state is State.PRIVATE


def test_a_hit_cut_short_on_the_way_back_leaves_no_shared_tail_to_write() -> None:
    rig = Rig(2, 8, layout=HALVES)
    lease = rig.acquire("abc", 6)
    rig.cache.advance([Step(lease, 6, publish=True)], NOW)
    rig.cache.suspend(lease, 6, NOW)
    rig.transfer.run()
    rig.release(rig.acquire("xyz", 6))  # nothing of it is left on top
    rig.cache.resume(lease, NOW)
    whole, tail = list(rig.transfer.pending)
    assert (whole.key, tail.key) == (b"ab", b"abc")
    rig.transfer.end(whole, Outcome.FAILED)
    rig.transfer.run()
    assert (lease.hit, lease.room) == (0, 6)
    assert [block.state for block in lease.tables[0]] == [State.PRIVATE] * 2


def test_a_place_given_up_under_pressure_while_it_is_filled_is_nobodys() -> None:
    rig = Rig(2, 4, layout=HALVES)
    rig.place(HOST, "abcd")
    lease = rig.acquire(PART, 7)
    whole, part = rig.transfer.copies
    rig.transfer.begun.add(part)
    rig.pool(DEVICE).pin(whole.dst)  # somebody else holds it, so that there is no other place
    rig.transfer.end(whole, Outcome.FAILED)
    assert (lease.hit, lease.room) == (0, 0)
    assert [block for _, block in lease.parked] == [part.dst]
    extend(rig, lease, 0)  # it has heard so
    assert part.dst.state is State.FREE
    (place,) = rig.pool(DEVICE).allocate(1)
    assert place is part.dst
    assert rig.cache.loads.idle
