"""What a call takes beside 10^3, 10^4 and 10^5 resident blocks, and what a block adds to it.

A daemon for each number of blocks, asked in turn: a call about a sequence of LENGTH tokens must not
take longer for what else is resident. Blocks are of 4 KiB, so that as many fit, and so that what
they cost is not their bytes.
"""

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from statistics import median
from time import perf_counter_ns

import numpy as np
from bench_engine import fill, prompt
from bench_report import BenchReport, Figure
from bench_rounds import Measure, Rounds
from bench_sharing_stage import SMALL, attached, places, running

from tierd.lease import Lease
from tierd.pool import Pool
from tierd.protocol import Op

BLOCK, BLOCK_NBYTES = 16, 4096  # tokens, bytes
RESIDENT = (1_000, 10_000, 100_000)
FLAT_BAR = 1.5
LENGTH = 4000  # tokens, 250 blocks
BATCH = 32

Prepared = tuple[Callable[[], object], Callable[[], object]]  # what to time, what to do then


def measure(report: BenchReport, quick: bool) -> None:
    number, rounds = (20, 5) if quick else (100, 15)
    with ExitStack() as stack:
        report.heading(f"A call about {LENGTH:,} tokens beside many blocks, µs")
        pools = []
        for resident in RESIDENT:
            on = stack.enter_context(running("448MiB", "16MiB"))
            pools.append(stack.enter_context(attached(on, SMALL)))
            _fill(pools[-1], resident)
        _beside(report, pools, number, rounds)
        report.heading("What a block adds to a call, µs")
        _by_block(report, pools[0], number, rounds)
        report.heading(f"{BATCH} leases that need a block each")
        _batch(report, pools[0], number, rounds)


