"""What a request feels of a policy that is exchanged under it, with many resident blocks.

This process is the engine: it acquires and releases prompts that are resident, one after the other,
while `tierd reload` runs beside it. What it felt just before, for as long, stands beside it.
"""

import subprocess
import sys
import time
from collections.abc import Callable
from itertools import cycle

from bench_engine import BLOCK, prompt
from bench_report import BenchReport, Figure
from bench_rounds import percentile
from bench_sharing_stage import SMALL, attached, places
from bench_suite import Bench, run
from demo_stage import Stage, stage

from tierd.pool import Pool

BAR_MS = 50.0  # of a request
PROMPT = 64  # blocks
POLICIES = ("learned", "s3fifo", "sieve", "learned", "wtinylfu", "lru")
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
            _exchanges(report, on, pool, prompts, number)


def _exchanges(
    report: BenchReport, on: Stage, pool: Pool, prompts: list[list[int]], number: int
) -> None:
    turns, old = cycle(prompts), "lru"
    for new in POLICIES:
        _configure(on, number, new)
        started = _long_turns(on)
        before = _requests(pool, turns.__next__, _for(2.0))
        quiet = _long_turns(on)
        command = [sys.executable, "-m", "tierd", "reload", "--socket", str(on.socket)]
        begin = time.perf_counter()
        with subprocess.Popen(command, stdout=subprocess.DEVNULL) as reload:
            during = _requests(pool, turns.__next__, lambda reload=reload: reload.poll() is None)
            took = time.perf_counter() - begin
            assert reload.wait() == 0, "the reload failed"
        what = f"{old} to {new}"
        report.limit(
            Figure(f"{what}, longest request", max(during), max(before), "ms", "before"), BAR_MS
        )
        long = _long_turns(on) - quiet, quiet - started
        of = [percentile(times, 0.99) for times in (during, before)]
        report.note(Figure(f"{what}, 99th of {len(during)} requests", *of, "ms", "before"))
        report.note(Figure(f"{what}, turns of the loop over 1 ms", *long, "", "before, in 2 s"))
        report.note(Figure(f"{what}, by the command", took, 2.0, "s", "measured before"))
        old = new


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


def _for(seconds: float) -> Callable[[], bool]:
    end = time.perf_counter() + seconds
    return lambda: time.perf_counter() < end


def _long_turns(on: Stage) -> int:
    """Turns of the daemon's loop that took more than a millisecond of CPU."""
    return int(on.status()["process"]["loop"]["long"])


def _configure(on: Stage, number: int, policy: str) -> None:
    mib = (
        -(-number * 4 // 1024 // 2) * 2 + 34
    )  # blocks of 4 KiB, and room for a run of extents more
    text = CONFIG.format(folder=on.folder, mib=mib, policy=policy)
    (on.folder / "tierd.toml").write_text(text)


BENCHES: dict[str, Bench] = {"reload": measure}

if __name__ == "__main__":
    raise SystemExit(run(__doc__, BENCHES))
