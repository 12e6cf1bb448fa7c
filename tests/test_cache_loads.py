"""Loads that several wait for, that are cancelled, or that fail: a shorter hit, no error (I6)."""

import pytest

from tests.rig import DEVICE, HOST, SSD, WINDOWED, Rig
from tierd.block import State
from tierd.daemon.copy import Copy, Outcome, Place


def test_two_requests_wait_for_one_load() -> None:
    rig = Rig(8, 8)
    rig.place(HOST, "ab")
    one, two = rig.acquire("ab"), rig.acquire("ab")
    assert len(rig.transfer.copies) == 2
    assert one.tables[0][:2] == two.tables[0][:2]
    assert not one.ready
    assert not two.ready
    rig.transfer.run()
    assert one.ready
    assert two.ready
    assert rig.told == [one, two]


def test_the_last_to_leave_cancels_the_load() -> None:
    rig = Rig(8, 8)
    rig.place(HOST, "ab")
    one, two = rig.acquire("ab"), rig.acquire("ab")
    rig.release(one)
    assert len(rig.transfer.pending) == 2
    rig.release(two)
    assert rig.transfer.pending == {}
    assert rig.pool(DEVICE).num_free == 8
    assert {(b.state, b.ref_cnt) for b in rig.pool(HOST) if b.key} == {(State.COMMITTED, 0)}
    assert rig.told == []


def test_a_load_that_has_begun_lands_though_nobody_waits_and_serves_the_next() -> None:
    rig = Rig(8, 8)
    rig.place(HOST, "a")
    lease = rig.acquire("a")
    (copy,) = rig.transfer.copies
    rig.transfer.begun.add(copy)
    rig.release(lease)
    assert (copy.dst.state, copy.dst.ref_cnt) == (State.LOADING, 0)
    late = rig.acquire("a")
    assert rig.transfer.copies == [copy]
    rig.transfer.run()
    assert late.ready


def test_what_was_begun_from_the_ssd_stays_in_host_memory_when_the_rest_is_cancelled() -> None:
    rig = Rig(8, 8, 8)
    rig.place(SSD, "a")
    lease = rig.acquire("a")
    rig.transfer.begun.add(rig.transfer.copies[0])
    rig.release(lease)
    rig.transfer.run()
    assert (rig.found(DEVICE), rig.found(HOST)) == (set(), {"a"})
    assert {block.ref_cnt for level in (HOST, SSD) for block in rig.pool(level)} == {0}


def fail(rig: Rig, name: str, outcome: Outcome = Outcome.FAILED) -> Copy:
    copy = next(c for c in rig.transfer.pending if c.key == name.encode())
    rig.transfer.end(copy, outcome)
    return copy


def test_a_failed_load_shortens_every_waiters_hit_and_gives_private_places() -> None:
    rig = Rig(12, 8)
    rig.place(HOST, "abc")
    one, two = rig.acquire("abc"), rig.acquire("abcd", room=12)
    fail(rig, "ab")
    for lease in (one, two):
        assert (lease.hit, lease.committed, lease.shortened) == (2, 2, True)
        assert lease.tables[0][0].key == b"a"
        assert {block.state for block in lease.tables[0][1:]} == {State.PRIVATE}
    assert (len(one.tables[0]), len(two.tables[0])) == (4, 6)
    assert not set(one.tables[0][1:]) & set(two.tables[0][1:])
    assert set(rig.told) == {one, two}
    rig.transfer.run()
    assert one.ready
    assert two.ready
    rig.commit(one)
    assert rig.found(DEVICE) == {"a", "ab", "abc"}


def test_a_load_that_fails_behind_a_shorter_hit_concerns_nobody() -> None:
    rig = Rig(8, 8)
    rig.place(HOST, "abc")
    lease = rig.acquire("abc")
    rig.transfer.begun |= set(rig.transfer.copies)
    fail(rig, "ab")
    table, rig.told = list(lease.tables[0]), []
    fail(rig, "abc")
    assert (lease.tables[0], lease.hit, rig.told) == (table, 2, [])


def test_where_no_private_places_are_left_the_room_ends_with_the_hit() -> None:
    rig = Rig(5, 8)
    rig.place(HOST, "abc")
    one, two = rig.acquire("abc"), rig.acquire("abc")
    fail(rig, "ab")
    rooms = sorted((lease.hit, lease.room, len(lease.tables[0])) for lease in (one, two))
    assert rooms == [(2, 2, 1), (2, 7, 4)]
    rig.transfer.run()
    for lease in (one, two):
        assert lease.ready
        rig.release(lease)
    assert {block.ref_cnt for block in rig.pool(DEVICE)} == {0}


@pytest.mark.parametrize("at_once", [False, True])
def test_a_corrupt_block_of_the_ssd_is_forgotten(at_once: bool) -> None:
    rig = Rig(8, 8, 8, at_once=at_once)
    bad = rig.place(SSD, "ab")[1]
    rig.transfer.corrupt = {Place(SSD, 0, bad.block_id)}
    lease = rig.acquire("ab")
    rig.transfer.run()
    assert (lease.hit, lease.ready) == (2, True)
    assert (rig.found(SSD), rig.found(HOST), rig.found(DEVICE)) == ({"a"}, {"a"}, {"a"})
    assert bad.state is State.FREE
    assert rig.cache.chain.counts.lost == 1
    assert rig.acquire("ab").hit == 2


def test_a_copy_that_fails_for_another_reason_leaves_its_source() -> None:
    rig = Rig(8, 8)
    rig.place(HOST, "a")
    rig.acquire("a")
    fail(rig, "a")
    assert (rig.found(HOST), rig.cache.chain.counts.lost) == ({"a"}, 0)


def test_a_failed_window_block_cuts_the_hit_in_every_group() -> None:
    rig = Rig((8, 12), (8, 12), layout=WINDOWED)
    rig.place(HOST, "abcdef", group=0)
    rig.place(HOST, "abcdef", group=1, first=4)
    lease = rig.acquire("abcdef")
    assert lease.hit == 12
    rig.transfer.end(next(c for c in rig.transfer.pending if c.group == 1), Outcome.FAILED)
    assert lease.hit == 0  # the window of no shorter hit was fetched
    assert [len(table) for table in lease.tables] == [4, 7]
    assert {block.state for table in lease.tables for block in table} == {State.PRIVATE}
    assert (lease.ready, rig.transfer.pending) == (True, {})
