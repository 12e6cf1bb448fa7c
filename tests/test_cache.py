"""What an engine asks of the tiered cache, and gets: rooms, commits, releases, refusals."""

import pytest

from tests.rig import DEVICE, HOST, NOW, SSD, WINDOWED, Rig, chain
from tierd.block import State
from tierd.daemon.steps import Step
from tierd.errors import LeaseError, OutOfBlocks


def test_a_cold_prompt_gets_private_places_and_moves_nothing() -> None:
    rig = Rig(8)
    lease = rig.acquire("abc", 7, room=9)
    assert (lease.hit, lease.committed, lease.room, lease.ready) == (0, 0, 9, True)
    assert [block.state for block in lease.tables[0]] == [State.PRIVATE] * 5
    assert rig.transfer.copies == []


def test_shortage_names_the_shortest_group_and_changes_nothing() -> None:
    rig = Rig((8, 6), (8, 8), (8, 8), layout=WINDOWED)
    rig.place(DEVICE, "ab", group=0)
    rig.place(SSD, "abcd", group=0)
    rig.place(HOST, "abcd", group=1, first=2)
    holder = rig.acquire("xyz")
    before = rig.snapshot()
    with pytest.raises(OutOfBlocks, match=r"group 1 \(layers 1 to 1\): need 6 .* 'device'"):
        rig.acquire("abcd", room=16)
    assert rig.snapshot() == before
    assert rig.transfer.copies == []
    rig.release(holder)
    assert rig.acquire("abcd", room=16).hit == 8


def test_what_a_lease_holds_is_never_given_away() -> None:
    rig = Rig(4)
    rig.write("abc")
    rig.acquire("abc", 7)
    before = rig.snapshot()
    with pytest.raises(OutOfBlocks):
        rig.acquire("x")
    assert rig.snapshot() == before


def test_a_commit_freezes_full_blocks_under_their_names_and_parents() -> None:
    rig = Rig(8)
    lease = rig.acquire("ab", room=12)
    first, second, third, *_ = lease.tables[0]
    rig.cache.advance([Step(lease, 5, (), 0)], NOW)
    assert (first.key, first.parent) == (b"a", None)
    assert (second.key, second.parent) == (b"ab", b"a")
    assert third.state is State.PRIVATE
    rig.cache.advance([Step(lease, 6, [chain("abc")[-1]], 0)], NOW)
    assert (third.key, third.parent, lease.committed) == (b"abc", b"ab", 6)


def test_each_group_commits_at_its_own_block_size() -> None:
    rig = Rig((8, 8), layout=WINDOWED)
    lease = rig.acquire("abc")
    rig.commit(lease)
    assert rig.found(DEVICE, 0) == {"ab"}
    assert rig.found(DEVICE, 1) == {"a", "ab", "abc"}


def test_identical_content_is_kept_twice_and_known_once() -> None:
    rig = Rig(8)
    one, two = rig.acquire("ab"), rig.acquire("ab")
    rig.commit(one, two)
    assert rig.pool(DEVICE).get(chain("ab")[1]) is one.tables[0][1]
    assert two.tables[0][1].state is State.PRIVATE
    rig.release(two)
    assert rig.pool(DEVICE).counts[State.FREE] == 8 - 3
    rig.release(one)
    assert rig.acquire("ab").hit == 4


def test_committing_before_the_hit_is_ready_is_refused() -> None:
    rig = Rig(8, 8)
    rig.place(HOST, "ab")
    lease = rig.acquire("abc")
    before = rig.snapshot()
    with pytest.raises(LeaseError, match="ready"):
        rig.commit(lease)
    assert rig.snapshot() == before
    assert lease.hashes == chain("abc")
    rig.transfer.run()
    rig.commit(lease)
    assert rig.found(DEVICE) == {"a", "ab", "abc"}


def test_room_grows_before_the_hit_is_ready() -> None:
    rig = Rig(8, 8)
    rig.place(HOST, "ab")
    lease = rig.acquire("ab")
    [[added]] = rig.cache.advance([Step(lease, 0, (), 10)], NOW)
    assert (added.start, len(added.blocks)) == (3, 2)
    assert lease.tables[0][-2:] == added.blocks
    assert lease.room == 10


@pytest.mark.parametrize(
    ("committed", "hashes", "match"),
    [(8, [], "room for 5"), (6, [], "room for 5"), (5, [], None), (4, [b"x"], None)],
)
def test_only_what_there_is_room_for_is_committed(committed, hashes, match) -> None:
    rig = Rig(8)
    lease = rig.acquire("ab")
    if match is None:
        rig.cache.advance([Step(lease, committed, hashes, 0)], NOW)
        return
    before = rig.snapshot()
    with pytest.raises(LeaseError, match=match):
        rig.cache.advance([Step(lease, committed, hashes, 0)], NOW)
    assert rig.snapshot() == before


