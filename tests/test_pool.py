"""One pool's bookkeeping: the five states and every transition between them."""

import pytest

from policies.base import Access
from policies.lru import LRU
from tierd.block import Block, BlockHash, BlockId, State
from tierd.daemon.pool import BlockPool
from tierd.errors import OutOfBlocks

NOW = Access(0.0)


def name(number: int) -> BlockHash:
    return BlockHash(b"%d" % number)


def make_pool(capacity: int) -> BlockPool:
    pool = BlockPool(LRU(0))
    pool.grow(range(capacity))
    return pool


def committed(pool: BlockPool, *numbers: int) -> list[Block]:
    """Commit a block under each name and let go of it."""
    blocks = pool.allocate(len(numbers))
    for block, number in zip(blocks, numbers, strict=True):
        assert pool.commit(block, name(number), None, NOW)
        pool.unpin(block)
    return blocks


def states(pool: BlockPool) -> dict[State, int]:
    return {state: count for state, count in pool.counts.items() if count}


def snapshot(pool: BlockPool) -> object:
    blocks = [(b.block_id, b.state, b.ref_cnt, b.key, b.parent) for b in pool]
    return blocks, pool.num_free, [b.block_id for b in pool.evictable()], states(pool)


def test_an_allocated_block_is_private_with_one_reference() -> None:
    pool = make_pool(3)
    first, second = pool.allocate(2)
    assert first.block_id != second.block_id
    assert (first.state, first.ref_cnt, first.key) == (State.PRIVATE, 1, None)
    assert states(pool) == {State.FREE: 1, State.PRIVATE: 2}


def test_a_private_block_is_free_when_its_last_holder_lets_go() -> None:
    pool = make_pool(1)
    (block,) = pool.allocate(1)
    pool.pin(block)
    pool.unpin(block)
    assert block.state is State.PRIVATE
    pool.unpin(block)
    assert states(pool) == {State.FREE: 1}


def test_many_blocks_are_held_and_let_go_of_at_once_as_one_by_one() -> None:
    pool = make_pool(3)
    (kept,) = committed(pool, 1)
    pool.pin(kept)
    own = pool.allocate(1)
    pool.pin_all([kept, None, *own], 2)
    assert [kept.ref_cnt, own[0].ref_cnt] == [3, 3]
    for _ in range(3):
        assert own[0].state is State.PRIVATE
        pool.unpin_all([None, kept, *own])
    assert kept.ref_cnt == 0
    assert pool.get(name(1)) is kept
    assert states(pool) == {State.FREE: 2, State.COMMITTED: 1}


def test_a_committed_block_is_findable_and_stays_when_its_holder_lets_go() -> None:
    pool = make_pool(1)
    (block,) = committed(pool, 1)
    assert pool.get(name(1)) is block
    assert (block.state, block.ref_cnt) == (State.COMMITTED, 0)
    assert pool.get(name(2)) is None


def test_a_block_that_is_loading_is_findable_and_lands_committed() -> None:
    pool = make_pool(1)
    (block,) = pool.allocate(1)
    pool.load(block, name(1), name(0), NOW)
    assert (pool.get(name(1)), block.state, block.parent) == (block, State.LOADING, name(0))
    assert pool.num_free == 0
    pool.landed(block)
    assert states(pool) == {State.COMMITTED: 1}


def test_a_load_that_fails_is_unfindable_at_once_and_free_when_its_waiters_are_gone() -> None:
    pool = make_pool(1)
    (block,) = pool.allocate(1)
    pool.load(block, name(1), None, NOW)
    pool.failed(block)
    assert pool.get(name(1)) is None
    assert (block.state, block.key) == (State.PRIVATE, None)
    pool.unpin(block)
    assert states(pool) == {State.FREE: 1}


def test_too_few_free_places_raise_and_change_nothing() -> None:
    pool = make_pool(3)
    committed(pool, 1, 2)
    before = snapshot(pool)
    with pytest.raises(OutOfBlocks, match="need 2 blocks, 1 are free"):
        pool.allocate(2)
    assert snapshot(pool) == before


