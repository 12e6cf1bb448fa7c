"""How fast a route is, from what its bursts took; and which hit is the fastest for that."""

import random
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import pytest

from storage.base import BlockFault, CorruptBlock
from tests.bench import DEVICE, HOST, SSD, Bench, turn
from tierd.daemon.speed import Route, RouteSpeed, Speeds, fastest_hit

MB = 10**6
LATENCY, RATE = 0.002, 1e-9  # 2 ms, then 1 GB/s


class Clock:
    """Seconds that pass when told."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def took(nbytes: int, latency: float = LATENCY, rate: float = RATE) -> float:
    return latency + nbytes * rate


def measured(latency: float = LATENCY, rate: float = RATE) -> RouteSpeed:
    """A route that has always been exactly so fast."""
    speed = RouteSpeed()
    for blocks in (1, 16, 4, 9) * 8:
        speed.took(blocks * MB, took(blocks * MB, latency, rate))
    return speed


def test_latency_and_bandwidth_are_told_apart_by_bursts_of_different_sizes() -> None:
    speed = measured()
    assert speed.latency == pytest.approx(LATENCY)
    assert speed.seconds_per_byte == pytest.approx(RATE)
    loads = speed.seconds(np.array([0, MB, 100 * MB]))
    assert loads.tolist() == pytest.approx([0.0, 0.003, 0.102])


def test_bursts_of_one_size_have_no_latency_of_their_own() -> None:
    speed = RouteSpeed()
    for _ in range(20):
        speed.took(4 * MB, took(4 * MB))
    assert speed.latency == 0.0
    assert speed.seconds(np.array([8 * MB])).tolist() == pytest.approx([2 * took(4 * MB)])


def test_a_route_that_was_never_measured_takes_no_time() -> None:
    assert RouteSpeed().seconds(np.array([MB])).tolist() == [0.0]


def test_what_is_under_way_comes_first() -> None:
    speed = measured()
    speed.nbytes = 50 * MB
    assert speed.seconds(np.array([0, MB])).tolist() == pytest.approx([0.0, 0.053])


@pytest.mark.parametrize("seed", range(5))
def test_noise_and_accidents_leave_it_about_right(seed: int) -> None:
    speed, chance = RouteSpeed(), random.Random(seed)
    for number in range(400):
        nbytes = chance.randint(1, 64) * MB
        seconds = took(nbytes) * chance.uniform(0.8, 1.25)
        speed.took(nbytes, 1000 * seconds if number % 40 == 20 else seconds)
    expected = took(32 * MB)
    found = float(speed.seconds(np.array([32 * MB]))[0])
    assert 0.6 * expected < found < 1.7 * expected


def test_a_route_that_becomes_slower_for_good_is_found_out() -> None:
    speed = measured()
    for blocks in (1, 16, 4, 9) * 30:
        speed.took(blocks * MB, took(blocks * MB, rate=20 * RATE))
    assert speed.seconds_per_byte == pytest.approx(20 * RATE, rel=0.1)


def test_a_latency_that_noise_suggests_is_never_negative_nor_all_of_it() -> None:
    small_is_fast, large_is_fast = RouteSpeed(), RouteSpeed()
    for _ in range(10):
        small_is_fast.took(MB, 0.0001)
        small_is_fast.took(10 * MB, 1.0)
        large_is_fast.took(MB, 1.0)
        large_is_fast.took(10 * MB, 0.0001)
    assert small_is_fast.latency == 0.0
    assert large_is_fast.seconds_per_byte > 0


def test_batches_that_overlap_are_one_burst() -> None:
    clock, route = Clock(), (SSD, HOST)
    speeds = Speeds(clock)
    for _ in range(3):
        speeds.begin(route, MB)
    for _ in range(3):
        clock.now += 1.0
        speeds.end(route, MB, moved=True)
    clock.now += 50.0  # idle
    assert speeds.routes[route].bursts == 1
    assert speeds.routes[route].nbytes == 0
    assert speeds.routes[route].seconds_per_byte == pytest.approx(3.0 / (3 * MB))


def test_a_burst_that_does_not_end_is_measured_in_pieces_without_latency() -> None:
    clock, route = Clock(), (SSD, HOST)
    speeds = Speeds(clock)
    speeds.begin(route, MB)
    clock.now += 0.5  # the latency
    for number in range(160):
        speeds.begin(route, MB)
        clock.now += 0.001 * (1 + number % 2)
        speeds.end(route, MB, moved=True)
    speed = speeds.routes[route]
    assert speed.bursts == 5
    assert speed.seconds_per_byte == pytest.approx(0.0015 / MB, rel=0.01)
    assert speed.latency == pytest.approx(0.5, rel=0.01)


def test_what_did_not_move_says_nothing() -> None:
    clock, route = Clock(), (SSD, HOST)
    speeds = Speeds(clock)
    speeds.begin(route, MB)
    speeds.begin(route, MB)
    speeds.end(route, MB, moved=False)
    speeds.end(route, MB, moved=True)
    assert speeds.routes[route] == RouteSpeed()


async def test_a_transfer_measures_its_routes() -> None:
    bench = Bench()
    clock = Clock()
    bench.transfer.speeds = Speeds(clock)
    bench.copy((SSD, 5), (HOST, 1))
    bench.copy((SSD, 6), (HOST, 2))
    await turn()
    assert bench.transfer.speeds.routes[(SSD, HOST)].nbytes == 16
    clock.now += 8.0
    await bench.log[0].end()
    speed = bench.transfer.speeds.routes[(SSD, HOST)]
    assert (speed.nbytes, speed.bursts, speed.seconds_per_byte) == (0, 1, 0.5)


async def test_a_read_that_fails_is_not_measured() -> None:
    bench = Bench()
    bench.copy((SSD, 5), (DEVICE, 1))
    await turn()
    await bench.log[0].end(BlockFault({5: CorruptBlock("bad")}))
    assert bench.transfer.speeds.routes[(SSD, DEVICE)] == RouteSpeed()


# -- the fastest hit -----------------------------------------------------------------------------

HITS = [400, 300, 200, 100, 0]
Below = npt.NDArray[np.int64]


def below(device: int = 0, host: int = 0, ssd: int = 0) -> Below:
    """MB by level of `HITS`, for a prompt whose first blocks lie so: 100 tokens a block of 1 MB."""
    levels = [0] * device + [1] * host + [2] * ssd
    rows = [[levels[: hit // 100].count(level) for hit in HITS] for level in range(3)]
    return np.array([[0] * 5, rows[1], rows[2]]) * MB


def choice(of: Below, prefill: float, **speeds: RouteSpeed) -> int:
    names: Mapping[str, Route] = {"host": (1, 0), "ssd": (2, 1)}
    routes = {names[name]: speed for name, speed in speeds.items()}
    return fastest_hit(HITS, of, 401, prefill, routes)


def test_what_loads_faster_than_it_is_computed_is_loaded() -> None:
    # A block is loaded in 1 ms; 100 tokens are computed in 10 ms.
    assert choice(below(host=4), 1e4, host=measured()) == 400


def test_what_is_computed_faster_than_it_loads_is_computed() -> None:
    # 100 tokens in 0.1 ms.
    assert choice(below(host=4), 1e6, host=measured()) == 0


def test_what_the_device_tier_holds_costs_nothing() -> None:
    assert choice(below(device=2, host=2), 1e6, host=measured()) == 200
    assert choice(below(device=4), 1e9, host=measured()) == 400


def test_the_rest_of_a_hit_is_loaded_only_if_all_of_it_is_worth_the_latency() -> None:
    # Computing 100 tokens takes 1.5 ms, and loading them 1 ms after a latency of 2 ms.
    assert choice(below(device=3, host=1), 1e5 / 1.5, host=measured()) == 300
    assert choice(below(device=0, host=4), 1e5 / 1.5, host=measured()) == 0
    assert choice(below(device=0, host=4), 1e5 / 1.6, host=measured()) == 400


def test_a_slow_tier_is_left_out_and_a_fast_one_is_not() -> None:
    slow = measured(rate=50 * RATE)  # 50 ms a block
    assert choice(below(host=2, ssd=2), 1e4, host=measured(), ssd=slow) == 200
    assert choice(below(host=2, ssd=2), 1e3, host=measured(), ssd=slow) == 400


def test_what_comes_from_the_ssd_takes_the_way_through_host_memory_too() -> None:
    # From SSD 8 ms a block, to the device 3 ms a block; computing one takes 10 ms.
    ssd, host = measured(0.0, 8 * RATE), measured(0.0, 3 * RATE)
    assert choice(below(ssd=4), 1e4, ssd=ssd) == 400
    assert choice(below(ssd=4), 1e4, ssd=ssd, host=host) == 0


def test_a_queue_makes_a_hit_slower() -> None:
    busy = measured()
    assert choice(below(host=4), 1e4, host=busy) == 400
    busy.nbytes = 100 * MB
    assert choice(below(host=4), 1e4, host=busy) == 0


def test_where_nothing_is_known_of_a_route_the_longest_hit_is_taken() -> None:
    assert choice(below(ssd=4), 1e12) == 400


def test_of_equally_fast_hits_the_longest_is_taken() -> None:
    # A block takes exactly as long to load as to compute.
    assert choice(below(host=4), 1e5, host=measured(0.0, 1e-9)) in (400, 0)
    assert fastest_hit([2, 1, 0], np.array([[0] * 3, [2, 1, 0]]), 3, 1.0, {(1, 0): flat()}) == 2


def flat() -> RouteSpeed:
    """A byte a second."""
    speed = RouteSpeed()
    speed.took(1, 1.0)
    return speed


@pytest.mark.parametrize("hits", [[0], [16, 0]])
def test_there_is_always_a_hit_if_only_of_nothing(hits: Sequence[int]) -> None:
    assert fastest_hit(hits, np.zeros((1, len(hits)), np.int64), 17, 1.0, {}) == hits[0]
