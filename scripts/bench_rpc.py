"""Round trips of the Python client to a real daemon, and how many a decode step needs.

The floor is a C echo server asked by a C client with frames of the same length; what a plain Python
socket takes to the same server says how much of ours is Python's. All of them run on one core:
whether a second one had gone to sleep would be more than what is measured.
"""

import importlib.util
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from bench_echo import Echo, echo, loop_echo
from bench_engine import LAYOUT, prompt
from bench_report import BenchReport, Figure
from bench_rounds import Rounds
from demo_stage import Stage

from tierd import protocol
from tierd.client import connect
from tierd.pool import Pool
from tierd.protocol import Op

BAR = 2.5
ROUNDS = 9  # the best counts: others can only add to a round trip
BATCH = 32
BLOCK = 16  # tokens
LOOKUP_BAR = 1.5
NAMES, DEPTH = 64, 16
NO_REDIS = "no redis-server, or no package redis"


def measure(report: BenchReport, on: Stage, quick: bool) -> None:
    """The daemon of `on` runs."""
    report.heading("A round trip of the Python client, p50, µs")
    with connect(on.socket) as client, client.attach(LAYOUT) as pool:
        _fill(pool, 1)
        with _one_core(client.status()["pid"]), echo(on.folder) as floor:
            _round_trips(report, pool, floor, on.folder, 500 if quick else 2000)
            with _redis_client(on.folder) as redis:
                _get(report, redis, pool, 500 if quick else 2000)
                report.heading(f"Lookups of {NAMES} names a message, {DEPTH} messages on their way")
                _lookups(report, redis, pool, 50 if quick else 200)
        report.heading("Messages to the daemon")
        _decode(report, pool, "32 in step", [BLOCK] * BATCH)
        _decode(report, pool, "32 out of step", range(1, BATCH + 1))


@contextmanager
def _one_core(daemon: int) -> Iterator[None]:
    """This process, what it starts, and the daemon's threads on one core for a while."""
    threads = [0, *(int(name) for name in os.listdir(f"/proc/{daemon}/task"))]
    cores = os.sched_getaffinity(0)
    try:
        for thread in threads:
            os.sched_setaffinity(thread, {min(cores)})
        yield
    finally:
        for thread in threads:
            os.sched_setaffinity(thread, cores)


def _fill(pool: Pool, seed: int) -> None:
    """Have the first block of a prompt in the cache."""
    with pool.acquire(prompt(seed, BLOCK + 1)) as lease:
        lease.wait()
        lease.commit(BLOCK)


def _round_trips(
    report: BenchReport, pool: Pool, floor: Echo | None, folder: Path, number: int
) -> None:
    call, empty_step = pool.client.call, protocol.dump_steps([])
    hit = prompt(1, BLOCK + 1)
    acquired: list[float] = []

    def lease() -> None:
        begin = time.perf_counter_ns()
        held = pool.acquire(hit)
        acquired.append((time.perf_counter_ns() - begin) / 1e3)
        assert held.hit == BLOCK
        held.release()

    def acquires() -> float:
        acquired.clear()
        _p50(lease, number)
        return median(acquired)

    measures: dict[str, Callable[[], float]] = {
        "minimal frame": lambda: _p50(lambda: call(Op.RELEASE, b""), number),
        "empty ADVANCE": lambda: _p50(lambda: call(Op.ADVANCE, empty_step), number),
        "acquire, a device hit of one block": acquires,
        "acquire and release": lambda: _p50(lease, number),
    }
    if floor is None:
        report.skip("round trips", "no C compiler")
        return
    with loop_echo(floor, folder) as loop:
        asks = {
            "C": lambda: floor.ask(number, protocol.HEADER.size),
            "python": lambda: median(floor.ask_from_python(number, protocol.HEADER.size)),
            "loop": lambda: loop.ask(number, protocol.HEADER.size),
        }
        rounds = Rounds({**measures, **asks}, ROUNDS)
    for what in measures:
        figure = Figure(what, rounds.best(what), rounds.best("C"), "µs", "C echo, C client")
        report.ratio_at_most(figure, BAR) if what == "minimal frame" else report.note(figure)
    ours = rounds.best("minimal frame")
    for peer, what in (("python", "C echo, Python socket"), ("loop", "asyncio echo, C client")):
        report.note(Figure("minimal frame", ours, rounds.best(peer), "µs", what))