def test_too_few_victims_raise_and_change_nothing() -> None:
    pool = make_pool(3)
    pool.pin(committed(pool, 1, 2)[0])
    before = snapshot(pool)
    with pytest.raises(OutOfBlocks, match="need 2 blocks to evict, 1 are not in use"):
        pool.victims(2)
    assert snapshot(pool) == before


def test_a_pinned_block_is_never_a_victim() -> None:
    pool = make_pool(3)
    blocks = committed(pool, 1, 2, 3)
    pool.pin(blocks[0])
    assert pool.victims(2) == blocks[1:]
    pool.unpin(blocks[0])
    assert pool.victims(3) == blocks


def test_a_loading_block_is_never_a_victim_even_if_nobody_waits() -> None:
    pool = make_pool(1)
    (block,) = pool.allocate(1)
    pool.load(block, name(1), None, NOW)
    pool.unpin(block)
    assert list(pool.evictable()) == []
    pool.landed(block)
    assert pool.victims(1) == [block]


def test_protection_is_not_use() -> None:
    pool = make_pool(2)
    blocks = committed(pool, 1, 2)
    pool.pin(blocks[0])
    pool.unpin(blocks[0])
    assert pool.victims(2) == blocks


def test_a_touched_path_is_given_up_last_and_tail_first() -> None:
    pool = make_pool(4)
    one, two, three, four = committed(pool, 1, 2, 3, 4)
    pool.touch([name(1), name(9), name(2), name(3)], NOW)  # nobody knows 9
    assert pool.victims(4) == [four, three, two, one]
    assert pool.hottest() == [one, two, three, four]


def test_an_evicted_block_is_free_and_unknown() -> None:
    pool = make_pool(2)
    block, _ = committed(pool, 1, 2)
    pool.evict(block)
    assert pool.get(name(1)) is None
    assert (block.state, block.key, block.parent) == (State.FREE, None, None)
    assert states(pool) == {State.FREE: 1, State.COMMITTED: 1}


def test_a_name_committed_twice_keeps_both_blocks_and_finds_the_first() -> None:
    pool = make_pool(2)
    first, second = pool.allocate(2)
    assert pool.commit(first, name(1), None, NOW)
    assert not pool.commit(second, name(1), None, NOW)
    assert pool.get(name(1)) is first
    assert (second.state, second.key, second.ref_cnt) == (State.PRIVATE, None, 1)


def test_a_forgotten_block_stays_with_its_holders_and_is_then_free() -> None:
    pool = make_pool(2)
    held, alone = committed(pool, 1, 2)
    pool.pin(held)
    pool.forget(held)
    pool.forget(alone)
    assert (pool.get(name(1)), pool.get(name(2))) == (None, None)
    assert (held.state, alone.state) == (State.PRIVATE, State.FREE)
    pool.unpin(held)
    assert pool.num_free == 2


def test_a_quarantined_block_is_of_no_use_until_it_is_thawed() -> None:
    pool = make_pool(1)
    (block,) = pool.allocate(1)
    pool.quarantine(block)
    assert (block.state, block.ref_cnt) == (State.QUARANTINED, 0)
    with pytest.raises(OutOfBlocks):
        pool.allocate(1)
    pool.thaw(block)
    assert pool.allocate(1) == [block]


def test_a_thawed_block_is_free_only_when_nobody_reads_it_any_more() -> None:
    pool = make_pool(1)
    (block,) = pool.allocate(1)
    pool.pin(block)
    pool.quarantine(block)
    pool.thaw(block)
    assert (block.state, block.ref_cnt) == (State.PRIVATE, 1)
    pool.unpin(block)
    assert block.state is State.FREE


def test_a_block_is_found_by_each_of_its_granules_as_long_as_it_is_findable() -> None:
    pool = make_pool(2)
    one, two = pool.allocate(2)
    pool.commit(one, name(3), None, NOW, [name(1), name(2)])
    pool.commit(two, name(5), None, NOW, [name(1), name(4)])
    assert pool.get(name(1)) is None
    assert [pool.covering(name(n)) for n in range(6)] == [None, two, one, one, two, two]
    pool.unpin(two)
    pool.evict(two)
    assert [pool.covering(name(n)) for n in range(2, 6)] == [one, one, None, None]


