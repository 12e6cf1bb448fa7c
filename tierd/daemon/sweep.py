"""The sweep: slabs that are mostly empty are emptied and given back, in the background.

    before   |A . . . . . . .|B C D E . . . .|     after   |B C D E A . . .|

It looks when enough places of a pool have become free, and when a pool joins; never by a clock.
Nothing is evicted for it, and an array keeps some free places, so that it need not grow at once. It
owns the task; the lock it shares with whoever else empties slabs.
"""

import asyncio

from tierd.daemon.balance import Balance
from tierd.daemon.holder import Holder, Part, Space
from tierd.daemon.vacate import vacate

_SPARE = 0.25  # of a slab's places, that stay free elsewhere in the array


class Sweep:
    """Owns the task, from `start` to `close`; a slab is sparse if less than `sparse` of it is used.

    Its pools tell slabs apart (`BlockPool.span`).
    """

    def __init__(self, space: Space, balance: Balance, sparse: float) -> None:
        self._space, self._balance, self.sparse = space, balance, sparse
        self._stirred = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.slabs_freed = 0

    def start(self) -> None:
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """End the task. What it was emptying stays with its owner."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    def stir(self) -> None:
        """A pool may have sparse slabs."""
        self._stirred.set()

    async def _run(self) -> None:
        while True:
            await self._stirred.wait()
            self._stirred.clear()
            for holder in self._balance.holders():
                holder.pool.when_freed(max(1, int(_SPARE * holder.pool.span)), self.stir)
                await self._sweep(holder)

    async def _sweep(self, holder: Holder) -> None:
        """Give back what one pool can do without. A slab that would not be emptied is left for
        another time: the next look begins with more places free."""
        tried: set[int] = set()
        while (part := self._sparsest(holder, tried)) is not None:
            tried.add(part.start)
            async with self._balance.one:
                if holder not in self._balance.holders():
                    return
                if await vacate(self._space, holder, part, evict=False):
                    tried.discard(part.start)  # it may be reserved, and empty, again
                    self.slabs_freed += 1

    def _sparsest(self, holder: Holder, tried: set[int]) -> Part | None:
        """The slab with the fewest blocks that is sparse, and whose blocks have room elsewhere."""
        pool, spare = holder.pool, int(_SPARE * holder.pool.span)
        if pool.num_free < pool.span:
            return None
        found = [
            (live, part.start, part)
            for part in self._space.parts(holder, holder)
            if part.start not in tried
            and (live := pool.live(part.ids)) < self.sparse * len(part.ids)
            and live + spare <= pool.num_free - (len(part.ids) - live)
        ]
        return min(found, key=lambda entry: entry[:2])[2] if found else None
