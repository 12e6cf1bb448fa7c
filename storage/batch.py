"""A batch: blocks and their rows, carried to threads in hops of several blocks.

One hop costs the event loop some 20 µs, so it carries up to `HOP` blocks. A thread writes into rows
that belong to the caller: whoever waits for it waits to the end, cancelled or not, because after
that the caller may give those rows to somebody else.
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future
from typing import TypeVar, TypeVarTuple

import numpy as np

from storage.base import MAX_TAG_NBYTES, Row

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

HOP = 32
_BYTES = np.dtype(np.uint8)


def check_batch(
    block_nbytes: int, ids: Sequence[int], rows: Sequence[Row], tags: Sequence[bytes] | None = None
) -> None:
    """Raise `ValueError` for what no store can carry, before anything has changed."""
    if len(rows) != len(ids) or (tags is not None and len(tags) != len(ids)):
        raise ValueError(f"{len(ids)} ids with {len(rows)} rows and {len(tags or ids)} tags")
    if not ids:
        return
    if (lowest := min(ids)) < 0:
        raise ValueError(f"{lowest} is no block id")
    shape = (block_nbytes,)
    if not all([row.shape == shape and row.dtype is _BYTES for row in rows]):
        _check_rows(shape, rows)
    if tags and (longest := max(map(len, tags))) > MAX_TAG_NBYTES:
        raise ValueError(f"a tag of {longest} bytes; at most {MAX_TAG_NBYTES}")


def _check_rows(shape: tuple[int], rows: Sequence[Row]) -> None:
    for row in rows:
        if row.shape != shape or row.dtype != _BYTES:
            raise ValueError(f"a row of {row.dtype}{row.shape}, not of {shape[0]} bytes")


def hops(num_blocks: int, num_threads: int) -> Iterator[slice]:
    """Cut a batch so that every thread has a share, of at most `HOP` blocks a time."""
    step = max(1, min(HOP, -(-num_blocks // num_threads)))
    return (slice(start, start + step) for start in range(0, num_blocks, step))


class _Countdown:
    """Tells the loop once, when the last of many futures is over: being woken costs it more than
    all the rest of a hop."""

    def __init__(self, number: int) -> None:
        self._loop = asyncio.get_running_loop()
        self._left = iter(range(number - 1, -1, -1))  # its `next` is one step for every thread
        self._told = self._loop.create_future()
        self.over = not number

    def one_over(self, _: object) -> None:
        """In whatever thread."""
        if next(self._left) == 0:
            self._loop.call_soon_threadsafe(self._tell)

    async def wait(self) -> None:
        """Until it is over; a wait that is cancelled may be waited for again."""
        if self._told.cancelled():
            self._told = self._loop.create_future()
        await self._told

    def _tell(self) -> None:
        self.over = True
        if not self._told.done():
            self._told.set_result(None)


async def settle(futures: Sequence[Future[T]]) -> list[T]:
    """Wait until every future is over, even when cancelled meanwhile; then their results."""
    countdown = _Countdown(len(futures))
    cancelled: asyncio.CancelledError | None = None
    for future in futures:
        # Not wrapped for asyncio: cancelling what wraps it would cancel the work itself.
        future.add_done_callback(countdown.one_over)
    while not countdown.over:
        try:
            await countdown.wait()
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled
    return [future.result() for future in futures]


async def hop(executor: Executor, function: Callable[[*Ts], T], *args: *Ts) -> T:
    """Run `function` in a thread and wait until it is over, even when cancelled meanwhile."""
    return (await settle([executor.submit(function, *args)]))[0]
