"""The selector counts an event loop's turns, and among them those that took long."""

import asyncio
import time
from collections.abc import Coroutine

from tierd.daemon.monitor import LONG_S, LoopTurns, WatchedSelector


def turns_of(work: Coroutine[None, None, None]) -> LoopTurns:
    selector = WatchedSelector()
    with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(selector)) as runner:
        runner.get_loop()
        selector.forget()
        runner.run(work)
        return selector.turns


def compute(seconds: float) -> None:
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


async def test_each_turn_is_counted() -> None:
    async def breathe() -> None:
        for _ in range(500):
            await asyncio.sleep(0)

    turns = await asyncio.to_thread(lambda: turns_of(breathe()))
    assert turns.count >= 500


async def test_a_turn_that_computes_for_long_is_seen_among_short_ones() -> None:
    async def work() -> None:
        for number in range(300):
            if number % 100 == 50:
                compute(5 * LONG_S)
            await asyncio.sleep(0)

    turns = await asyncio.to_thread(lambda: turns_of(work()))
    assert turns.long >= 3
    assert turns.max_cpu >= 5 * LONG_S


async def test_a_turn_that_waits_does_not_count_as_computing() -> None:
    async def work() -> None:
        time.sleep(20 * LONG_S)  # noqa: ASYNC251  # a blocked loop is what is looked for
        await asyncio.sleep(0)

    turns = await asyncio.to_thread(lambda: turns_of(work()))
    assert turns.max_wall >= 20 * LONG_S
    assert turns.max_cpu < 20 * LONG_S
