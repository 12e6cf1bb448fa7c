"""An engine that does nothing but load: a process that asks for prompts only the SSD has.

    python bench_engine.py SOCKET NUM_PROMPTS

A line on its standard input, seconds, is answered by a line of JSON: what it loaded meanwhile.
"""

import json
import random
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import cycle

from tierd.client import connect
from tierd.layout import KVLayout
from tierd.pool import Pool

# Blocks of 256 KiB, 16 tokens each.
LAYOUT = KVLayout("bench", 16, 2, 128, "bfloat16", revision="1")
BLOCK = 16
PROMPT = 48  # blocks


def prompt(seed: int, num_tokens: int) -> list[int]:
    return random.Random(seed).choices(range(50_000), k=num_tokens)


def fill(pool: Pool, prompts: list[list[int]]) -> None:
    """Have the prompts in the cache; their bytes are whatever lies there."""
    for tokens in prompts:
        with pool.acquire(tokens) as lease:
            lease.wait()
            lease.commit(len(tokens) // BLOCK * BLOCK)


def load(pool: Pool, prompts: Iterator[list[int]], seconds: float) -> dict[str, float]:
    """Ask for one prompt after the other, as fast as they come."""
    begin, blocks, missed = time.perf_counter(), 0, 0
    while (took := time.perf_counter() - begin) < seconds:
        with pool.acquire(next(prompts)) as lease:
            hit = lease.wait() // BLOCK
        blocks += hit
        missed += PROMPT - hit
    nbytes = blocks * LAYOUT.with_block_sizes([BLOCK] * LAYOUT.num_layers).block_nbytes(0)
    return {"MB/s": nbytes / took / 1e6, "blocks": blocks, "missed": missed}


def main() -> None:
    path, number = sys.argv[1], int(sys.argv[2])
    prompts = [prompt(1000 + seed, PROMPT * BLOCK + 1) for seed in range(number)]
    with ExitStack() as stack:
        client = stack.enter_context(connect(path))
        pool = stack.enter_context(client.attach(LAYOUT))
        fill(pool, prompts)
        turns = cycle(prompts)
        print(json.dumps({}), flush=True)
        for line in sys.stdin:
            print(json.dumps(load(pool, turns, float(line))), flush=True)


if __name__ == "__main__":
    main()
