"""The hit: how much of a prompt is known, group by group."""

import pytest

from tests.rig import DEVICE, HOST, SSD, WINDOWED, Rig, chain
from tierd.block import State


def test_a_known_prompt_is_served_in_place() -> None:
    rig = Rig(8)
    rig.write("abc")
    before = {block.key: block for block in rig.pool(DEVICE)}
    lease = rig.acquire("abc")
    assert (lease.hit, lease.ready) == (6, True)
    assert lease.tables[0][:3] == [before[key] for key in chain("abc")]
    assert lease.tables[0][3].state is State.PRIVATE
    assert rig.transfer.copies == []


def test_a_hit_ends_where_the_prompts_part() -> None:
    rig = Rig(16)
    rig.write("abc")
    assert rig.acquire("abxc").hit == 4
    assert rig.acquire("xabc").hit == 0


@pytest.mark.parametrize(("num_tokens", "hit"), [(1, 0), (2, 0), (3, 2), (6, 4), (7, 6), (8, 6)])
def test_the_last_token_is_always_computed(num_tokens: int, hit: int) -> None:
    rig = Rig(8)
    rig.write("abc")
    assert rig.acquire("abc", num_tokens).hit == hit


def test_a_hit_ends_at_any_granule_with_a_copy_of_the_block_it_ends_in() -> None:
    rig = Rig((16, 16), layout=WINDOWED)
    rig.write("abcdef")
    assert rig.acquire("abcdef").hit == 12
    assert rig.transfer.copies == []
    lease = rig.acquire("abcdex")
    assert lease.hit == 10  # five granules are known, two make a block of group 0
    (copy,) = rig.transfer.copies
    assert (copy.src.key, copy.private) == (b"abcdef", True)
    assert copy.dst is lease.tables[0][2]
    assert copy.dst.state is State.PRIVATE
    assert rig.acquire("abcdef", 12).hit == 10


def test_a_part_of_a_block_is_found_in_any_tier_and_copied_straight_from_there() -> None:
    rig = Rig((16, 16), (8, 8), (8, 8), layout=WINDOWED)
    rig.place(SSD, "abcdef", group=0)
    rig.place(DEVICE, "abcdef", group=1)
    lease = rig.acquire("abcx")
    assert lease.hit == 6
    assert rig.transfer.routes == [("ab", SSD, HOST), ("ab", HOST, DEVICE), ("abcd", SSD, DEVICE)]
    assert not lease.ready
    rig.transfer.run()
    assert lease.ready
    assert rig.found(HOST) == {"ab"}


def test_a_part_is_not_found_by_a_granule_that_differs() -> None:
    rig = Rig((16, 16), layout=WINDOWED)
    rig.place(DEVICE, "abcdef", group=0)
    rig.place(DEVICE, "abxdef", group=1)
    assert rig.acquire("abcdef").hit == 4
    assert rig.acquire("abxdef").hit == 4


def test_a_window_group_needs_only_its_window() -> None:
    rig = Rig((8, 8), layout=WINDOWED)
    rig.place(DEVICE, "abcdef", group=0)
    rig.place(DEVICE, "abcdef", group=1, first=4)  # 12 tokens; the window sees 8 to 11
    lease = rig.acquire("abcdef")
    assert (lease.hit, lease.ready) == (12, True)
    assert lease.tables[1][:4] == [None] * 4
    assert [block.key for block in lease.tables[1][4:6]] == chain("abcdef")[4:]


def test_a_gap_in_the_window_shortens_the_hit_to_before_it() -> None:
    rig = Rig((8, 8), layout=WINDOWED)
    rig.place(DEVICE, "abcdef", group=0)
    rig.place(DEVICE, "abcd", group=1, first=2)  # a window for 8 tokens, none for 12
    assert rig.acquire("abcdef").hit == 8


def test_a_full_attention_group_needs_every_block() -> None:
    rig = Rig((8, 8), layout=WINDOWED)
    rig.place(DEVICE, "abcdef", group=0, first=1)
    rig.place(DEVICE, "abcdef", group=1)
    assert rig.acquire("abcdef").hit == 0
