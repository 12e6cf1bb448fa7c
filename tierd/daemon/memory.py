"""One memory tier of a tenant: its arena, whose pools live there, and the balance between them.

Memory is made elsewhere and handed in. A namespace joins with a pool for each of its layer groups,
which grow out of the arena a run of extents at a time; when nothing is free, the balance takes runs
from those that have more than their fair share (`[models.NAME]`), and first from who has no engine.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from storage.base import BlockStore
from tierd.block import BlockHash
from tierd.daemon import plugins
from tierd.daemon.arena import Arena
from tierd.daemon.balance import Balance
from tierd.daemon.config import MemoryConfig, ModelConfig
from tierd.daemon.extents import Extents
from tierd.daemon.holder import holders
from tierd.daemon.namespace import Namespace
from tierd.daemon.tier import Tier
from tierd.layout import KVLayout


class Memory:
    """Made over `data`, `nbytes` of memory that a store of class `kind` takes blocks of."""

    def __init__(
        self,
        name: str,
        config: MemoryConfig,
        kind: type[BlockStore],
        data: Any,
        copiers: ThreadPoolExecutor,
    ) -> None:
        self.name, self._config = name, config
        self._kind, self._data, self._copiers = kind, data, copiers
        self.arena = Arena(data.nbytes)
        self.balance = Balance(Extents(self.arena))

    def tier(self, layout: KVLayout, owner: BlockHash) -> Tier:
        """A tier of empty pools for a layout; `owner` is its namespace's root."""
        sizes = _sizes(layout)

        def grow(group: int) -> list[int] | None:
            ids = self.arena.grow((owner, group), sizes[group])
            if ids is None:
                self.balance.want((owner, group))
            return ids

        policy = plugins.policy(self._config.policy)
        tier = Tier.of(self.name, policy, self._config.options, sizes, grow)
        tier.watermarks = self._config.watermarks
        return tier

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
            "nbytes_free": self.arena.nbytes_free,
            "nbytes_rebalanced": self.balance.nbytes_moved,
        }


def _sizes(layout: KVLayout) -> Sequence[int]:
    return [layout.block_nbytes(group) for group in range(len(layout.groups))]
