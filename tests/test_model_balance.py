"""Two models share every tier under random engines, and take memory from each other (I2, I4, I9).

The machine of `tests.machine` twice, on one ground; the balance is the real one, told to serve by
the same generator that drives the engines. Extents that are nobody's hold poison.
"""

import asyncio
import random
from collections import Counter

import pytest

from tests.machine import EXTENT, POISON, SIZES, Engines
from tests.stepped import NBYTES
from tests.test_model import MIX, do_something
from tierd.daemon.balance import Balance
from tierd.daemon.extents import Extents
from tierd.daemon.fair import Claim
from tierd.daemon.holder import Holder

MOVES = {do: often for do, often in MIX.items() if do.__name__ not in ("compact", "a_vacancy_ends")}


class TwoModels:
    """Two models' engines, and a balance for each level."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        first = Engines("one")
        self.models = [first, Engines("two", beside=first)]
        for engines in self.models:
            engines.start()
            engines.alone = False
        self.ground, self.loop = first.ground, first.loop
        self.balances = [Balance(Extents(arena)) for arena in self.ground.arenas]
        for level, balance in enumerate(self.balances):
            balance.join(self.holders(level))
        self.tasks: set[asyncio.Task[bool]] = set()
        self.gave = 0

    def holders(self, level: int) -> list[Holder]:
        return [
            Holder(
                engines.owner(group),
                level,
                NBYTES,
                engines.cache,
                engines.transfer,
                lambda held, engines=engines, group=group: Claim(
                    engines.owner(group), held, 1.0, 0, bool(engines.engines)
                ),
            )
            for engines in self.models
            for group in range(len(SIZES))
        ]

    def step(self) -> None:
        engines = self.rng.choice(self.models)
        if self.rng.random() < 0.1:
            owner = engines.owner(self.rng.randrange(len(SIZES)))
            serving = self.rng.choice(self.balances).serve(owner)
            self.tasks.add(self.loop.create_task(serving))
            engines.settle()
        else:
            do_something(engines, self.rng, MOVES)
        self.count()
        self.poison()
        for engines in self.models:
            engines.check()

    def count(self) -> None:
        for task in [task for task in self.tasks if task.done()]:
            self.tasks.remove(task)
            self.gave += task.result()

    def poison(self) -> None:
        for arena, rows in zip(self.ground.arenas, self.ground.blocks, strict=True):
            for start, stop in arena.runs(None):
                rows[start * EXTENT : stop * EXTENT] = POISON

    def end(self) -> None:
        while self.tasks:
            for engines in self.models:
                engines.everything_ends()
                engines.settle()
            self.count()
        for engines in reversed(self.models):
            engines.teardown()


def run(seed: int, steps: int) -> Counter[str]:
    models = TwoModels(seed)
    for _ in range(steps):
        models.step()
    models.end()
    moved = sum(balance.nbytes_moved for balance in models.balances)
    return Counter({"gave": models.gave, "moved": moved})


def test_two_models_take_memory_from_each_other_and_see_only_their_own_bytes() -> None:
    seen: Counter[str] = Counter()
    for seed in range(12):
        seen += run(seed, 600)
    assert seen["gave"] > 50
    assert seen["moved"] >= 50 * EXTENT * NBYTES


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_two_models_for_two_hundred_thousand_steps() -> None:
    for seed in range(1000, 1200):
        run(seed, 1000)
