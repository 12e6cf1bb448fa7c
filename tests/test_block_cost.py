"""What a block size costs, and the size that `auto` chooses for it."""

from dataclasses import replace

import pytest

from policies.base import LayerShape, RouteFacts, SizingFacts
from policies.block_cost import ENTRY_NBYTES, ENTRY_S, LayerKind, cost_of, kinds_of
from policies.block_size import Auto
from policies.size_testing import BlockSizePolicyTests

SSD = RouteFacts(latency=1e-4, seconds_per_block=4e-5, seconds_per_byte=5e-10)
MEMORY = RouteFacts(latency=1e-5, seconds_per_block=5e-6, seconds_per_byte=5e-11)
FACTS = SizingFacts({1000: 1}, [SSD, MEMORY])
FULL = LayerKind((0, 1), 4096, None)
WINDOW = replace(FULL, window=100)
PER_BYTE = 5.5e-10


class TestAuto(BlockSizePolicyTests):
    def make(self, num_layers: int) -> Auto:
        return Auto()


def layers(count: int, nbytes: int = 1024, window: int | None = None) -> list[LayerShape]:
    return [LayerShape(index, nbytes, window) for index in range(count)]


def size(facts: SizingFacts, nbytes: int = 1024, window: int | None = None, **options: int) -> int:
    """What `auto` chooses for eight equal layers."""
    sizes = set(Auto(**options).sizes(layers(8, nbytes, window), facts))
    assert len(sizes) == 1
    return sizes.pop()


def test_layers_are_of_a_kind_by_their_window() -> None:
    mixed = [LayerShape(i, 100, 64 if i % 3 else None) for i in range(6)]
    assert kinds_of(mixed) == [LayerKind((0, 3), 200, None), LayerKind((1, 2, 4, 5), 400, 64)]


def test_the_terms_are_those_of_the_formula() -> None:
    cost = cost_of(64, FULL, FACTS)
    blocks, nbytes = (1000 + 63 / 2) / 64, 64 * 4096
    assert cost.blocks == pytest.approx(blocks)
    assert cost.tail == pytest.approx(63 / 2 * 4096 * PER_BYTE)
    copied = 5e-6 + nbytes * 5e-11
    assert cost.shared == pytest.approx(0.75 * (copied + 24 * 4096 * PER_BYTE))
    assert cost.table == pytest.approx(blocks * (ENTRY_S + (ENTRY_NBYTES + 3 * 109) * PER_BYTE))
    assert cost.transfer == pytest.approx(1.1e-4 + blocks * 4.5e-5 + 1000 * 4096 * PER_BYTE)
    assert cost.total == cost.tail + cost.shared + cost.table + cost.transfer


def test_blocks_of_one_granule_are_never_shared_in_part() -> None:
    assert cost_of(16, FULL, FACTS).shared == 0
    assert cost_of(16, FULL, replace(FACTS, granule=1)).shared > 0
    assert cost_of(64, FULL, replace(FACTS, granule=64)).shared == 0


def test_a_window_holds_its_tokens_and_what_its_first_block_has_before_them() -> None:
    assert cost_of(16, WINDOW, FACTS).blocks == pytest.approx(115 / 16)
    assert cost_of(16, WINDOW, replace(FACTS, lengths={100: 1})).blocks == pytest.approx(107.5 / 16)
    assert cost_of(512, WINDOW, FACTS).tail == pytest.approx((611 - 100) * 4096 * PER_BYTE)


def test_a_request_shorter_than_a_block_still_takes_one() -> None:
    assert cost_of(512, FULL, replace(FACTS, lengths={10: 1})).blocks == 1


def test_padding_to_whole_pages_is_waste() -> None:
    thin = LayerKind((0,), 4, None)
    assert cost_of(16, thin, FACTS).tail > 10 * cost_of(1024, thin, FACTS).tail


def test_the_lengths_count_by_how_often_they_were_seen() -> None:
    one, other = (cost_of(64, FULL, replace(FACTS, lengths={n: 1})) for n in (1000, 5000))
    mean = cost_of(64, FULL, replace(FACTS, lengths={1000: 3, 5000: 1}))
    assert mean.total == pytest.approx((3 * one.total + other.total) / 4)


def test_the_best_size_is_near_the_root_that_the_books_have() -> None:
    # Fixed cost a block f, waste a token w: b * b * w = n * f, if no block is shared in part.
    facts = replace(FACTS, routes=[replace(SSD, latency=0.0)], lengths={16000: 1}, granule=1)
    waste = 8192 * SSD.seconds_per_byte * (1 / 2 + 1 + 1 / 2)
    best = (16000 * (4e-5 + ENTRY_S) / waste) ** 0.5
    assert best / 2**0.5 <= size(facts) <= best * 2**0.5


def test_what_makes_blocks_dear_makes_them_larger_and_what_makes_waste_dear_smaller() -> None:
    middle = size(FACTS)
    assert 16 < middle < 512
    assert size(replace(FACTS, lengths={100_000: 1})) > middle
    assert size(replace(FACTS, lengths={50: 1})) < middle
    assert size(replace(FACTS, routes=[replace(SSD, seconds_per_block=1e-3)])) > middle
    assert size(replace(FACTS, routes=[replace(SSD, seconds_per_byte=1e-8)])) < middle
    assert size(FACTS, nbytes=16384) < middle
    assert size(FACTS, window=64) < middle


def test_kinds_have_sizes_of_their_own() -> None:
    mixed = [LayerShape(i, 1024, None if i % 6 == 5 else 512) for i in range(18)]
    sizes = Auto().sizes(mixed, FACTS)
    assert sizes[0] < sizes[5]
    assert sizes == [sizes[5] if i % 6 == 5 else sizes[0] for i in range(18)]


def test_a_layer_is_known_by_its_index() -> None:
    mixed = [LayerShape(i, 1024, None if i % 6 == 5 else 512) for i in range(18)]
    assert Auto().sizes(mixed[::-1], FACTS) == Auto().sizes(mixed, FACTS)[::-1]


@pytest.mark.parametrize("granule", [1, 3, 24, 100, 512])
def test_every_size_is_a_multiple_of_the_granule_and_within_the_limits(granule: int) -> None:
    chosen = size(replace(FACTS, granule=granule))
    assert chosen % granule == 0
    assert 16 <= chosen <= 512


def test_a_granule_beyond_the_limits_is_refused() -> None:
    with pytest.raises(ValueError, match="no multiple of the granule, 600, is from 16 to 512"):
        size(replace(FACTS, granule=600))


def test_a_small_tier_has_small_blocks() -> None:
    small = size(replace(FACTS, memory_nbytes=2 << 20))
    assert 64 * small * 8192 <= 2 << 20 or small == 16
    assert small < size(FACTS)


def test_the_options_are_limits() -> None:
    assert size(FACTS, smallest=8, largest=8) == 8
    assert size(replace(FACTS, lengths={10**6: 1}), smallest=48, largest=100) == 96
    with pytest.raises(ValueError, match="smallest = 32 is above largest = 16"):
        Auto(smallest=32, largest=16)
    with pytest.raises(ValueError, match="largest = 5000 is not an integer from 1 to 4096"):
        Auto(largest=5000)