def test_a_pool_grows_and_gives_free_places_back() -> None:
    pool = make_pool(1)
    pool.grow([7, 9])
    assert (pool.capacity, pool.num_free) == (3, 3)
    pool.shrink([7])
    assert {block.block_id for block in pool.allocate(2)} == {0, 9}
    with pytest.raises(AssertionError, match="not free"):
        pool.shrink([9])


def test_a_pool_takes_up_what_a_former_life_left() -> None:
    pool = make_pool(4)
    (held,) = pool.allocate(1)
    first, second, absent = BlockId(1), BlockId(2), BlockId(9)
    found = [
        (first, name(1), name(0), ()),
        (second, name(1), None, ()),  # the name is known
        (first, name(2), None, ()),  # the place is taken
        (held.block_id, name(3), None, ()),
        (absent, name(4), None, ()),
    ]
    assert pool.adopt(found) == 1
    assert pool.adopt([(second, name(5), name(1), ())]) == 1
    assert states(pool) == {State.FREE: 1, State.PRIVATE: 1, State.COMMITTED: 2}
    assert [block.block_id for block in pool.allocate(1)] == [3]
    blocks = [(b.block_id, b.key, b.parent) for b in pool.victims(2)]
    assert blocks == [(first, name(1), name(0)), (second, name(5), name(1))]
    assert pool.get(name(2)) is pool.get(name(3)) is pool.get(name(4)) is None


def test_new_places_are_given_out_in_the_order_in_which_they_lie() -> None:
    pool = make_pool(5)
    assert [block.block_id for block in pool.allocate(3)] == [0, 1, 2]
    pool.grow([7, 8])
    assert [block.block_id for block in pool.allocate(4)] == [7, 8, 3, 4]


@pytest.mark.parametrize("verb", ["landed", "failed", "evict", "unpin", "quarantine", "thaw"])
def test_a_transition_from_the_wrong_state_is_refused(verb: str) -> None:
    pool = make_pool(1)
    (free,) = pool
    with pytest.raises(AssertionError):
        getattr(pool, verb)(free)


def test_a_leaving_place_leaves_when_it_is_free() -> None:
    pool = make_pool(4)
    held, other = pool.allocate(2)
    pool.leave([held.block_id, *(b.block_id for b in pool if b.state is State.FREE), 99])
    assert states(pool) == {State.PRIVATE: 2}
    pool.unpin(held)
    assert pool.at(held.block_id) is None
    assert states(pool) == {State.PRIVATE: 1}
    pool.unpin(other)
    assert states(pool) == {State.FREE: 1}


def test_places_that_stay_are_free_in_the_pool_again_those_that_are_gone_are_not() -> None:
    pool = make_pool(4)
    (held,) = pool.allocate(1)
    pool.leave(range(4))
    pool.stay(range(2))
    assert pool.capacity - pool.num_free == 1
    pool.gone(range(2, 4))
    pool.stay(range(4))
    pool.unpin(held)
    assert {block.block_id for block in pool} == {BlockId(0), BlockId(1)}
    pool.grow(range(2, 4))
    for block in pool.allocate(4):
        pool.unpin(block)
    assert states(pool) == {State.FREE: 4}


def test_a_pool_counts_what_each_of_its_parts_holds() -> None:
    pool = BlockPool(LRU(0), span=2)
    pool.grow(range(6))
    blocks = committed(pool, 1, 2, 3)
    assert [pool.live(range(at, at + 2)) for at in (0, 2, 4)] == [2, 1, 0]
    pool.evict(blocks[0])
    pool.pin(blocks[1])
    (target,) = [block for block in pool.allocate(3) if block.block_id == 4]
    pool.unpin(blocks[1])
    pool.relocate(blocks[1], target)
    assert pool.get(name(2)) is target
    assert [pool.live(range(at, at + 2)) for at in (0, 2, 4)] == [1, 2, 1]


def test_a_pool_tells_when_so_many_places_have_become_free() -> None:
    pool, told = make_pool(4), list[int]()
    blocks = pool.allocate(4)
    pool.when_freed(2, lambda: told.append(pool.num_free))
    for block in blocks:
        pool.unpin(block)
    assert told == [2]
