"""The core under random engines: what the machine of `tests.machine` must never see."""

import inspect
import random
from collections import Counter
from dataclasses import asdict
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.machine import Engines

CHECKS = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]
MIX = {  # how often a seeded run does what
    Engines.acquire: 6,
    Engines.serve_a_whole_request: 3,
    Engines.write_and_commit: 8,
    Engines.decode_a_batch: 5,
    Engines.fork: 6,
    Engines.truncate: 5,
    Engines.suspend_or_resume: 5,
    Engines.leave: 6,
    Engines.processes_are_gone: 1,
    Engines.an_operation_ends: 18,
    Engines.everything_ends: 1,
    Engines.the_medium_recovers: 2,
    Engines.reclaim: 2,
    Engines.prefetch: 2,
    Engines.advise: 2,
    Engines.save: 1,
    Engines.compact: 3,
    Engines.a_vacancy_ends: 4,
    Engines.what_stayed_moves_after_all: 3,
}
RARE = (
    *("promoted", "demoted", "dropped", "failed", "lost", "out_of_blocks", "copied_on_write"),
    *("forks", "part", "published", "refused", "no room", "suspended", "resumed whole"),
    *("moved", "vacated", "stayed", "no room to move", "at level 1"),
)


def do_something(engines: Engines, rng: random.Random, mix: dict[Any, int]) -> None:
    (do,) = rng.choices(list(mix), list(mix.values()))
    arguments = inspect.signature(do).parameters.keys() - {"self"}
    do(engines, **{name: rng.randrange(1024) for name in sorted(arguments)})


def run_seeded(seed: int, steps: int) -> Counter[str]:
    """The same machine, driven by a generator: long and dense runs, where hypothesis shrinks.

    Returns how often what happened.
    """
    rng = random.Random(seed)
    engines = Engines()
    engines.start(seed)
    for _ in range(steps):
        do_something(engines, rng, MIX)
        engines.check()
    engines.teardown()
    counts = asdict(engines.cache.chain.counts)
    del counts["blocks_hit"]
    return Counter(counts) + engines.seen


def test_hypothesis_finds_no_interleaving_that_breaks_an_invariant() -> None:
    run_state_machine_as_test(
        Engines,
        settings=settings(
            max_examples=60, stateful_step_count=50, deadline=None, suppress_health_check=CHECKS
        ),
    )


def test_thousands_of_random_steps_see_only_the_bytes_committed_under_a_name() -> None:
    counts: Counter[str] = Counter()
    for seed in range(60):
        counts += run_seeded(seed, 400)
    for what in RARE:
        assert counts[what] > 20, f"the runs hardly saw a block {what}: {counts}"


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_million_random_steps() -> None:
    for seed in range(1000, 2000):
        run_seeded(seed, 1000)
