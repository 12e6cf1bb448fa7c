"""One memory tier of a tenant: its arena, whose pools live there, and the balance between them.

Memory is made elsewhere and handed in. A namespace joins with a pool for each of its layer groups,
which grow out of the arena a run of extents at a time; when nothing is free, the balance takes runs
from those that have more than their fair share (`[models.NAME]`), and first from who has no engine.
Its size may change, up to what there is of memory: what is not used of it goes back to the system.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from policies.base import EvictionPolicy
from storage.base import BlockStore
from storage.batch import hop
from tierd.block import BlockHash
from tierd.daemon.arena import EXTENT_NBYTES, Arena
from tierd.daemon.balance import Balance
from tierd.daemon.config import ModelConfig
from tierd.daemon.extents import Extents
from tierd.daemon.holder import holders
from tierd.daemon.namespace import Namespace
from tierd.daemon.pool import BlockPool
from tierd.daemon.shrink import Shrink
from tierd.daemon.tier import Tier
from tierd.layout import KVLayout

log = logging.getLogger("tierd.memory")

_BACKED = 32 << 20  # bytes that are backed with pages at a time

Discard = Callable[[int, int], None]  # gives bytes of the memory, from an offset on, to the system


class Memory:
    """Made over `data`, memory that a store of class `kind` takes blocks of; all of it is in use
    until `resize`. `close` ends what moves blocks."""

    def __init__(
        self,
        name: str,
        kind: type[BlockStore],
        data: Any,
        copiers: ThreadPoolExecutor,
        discard: Discard | None = None,
    ) -> None:
        self.name, self._kind, self._data, self._copiers = name, kind, data, copiers
        self._discard = discard
        self.arena = Arena(data.nbytes)
        self.balance = Balance(Extents(self.arena))
        self._discarding = asyncio.Lock()
        self._shrink = Shrink(self._is_over, self.balance.withdraw, self._give_up)

    async def resize(self, nbytes: int) -> list[tuple[int, int]]:
        """Have so many bytes of the memory in use: more at once, `(offset, bytes)` of which are
        returned, fewer as soon as they are emptied, in the background."""
        async with self._discarding:  # what goes back to the system is not given out meanwhile
            back = self.arena.resize(nbytes)
        self._shrink.start()
        return [(a * EXTENT_NBYTES, (b - a) * EXTENT_NBYTES) for a, b in back]

    async def back(
        self, parts: Sequence[tuple[int, int]], populate: Callable[[int, int], int]
    ) -> int:
        """Have parts, `(offset, bytes)`, backed with pages by `populate` in a thread, some at a
        time, but for what is not in use any more. Returns the sum of what that returns."""
        total = 0
        for start, nbytes in parts:
            for offset in range(start, start + nbytes, _BACKED):
                stop = min(offset + _BACKED, start + nbytes)
                async with self._discarding:
                    for a, b in self.arena.in_use(offset // EXTENT_NBYTES, stop // EXTENT_NBYTES):
                        at, size = a * EXTENT_NBYTES, (b - a) * EXTENT_NBYTES
                        total += await asyncio.to_thread(populate, at, size)
        return total

    def _is_over(self) -> bool:
        return self.arena.nbytes_over > 0

    async def _give_up(self) -> None:
        """Give what nobody gets any more back to the system."""
        async with self._discarding:
            for start, stop in self.arena.withheld():
                nbytes = (stop - start) * EXTENT_NBYTES
                if self._discard is not None:
                    try:
                        await hop(self._copiers, self._discard, start * EXTENT_NBYTES, nbytes)
                    except OSError as error:
                        log.warning("%s: %d bytes are kept: %s", self.name, nbytes, error)

    async def close(self) -> None:
        """Move no more blocks: the daemon is about to end."""
        await self._shrink.close()
        await self.balance.close()

    def tier(self, layout: KVLayout, owner: BlockHash, policies: Sequence[EvictionPolicy]) -> Tier:
        """A tier of empty pools for a layout, a policy each; `owner` is its namespace's root."""
        sizes = _sizes(layout)

        def grow(group: int) -> list[int] | None:
            ids = self.arena.grow((owner, group), sizes[group])
            if ids is None:
                self.balance.want((owner, group))
            return ids

        return Tier(self.name, [BlockPool(policy) for policy in policies], grow)

    def stores(self, layout: KVLayout) -> list[BlockStore]:
        """The stores of a layout's groups over this memory."""
        make: Any = self._kind  # `plugins.store` says how
        return [make(self._data, nbytes, self._copiers) for nbytes in _sizes(layout)]

    def join(self, namespace: Namespace, level: int, owner: BlockHash, model: ModelConfig) -> None:
        """A namespace whose tier `level` is this one takes part in the balance."""
        self.balance.join(holders(namespace, level, owner, model))

    async def more(self, owner: BlockHash) -> bool:
        """Give each pool of a namespace another run of extents, where others have to give way;
        whether any got one."""
        return any([await self.balance.serve(h.owner) for h in self.balance.of(owner)])

    async def leave(self, owner: BlockHash) -> None:
        """A namespace is about to close: nothing of its is on its way any more."""
        await self.balance.leave(owner)

    def left(self, owner: BlockHash, num_groups: int) -> None:
        """The namespace is closed: all of its extents are free."""
        for group in range(num_groups):
            self.arena.release((owner, group))

    def fragmentation(self, owner: BlockHash) -> list[dict[str, int]]:
        """By group: bytes of the extents it holds, of free places in them, and what is lost at
        their edges, where no whole block fits."""
        return [
            {
                "nbytes_held": (held := self.arena.held(holder.owner)),
                "nbytes_free": holder.pool.num_free * holder.block_nbytes,
                "nbytes_edges": held - holder.pool.capacity * holder.block_nbytes,
            }
            for holder in self.balance.of(owner)
        ]

    def status(self) -> dict[str, int]:
        """Facts for `tierd status`, as JSON."""
        return {
            "nbytes": self.arena.nbytes,
            "nbytes_reserved": self._data.nbytes,
            "nbytes_over": self.arena.nbytes_over,
            "nbytes_free": self.arena.nbytes_free,
            "nbytes_rebalanced": self.balance.nbytes_moved,
        }


def _sizes(layout: KVLayout) -> Sequence[int]:
    return [layout.block_nbytes(group) for group in range(len(layout.groups))]
