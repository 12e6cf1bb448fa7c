"""What a namespace does when nobody waits for it: prefetches, and keeping cold blocks clean.

One small batch is under way at a time, and the next is planned when it has ended, so that requests
find the threads free; prefetches go before write-backs. It wakes when a request has changed
something, never by a clock. It plans through the cache like everybody else.
"""

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from policies.base import Access
from tierd.block import BlockHash
from tierd.daemon.cache import TieredCache
from tierd.daemon.copy import Copy
from tierd.daemon.transfer import StoreTransfer

_BATCH = 16  # blocks a pool, and at once
_MOST_PREFETCHES = 256  # waiting ones; the oldest gives way


@dataclass(frozen=True, slots=True)
class Prefetch:
    """A prompt that is expected before `deadline`, on the loop's clock."""

    hashes: Sequence[BlockHash]
    num_tokens: int
    deadline: float


class Upkeep:
    """Owns the task that does it, from `start` to `close`."""

    def __init__(self, cache: TieredCache, transfer: StoreTransfer) -> None:
        self._cache, self._transfer = cache, transfer
        self._stirred = asyncio.Event()
        self._prefetches: deque[Prefetch] = deque(maxlen=_MOST_PREFETCHES)
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run())

    def stir(self) -> None:
        """Something has changed: look whether there is something to do."""
        self._stirred.set()

    def prefetch(self, prefetch: Prefetch) -> None:
        """Bring a prompt's hit from SSD into host memory, if its deadline allows."""
        self._prefetches.append(prefetch)
        self.stir()

    async def _run(self) -> None:
        while True:
            await self._stirred.wait()
            self._stirred.clear()
            while copies := self._next():
                await self._transfer.idle([copy.target for copy in copies])

    def _next(self) -> list[Copy]:
        """Begin the next batch; none if all is done."""
        now = asyncio.get_running_loop().time()
        while self._prefetches:
            first = self._prefetches[0]
            if first.deadline > now:
                args = (first.hashes, first.num_tokens, _BATCH, Access(now))
                if copies := self._cache.prefetch(*args):
                    return copies
            self._prefetches.popleft()
        return self._cache.reclaim(_BATCH)

    async def close(self) -> None:
        """End the task; what it began goes on."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
