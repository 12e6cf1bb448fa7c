"""Sizing: the facts that a policy gets, the granule by default, and a choice that is kept."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from policies.block_size import Auto, Uniform
from tierd.daemon.config import BlocksConfig, Config, SsdConfig
from tierd.daemon.lengths import Lengths
from tierd.daemon.sizing import (
    ENOUGH_BURSTS,
    ENOUGH_REQUESTS,
    LENGTHS,
    MEMORY,
    SSD,
    choose,
    facts_of,
    keep,
    shapes_of,
)
from tierd.layout import KVLayout

PLAIN = KVLayout("m", 4, 2, 64, "float32", windows=(None, 512, None, 512))
CONFIG = Config(ssd=SsdConfig(path=Path("/nowhere")))
FAST = {"latency_s": 2e-4, "seconds_per_gib": 1.0, "bursts": ENOUGH_BURSTS}


def tenant(speeds: dict[str, Any] | None = None, lengths: dict[str, int] | None = None) -> Any:
    """A tenant's status with one namespace, whose blocks are of 16 KiB and 64 KiB."""
    layout = PLAIN.with_block_sizes([8, 32, 8, 32]).to_json()
    namespaces = [{"name": "m", "layout": layout, "speeds": speeds or {}}]
    memory = {"device": {"nbytes": 123 << 20}, "host": {}}
    facts = {"memory": memory, "ssd": {"nbytes": 1}}
    return {**facts, "lengths": lengths or {}, "namespaces": namespaces}


def test_before_anything_is_measured_there_are_priors() -> None:
    for status in (None, tenant(), tenant({"2>1": {**FAST, "bursts": ENOUGH_BURSTS - 1}})):
        facts = facts_of(CONFIG, status)
        assert facts.routes == [SSD, MEMORY]
        assert facts.lengths == LENGTHS


def test_routes_are_those_of_the_tiers_there_are() -> None:
    assert facts_of(Config()).routes == [MEMORY]
    assert facts_of(replace(CONFIG, host=None)).routes == [SSD]
    assert facts_of(Config(host=None)).routes == [SSD]


def test_a_tenant_has_its_own_part_of_the_tiers_that_it_has() -> None:
    assert facts_of(Config(), tenant()).memory_nbytes == 123 << 20
    assert facts_of(Config(), tenant()).routes == [SSD, MEMORY]
    assert facts_of(CONFIG, {**tenant(), "ssd": {}}).routes == [MEMORY]
    assert facts_of(Config()).memory_nbytes == Config().device.size


def test_lengths_count_once_there_are_enough() -> None:
    few, enough = ({"100": n, "9": 1} for n in (ENOUGH_REQUESTS - 2, ENOUGH_REQUESTS - 1))
    assert facts_of(CONFIG, tenant(lengths=few)).lengths == LENGTHS
    assert facts_of(CONFIG, tenant(lengths=enough)).lengths == {100: ENOUGH_REQUESTS - 1, 9: 1}


def test_a_measured_route_takes_what_its_bursts_took() -> None:
    route, memory = facts_of(CONFIG, tenant({"2>1": FAST})).routes
    assert memory == MEMORY
    assert route.latency == 2e-4
    block = (16384 + 65536) / 2
    took = route.seconds_per_block + block * route.seconds_per_byte
    assert took == pytest.approx(block / 2**30)
    assert route.seconds_per_byte > 0


def test_a_route_that_is_hardly_slower_than_its_blocks_alone_still_has_bytes_that_cost() -> None:
    for seconds_per_gib in (1e-3, 1e-1, 10.0):
        route = facts_of(
            CONFIG, tenant({"1>0": {**FAST, "seconds_per_gib": seconds_per_gib}})
        ).routes[1]
        assert route.seconds_per_byte >= seconds_per_gib / 2**30 / 4
        assert 0 <= route.seconds_per_block <= MEMORY.seconds_per_block


def test_of_two_namespaces_the_one_that_was_measured_most_counts() -> None:
    status = tenant({"1>0": {**FAST, "latency_s": 1.0}})
    status["namespaces"] += tenant({"1>0": {**FAST, "latency_s": 2.0, "bursts": 99}})["namespaces"]
    status["namespaces"] += tenant({"1>0": {**FAST, "latency_s": 3.0}})["namespaces"]
    assert facts_of(CONFIG, status).routes[1].latency == 2.0


def test_layers_are_told_with_their_bytes_and_windows() -> None:
    shapes = shapes_of(PLAIN)
    assert [shape.window for shape in shapes] == [None, 512, None, 512]
    assert {shape.nbytes_per_token for shape in shapes} == {PLAIN.nbytes_per_token() / 4}
    assert [shape.index for shape in shapes_of(replace(PLAIN, windows=()))] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("size", "step"), [(1, 1), (16, 16), (24, 12), (64, 16), (20, 10), (17, 17), (12, 12), (30, 15)]
)
def test_by_default_a_granule_is_a_block_or_a_part_of_it_near_16(size: int, step: int) -> None:
    layout = choose(PLAIN, Uniform(size), facts_of(CONFIG))
    assert layout.hash_step == step
    # The same root as ever where nothing is new.
    assert layout.granule == (0 if step == size else step)


def test_a_granule_that_is_asked_for_is_the_one() -> None:
    told = facts_of(replace(CONFIG, blocks=BlocksConfig(granule=4)))
    assert choose(PLAIN, Uniform(64), told).granule == 4
    assert choose(replace(PLAIN, granule=2), Uniform(64), told).granule == 2
    assert (
        choose(replace(PLAIN, granule=48), Auto(), facts_of(CONFIG)).groups[0].block_size % 48 == 0
    )


def test_what_is_kept_is_the_same_model_with_groups() -> None:
    layout = PLAIN.with_block_sizes([64] * 4)
    fine = replace(layout, granule=8)
    others = [PLAIN, replace(layout, salt="x"), replace(layout, num_ranks=2)]
    assert keep(PLAIN, None, others) is None
    assert keep(PLAIN, None, [*others, fine, layout]) is fine
    assert keep(PLAIN, 16, [fine]) is None
    assert keep(PLAIN, 8, [layout, fine]) is fine
    assert keep(replace(PLAIN, granule=8), None, [layout, fine]) is fine
    assert keep(replace(PLAIN, granule=4), 8, [layout, fine]) is None


def test_lengths_are_counted_by_ranges_whose_middle_is_near() -> None:
    lengths = Lengths()
    for number in range(1, 5000):
        lengths.add(number)
        assert sum(lengths.counts().values()) == number
    counts = lengths.counts()
    assert len(counts) < 50
    assert list(counts) == sorted(counts)
    for number in (1, 2, 3, 7, 8, 100, 4000, 10**6, 2**32):
        lengths = Lengths()
        lengths.add(number)
        (middle,) = lengths.counts()
        assert abs(middle - number) <= number / 8
