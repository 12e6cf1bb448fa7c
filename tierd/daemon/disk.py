"""A tenant's part of the SSD: one volume, an array for each layer group of each layout.

Arrays outlive the namespaces that wrote them. Those of layouts not in use count against the budget
too, and give way, the longest unwritten first, when one in use can grow no more; after them, those
in use share it like memory, a slab at a time. What is mostly empty is swept. Beside the arrays lies
what the policies of their namespaces knew.
"""

import asyncio
import logging
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import chain
from typing import Any, Self

from policies.base import AdmissionPolicy, EvictionPolicy
from storage.base import BlockStore, Volume
from storage.batch import hop
from tierd.block import BlockHash
from tierd.daemon import plugins
from tierd.daemon.balance import Balance
from tierd.daemon.config import ModelConfig, SsdConfig
from tierd.daemon.holder import Holder, Owner, holders
from tierd.daemon.namespace import Namespace
from tierd.daemon.policy_file import PolicyFile, Remembered, remember, tidy
from tierd.daemon.pool import BlockPool
from tierd.daemon.rules import Choice
from tierd.daemon.shrink import Shrink
from tierd.daemon.slabs import Slabs, array_name
from tierd.daemon.sweep import Sweep
from tierd.daemon.tier import Tier
from tierd.errors import ConfigError
from tierd.layout import KVLayout

log = logging.getLogger("tierd.disk")

_KNOWN, _LEAST_KNOWN = 64, 1 << 20  # what policies know: a part of the budget, at least so much
_FILLS = 4  # classes of slabs by how full they are


