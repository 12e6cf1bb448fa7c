"""One namespace of a tenant: a layout, its cache, its stores and the transfer between them.

It exists from the first attach of a layout until its tenant retires it, and outlives its engines:
what they committed stays findable. Nothing here knows sockets.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

from policies.base import Access, EvictionPolicy, PlacementPolicy, PrefetchPolicy
from storage.base import BlockStore
from tierd.block import HASH_NBYTES, Block, BlockHash, BlockId
from tierd.daemon.cache import TieredCache
from tierd.daemon.conversations import Conversations
from tierd.daemon.pool import Adopted
from tierd.daemon.speed import fastest_hit
from tierd.daemon.tag import unpack
from tierd.daemon.tier import Tier
from tierd.daemon.transfer import StoreTransfer
from tierd.daemon.upkeep import Upkeep
from tierd.layout import KVLayout

log = logging.getLogger("tierd.namespace")

_Told = TypeVar("_Told")

_PLAIN_TAG = 2 * HASH_NBYTES + 1  # its name and its parent's
_FEWEST, _MOST = 16, 1024  # keys that change hands at once,
_HANDING_S = 0.0003  # so many as take about so long (I11)
_PAUSE_S = 10.0  # how long a medium that refused a write is left alone


class Namespace:
    """`stores[level][group]` are its own: `close` closes them."""

    def __init__(
        self,
        name: str,
        layout: KVLayout,
        tiers: Sequence[Tier],
        stores: Sequence[Sequence[BlockStore]],
        prefetch: PrefetchPolicy,
        placement: PlacementPolicy | None = None,
        staging: Sequence[Any] = (),
    ) -> None:
        self.name, self.layout = name, layout
        self.tiers, self.stores = tiers, stores
        self.transfer = StoreTransfer(stores, self._pause, staging)
        self.cache = TieredCache(layout, tiers, self.transfer, placement)
        self.upkeep = Upkeep(self.cache, self.transfer, prefetch)
        self.conversations = Conversations(self.cache, self.upkeep, self.transfer.speeds)
        self.num_sessions = 0
        # Takes memory from others, if they have to give it; whether any came.
        self.more_room: Callable[[], Awaitable[bool]] | None = None
        self._pauses: dict[int, asyncio.TimerHandle] = {}

    async def recover(self) -> int:
        """Take up what former lives left in the stores. Returns how many blocks.

        Nobody else may have the namespace yet: its pools are filled in a thread.
        """
        adopted = 0
        for tier, stores in zip(self.tiers, self.stores, strict=True):
            for pool, store in zip(tier.pools, stores, strict=True):
                found = _named(await store.recover())
                adopted += await asyncio.to_thread(pool.adopt, found)
        self.upkeep.start()
        return adopted

    async def exchange(self, level: int, group: int, policy: EvictionPolicy) -> None:
        """Have another policy decide at one pool, which goes on serving while its residents are
        handed over, some at a time."""
        pool, loop, piece = self.tiers[level].pools[group], asyncio.get_running_loop(), _FEWEST
        pool.exchange(policy)
        begin = time.thread_time()
        while pool.hand_over(piece, Access(loop.time())):
            took = time.thread_time() - begin
            if took > _HANDING_S:
                piece = max(_FEWEST, piece // 2)
            elif took < _HANDING_S / 3:
                piece = min(2 * piece, _MOST)
            await asyncio.sleep(0)
            begin = time.thread_time()

    async def read(
        self, level: int, group: int, ask: Callable[[EvictionPolicy], Awaitable[_Told]]
    ) -> _Told:
        """Have somebody read the policy of one pool, which goes on serving meanwhile."""
        pool = self.tiers[level].pools[group]
        policy, piece, waiting = pool.hold(), _FEWEST, 0
        try:
            return await ask(policy)
        finally:
            while left := pool.tell(piece):
                if left >= waiting > 0:  # as much comes as is told
                    piece *= 2
                waiting = left
                await asyncio.sleep(0)

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

    def shorter_hit(
        self, hashes: Sequence[BlockHash], num_tokens: int, prefill: float, level: int
    ) -> int | None:
        """The hit, in tokens, that has a prompt ready first at `level`, where an engine computes
        `prefill` tokens a second; None if that is the longest, or `prefill` 0, unknown."""
        match = self.cache.match
        if not prefill or match.in_place(hashes, match.hit(hashes, num_tokens), level):
            return None
        hits = list(match.hits(hashes, num_tokens))
        elsewhere, routes = match.elsewhere(hashes, hits, level), self.transfer.speeds.routes
        fastest = fastest_hit(hits, elsewhere, num_tokens, prefill, routes, level)
        return fastest if fastest < hits[0] else None

    async def save(self, deadline: float) -> int:
        """Write what only memory holds to the coldest tier, hottest first, until `deadline` on the
        loop's clock. Returns how many blocks were left unsaved."""
        self.conversations.close()
        await self.upkeep.close()
        unsaved = self.cache.chain.unsaved()
        runs = _runs(unsaved)
        loop = asyncio.get_running_loop()
        while unsaved and loop.time() < deadline and not self.tiers[-1].paused:
            batch, unsaved = unsaved[:64], unsaved[64:]
            self.cache.save(batch)
            await self.transfer.drain()
        for group, path in reversed(runs):  # else the hottest came first, and would go first
            self.tiers[-1].pools[group].touch(path, Access(loop.time()))
            await asyncio.sleep(0)
        return len(unsaved)

    async def close(self) -> None:
        """End the transfers, then the stores."""
        for handle in self._pauses.values():
            handle.cancel()
        self.conversations.close()
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
            "prefetched": counts.prefetched,
            "demoted": counts.demoted,
            "dropped": counts.dropped,
            "refused": counts.refused,
            "failed": counts.failed,
            "lost": counts.lost,
            "out_of_blocks": counts.out_of_blocks,
            "hints": self.conversations.status(),
            "moved": {f"{a}>{b}": n for (a, b), n in self.transfer.blocks_moved.items()},
            "speeds": {
                f"{a}>{b}": {
                    "latency_s": speed.latency,
                    "seconds_per_gib": speed.seconds_per_byte * 2**30,
                    "bursts": speed.bursts,
                }
                for (a, b), speed in self.transfer.speeds.routes.items()
                if speed.bursts
            },
            "tiers": [self._tier_status(level) for level in range(len(self.tiers))],
        }

    def _tier_status(self, level: int) -> dict[str, Any]:
        tier = self.tiers[level]
        groups = []
        for group, pool in enumerate(tier.pools):
            states = {state.word: count for state, count in pool.counts.items()}
            nbytes = self.layout.block_nbytes(group)
            facts: dict[str, Any] = {
                "policy": type(pool.policy).__name__,
                "capacity": pool.capacity,
            }
            groups.append({**facts, "block_nbytes": nbytes, **states})
        used = sum((g["capacity"] - g["free"]) * g["block_nbytes"] for g in groups)
        return {"name": tier.name, "paused": tier.paused, "nbytes_used": used, "groups": groups}


def _named(found: Iterable[tuple[int, bytes]]) -> Iterator[Adopted]:
    """Places and names of blocks, by the tags that were kept with them."""
    for number, tag in found:
        if len(tag) == _PLAIN_TAG and tag[0]:  # of a million, nearly all: unpacking takes as long
            names = tag[1 : HASH_NBYTES + 1], tag[HASH_NBYTES + 1 :], ()
            yield number, *names  # type: ignore[misc]  # calling the types' names would, too
        elif (named := unpack(tag)) is not None:
            yield BlockId(number), *named


def _runs(blocks: Iterable[tuple[int, int, Block]]) -> list[tuple[int, list[BlockHash]]]:
    """What is to be saved as paths of one layer group each, the hottest first."""
    runs: list[tuple[int, list[BlockHash]]] = []
    latest: dict[int, list[BlockHash]] = {}  # by group
    for _, group, block in blocks:
        assert block.key is not None, "only what has a name is saved"
        path = latest.get(group)
        if path is None or block.parent != path[-1]:
            path = latest[group] = []
            runs.append((group, path))
        path.append(block.key)
    return runs
