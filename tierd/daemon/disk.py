"""A tenant's part of the SSD: one volume, an array for each layer group of each layout.

Arrays outlive the namespaces that wrote them. Those of layouts not in use count against the budget
too, and give way, the longest unwritten first, when one in use can grow no more.
"""

import asyncio
import logging
from collections.abc import Collection
from typing import Self

from storage.base import BlockStore, Volume
from tierd.block import BlockHash
from tierd.daemon import plugins
from tierd.daemon.config import SsdConfig
from tierd.daemon.tier import Tier
from tierd.errors import ConfigError
from tierd.layout import KVLayout

log = logging.getLogger("tierd.disk")


class Disk:
    """Made by `open`; `close` gives the volume back."""

    def __init__(self, tenant: str, config: SsdConfig, volume: Volume, nbytes: int) -> None:
        self.nbytes = nbytes  # the budget
        self._tenant, self._config, self._volume = tenant, config, volume
        self._unused: list[str] = []  # arrays of layouts not in use, the longest unwritten first
        self._dropping: asyncio.Task[None] | None = None

    @classmethod
    async def open(cls, tenant: str, config: SsdConfig, share: float) -> Self:
        """Open the tenant's folder. Raises ConfigError if another daemon has it, OSError."""
        path, nbytes = config.path / tenant, int(config.size * share)
        try:
            volume = await asyncio.to_thread(
                plugins.volume(config.store).open,
                path,
                nbytes=nbytes,
                min_free_nbytes=config.min_free,
                slab_nbytes=config.slab,
                durability=config.durability,
            )
        except BlockingIOError:
            raise ConfigError(f"{path} is in use by another daemon") from None
        return cls(tenant, config, volume, nbytes)

    @property
    def nbytes_used(self) -> int:
        return self._volume.nbytes

    async def arrays(
        self, name: str, layout: KVLayout, in_use: Collection[BlockHash]
    ) -> list[BlockStore]:
        """The arrays of a layout, one a group; `in_use` are the roots of the other layouts'."""
        return await asyncio.to_thread(self._open_arrays, name, layout, in_use)

    def _open_arrays(
        self, name: str, layout: KVLayout, in_use: Collection[BlockHash]
    ) -> list[BlockStore]:
        names, live = self._names(layout), {root.hex() for root in in_use}
        on_disk = self._volume.arrays()
        self._unused = sorted(
            (n for n in on_disk if n not in names and n.rpartition("-")[0] not in live),
            key=lambda unused: on_disk[unused].written_at,
        )
        facts = {"model": name, "layout": layout.to_json(), "tenant": self._tenant}
        return [
            self._volume.array(
                names[group],
                layout.block_nbytes(group),
                {**facts, "group": group, "block_shape": layout.block_shape(group)},
            )
            for group in range(len(layout.groups))
        ]

    async def tier(self, layout: KVLayout) -> Tier:
        """The tier over the arrays of a layout, which are open."""
        names = self._names(layout)

        def grow(group: int) -> range | None:
            ids = self._volume.grow(names[group])
            if ids is None and self._unused and self._dropping is None:
                self._dropping = asyncio.create_task(self._drop_unused())
            return ids

        tier = Tier.of(
            "ssd", plugins.policy(self._config.policy), self._config.options, names, grow
        )
        for name, pool in zip(names, tier.pools, strict=True):
            # There may be a million, and nobody has the pool yet.
            await asyncio.to_thread(pool.grow, self._volume.capacity(name))
        return tier

    def _names(self, layout: KVLayout) -> list[str]:
        root = layout.root(self._tenant).hex()
        return [f"{root}-{group}" for group in range(len(layout.groups))]

    async def _drop_unused(self) -> None:
        name = self._unused.pop(0)
        log.info("%s: the SSD budget is spent; dropping the unused array %s", self._tenant, name)
        try:
            await asyncio.to_thread(self._volume.drop, name)
        except (OSError, ValueError) as error:
            log.warning("%s: cannot drop array %s: %s", self._tenant, name, error)
        finally:
            self._dropping = None

    async def close(self) -> None:
        """Flush and close the volume; its stores are closed before."""
        if self._dropping:
            await self._dropping
        await asyncio.to_thread(self._volume.close)
