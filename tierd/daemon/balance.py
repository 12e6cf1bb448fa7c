"""The balance of one memory tier: extents go from pools with too many to pools that ask for more.

    needy asks -> donors by fair share -> the donor's extents that cost the least -> emptied by
    moving and demoting -> given to the needy pool

A pool that can make do with its own blocks is not waited for: it is given more in the background.
One range is on its way at a time. It owns the task; who deserves what is decided elsewhere.
"""

import asyncio
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from policies.base import Access
from tierd.block import State
from tierd.daemon.arena import Arena
from tierd.daemon.cache import TieredCache
from tierd.daemon.fair import Claim, donors
from tierd.daemon.pool import BlockPool
from tierd.daemon.transfer import StoreTransfer

log = logging.getLogger("tierd.balance")

_BREATH = 2048  # blocks looked at before the loop may go on
_REST_S = 1.0  # after nobody could give any


@dataclass(frozen=True, slots=True, eq=False)
class Holder:
    """One pool that holds extents: a group of a namespace, at one level of its chain."""

    owner: tuple[object, int]
    level: int
    group: int
    block_nbytes: int
    cache: TieredCache
    transfer: StoreTransfer
    claim: Callable[[int], Claim]  # of the bytes it holds

    @property
    def pool(self) -> BlockPool:
        return self.cache.chain.tiers[self.level].pools[self.group]


class Balance:
    """Owns the task, from `start` to `close`. `holders` are those that share the arena now."""

    def __init__(self, arena: Arena, holders: Callable[[], list[Holder]]) -> None:
        self._arena, self._holders = arena, holders
        self._wanting: set[tuple[object, int]] = set()
        self._asked = asyncio.Event()
        self._one = asyncio.Lock()  # of ranges, and no request holds it
        self._task: asyncio.Task[None] | None = None
        self.nbytes_moved = 0  # from one owner to another

    def start(self) -> None:
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """End the task. What it was emptying stays with its owner."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    def want(self, owner: tuple[object, int]) -> None:
        """A pool asked for more and the arena had none."""
        self._wanting.add(owner)
        self._asked.set()

    async def _run(self) -> None:
        while True:
            await self._asked.wait()
            self._asked.clear()
            wanting, self._wanting = self._wanting, set()
            gave = [await self.serve(owner) for owner in sorted(wanting, key=repr)]
            if not any(gave):
                await asyncio.sleep(_REST_S)  # it may be asked by every request that evicts

    async def serve(self, owner: tuple[object, int]) -> bool:
        """Give `owner` one more run of extents, if somebody has to give it, unless it got more
        while another range was on its way; whether it has more now."""
        before = self._held(owner)
        async with self._one:
            return self._held(owner) > before or await self._serve(owner)

    async def _serve(self, owner: tuple[object, int]) -> bool:
        holders = {holder.owner: holder for holder in self._holders()}
        needy = holders.get(owner)
        if needy is None or len(holders) < 2:
            return False
        held = {name: self._held(name) for name in holders}
        claims = {name: holder.claim(held[name]) for name, holder in holders.items()}
        size = max(self._arena.least(needy.block_nbytes), self._arena.step // 4)
        for claim in donors(claims[owner], list(claims.values()), self._arena.nbytes):
            donor = holders[claim.owner]  # type: ignore[index]  # ours are pairs
            for start, stop in await self._cheapest(donor, size):
                if await self._empty(donor, start, stop) and self._give(needy):
                    return True
        return False

    def _give(self, needy: Holder) -> bool:
        """At once: the donor may want the extents back."""
        ids = self._arena.grow(needy.owner, needy.block_nbytes)
        if ids:
            needy.pool.grow(ids)
        return bool(ids)

    def _held(self, owner: tuple[object, int]) -> int:
        extents = sum(stop - start for start, stop in self._arena.runs(owner))
        return extents * self._arena.extent_nbytes

    async def _cheapest(self, donor: Holder, size: int) -> list[tuple[int, int]]:
        """Ranges of the donor's extents that can be emptied, those with the fewest blocks first."""
        found, looked = [], 0
        for start, stop in self._ranges(donor, size):
            cost = self._cost(donor, start, stop)
            if cost is not None:
                found.append((cost, start, stop))
            looked += len(self._arena.touching(start, stop, donor.block_nbytes))
            if looked >= _BREATH:
                looked = 0
                await asyncio.sleep(0)
        return [(start, stop) for _, start, stop in sorted(found)]

    def _ranges(self, donor: Holder, size: int) -> Iterator[tuple[int, int]]:
        for first, last in self._arena.runs(donor.owner):
            for start in range(first, last, size):
                yield start, min(start + size, last)

    def _cost(self, donor: Holder, start: int, stop: int) -> int | None:
        """How many blocks lie in a range; None if one of them cannot move."""
        pool, live = donor.pool, 0
        for block_id in self._arena.touching(start, stop, donor.block_nbytes):
            block = pool.at(block_id)
            if block is None or block.state is State.FREE:
                continue
            if block.state is not State.COMMITTED or block.ref_cnt:
                return None
            live += 1
        return live

    async def _empty(self, donor: Holder, start: int, stop: int) -> bool:
        """Empty a range of extents and give it back; whether that worked."""
        ids = self._arena.touching(start, stop, donor.block_nbytes)
        access = Access(asyncio.get_running_loop().time())
        compaction = donor.cache.compaction
        vacancy = compaction.begin(donor.level, donor.group, ids, access)
        if vacancy is None:
            return False
        done = False
        try:
            await donor.transfer.idle(vacancy.places)
            done = compaction.end(vacancy)
            if done:  # what was read of them while they left the pool has been read
                await donor.transfer.idle(vacancy.places)
        finally:
            if not done:
                compaction.undo(vacancy)
        if done:
            self._arena.give_back(donor.owner, start, stop)
            self.nbytes_moved += (stop - start) * self._arena.extent_nbytes
        return done
