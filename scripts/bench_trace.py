"""What recording costs the event loop of a daemon: CPU time of its thread, by request.

Two daemons that differ in nothing but `[trace]` serve the same requests in turn; beside them stands
what the one call takes that a session makes. A request is an acquire of a device hit and a release.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import count
from signal import SIGTERM
from typing import Any, NamedTuple

from bench_engine import BLOCK, LAYOUT, fill, prompt
from bench_report import BenchReport, Figure
from bench_rounds import Rounds
from bench_suite import run
from demo_stage import Stage, stage

from policies.base import NO_HINTS
from tierd.client import connect
from tierd.daemon.recording import Encoder, Served
from tierd.layout import KVLayout
from tierd.pool import Pool
from tierd.prefix import PrefixChain

BAR = 1.01  # of the same requests without
LENGTHS = (BLOCK, 2048)  # tokens of the hit


class Source(NamedTuple):
    """As much of a namespace as a recording looks at."""

    name: str
    layout: KVLayout


def measure(report: BenchReport, quick: bool) -> None:
    with ExitStack() as stack:
        plain, recording = (
            stack.enter_context(_daemon(more))
            for more in ("", '[trace]\npath = "{folder}/trace"\n')
        )
        for length in LENGTHS:
            _requests(report, plain, recording, length, quick)
        _new_requests(report, plain, recording, quick)
        recorded, dropped = (recording.status()["trace"][key] for key in ("recorded", "dropped"))
        nbytes = sum(file.stat().st_size for file in (recording.folder / "trace").iterdir())
        print(f"  {recorded} requests recorded in {nbytes} bytes, {dropped} dropped")
    _encoding(report)


def _requests(
    report: BenchReport, plain: Stage, recording: Stage, length: int, quick: bool
) -> None:
    report.heading(f"Requests of {length} tokens, CPU of the event loop")
    number, rounds = (200, 5) if quick else (400, 41)
    tokens = prompt(1, length + 1)

    def ask(pool: Pool) -> None:
        for _ in range(number):
            pool.acquire(tokens).release()

    with ExitStack() as stack:
        pools = [_pool(stack, on) for on in (recording, plain)]
        for pool in pools:
            fill(pool, [tokens])
        figure = _compared(
            f"a known request of {length} tokens", (recording, plain), pools, ask, number, rounds
        )
    report.ratio_at_most(figure, BAR) if length == max(LENGTHS) else report.note(figure)


def _new_requests(report: BenchReport, plain: Stage, recording: Stage, quick: bool) -> None:
    report.heading("Requests that nobody has made before, CPU of the event loop")
    length, number, rounds = max(LENGTHS), 20, 5 if quick else 21
    seeds = count(1000)

    def ask(pool: Pool) -> None:
        fill(pool, [prompt(next(seeds), length + 1) for _ in range(number)])

    with ExitStack() as stack:
        pools = [_pool(stack, on) for on in (recording, plain)]
        what = f"a new request of {length} tokens"
        report.note(_compared(what, (recording, plain), pools, ask, number, rounds))


def _compared(
    what: str, on: tuple[Stage, Stage], pools: list[Pool], ask: Callable[[Pool], None],
    number: int, rounds: int,
) -> Figure:  # fmt: skip
    """What so many requests take of two event loops, in turn; microseconds each."""

    def cpu(at: int) -> float:
        begin = _loop_cpu(on[at])
        ask(pools[at])
        return (_loop_cpu(on[at]) - begin) / number * 1e6

    found = Rounds({"recording": partial(cpu, 0), "plain": partial(cpu, 1)}, rounds)
    ratio = found.ratio("recording", "plain")
    return Figure(
        what, found.median("recording"), found.median("plain"), "µs", "not recorded", ratio
    )


def _pool(stack: ExitStack, on: Stage) -> Pool:
    return stack.enter_context(stack.enter_context(connect(on.socket)).attach(LAYOUT))


def _loop_cpu(on: Stage) -> float:
    seconds: float = on.status()["process"]["loop"]["cpu_seconds"]
    return seconds


def _encoding(report: BenchReport) -> None:
    """What the thread does, for who wonders about the other cores."""
    report.heading("Beside the loop, in a thread")
    chain = PrefixChain(LAYOUT.root("t"), BLOCK)
    chain.append(prompt(3, 100_000))
    source: Any = Source("bench", LAYOUT.with_block_sizes([BLOCK] * LAYOUT.num_layers))
    encoder, took = Encoder(0.0, 0.0, b"key"), []
    for _ in range(2):
        begin = time.perf_counter()
        path = encoder.split(chain.hashes)
        encoder.encode([Served("t", source, 0.0, 1.0, 100_000, 0, 100_000, NO_HINTS, False, *path)])
        took.append((time.perf_counter() - begin) * 1e6)
    report.note(Figure("a request of 100,000 tokens", took[0], took[1], "µs", "known already"))


@contextmanager
def _daemon(more: str) -> Iterator[Stage]:
    with stage() as on:
        config = on.folder / "tierd.toml"
        config.write_text(config.read_text() + more.format(folder=on.folder))
        on.start_daemon()
        yield on
        on.stop_daemon(SIGTERM)


if __name__ == "__main__":
    raise SystemExit(run(__doc__, {"trace": measure}))
