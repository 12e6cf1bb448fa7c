"""What a request feels of a policy that is exchanged under it, with many resident blocks.

This process is the engine: it acquires and releases prompts that are resident, one after the other,
while `tierd reload` runs beside it. What it felt just before, for as long, stands beside it.
"""

import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import cycle, pairwise
from statistics import median

from bench_engine import BLOCK, prompt
from bench_report import BenchReport, Figure
from bench_sharing_stage import SMALL, attached, places
from bench_suite import Bench, run
from demo_stage import Stage, stage

from tierd.pool import Pool

BAR_MS = 50.0
QUIET_S = 1.0  # of requests before each exchange
PROMPT = 64  # blocks
POLICIES = ("lru", "learned", "s3fifo", "wtinylfu")  # each to the next, and the last to the first
CONFIG = """\
socket = "{folder}/tierd.sock"
device.size = "{mib}MiB"
device.watermarks = [0, 0]
device.policy = "{policy}"
host.size = "0B"
"""


def measure(report: BenchReport, quick: bool) -> None:
    number = 20_480 if quick else 102_400
    report.heading(f"A policy is exchanged, {number:,} resident blocks")
    with stage() as on:
        _configure(on, number, "lru")
        on.start_daemon()
        with attached(on, SMALL) as pool:
            prompts = [prompt(seed, PROMPT * BLOCK + 1) for seed in range(number // PROMPT)]
            for tokens in prompts:
                with pool.acquire(tokens) as lease:
                    lease.wait()
                    lease.commit(PROMPT * BLOCK)
            assert places(pool) >= number, "not all is resident"
            _exchanges(report, on, pool, prompts, number, quick)


def _exchanges(
    report: BenchReport, on: Stage, pool: Pool, prompts: list[list[int]], number: int, quick: bool
) -> None:
    turns = cycle(prompts)
    pairs = list(pairwise([*POLICIES, POLICIES[0]]))
    found: dict[tuple[str, str], list[Felt]] = {pair: [] for pair in pairs}
    for _ in range(2 if quick else 5):
        for pair in pairs:
            _configure(on, number, pair[1])
            found[pair].append(_exchange(on, pool, turns.__next__))
    for (old, new), felt in found.items():
        what = f"{old} to {new}"
        # The least of the longest: who else runs on the machine only adds to them.
        longest = min(of.longest for of in felt), min(of.longest_before for of in felt)
        usual = median(of.usual for of in felt), median(of.usual_before for of in felt)
        report.limit(Figure(f"{what}, longest request", *longest, "ms", "before"), BAR_MS)
        report.note(Figure(f"{what}, median request", *usual, "ms", "before"))
        took = median(of.seconds for of in felt)
        report.note(Figure(f"{what}, the command", took, QUIET_S, "s", "measured before"))


@dataclass(frozen=True, slots=True)
class Felt:
    """Requests while a policy was exchanged and just before, in milliseconds, and how long it was
    until the command had ended."""

    longest: float
    longest_before: float
    usual: float
    usual_before: float
    seconds: float


def _exchange(on: Stage, pool: Pool, tokens: Callable[[], list[int]]) -> Felt:
    end = time.perf_counter() + QUIET_S
    before = _requests(pool, tokens, lambda: time.perf_counter() < end)
    command = [sys.executable, "-m", "tierd", "reload", "--socket", str(on.socket)]
    begin = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as reload:
        during = _requests(pool, tokens, lambda: reload.poll() is None)
        took = time.perf_counter() - begin
        if reload.wait():
            raise RuntimeError("the reload failed")
    return Felt(max(during), max(before), median(during), median(before), took)


def _requests(pool: Pool, tokens: Callable[[], list[int]], more: Callable[[], bool]) -> list[float]:
    """Milliseconds of each request, as long as there is to be one more."""
    times = []
    while more():
        asked = tokens()
        begin = time.perf_counter()
        with pool.acquire(asked) as lease:
            lease.wait()
        times.append((time.perf_counter() - begin) * 1e3)
    return times


def _configure(on: Stage, number: int, policy: str) -> None:
    mib = (
        -(-number * 4 // 1024 // 2) * 2 + 34
    )  # blocks of 4 KiB, and room for a run of extents more
    text = CONFIG.format(folder=on.folder, mib=mib, policy=policy)
    (on.folder / "tierd.toml").write_text(text)


BENCHES: dict[str, Bench] = {"reload": measure}

if __name__ == "__main__":
    raise SystemExit(run(__doc__, BENCHES))
