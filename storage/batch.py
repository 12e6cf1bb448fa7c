"""A batch: blocks and their rows, carried to threads in hops of several blocks.

One hop costs the event loop some 20 µs, so it carries up to `HOP` blocks. A thread writes into rows
that belong to the caller: whoever waits for it waits to the end, cancelled or not, because after
that the caller may give those rows to somebody else.
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from typing import TypeVar, TypeVarTuple

import numpy as np

from storage.base import MAX_TAG_NBYTES, Row

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

HOP = 16


def check_batch(
    block_nbytes: int, ids: Sequence[int], rows: Sequence[Row], tags: Sequence[bytes] | None = None
) -> None:
    """Raise `ValueError` for what no store can carry, before anything has changed."""
    if len(rows) != len(ids) or (tags is not None and len(tags) != len(ids)):
        raise ValueError(f"{len(ids)} ids with {len(rows)} rows and {len(tags or ids)} tags")
    for block_id in ids:
        if block_id < 0:
            raise ValueError(f"{block_id} is no block id")
    for row in rows:
        if row.shape != (block_nbytes,) or row.dtype != np.uint8:
            raise ValueError(f"a row of {row.dtype}{row.shape}, not of {block_nbytes} bytes")
    for tag in tags or ():
        if len(tag) > MAX_TAG_NBYTES:
            raise ValueError(f"a tag of {len(tag)} bytes; at most {MAX_TAG_NBYTES}")


def hops(num_blocks: int, num_threads: int) -> Iterator[slice]:
    """Cut a batch so that every thread has a share, of at most `HOP` blocks a time."""
    step = max(1, min(HOP, -(-num_blocks // num_threads)))
    return (slice(start, start + step) for start in range(0, num_blocks, step))


async def settle(futures: Sequence[asyncio.Future[T]]) -> list[T]:
    """Wait until every future is over, even when cancelled meanwhile; then their results."""
    cancelled: asyncio.CancelledError | None = None
    while pending := [future for future in futures if not future.done()]:
        try:
            await asyncio.wait(pending)
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled
    return [future.result() for future in futures]


async def hop(executor: Executor, function: Callable[[*Ts], T], *args: *Ts) -> T:
    """Run `function` in a thread and wait until it is over, even when cancelled meanwhile."""
    loop = asyncio.get_running_loop()
    return (await settle([loop.run_in_executor(executor, function, *args)]))[0]