def _fill(pool: Pool, resident: int) -> None:
    """Have that many blocks in the cache."""
    fill(pool, [prompt(seed, LENGTH) for seed in range(resident * BLOCK // LENGTH)])
    assert places(pool) == resident, f"{places(pool)} blocks are resident, not {resident}"


def _beside(report: BenchReport, pools: list[Pool], number: int, rounds: int) -> None:
    parents = dict(zip(RESIDENT, [_committed(pool, LENGTH) for pool in pools], strict=True))
    measures = {
        f"{call} {resident}": partial(_p50, partial(prepare, parent), number)
        for call, prepare in CALLS.items()
        for resident, parent in parents.items()
    }
    found = Rounds(measures, rounds)
    few, *more = RESIDENT
    for call in CALLS:
        for resident in more:
            what, peer = f"{call} beside {resident:,} blocks", f"beside {few:,}"
            figure = _figure(found, what, f"{call} {resident}", f"{call} {few}", peer)
            report.ratio_at_most(figure, FLAT_BAR)
    for parent in parents.values():
        parent.release()


def _by_block(report: BenchReport, pool: Pool, number: int, rounds: int) -> None:
    """What a sequence of many blocks takes more than one of a single block, by the block."""
    measures: dict[str, Measure] = {"np.copyto": _copying}
    leases = {length: _committed(pool, length) for length in (LENGTH, BLOCK)}
    for call, prepare in {**CALLS, "acquire": _acquire}.items():
        each = [partial(_p50, partial(prepare, lease), number) for lease in leases.values()]
        measures[call] = partial(_difference, *each)
    for state, lease_of in (("a private", _private), ("a committed", _committed)):
        resting = [_rest(lease_of(pool, n, seed=100_000 + n)) for n in (LENGTH, BLOCK)]
        each = [partial(_p50, rest, max(5, number // 10)) for rest in resting]
        measures[f"suspend and resume, {state} block"] = partial(_difference, *each)
    found = Rounds(measures, rounds)
    for call in list(measures)[1:]:
        report.note(_figure(found, call, call, "np.copyto", "np.copyto, 4 KiB"))


def _difference(long: Measure, short: Measure) -> float:
    return (long() - short()) / (LENGTH // BLOCK - 1)


def _batch(report: BenchReport, pool: Pool, number: int, rounds: int) -> None:
    parent, sent = _committed(pool, LENGTH), 0
    send = pool.client.call

    def counted(op: Op, *arguments: object) -> bytes:
        nonlocal sent
        sent += 1
        return send(op, *arguments)  # type: ignore[arg-type]

    def prepared(extend: Callable[[list[Lease]], object]) -> Prepared:
        forks = pool.fork([(parent, LENGTH)] * BATCH)
        return lambda: extend(forks), lambda: pool.release(forks)

    def together(forks: list[Lease]) -> None:
        pool.advance([(fork, 0, LENGTH + 1) for fork in forks])

    def apart(forks: list[Lease]) -> None:
        for fork in forks:
            fork.extend(LENGTH + 1)

    forks = pool.fork([(parent, LENGTH)] * BATCH)
    pool.client.call = counted  # type: ignore[method-assign, assignment]
    together(forks)
    del pool.client.call
    pool.release(forks)
    figure = Figure(f"extend {BATCH} leases", sent, BATCH, "messages", "one by one")
    report.limit(figure, 1)
    ways = {"together": together, "apart": apart}
    found = Rounds(
        {name: partial(_p50, partial(prepared, way), number) for name, way in ways.items()}, rounds
    )
    what = f"extend {BATCH} leases in a message"
    report.note(_figure(found, what, "together", "apart", "one by one"))
    parent.release()


def _figure(found: Rounds, what: str, ours: str, other: str, peer: str) -> Figure:
    ratio = found.ratio(ours, other)
    return Figure(what, found.median(ours), found.median(other), "µs", peer, ratio)


# -- calls ---------------------------------------------------------------------------------------


def _p50(prepare: Callable[[], Prepared], number: int) -> float:
    """Median microseconds of a call, each time prepared and tidied up."""
    took = []
    for _ in range(number):
        call, tidy = prepare()
        begin = perf_counter_ns()
        call()
        took.append((perf_counter_ns() - begin) / 1e3)
        tidy()
    return median(took)


def _private(pool: Pool, length: int, seed: int = 0) -> Lease:
    lease = pool.acquire(prompt(seed, length))
    lease.wait()
    return lease


def _committed(pool: Pool, length: int, seed: int = 0) -> Lease:
    lease = _private(pool, length, seed)
    lease.commit(length)
    return lease


def _fork(parent: Lease) -> Prepared:
    made: list[Lease] = []
    return lambda: made.append(parent.fork()), lambda: made.pop().release()


def _extend(parent: Lease) -> Prepared:
    fork = parent.fork()
    return lambda: fork.extend(fork.num_tokens + 1), fork.release


def _truncate(parent: Lease) -> Prepared:
    """Into a block that is committed, so that the daemon is asked."""
    fork = parent.fork()
    return lambda: fork.truncate(fork.num_tokens - 1), fork.release


def _release(parent: Lease) -> Prepared:
    return parent.fork().release, lambda: None


def _acquire(parent: Lease) -> Prepared:
    made: list[Lease] = []
    tokens = np.array([*prompt(0, parent.num_tokens), 1])
    return lambda: made.append(parent._pool.acquire(tokens)), lambda: made.pop().release()


def _rest(lease: Lease) -> Callable[[], Prepared]:
    def there_and_back() -> None:
        lease.suspend()
        lease.resume()
        lease.wait()

    return lambda: (there_and_back, lambda: None)


def _copying() -> float:
    """Microseconds to copy a block's bytes."""
    source = np.ones((256, BLOCK_NBYTES), np.uint8)
    target = np.zeros_like(source)
    begin = perf_counter_ns()
    for place, block in zip(target, source, strict=True):
        np.copyto(place, block)
    return (perf_counter_ns() - begin) / 1e3 / len(source)


CALLS: dict[str, Callable[[Lease], Prepared]] = {
    "fork": _fork,
    "extend": _extend,
    "truncate": _truncate,
    "release": _release,
}
