"""Many sequences of one: forks of a long sequence, and requests that share a prompt.

What stands beside forks is what an engine without them does: copy the blocks (np.copyto, into
memory that is there already), or ask for the same prompt again and again. What stands beside a
shared prompt is the same requests with nothing in common, in the same daemon.
"""

from collections.abc import Callable, Sequence

import numpy as np
from bench_engine import LAYOUT, prompt
from bench_report import BenchReport, Figure
from bench_rounds import Measure, Rounds, seconds
from bench_sharing_stage import SMALL, attached, places, running

from tierd.lease import Lease
from tierd.pool import Pool

BLOCK = 16  # tokens
LENGTH, FORKS = 4000, 64
REQUESTS, SHARED, OWN = 100, 2000, 64
PROMPT_BAR = 15.0
COPYING_BAR, ACQUIRING_BAR = 200.0, 10.0  # so that a fork that does something a block is noticed
WAYS = {
    "one by one": "one by one",
    "new": "gone on, by a new block each",
    "tail": "gone on, in a copy of the tail each",
}


def measure(report: BenchReport, quick: bool) -> None:
    report.heading(f"{FORKS} forks of a {LENGTH:,}-token sequence")
    with running("192MiB") as on, attached(on, LAYOUT) as pool:
        tokens = prompt(1, LENGTH)
        with pool.acquire(tokens) as parent:
            parent.wait()
            parent.commit(LENGTH)
            _bytes(report, pool, parent)
            _times(report, pool, parent, tokens, 5 if quick else 15)
    report.heading(f"{REQUESTS} requests that share a prompt of {SHARED:,} tokens")
    with running("128MiB") as on, attached(on, SMALL) as pool:
        _requests(report, pool)


def _bytes(report: BenchReport, pool: Pool, parent: Lease) -> None:
    """Forks at a block's end get a new one each when they go on; in its middle, a copy of it."""
    before, of_a_sequence = places(pool), -(-LENGTH // BLOCK)
    for length, what in ((LENGTH, "at a block's end"), (LENGTH - 5, "inside a block")):
        forks = pool.fork([(parent, length)] * FORKS)
        idle = places(pool) - before
        pool.advance([(fork, 0, length + 1) for fork in forks])
        grown = places(pool) - before
        pool.release(forks)
        for name, number, most in (("made", idle, 0), ("gone on", grown, FORKS)):
            figure = Figure(
                f"{FORKS} forks {what}, {name}", number, FORKS * of_a_sequence, "blocks", "copies"
            )
            report.limit(figure, most)


def _times(
    report: BenchReport, pool: Pool, parent: Lease, tokens: Sequence[int], rounds: int
) -> None:
    found = Rounds(_measures(pool, parent, tokens), rounds)

    def figure(name: str, what: str, other: str, peer: str) -> Figure:
        """The ratio says how many times sooner."""
        ours, against = found.median(name), found.median(other)
        sooner = found.ratio(other, name)
        return Figure(f"{FORKS} forks {what}", ours, against, "ms", peer, sooner)

    copying, acquiring = f"np.copyto, {FORKS} sequences", f"{FORKS} acquires"
    report.at_least(figure("forks", "in one message", "sequences", copying), COPYING_BAR)
    report.at_least(figure("forks", "in one message", "acquires", acquiring), ACQUIRING_BAR)
    for name, what in WAYS.items():
        report.note(figure(name, what, "sequences", copying))
        report.note(figure(name, what, "acquires", acquiring))
    report.note(figure("tail", WAYS["tail"], "tails", f"np.copyto, {FORKS} blocks"))


def _measures(pool: Pool, parent: Lease, tokens: Sequence[int]) -> dict[str, Measure]:
    """Milliseconds each; what is leased is given back, which is not timed."""
    sequences, tails = _copier(pool, parent)
    longer = [np.array([*tokens, number]) for number in range(FORKS)]

    def timed(call: Callable[[], list[Lease]]) -> float:
        held: list[Lease] = []
        took = seconds(lambda: held.extend(call()))
        pool.release(held)
        return took * 1e3

    def gone_on(length: int) -> list[Lease]:
        forks = pool.fork([(parent, length)] * FORKS)
        pool.advance([(fork, 0, length + 1) for fork in forks])
        for fork in forks:
            fork.wait()
        return forks

    return {
        "forks": lambda: timed(lambda: pool.fork([(parent, LENGTH)] * FORKS)),
        "one by one": lambda: timed(lambda: [parent.fork(LENGTH) for _ in range(FORKS)]),
        "new": lambda: timed(lambda: gone_on(LENGTH)),
        "tail": lambda: timed(lambda: gone_on(LENGTH - 5)),
        "acquires": lambda: timed(lambda: [pool.acquire(its) for its in longer]),
        "sequences": lambda: seconds(sequences) * 1e3,
        "tails": lambda: seconds(tails) * 1e3,
    }


def _copier(pool: Pool, parent: Lease) -> tuple[Callable[[], None], Callable[[], None]]:
    """What copies the parent's blocks as often as there are forks, and what its last block."""
    import torch

    blocks = pool.view(0).view(torch.int16).numpy()
    table = [int(block) for block in parent.tables[0]]
    target = np.zeros((len(table), *blocks.shape[1:]), np.int16)

    def sequences() -> None:
        for _ in range(FORKS):
            for place, block in zip(target, table, strict=True):
                np.copyto(place, blocks[block])

    def tails() -> None:
        for place in target[:FORKS]:
            np.copyto(place, blocks[table[-1]])

    return sequences, tails


def _requests(report: BenchReport, pool: Pool) -> None:
    begin = prompt(2, SHARED)
    with pool.acquire(begin) as lease:
        lease.wait()
        lease.commit(SHARED)
    prompts = [[*begin, *prompt(1000 + number, OWN)] for number in range(REQUESTS)]
    shared = [pool.acquire(tokens) for tokens in prompts]
    ours = places(pool)
    pool.release(shared)
    before = places(pool)  # the prompt is kept
    alone = [
        pool.acquire(tokens, extra={0: bytes([number])}) for number, tokens in enumerate(prompts)
    ]
    theirs = places(pool) - before
    pool.release(alone)
    # How many times less, hence the ratio the other way round.
    figure = Figure(
        f"{REQUESTS} requests of {OWN} own tokens", ours, theirs, "blocks", "nothing shared",
        theirs / ours,
    )  # fmt: skip
    report.at_least(figure, PROMPT_BAR)