class Disk:
    """Made by `open`; `close` gives the volume back."""

    def __init__(self, tenant: str, config: SsdConfig, volume: Volume, nbytes: int) -> None:
        self.nbytes = nbytes  # the budget
        self._tenant, self._volume, self._min_free = tenant, volume, config.min_free
        self._policies = config.path / tenant / "policies"
        self._unused: list[str] = []  # arrays of layouts not in use, the longest unwritten first
        self._dropping: asyncio.Task[None] | None = None
        self._thread = ThreadPoolExecutor(1, "tierd-disk")
        self._slabs = Slabs(volume, nbytes, self._thread)
        self._balance = Balance(self._slabs)
        self._sweep = Sweep(self._slabs, self._balance, config.sparse)
        self._shrink = Shrink(self._is_over, self._withdraw, self._withdrawn)

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
        disk = cls(tenant, config, volume, nbytes)
        await asyncio.to_thread(disk._tidy)
        disk._balance.start()
        disk._sweep.start()
        return disk

    async def layouts(self, chosen_by: Mapping[str, object]) -> list[KVLayout]:
        """The layouts that were given to `arrays` with `chosen_by`, the latest written first."""
        on_disk = await asyncio.to_thread(self._volume.arrays)
        found: list[KVLayout] = []
        for array in sorted(on_disk.values(), key=lambda array: array.written_at, reverse=True):
            values = array.attributes.get("layout")
            if isinstance(values, dict) and array.attributes.get("chosen_by") == chosen_by:
                with suppress(ValueError):  # another version's
                    found.append(KVLayout.from_json(values))
        return found

    async def arrays(
        self,
        name: str,
        layout: KVLayout,
        in_use: Collection[BlockHash],
        chosen_by: Mapping[str, object],
    ) -> list[BlockStore]:
        """The arrays of a layout, one a group; `in_use` are the roots of the other layouts'.

        `chosen_by` (JSON) is kept with new ones: what the configuration said of block sizes.
        """
        facts = {"model": name, "layout": layout.to_json(), "tenant": self._tenant}
        facts |= {"chosen_by": chosen_by}
        return await asyncio.to_thread(self._open_arrays, layout, in_use, facts)

    def _open_arrays(
        self, layout: KVLayout, in_use: Collection[BlockHash], facts: Mapping[str, object]
    ) -> list[BlockStore]:
        names = self._names(layout)
        self._find_unused([*in_use, layout.root(self._tenant)])
        return [
            self._volume.array(
                names[group],
                layout.block_nbytes(group),
                {**facts, "group": group, "block_shape": layout.block_shape(group)},
            )
            for group in range(len(layout.groups))
        ]

    def _tidy(self) -> None:
        """No file is left of a namespace whose arrays are gone."""
        roots = {name.rpartition("-")[0] for name in self._volume.arrays()}
        tidy(self._policies, roots)

    def _forget(self, root: str) -> None:
        """An array of a namespace is gone: if that was the last, so is what its policies knew."""
        if not any(name.rpartition("-")[0] == root for name in self._volume.arrays()):
            PolicyFile(self._policies, root).remove()

    async def remembered(self, root: BlockHash) -> list[Remembered]:
        """What the policies of a namespace knew."""
        return await asyncio.to_thread(PolicyFile(self._policies, root.hex()).read)

    async def ask(
        self, tier: str, group: int, choice: Choice, policy: EvictionPolicy
    ) -> list[Remembered]:
        """What the policy of a pool knows; nobody changes it before this is over, cancelled or
        not."""
        return await hop(self._thread, remember, tier, group, choice, policy)

    async def remember(self, root: BlockHash, known: Sequence[Remembered]) -> None:
        """Keep what the policies of a namespace know."""
        most = max(_LEAST_KNOWN, self.nbytes // _KNOWN)
        file = PolicyFile(self._policies, root.hex())
        try:
            await hop(self._thread, file.write, known, most, self._min_free)
        except OSError as error:
            log.warning("%s: what the policies knew is not kept: %s", self._tenant, error)

    def _find_unused(self, in_use: Collection[BlockHash]) -> None:
        live, on_disk = {root.hex() for root in in_use}, self._volume.arrays()
        self._unused = sorted(
            (name for name in on_disk if name.rpartition("-")[0] not in live),
            key=lambda unused: on_disk[unused].written_at,
        )

    async def resize(self, config: SsdConfig, share: float, in_use: Collection[BlockHash]) -> None:
        """Have the budget, the floor for others and the bar of the sweep that `config` says. What
        is over a smaller budget is given back in the background."""
        self.nbytes = self._slabs.nbytes = int(config.size * share)
        self._sweep.sparse, self._min_free = config.sparse, config.min_free
        await self._let_drop()
        try:
            await asyncio.to_thread(self._volume.limit, self.nbytes, config.min_free)
        except OSError as error:
            log.warning("%s: the arrays say nothing of the new size: %s", self._tenant, error)
        await asyncio.to_thread(self._find_unused, in_use)
        self._shrink.start()
        self._sweep.stir()

    def _is_over(self) -> bool:
        return self._volume.nbytes > self.nbytes

    async def _withdraw(self) -> bool:
        """Give one slab, or one array that nobody uses, back."""
        if self._unused:
            self._drop()
            await self._let_drop()
            return True
        return await self._balance.withdraw()

    async def _withdrawn(self) -> None:
        pass  # what is deleted is the file system's already

    async def tier(
        self,
        layout: KVLayout,
        policies: Sequence[EvictionPolicy],
        admissions: Sequence[AdmissionPolicy],
    ) -> Tier:
        """The tier over the arrays of a layout, which are open, a policy of both kinds each."""
        root, names = layout.root(self._tenant), self._names(layout)

        def grow(group: int) -> range | None:
            ids = self._volume.grow(names[group])
            if ids is None:
                self._make_room((root, group))
            return ids

        spans = [self._volume.slab(name).num_blocks for name in names]
        pools = [BlockPool(policy, span) for policy, span in zip(policies, spans, strict=True)]
        for name, pool in zip(names, pools, strict=True):
            # There may be a million, and nobody has the pool yet.
            await asyncio.to_thread(pool.grow, chain.from_iterable(self._volume.slabs(name)))
        return Tier("ssd", pools, grow, admissions=admissions)

    def join(self, namespace: Namespace, level: int, owner: BlockHash, model: ModelConfig) -> None:
        """A namespace whose tier `level` is this one shares it with the others."""
        self._balance.join(holders(namespace, level, owner, model))
        self._sweep.stir()

    async def leave(self, owner: BlockHash) -> None:
        """A namespace is about to close: no slab of its is on its way any more."""
        await self._balance.leave(owner)

    async def rest(self) -> None:
        """Move no more blocks: the daemon is about to end."""
        await self._shrink.close()
        await self._sweep.close()
        await self._balance.close()

    def fragmentation(self, owner: BlockHash) -> list[dict[str, Any]]:
        """By group: bytes that its slabs take and that its blocks do, and how many slabs are up to
        a quarter full, a half, three quarters, or fuller."""
        return [self._fragmentation(holder) for holder in self._balance.of(owner)]

    def _fragmentation(self, holder: Holder) -> dict[str, Any]:
        pool, parts, fills = holder.pool, self._slabs.parts(holder, holder), [0] * _FILLS
        for part in parts:
            fills[max(0, -(-pool.live(part.ids) * _FILLS // pool.span) - 1)] += 1
        live = pool.capacity - pool.num_free
        return {
            "nbytes_held": sum(part.nbytes for part in parts),
            "nbytes_live": live * holder.block_nbytes,
            "slabs": len(parts),
            "slabs_by_fill": fills,
        }

    def status(self) -> dict[str, int]:
        """Facts for `tierd status`, as JSON."""
        return {
            "nbytes": self.nbytes,
            "nbytes_used": self._volume.nbytes,
            "nbytes_rebalanced": self._balance.nbytes_moved,
            "slabs_swept": self._sweep.slabs_freed,
        }

    def _names(self, layout: KVLayout) -> list[str]:
        root = layout.root(self._tenant)
        return [array_name((root, group)) for group in range(len(layout.groups))]

    def _make_room(self, owner: Owner) -> None:
        """The budget is spent: arrays that nobody uses give way, then who has too much."""
        if self._unused:
            self._drop()
        elif self._dropping is None:
            self._balance.want(owner)

    def _drop(self) -> None:
        """One array that nobody uses gives way, unless one is about to."""
        if self._dropping is None:
            self._dropping = asyncio.create_task(self._drop_unused())

    async def _let_drop(self) -> None:
        """Wait for an array that is about to go."""
        if self._dropping:
            await asyncio.wait([self._dropping])

    async def _drop_unused(self) -> None:
        name = self._unused.pop(0)
        log.info("%s: the SSD budget is spent; dropping the unused array %s", self._tenant, name)
        try:
            await asyncio.to_thread(self._volume.drop, name)
            await asyncio.to_thread(self._forget, name.rpartition("-")[0])
        except (OSError, ValueError) as error:
            log.warning("%s: cannot drop array %s: %s", self._tenant, name, error)
        finally:
            self._dropping = None

    async def close(self) -> None:
        """Flush and close the volume; its stores are closed before."""
        await self.rest()
        await self._let_drop()
        self._thread.shutdown()
        await asyncio.to_thread(self._volume.close)
