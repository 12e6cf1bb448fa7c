"""What finer granules cost in memory, bytes and time, and how many tokens they save a request.

A granule is what lies between two names of a prompt: with finer ones a hit may end inside a block.
A real daemon, one layout for each granule, measured in turns. Prompts go on from others at a random
token; with `--trace FILE` they have the lengths of a recorded trace.
"""

import argparse
import csv
import gzip
import json
import random
import sys
import tracemalloc
from collections.abc import Sequence
from contextlib import ExitStack, redirect_stdout
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from bench_report import BenchReport, Figure
from bench_rounds import Rounds, seconds
from demo_stage import Stage, stage

from policies.base import Access
from policies.lru import LRU
from tierd.block import BlockHash
from tierd.client import connect
from tierd.daemon.pool import BlockPool
from tierd.layout import KVLayout, LayerGroup
from tierd.pool import Pool
from tierd.prefix import PrefixChain
from tierd.protocol import dump_acquire

GRANULES = (1, 4, 16)
SIZES = (16, 64)  # tokens a block
PROMPT = 2048  # tokens
GPU = 10_000  # tokens a second of prefill, to compare with
ROOT = BlockHash(bytes(16))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", metavar="FILE", help="write one line a figure; - for stdout")
    parser.add_argument("--quick", action="store_true", help="half a minute: less of all")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="lengths: .jsonl.gz or .csv.gz")
    arguments = parser.parse_args()
    lengths = trace(arguments.trace) if arguments.trace else [PROMPT]
    with redirect_stdout(sys.stderr if arguments.json == "-" else sys.stdout):
        report = BenchReport()
        with stage() as on:
            on.start_daemon()
            for size in SIZES:
                measure(report, on, size, lengths, arguments.quick)
        print(f"\n{report.table()}")
    if arguments.json:
        report.write(arguments.json)
    return 0


def measure(report: BenchReport, on: Stage, size: int, lengths: Sequence[int], quick: bool) -> None:
    """Each granule against one a block, for blocks of `size` tokens. The daemon of `on` runs."""
    report.heading(f"Blocks of {size} tokens")
    granules = sorted({*GRANULES, size})
    with ExitStack() as stack:
        pools = {granule: attached(stack, on, size, granule) for granule in granules}
        turns = Rounds(
            {f"{granule}": partial(acquire, pool) for granule, pool in pools.items()},
            5 if quick else 25,
        )
        short = {g: tokens_short(pool, lengths, 60 if quick else 300) for g, pool in pools.items()}
    took = {granule: turns.best(f"{granule}") for granule in granules}
    for granule in granules[:-1]:
        name = f"block {size}, granule {granule}: "

        def note(what: str, ours: float, against: float, unit: str, name: str = name) -> None:
            report.note(Figure(name + what, ours, against, unit, f"granule {size}"))

        note("index of a block", index_nbytes(size // granule), index_nbytes(1), "bytes")
        note("frame of 2,048 tokens", frame_nbytes(granule), frame_nbytes(size), "bytes")
        note("hashing 2,048 tokens", hashing(granule), hashing(size), "µs")
        note("hit of 2,048 tokens, hashed and released", took[granule], took[size], "µs")
        note("a hit falls short by", short[granule], short[size], "tokens")
    for finer, coarser in pairwise(granules):
        # An engine slower than that has the prompt ready sooner with the finer granule.
        speed = (short[coarser] - short[finer]) / (took[finer] - took[coarser]) * 1e6
        what = f"block {size}, granule {finer} pays where an engine computes less than"
        peer = f"8B on a GPU; against granule {coarser}"
        report.note(Figure(what, speed, GPU, "tokens/s", peer))


def prompt() -> list[int]:
    return random.Random(1).choices(range(50_000), k=PROMPT)


def hashing(granule: int) -> float:
    """µs of an engine's for the names of a prompt."""
    tokens = prompt()
    return 1e6 * min(seconds(lambda: PrefixChain(ROOT, granule).append(tokens)) for _ in range(20))


def frame_nbytes(granule: int) -> int:
    """Bytes on the socket that ask for a prompt."""
    chain = PrefixChain(ROOT, granule)
    chain.append(prompt())
    return len(dump_acquire(1, PROMPT, PROMPT, chain.hashes))


def attached(stack: ExitStack, on: Stage, size: int, granule: int) -> Pool:
    """A pool of blocks of one page each 16 tokens, of a namespace of its own."""
    groups = (LayerGroup((0,), size),)
    layout = KVLayout(f"{size}/{granule}", 1, 1, 32, "float32", groups, granule=granule)
    return stack.enter_context(stack.enter_context(connect(on.socket)).attach(layout))


def index_nbytes(names: int) -> float:
    """Python memory that a committed block of so many names takes in a pool of one tier."""
    count = 2000
    pool = BlockPool(LRU(count))
    pool.grow(range(count))
    blocks = pool.allocate(count)
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for number, block in enumerate(blocks):
            name = [b"%8d%8d" % (number, i) for i in range(names)]
            inner = [BlockHash(key) for key in name[:-1]]
            pool.commit(block, BlockHash(name[-1]), None, Access(0.0), inner)
        return (tracemalloc.get_traced_memory()[0] - before) / count
    finally:
        tracemalloc.stop()


def acquire(pool: Pool) -> float:
    """µs of a device hit of the whole prompt, the best of a few."""
    tokens = prompt()
    with pool.acquire(tokens) as lease:
        lease.wait()
        lease.commit(PROMPT)

    def once() -> None:
        with pool.acquire([*tokens, 0]) as lease:  # so that a block ends where the hit does
            assert lease.wait() == PROMPT

    return min(seconds(once) for _ in range(5)) * 1e6


def tokens_short(pool: Pool, lengths: Sequence[int], number: int) -> float:
    """By how many tokens a hit falls short of what a prompt shares with the one before, on average:
    each goes on from that, cut at any token."""
    rng, earlier, short = random.Random(7), list[int](), 0
    for _ in range(number):
        whole = max(SIZES) * max(1, min(rng.choice(lengths), PROMPT) // max(SIZES))
        shared = rng.randrange(1, min(len(earlier), whole)) if earlier else 0
        new = rng.choices(range(50_000), k=whole - shared)
        tokens = [*earlier[:shared], new[0] ^ 1 << 20, *new[1:]]  # not by chance one more
        with pool.acquire(tokens) as lease:
            short += shared - lease.wait()
            lease.commit(whole)
        earlier = tokens
    return short / number


def trace(path: Path) -> list[int]:
    """Tokens of each request of a trace: `input_length` of JSON lines, `ContextTokens` of CSV."""
    with gzip.open(path, "rt") as file:
        rows: Any = (
            csv.DictReader(file) if ".csv" in path.suffixes else (json.loads(x) for x in file)
        )
        return [int(row.get("input_length") or row["ContextTokens"]) for row in rows]


if __name__ == "__main__":
    raise SystemExit(main())
