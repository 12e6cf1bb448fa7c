"""How long a device hit takes while another engine loads from the SSD as fast as it can.

A real daemon and two client processes; idle and loaded take turns. What is timed is `acquire` of a
hit of one block, which also takes a place to write into.
"""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median

from bench_engine import BLOCK, LAYOUT, fill, prompt
from bench_report import BenchReport, Figure
from bench_rounds import percentile
from demo_stage import Stage, end

from tierd.client import connect
from tierd.pool import Pool

BAR = 3.0
NUM_PROMPTS = 48  # 576 MiB, where device and host have 224
P = 0.99

Measured = Callable[[float], list[float]]  # seconds -> microseconds each


class Loader:
    """The other engine, in a process of its own."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process
        self.answer()

    def load(self, seconds: float) -> None:
        assert self._process.stdin is not None
        print(seconds, file=self._process.stdin, flush=True)

    def answer(self) -> dict[str, float]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the loading engine died"
        answer: dict[str, float] = json.loads(line)
        return answer


def measure(report: BenchReport, on: Stage, quick: bool) -> None:
    """The daemon of `on` runs."""
    report.heading("A device hit beside another engine's loads from SSD, µs")
    rounds, span = (2, 1.0) if quick else (6, 1.5)
    with ExitStack() as stack:
        loader = stack.enter_context(_loader(on.socket))
        pool = stack.enter_context(stack.enter_context(connect(on.socket)).attach(LAYOUT))
        fill(pool, [prompt(1, BLOCK + 1)])
        kept = pool.acquire(prompt(1, BLOCK + 1))  # so that it stays a device hit
        hits = _turns(loader, lambda seconds: _hits(pool, seconds), rounds, span)
        before = on.status()
        kept.release()
        for part in (0.5, P):
            _add(report, f"acquire of a device hit, p{part * 100:.0f}", hits, part)
    tiers = before["tenants"][0]["namespaces"][0]["blocks_hit"]
    print(f"  loaded {hits.rate:.0f} MB/s meanwhile; blocks hit by tier so far: {tiers}")


class Turns:
    """Times taken while nobody else asks, and while the other engine loads, round by round."""

    def __init__(self) -> None:
        self.idle: list[list[float]] = []
        self.loaded: list[list[float]] = []
        self.rates: list[float] = []

    @property
    def rate(self) -> float:
        return median(self.rates)


def _turns(loader: Loader, measured: Measured, rounds: int, span: float) -> Turns:
    turns = Turns()
    measured(span / 4)
    for _ in range(rounds):
        turns.idle.append(measured(span))
        loader.load(span + 0.3)
        time.sleep(0.15)
        turns.loaded.append(measured(span))
        turns.rates.append(loader.answer()["MB/s"])
    return turns


def _add(report: BenchReport, what: str, turns: Turns, part: float) -> None:
    """Of each side its best round: others may have had the machine in any of them."""
    loaded, idle = (
        min(percentile(times, part) for times in side) for side in (turns.loaded, turns.idle)
    )
    figure = Figure(what, loaded, idle, "µs", "idle")
    report.ratio_at_most(figure, BAR) if part == P else report.note(figure)


def _hits(pool: Pool, seconds: float) -> list[float]:
    """What every acquire of the hit took; it is given back at once."""
    tokens, took = prompt(1, BLOCK + 1), []
    stop = time.perf_counter() + seconds
    while time.perf_counter() < stop:
        begin = time.perf_counter_ns()
        lease = pool.acquire(tokens)
        took.append((time.perf_counter_ns() - begin) / 1e3)
        assert lease.hit == BLOCK
        lease.release()
    return took


@contextmanager
def _loader(path: Path) -> Iterator[Loader]:
    command = [sys.executable, str(Path(__file__).with_name("bench_engine.py")), str(path)]
    process = subprocess.Popen(
        [*command, str(NUM_PROMPTS)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        yield Loader(process)
        assert process.stdin is not None
        process.stdin.close()
        process.wait(30)
    finally:
        end(process)
