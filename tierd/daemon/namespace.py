"""One namespace of a tenant: a layout, its cache, its stores and the transfer between them.

It exists from the first attach of a layout until its tenant retires it, and outlives its engines:
what they committed stays findable. Nothing here knows sockets.
"""

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

from storage.base import BlockStore
from tierd.block import BlockId
from tierd.daemon.cache import TieredCache
from tierd.daemon.tag import unpack as tag_names
from tierd.daemon.tier import Tier
from tierd.daemon.transfer import StoreTransfer
from tierd.daemon.upkeep import Upkeep
from tierd.layout import KVLayout

log = logging.getLogger("tierd.namespace")

_PAUSE_S = 10.0  # how long a medium that refused a write is left alone
_ADOPT = 256  # recovered blocks taken up before the loop may breathe


class Namespace:
    """`stores[level][group]` are its own: `close` closes them."""

    def __init__(
        self,
        name: str,
        layout: KVLayout,
        tiers: Sequence[Tier],
        stores: Sequence[Sequence[BlockStore]],
        staging: Sequence[Any] = (),
    ) -> None:
        self.name, self.layout = name, layout
        self.tiers, self.stores = tiers, stores
        self.transfer = StoreTransfer(stores, self._pause, staging)
        self.cache = TieredCache(layout, tiers, self.transfer)
        self.upkeep = Upkeep(self.cache, self.transfer)
        self.num_sessions = 0
        self._pauses: dict[int, asyncio.TimerHandle] = {}

    async def recover(self) -> int:
        """Take up what former lives left in the stores. Returns how many blocks."""
        adopted = 0
        for level, stores in enumerate(self.stores):
            for group, store in enumerate(stores):
                adopted += await self._adopt(level, group, store)
        self.upkeep.start()
        return adopted

    async def _adopt(self, level: int, group: int, store: BlockStore) -> int:
        pool, adopted = self.tiers[level].pools[group], 0
        for number, (block_id, tag) in enumerate(await store.recover()):
            if number % _ADOPT == _ADOPT - 1:
                await asyncio.sleep(0)
            if (named := tag_names(tag)) is not None:
                adopted += pool.adopt(BlockId(block_id), *named)
        return adopted

    def _pause(self, level: int) -> None:
        """A medium refused a write: nothing new goes there for a while; what it has is served."""
        if level in self._pauses:
            return
        tier = self.tiers[level]
        log.warning("%s: tier %r refuses writes; none for %.0f s", self.name, tier.name, _PAUSE_S)
        tier.paused = True
        self._pauses[level] = asyncio.get_running_loop().call_later(_PAUSE_S, self._resume, level)

    def _resume(self, level: int) -> None:
        del self._pauses[level]
        self.tiers[level].paused = False

    async def save(self, deadline: float) -> int:
        """Write what only memory holds to the coldest tier, hottest first, until `deadline` on the
        loop's clock. Returns how many blocks were left unsaved."""
        await self.upkeep.close()
        unsaved = self.cache.chain.unsaved()
        loop = asyncio.get_running_loop()
        while unsaved and loop.time() < deadline and not self.tiers[-1].paused:
            batch, unsaved = unsaved[:64], unsaved[64:]
            self.cache.save(batch)
            await self.transfer.drain()
        return len(unsaved)

    async def close(self) -> None:
        """End the transfers, then the stores."""
        for handle in self._pauses.values():
            handle.cancel()
        await self.upkeep.close()
        await self.transfer.close()
        for store in (store for stores in self.stores for store in stores):
            await store.close()

    def status(self) -> dict[str, Any]:
        """Facts for `tierd status`, as JSON."""
        counts = self.cache.chain.counts
        return {
            "name": self.name,
            "layout": self.layout.to_json(),
            "sessions": self.num_sessions,
            "requests": counts.requests,
            "tokens_asked": counts.tokens_asked,
            "tokens_hit": counts.tokens_hit,
            "blocks_hit": counts.blocks_hit,
            "promoted": counts.promoted,
            "demoted": counts.demoted,
            "dropped": counts.dropped,
            "failed": counts.failed,
            "lost": counts.lost,
            "out_of_blocks": counts.out_of_blocks,
            "moved": {f"{a}>{b}": n for (a, b), n in self.transfer.blocks_moved.items()},
            "tiers": [self._tier_status(level) for level in range(len(self.tiers))],
        }

    def _tier_status(self, level: int) -> dict[str, Any]:
        tier = self.tiers[level]
        groups = []
        for group, pool in enumerate(tier.pools):
            states = {state.word: count for state, count in pool.counts.items()}
            nbytes = self.layout.block_nbytes(group)
            groups.append({"capacity": pool.capacity, "block_nbytes": nbytes, **states})
        used = sum((g["capacity"] - g["free"]) * g["block_nbytes"] for g in groups)
        return {"name": tier.name, "paused": tier.paused, "nbytes_used": used, "groups": groups}