def _get(report: BenchReport, redis: Any, pool: Pool, number: int) -> None:
    if redis is None:
        report.skip("minimal frame against redis-py GET", NO_REDIS)
        return
    redis.set("key", b"value")
    measures = {
        "ours": lambda: _p50(lambda: pool.client.call(Op.RELEASE, b""), number),
        "redis": lambda: _p50(lambda: redis.get("key"), number),
    }
    rounds = Rounds(measures, ROUNDS)
    ours, theirs = rounds.best("ours"), rounds.best("redis")
    report.ratio_at_most(Figure("minimal frame", ours, theirs, "µs", "redis-py GET"), 1.0)


def _lookups(report: BenchReport, redis: Any, pool: Pool, number: int) -> None:
    """Where names that are all known lie, beside values of one byte that redis has."""
    what = f"lookup of {NAMES} names"
    if redis is None:
        report.skip(what, NO_REDIS)
        return
    tokens = prompt(2, NAMES * BLOCK + 1)
    with pool.acquire(tokens) as lease:
        lease.wait()
        lease.commit(NAMES * BLOCK)
    names = pool.hashes(tokens)
    redis.mset(dict.fromkeys(names, b"0"))

    def ours() -> None:
        for levels in pool.lookup_many([names] * DEPTH):
            assert not levels.any()

    def theirs() -> None:
        pipeline = redis.pipeline(transaction=False)
        for _ in range(DEPTH):
            pipeline.mget(names)
        for values in pipeline.execute():
            assert len(values) == NAMES

    def rate(call: Callable[[], None]) -> float:
        """Thousands of messages a second."""
        return DEPTH / _p50(call, number) * 1e3

    rounds = Rounds({"ours": lambda: rate(ours), "redis": lambda: rate(theirs)}, ROUNDS)
    best = (max(rounds.values[side]) for side in ("ours", "redis"))
    report.at_least(Figure(what, *best, "k/s", "redis-py MGET"), LOOKUP_BAR)


@contextmanager
def _redis_client(folder: Path) -> Iterator[Any]:
    """redis-py on a Unix socket to a server of our own, or None where either is missing."""
    server = shutil.which("redis-server")
    if server is None or importlib.util.find_spec("redis") is None:
        yield None
        return
    import redis

    path = folder / "redis.sock"
    options = ["--port", "0", "--unixsocket", str(path), "--save", "", "--dir", str(folder)]
    process = subprocess.Popen([server, *options], stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 10
        while not path.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        yield redis.Redis(unix_socket_path=str(path))
    finally:
        process.kill()
        process.wait()


def _decode(report: BenchReport, pool: Pool, name: str, lengths: Sequence[int]) -> None:
    """Decode two blocks' worth of tokens; prompts of `lengths`, so blocks fill where they do."""
    leases = [pool.acquire(prompt(100 + i, n)) for i, n in enumerate(lengths)]
    for lease in leases:
        lease.wait()
    pool.advance([(x, x.num_tokens, _whole(x.num_tokens + 1)) for x in leases])
    sent = 0
    send = pool.client.call

    def counted(*arguments: object) -> bytes:
        nonlocal sent
        sent += 1
        return send(*arguments)  # type: ignore[arg-type]

    pool.client.call = counted  # type: ignore[method-assign]
    worst = {False: 0, True: 0}  # by whether a block fills
    for _ in range(2 * BLOCK):
        before = sent
        for lease in leases:
            lease.append([7])
        fills = any(lease.num_tokens % BLOCK == 0 for lease in leases)
        pool.advance([(x, x.num_tokens, _whole(x.num_tokens + 1)) for x in leases])
        worst[fills] = max(worst[fills], sent - before)
    del pool.client.call
    pool.release(leases)
    for fills, word in ((False, "no block fills"), (True, "a block fills")):
        figure = Figure(f"decode step, {name}, {word}", worst[fills], 1, "messages", "the bar")
        report.limit(figure, int(fills))


def _whole(num_tokens: int) -> int:
    """Room to the end of the block."""
    return -(-num_tokens // BLOCK) * BLOCK


def _p50(call: Callable[[], object], number: int) -> float:
    """Median microseconds."""
    took = []
    for _ in range(number):
        begin = time.perf_counter_ns()
        call()
        took.append((time.perf_counter_ns() - begin) / 1e3)
    return median(took)
