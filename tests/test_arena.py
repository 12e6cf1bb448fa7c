"""Extents and the block ids inside them: whole, never shared by two owners, never given twice."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tierd.daemon.arena import _WITHHELD, Arena

EXTENT = 8


def arena(extents: int) -> Arena:
    """One whose `grow` takes as little as it can: 15 extents at most have a step of one."""
    return Arena(extents * EXTENT, EXTENT)


def test_an_owner_gets_the_blocks_that_lie_whole_inside_its_run() -> None:
    memory = arena(4)
    assert memory.grow("a", 5) == [0, 1, 2]  # bytes 0 to 15 of two extents
    assert memory.nbytes_free == 2 * EXTENT


def test_an_adjacent_run_gains_the_block_across_the_edge() -> None:
    memory = arena(4)
    memory.grow("a", 5)
    assert memory.grow("a", 5) == [3, 4, 5]  # 3 lies at 15 to 19, across the edge at 16


def test_a_block_across_two_owners_is_nobodys() -> None:
    memory = arena(4)
    assert memory.grow("a", 5) == [0, 1, 2]
    assert memory.grow("b", 5) == [4, 5]  # 3 would begin in an extent of a's


def test_ids_are_offsets_in_blocks_of_the_owners_own_size() -> None:
    memory = arena(4)
    assert memory.grow("a", 8) == [0]
    assert memory.grow("b", 4) == [2, 3]


def test_an_exhausted_arena_gives_none_and_changes_nothing() -> None:
    memory = arena(2)
    assert memory.grow("a", 8) == [0]
    assert memory.grow("a", 8) == [1]
    assert memory.grow("a", 8) is None
    assert memory.grow("b", 8) is None
    assert memory.nbytes_free == 0


def test_a_block_larger_than_what_is_left_gives_none_and_takes_nothing() -> None:
    memory = arena(2)
    assert memory.grow("a", 17) is None
    assert memory.nbytes_free == memory.nbytes == 2 * EXTENT


def test_a_block_may_be_larger_than_an_extent() -> None:
    memory = arena(6)
    gained = memory.grow("a", 12)
    assert gained is not None
    assert gained[0] == 0


def test_a_large_block_is_found_wherever_it_is_aligned() -> None:
    memory = arena(15)
    assert memory.grow("a", 8) == [0]
    # Blocks of five extents begin at extents 0, 5 and 10: five extents from 1 on hold none.
    assert memory.grow("b", 5 * EXTENT) == [1]


def test_what_is_left_of_a_partial_extent_belongs_to_nobody() -> None:
    assert Arena(2 * EXTENT + 5, EXTENT).nbytes == 2 * EXTENT


def test_a_released_run_is_given_out_again() -> None:
    memory = arena(2)
    memory.grow("a", 8)
    memory.release("a")
    assert memory.nbytes_free == 2 * EXTENT
    assert memory.grow("b", 4) == [0, 1]


def test_releasing_an_owner_leaves_the_others_theirs() -> None:
    memory = arena(4)
    memory.grow("a", 8)
    memory.grow("b", 8)
    memory.release("b")
    assert memory.nbytes_free == 3 * EXTENT
    assert memory.grow("c", 8) == [1]


def test_two_owners_share_what_little_there_is() -> None:
    memory = arena(2)
    assert memory.grow("a", 4) == [0, 1]
    assert memory.grow("b", 4) == [2, 3]


@pytest.mark.parametrize("owners", ["aba", "bab", "ba"])
def test_a_gap_closed_between_runs_gives_no_id_twice(owners: str) -> None:
    memory, of_a = arena(6), []
    for owner in owners:
        gained = memory.grow(owner, 5)
        assert gained is not None
        of_a += gained if owner == "a" else []
    memory.release("b")
    while gained := memory.grow("a", 5):
        of_a += gained
    assert sorted(of_a) == list(range(6 * EXTENT // 5))  # the blocks across the edges too


def test_a_smaller_arena_withholds_what_is_free_and_then_what_is_given_back() -> None:
    memory = arena(6)
    memory.grow("a", 8)
    memory.grow("a", 8)
    assert memory.resize(EXTENT) == []
    assert (memory.nbytes, memory.nbytes_free, memory.nbytes_over) == (2 * EXTENT, 0, EXTENT)
    assert memory.withheld() == [(2, 6)]
    assert memory.grow("b", 8) is None
    memory.give_back("a", 0, 1)
    assert (memory.nbytes, memory.nbytes_over) == (EXTENT, 0)
    assert memory.withheld() == [(0, 1)]
    assert memory.withheld() == []
    memory.release("a")
    assert memory.nbytes_free == EXTENT


def test_a_larger_arena_gives_out_what_was_withheld_and_no_more_than_there_is() -> None:
    memory = arena(6)
    memory.resize(2 * EXTENT)
    assert memory.resize(5 * EXTENT) == [(2, 5)]
    assert memory.withheld() == [(5, 6)]  # the others are in use again: nobody may discard them
    assert memory.resize(9 * EXTENT) == [(5, 6)]
    assert memory.nbytes == memory.nbytes_free == 6 * EXTENT


Steps = list[tuple[int, bool, int]]


@settings(max_examples=300, deadline=None)
@given(
    extents=st.integers(0, 40),
    sizes=st.lists(st.integers(1, 30), min_size=1, max_size=3),
    steps=st.lists(
        st.tuples(st.integers(0, 2), st.integers(0, 9).map(bool), st.integers(0, 80)), max_size=40
    ),
)
def test_no_two_owners_ever_hold_a_byte_in_common(
    extents: int, sizes: list[int], steps: Steps
) -> None:
    memory, held = arena(extents), {owner: set[int]() for owner in range(len(sizes))}
    for number, grows, size in steps:
        if size <= 40:
            memory.resize(size * EXTENT)
        owner = number % len(sizes)
        if grows:
            gained = memory.grow(owner, sizes[owner]) or []
            assert held[owner].isdisjoint(gained)
            held[owner] |= set(gained)
        else:
            memory.release(owner)
            held[owner].clear()
        check_apart(memory, held, sizes)


def check_apart(memory: Arena, held: dict[int, set[int]], sizes: list[int]) -> None:
    """No block overlaps another, all lie inside, and only extents that are taken hold them."""
    spans = sorted(
        (block_id * sizes[owner], (block_id + 1) * sizes[owner], owner)
        for owner, ids in held.items()
        for block_id in ids
    )
    assert all(stop <= start for (_, stop, _), (start, _, _) in pairwise(spans))
    withheld = memory._num_held[_WITHHELD] * EXTENT
    assert all(stop <= memory.nbytes + withheld for _, stop, _ in spans)
    assert memory.nbytes_over >= 0
    touched: dict[int, int] = {}
    for start, stop, owner in spans:
        for extent in range(start // EXTENT, (stop - 1) // EXTENT + 1):
            assert touched.setdefault(extent, owner) == owner, "two owners in one extent"
    assert memory.nbytes - memory.nbytes_free >= len(touched) * EXTENT


@settings(max_examples=300, deadline=None)
@given(
    extents=st.integers(0, 40),
    size=st.integers(1, 50),
    other=st.integers(1, 50),
    turns=st.lists(st.booleans(), max_size=20),
)
def test_an_owner_left_alone_gets_every_block_of_the_arena(
    extents: int, size: int, other: int, turns: list[bool]
) -> None:
    memory, mine = arena(extents), list[int]()
    for turn in turns:
        gained = memory.grow(turn, size if turn else other) or []
        mine += gained if turn else []
    memory.release(False)
    while gained := memory.grow(True, size):
        mine += gained
    assert sorted(mine) == list(range(memory.nbytes // size))
