"""The balance of one medium: parts of it go from pools with too many to pools that ask for more.

    needy asks -> donors by fair share -> the donor's part that costs the least -> emptied by
    moving and demoting -> given to the needy pool

A pool that can make do with its own blocks is not waited for: it is given more in the background.
One part is on its way at a time. It owns the task; who deserves what is decided elsewhere.
"""

import asyncio

from tierd.block import BlockHash, State
from tierd.daemon.fair import Claim, can_spare, donors, yielding
from tierd.daemon.holder import Holder, Owner, Part, Space
from tierd.daemon.vacate import vacate

_LOOK = 512  # blocks looked at before the loop may go on
_REST_S = 1.0  # after nobody could give any


class Balance:
    """Owns the task, from `start` to `close`, and knows the pools that share the space."""

    def __init__(self, space: Space) -> None:
        self._space = space
        self._holders: dict[Owner, Holder] = {}
        self._wanting: set[Owner] = set()
        self._asked = asyncio.Event()
        self.one = asyncio.Lock()  # of the parts on their way; no request holds it
        self._task: asyncio.Task[None] | None = None
        self.nbytes_moved = 0  # from one owner to another

    def start(self) -> None:
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """End the task. What it was emptying stays with its owner."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    def join(self, holders: list[Holder]) -> None:
        self._holders |= {holder.owner: holder for holder in holders}

    async def leave(self, root: BlockHash) -> None:
        """A namespace takes part no longer: nothing of its is, or will be, on its way."""
        async with self.one:
            for owner in [owner for owner in self._holders if owner[0] == root]:
                del self._holders[owner]

    def of(self, root: BlockHash) -> list[Holder]:
        """The pools of a namespace."""
        return [holder for owner, holder in self._holders.items() if owner[0] == root]

    def holders(self) -> list[Holder]:
        return list(self._holders.values())

    def want(self, owner: Owner) -> None:
        """A pool asked for more and there was none."""
        self._wanting.add(owner)
        self._asked.set()

    async def _run(self) -> None:
        while True:
            await self._asked.wait()
            self._asked.clear()
            wanting, self._wanting = self._wanting, set()
            gave = [await self.serve(owner) for owner in sorted(wanting)]
            if not any(gave):
                await asyncio.sleep(_REST_S)  # it may be asked by every request that evicts

    async def serve(self, owner: Owner) -> bool:
        """Give `owner` one more part, if somebody has to give it, unless it got more while another
        was on its way; whether it has more now."""
        if (needy := self._holders.get(owner)) is None:
            return False
        before = self._space.held(needy)
        async with self.one:
            if owner not in self._holders:
                return False
            return self._space.held(needy) > before or await self._serve(needy)

    async def _serve(self, needy: Holder) -> bool:
        if len(self._holders) < 2:
            return False
        claims = self._claims()
        mine = claims[needy.owner]
        for claim in donors(mine, list(claims.values()), self._space.nbytes):
            donor = next(h for h in self.holders() if h.owner == claim.owner)
            for part in await self._cheapest(donor, needy):
                now = self._claims()
                others, nbytes = list(now.values()), self._space.nbytes
                if not can_spare(now[donor.owner], part.nbytes, mine, others, nbytes):
                    break
                if await self._take(donor, part) and self._give(needy):
                    return True
        return False

    async def withdraw(self) -> bool:
        """The medium shrinks: empty a part of whoever has the most to give, and give it back;
        whether any could be emptied."""
        async with self.one:
            for claim in yielding(list(self._claims().values()), self._space.nbytes):
                holder = next(h for h in self.holders() if h.owner == claim.owner)
                for part in await self._cheapest(holder, holder):
                    if await vacate(self._space, holder, part, evict=True):
                        return True
        return False

    def _claims(self) -> dict[Owner, Claim]:
        return {o: h.claim(self._space.held(h)) for o, h in self._holders.items()}

    async def _take(self, donor: Holder, part: Part) -> bool:
        taken = await vacate(self._space, donor, part, evict=True)
        self.nbytes_moved += part.nbytes * taken
        return taken

    def _give(self, needy: Holder) -> bool:
        """At once: the donor may want the part back."""
        ids = self._space.grow(needy)
        if ids:
            needy.pool.grow(ids)
        return bool(ids)

    async def _cheapest(self, donor: Holder, needy: Holder) -> list[Part]:
        """Parts of the donor's that may be emptied, those with the fewest blocks first."""
        found = []
        for part in self._space.parts(donor, needy):
            cost = await self._cost(donor, part)
            if cost is not None:
                found.append((cost, part.start, part))
        return [part for _, _, part in sorted(found, key=lambda entry: entry[:2])]

    @staticmethod
    async def _cost(donor: Holder, part: Part) -> int | None:
        """How many blocks lie in a part; None if one of them is known not to move."""
        pool, live = donor.pool, 0
        if pool.span:
            return pool.live(part.ids)
        for start in range(0, len(part.ids), _LOOK):
            for block_id in part.ids[start : start + _LOOK]:
                block = pool.at(block_id)
                if block is None or block.state is State.FREE:
                    continue
                if block.state is not State.COMMITTED or block.ref_cnt:
                    return None
                live += 1
            await asyncio.sleep(0)
        return live
