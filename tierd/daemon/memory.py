"""One memory tier of a tenant: its arena, whose pools live there, and the balance between them.

Memory is made elsewhere and handed in. A namespace joins with a pool for each of its layer groups,
which grow out of the arena a run of extents at a time; when nothing is free, the balance takes runs
from those that have more than their fair share (`[models.NAME]`), and first from who has no engine.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from storage.base import BlockStore
from tierd.block import BlockHash
from tierd.daemon import plugins
from tierd.daemon.arena import Arena
from tierd.daemon.balance import Balance, Holder
from tierd.daemon.config import MemoryConfig, ModelConfig
from tierd.daemon.fair import Claim
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
        self.balance = Balance(self.arena, self._list)
        self._holders: dict[BlockHash, list[Holder]] = {}

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
        layout = namespace.layout
        sizes = zip(_sizes(layout), layout.groups, strict=True)
        per_token = [nbytes / group.block_size for nbytes, group in sizes]
        self._holders[owner] = [
            Holder(
                (owner, group),
                level,
                group,
                layout.block_nbytes(group),
                namespace.cache,
                namespace.transfer,
                partial(_claim, namespace, (owner, group), model, part / sum(per_token)),
            )
            for group, part in enumerate(per_token)
        ]

    async def more(self, owner: BlockHash) -> bool:
        """Give each pool of a namespace another run of extents, where others have to give way;
        whether any got one."""
        return any([await self.balance.serve(h.owner) for h in self._holders.get(owner, ())])

    def leave(self, owner: BlockHash) -> None:
        """The namespace is closed: all of its extents are free."""
        for holder in self._holders.pop(owner, ()):
            self.arena.release(holder.owner)

    def _list(self) -> list[Holder]:
        return [holder for holders in self._holders.values() for holder in holders]

    def status(self) -> dict[str, int]:
        """Facts for `tierd status`, as JSON."""
        return {
            "nbytes": self.arena.nbytes,
            "nbytes_free": self.arena.nbytes_free,
            "nbytes_rebalanced": self.balance.nbytes_moved,
        }


def _claim(
    namespace: Namespace, owner: tuple[BlockHash, int], model: ModelConfig, part: float, held: int
) -> Claim:
    """What a group may claim: its model's weight and floor by the bytes that it has of a token."""
    active = namespace.num_sessions > 0
    return Claim(owner, held, model.weight * part, int(model.floor * part), active)


def _sizes(layout: KVLayout) -> Sequence[int]:
    return [layout.block_nbytes(group) for group in range(len(layout.groups))]