def test_a_commit_without_its_hashes_is_refused() -> None:
    rig = Rig(8)
    lease = rig.acquire("ab", room=12)
    before = rig.snapshot()
    with pytest.raises(LeaseError, match="hashes are missing"):
        rig.cache.advance([Step(lease, 6, (), 0)], NOW)
    assert rig.snapshot() == before


@pytest.mark.parametrize("fault", ["room", "commit", "released", "twice"])
def test_an_advance_is_all_or_nothing_over_its_batch(fault: str) -> None:
    rig = Rig(8)
    good, bad, gone = rig.acquire("ab"), rig.acquire("x"), rig.acquire("y")
    rig.release(gone)
    step = {
        "room": Step(bad, 0, (), 100),
        "commit": Step(bad, 4, (), 0),
        "released": Step(gone, 0, (), 0),
        "twice": Step(good, 0, (), 0),
    }[fault]
    before = rig.snapshot()
    with pytest.raises(OutOfBlocks if fault == "room" else LeaseError):
        rig.cache.advance([Step(good, 4, [b"abc"], 8), step], NOW)
    assert rig.snapshot() == before
    assert (good.committed, good.room, good.hashes) == (0, 5, chain("ab"))
    assert len(good.tables[0]) == 3


def test_an_advance_serves_every_step_of_its_batch() -> None:
    rig = Rig(8)
    one, two = rig.acquire("a"), rig.acquire("b")
    added = rig.cache.advance([Step(one, 2, (), 6), Step(two, 2, (), 4)], NOW)
    assert [[len(group.blocks) for group in step] for step in added] == [[1], [0]]
    assert rig.found(DEVICE) == {"a", "b"}


def test_a_released_path_is_given_up_tail_first_after_older_ones() -> None:
    rig = Rig(8)
    rig.write("xy")
    rig.write("abc")
    order = [block.key for block in rig.pool(DEVICE).evictable()]
    assert order == [b"xy", b"x", b"abc", b"ab", b"a"]
    rig.release(rig.acquire("xy"))
    order = [block.key for block in rig.pool(DEVICE).evictable()]
    assert order == [b"abc", b"ab", b"a", b"xy", b"x"]


def test_a_release_touches_no_block_that_did_not_serve_its_hit() -> None:
    rig = Rig((8, 16), layout=WINDOWED)
    rig.write("abcdef")
    rig.write("xy")
    rig.release(rig.acquire("abcdef"))  # its window sees the last two blocks only
    order = [block.key for block in rig.pool(DEVICE, 1).evictable()]
    assert order == [b"abcd", b"abc", b"ab", b"a", b"xy", b"x", b"abcdef", b"abcde"]


def test_a_released_lease_is_of_no_use() -> None:
    rig = Rig(8)
    lease = rig.acquire("ab")
    rig.release(lease)
    assert rig.pool(DEVICE).num_free == 8
    with pytest.raises(LeaseError, match="released"):
        rig.release(lease)
    with pytest.raises(LeaseError, match="released"):
        rig.cache.abandon(lease, NOW)


def test_abandoning_quarantines_only_what_the_engine_could_write() -> None:
    rig = Rig(8, 8)
    rig.write("ab")
    rig.place(HOST, "abc", first=2)
    lease = rig.acquire("abc", room=10)
    shared, loading, own = lease.tables[0][:2], lease.tables[0][2], lease.tables[0][3:]
    frozen = rig.cache.abandon(lease, NOW)
    assert frozen == [(0, block) for block in own]
    assert {block.state for block in own} == {State.QUARANTINED}
    assert [(block.state, block.ref_cnt) for block in shared] == [(State.COMMITTED, 0)] * 2
    assert loading.state is State.FREE  # its load was cancelled
    for group, block in frozen:
        rig.cache.thaw(0, group, block)
    assert rig.pool(DEVICE).num_free == 6


def test_a_chain_that_names_a_block_twice_is_refused_and_changes_nothing() -> None:
    rig = Rig(8, 8)
    rig.place(HOST, "a")
    before = rig.snapshot()
    with pytest.raises(LeaseError, match="twice"):
        rig.cache.acquire(chain("a") * 2, 5, 5, NOW)
    assert rig.snapshot() == before


def test_what_was_asked_and_found_is_counted() -> None:
    rig = Rig(8, 8, 8)
    rig.write("a")
    rig.place(HOST, "ab", first=1)
    rig.place(SSD, "abc", first=2)
    rig.acquire("abcd")
    counts = rig.cache.chain.counts
    assert (counts.requests, counts.tokens_asked, counts.tokens_hit) == (2, 3 + 9, 6)
    assert (counts.blocks_hit, counts.promoted) == ([1, 1, 1], 2)
