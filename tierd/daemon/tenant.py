"""One tenant: its memory, its folder of the SSD, and the namespaces that share them.

Tenants share nothing: no arena, no index, no file (I10). Memory is made here and handed to the
stores; a namespace's pools grow out of the tenant's arenas, an extent run or a slab at a time.
"""

import asyncio
import logging
import mmap
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, ExitStack
from functools import partial
from typing import Any

import numpy as np

from policies.base import EvictionPolicy, PrefetchPolicy
from storage.base import Row
from storage.host import pin
from tierd.block import BlockHash
from tierd.daemon import collector, plugins, rules, sizing
from tierd.daemon.arena import EXTENT_NBYTES
from tierd.daemon.config import Config, MemoryConfig, ModelConfig
from tierd.daemon.disk import Disk
from tierd.daemon.fragmentation import internal
from tierd.daemon.handover import Handover
from tierd.daemon.lease import Lease
from tierd.daemon.lengths import Lengths
from tierd.daemon.memory import Memory
from tierd.daemon.namespace import Namespace
from tierd.daemon.policy_file import Remembered, revive
from tierd.daemon.rules import Choice
from tierd.errors import LayoutMismatch
from tierd.layout import KVLayout
from tierd.shm import CudaMemory, SharedMemory

log = logging.getLogger("tierd.tenant")

_STAGING_ROWS = 8  # host rows for SSD <-> GPU copies that find no place in host memory


class Tenant:
    """Made by `open`; `close` gives everything back."""

    def __init__(self, name: str, config: Config, copiers: ThreadPoolExecutor) -> None:
        """Make the memory tiers; `copiers` are the threads that move bytes between them."""
        self.name, self._config, self._copiers = name, config, copiers
        share = config.tenants[name].share
        # Found here, because looking for what is installed takes the loop too long later.
        self._device_store = plugins.store(config.device.store)
        self._host_store = plugins.store("host")
        self.device: SharedMemory | CudaMemory = (
            CudaMemory.create(_part(config.device.reserved, share))
            if config.device.store == "cuda"
            else SharedMemory.create(f"tierd-device-{name}", _part(config.device.reserved, share))
        )
        self.host = (
            SharedMemory.create(f"tierd-host-{name}", _part(config.host.reserved, share))
            if config.host
            else None
        )
        data = self.device.tensor if isinstance(self.device, CudaMemory) else self.device.array
        # What a GPU's driver has pinned, or is its own memory, does not go back to the system.
        shared = isinstance(self.device, SharedMemory)
        discard = self.device.discard if isinstance(self.device, SharedMemory) else None
        self._memories = [Memory("device", self._device_store, data, copiers, discard)]
        if self.host:
            discard = self.host.discard if shared else None
            memory = Memory("host", self._host_store, self.host.array, copiers, discard)
            self._memories.append(memory)
        self._disk: Disk | None = None
        self._stop = threading.Event()  # of what goes on in threads
        self._populating: asyncio.Task[None] | None = None
        self._huge: int | None = None  # bytes of the device tier on huge pages, once known
        self._pins = ExitStack()
        self._staging_pins: dict[BlockHash, ExitStack] = {}
        self.namespaces: dict[str, Namespace] = {}
        self.lengths = Lengths()  # of the requests of all engines
        self._chosen_by = {"policy": config.blocks.policy, "options": dict(config.blocks.options)}
        self._attaching = asyncio.Lock()

    async def open(self) -> None:
        """Pin host memory where there is a GPU, and open the tenant's folder of the SSD."""
        for memory in self._memories:
            memory.balance.start()
            await memory.resize(self._size(self._config, memory))
        self._populate([(0, self._size(self._config, self._memories[0]))])
        if self.host and isinstance(self.device, CudaMemory):
            self._pins = await asyncio.to_thread(pin, self.host.array)
        if (ssd := self._config.ssd) is not None:
            self._disk = await Disk.open(self.name, ssd, self._config.tenants[self.name].share)

    @property
    def gpu(self) -> int:
        """Which GPU the device tier lies on. Raises ValueError if on none."""
        if not isinstance(self.device, CudaMemory):
            raise ValueError("the device tier lies on no GPU")
        return self.device.device

    @staticmethod
    def _tier(config: Config, memory: Memory) -> MemoryConfig:
        tier = config.device if memory.name == "device" else config.host
        assert tier is not None, "a tier comes and goes with the daemon"
        return tier

    def _size(self, config: Config, memory: Memory) -> int:
        """Bytes of a memory tier that are to be in use."""
        return _part(self._tier(config, memory).size, config.tenants[self.name].share)

    @property
    def _device_nbytes(self) -> int:
        """What of the hottest tier is in use."""
        return self._memories[0].arena.nbytes

    def _populate(self, parts: Sequence[tuple[int, int]]) -> None:
        """Back parts, `(offset, bytes)`, of the memory that engines compute on, meanwhile."""
        if isinstance(self.device, SharedMemory) and parts:
            self._populating = asyncio.create_task(self._back(self.device, parts))

    async def _back(self, memory: SharedMemory, parts: Sequence[tuple[int, int]]) -> None:
        for start, nbytes in parts:
            huge = await asyncio.to_thread(memory.populate, self._stop, start, nbytes)
            self._huge = (self._huge or 0) + huge
        log.info("%s: %d bytes of the device tier lie on huge pages", self.name, self._huge)

    async def reconfigure(self, config: Config) -> None:
        """Go on by another configuration, which differs in what is `LIVE`. What is to be smaller
        shrinks in the background."""
        async with self._attaching:  # whoever attaches meanwhile waits
            old, self._config = self._config, config
            await self._resize(config)
            for namespace in self.namespaces.values():
                await self._change(namespace, old, config)

    async def _resize(self, config: Config) -> None:
        if self._populating:
            await asyncio.wait([self._populating])  # it would back again what is given up
        for memory in self._memories:
            more = await memory.resize(self._size(config, memory))
            if memory is self._memories[0]:
                self._populate(more)
        if self._disk and config.ssd:
            in_use = [namespace.layout.root(self.name) for namespace in self.namespaces.values()]
            await self._disk.resize(config.ssd, config.tenants[self.name].share, in_use)

    async def _change(self, namespace: Namespace, old: Config, new: Config) -> None:
        if new.prefetch != old.prefetch:
            namespace.upkeep.guess_by(_prefetch(new))
        self._join(namespace)
        for level, memory in enumerate(self._memories):
            watermarks = self._tier(new, memory).watermarks
            namespace.cache.chain.set_watermarks(level, watermarks)
        namespace.upkeep.stir()
        for level, tier in enumerate(namespace.tiers):
            before, after = (self._choices(of, tier.name, namespace) for of in (old, new))
            for group, (was, now) in enumerate(zip(before, after, strict=True)):
                if now != was:
                    await namespace.exchange(level, group, now.make())
                    where = f"{namespace.name}: {tier.name}, group {group}"
                    log.info("%s: %s, by %s", where, now.policy, now.why)

    def _choices(self, config: Config, tier: str, namespace: Namespace) -> Iterator[Choice]:
        return rules.choices(config, tier, self.name, namespace.name, namespace.layout)

    async def attach(self, name: str, wanted: KVLayout) -> Namespace:
        """The namespace of `wanted`, made if need be; an engine more is in it.

        A layout has one namespace, whatever other name it is asked for by. Raises LayoutMismatch if
        another layout is attached under that name, ValueError if no block of it fits.
        """
        async with self._attaching:  # of names only; no copy waits for it
            layout = await self._with_blocks(wanted)
            namespace = self.namespaces.get(name)
            if namespace is not None and namespace.layout != layout:
                if namespace.num_sessions:
                    raise LayoutMismatch(
                        f"{name!r} is attached with another layout: "
                        + "; ".join(layout.differences(namespace.layout))
                    )
                await self._retire(namespace)
                namespace = None
            if namespace is None:
                same = [n for n in self.namespaces.values() if n.layout == layout]
                namespace = next(iter(same), None)
            if namespace is None:
                with collector.paused():
                    namespace = await self._create(name, layout)
                self.namespaces[name] = namespace
            namespace.num_sessions += 1
            return namespace

    async def _with_blocks(self, wanted: KVLayout) -> KVLayout:
        """The layout with the layer groups that the configured policy chooses, if it has none."""
        if wanted.nbytes_per_token() > self._device_nbytes:  # before anything is made of its size
            raise ValueError(
                f"layout: a token takes {wanted.nbytes_per_token()} bytes, the device tier has "
                f"{self._device_nbytes}"
            )
        layout = wanted if wanted.groups else await self._with_groups(wanted)
        for group in range(len(layout.groups)):
            if layout.block_nbytes(group) > self._device_nbytes:
                raise ValueError(
                    f"layout: a block of group {group} takes {layout.block_nbytes(group)} bytes, "
                    f"the device tier has {self._device_nbytes}"
                )
        return layout

    async def _with_groups(self, wanted: KVLayout) -> KVLayout:
        policy, granule = sizing.policy_of(self._config.blocks), self._config.blocks.granule
        if policy.by_facts:
            known = [namespace.layout for namespace in self.namespaces.values()]
            if self._disk:
                known += await self._disk.layouts(self._chosen_by)
            if (kept := sizing.keep(wanted, granule, known)) is not None:
                return kept
        facts = sizing.facts_of(self._config, self.status())
        return await asyncio.to_thread(sizing.choose, wanted, policy, facts)  # some milliseconds

    async def _retire(self, namespace: Namespace) -> None:
        """End a namespace that no engine uses; its blocks live on in the SSD tier, if any."""
        del self.namespaces[namespace.name]
        owner = namespace.layout.root(self.name)
        for shared in self._shared():
            await shared.leave(owner)
        if self._disk:
            await namespace.save(asyncio.get_running_loop().time() + self._config.grace)
        await self._close(namespace)
        self._staging_pins.pop(owner, ExitStack()).close()
        for memory in self._memories:
            memory.left(owner, len(namespace.layout.groups))
        log.info("%s: retired", namespace.name)

    async def _close(self, namespace: Namespace) -> None:
        """Close a namespace and keep what its policies know."""
        await namespace.close()
        if self._disk:
            pools = [
                (tier.name, group, choice, pool.policy)
                for tier in namespace.tiers
                for group, (pool, choice) in enumerate(
                    zip(tier.pools, self._choices(self._config, tier.name, namespace), strict=True)
                )
                if not isinstance(pool.policy, Handover)  # half of it is known to each
            ]
            await self._disk.remember(namespace.layout.root(self.name), pools)

    async def _create(self, name: str, layout: KVLayout) -> Namespace:
        owner = layout.root(self.name)
        known = await self._disk.remembered(owner) if self._disk else []
        tiers = []
        for memory in self._memories:
            policies = await self._policies(memory.name, name, layout, known)
            tiers.append(memory.tier(layout, owner, policies))
            tiers[-1].watermarks = self._tier(self._config, memory).watermarks
        stores = [memory.stores(layout) for memory in self._memories]
        async with AsyncExitStack() as undo:
            if self._disk:
                in_use = [n.layout.root(self.name) for n in self.namespaces.values()]
                arrays = await self._disk.arrays(name, layout, in_use, self._chosen_by)
                for array in arrays:
                    undo.push_async_callback(array.close)
                stores.append(arrays)
                policies = await self._policies("ssd", name, layout, known)
                tiers.append(await self._disk.tier(layout, policies))
            largest = max(layout.block_nbytes(group) for group in range(len(layout.groups)))
            staging = self._stage(owner, largest)
            prefetch = _prefetch(self._config)
            namespace = Namespace(name, layout, tiers, stores, prefetch, staging)
            adopted = await namespace.recover()
            undo.pop_all()
        self._join(namespace)
        namespace.more_room = partial(self._memories[0].more, owner)
        log.info("%s: attached, %d blocks recovered", name, adopted)
        return namespace

    async def _policies(
        self, tier: str, name: str, layout: KVLayout, known: Sequence[Remembered]
    ) -> list[EvictionPolicy]:
        """What a tier's pools of a namespace begin with, or go on from."""
        choices = rules.choices(self._config, tier, self.name, name, layout)
        if not known:
            return [choice.make() for choice in choices]
        return await asyncio.to_thread(
            lambda: [revive(known, tier, group, choice) for group, choice in enumerate(choices)]
        )

    def _join(self, namespace: Namespace) -> None:
        """A namespace shares the media, by what the configuration says of its model."""
        model = self._config.models.get(namespace.name, ModelConfig())
        for level, shared in enumerate(self._shared()):
            shared.join(namespace, level, namespace.layout.root(self.name), model)

    def _stage(self, owner: BlockHash, nbytes: int) -> list[Row]:
        """Pinned rows for the way between an SSD and a GPU; elsewhere one end is memory."""
        if self._disk is None or not isinstance(self.device, CudaMemory):
            return []
        stride = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE  # direct I/O takes whole pages
        memory = np.frombuffer(mmap.mmap(-1, _STAGING_ROWS * stride), np.uint8)
        self._staging_pins[owner] = pin(memory)
        return list(memory.reshape(_STAGING_ROWS, stride))

    async def save(self, deadline: float) -> int:
        """Write what only memory holds to the SSD until `deadline`. Returns the blocks left out."""
        if self._disk is None:
            return 0
        await self._disk.rest()
        return sum([await namespace.save(deadline) for namespace in self.namespaces.values()])

    async def close(self) -> None:
        """Close every namespace and give the memory and the folder back."""
        self._stop.set()
        if self._populating:
            await self._populating
        for shared in self._memories:
            await shared.close()
        if self._disk:
            await self._disk.rest()
        for namespace in self.namespaces.values():
            await self._close(namespace)
        self.namespaces.clear()
        if self._disk:
            await self._disk.close()
        for pins in (*self._staging_pins.values(), self._pins):
            pins.close()
        for memory in (self.device, self.host):
            if memory:
                memory.close()

    def status(self) -> dict[str, Any]:
        """Facts for `tierd status`, as JSON."""
        memory: dict[str, dict[str, int | None]] = {
            shared.name: {**shared.status()} for shared in self._memories
        }
        memory["device"]["nbytes_huge"] = self._huge
        return {
            "name": self.name,
            "memory": memory,
            "ssd": self._disk.status() if self._disk else {},
            "lengths": {str(n): count for n, count in self.lengths.counts().items()},
            "namespaces": [self._describe(n) for n in self.namespaces.values()],
        }

    async def describe(self, leases: Mapping[Namespace, Sequence[Lease]]) -> dict[str, Any]:
        """As `status`, with what the blocks of `leases` have to spare."""
        spare = {
            namespace.name: await internal(namespace.layout, leases.get(namespace, ()))
            for namespace in list(self.namespaces.values())
        }
        facts = self.status()
        for namespace in facts["namespaces"]:  # one more may be there by now
            namespace["leased"] = spare.get(namespace["name"], [])
        return facts

    def _describe(self, namespace: Namespace) -> dict[str, Any]:
        """What a namespace says of itself, with what only those it shares media with know."""
        facts, owner = namespace.status(), namespace.layout.root(self.name)
        for tier, shared in zip(facts["tiers"], self._shared(), strict=True):
            for group, fragments in zip(tier["groups"], shared.fragmentation(owner), strict=True):
                group["fragmentation"] = fragments
        hits = facts["blocks_hit"]
        memories = len(self._memories)
        facts["faults"] = {"minor": sum(hits[:memories]), "major": sum(hits[memories:])}
        return facts

    def _shared(self) -> list[Memory | Disk]:
        """The media that namespaces share, hottest first."""
        return [*self._memories, *([self._disk] if self._disk else [])]


def _prefetch(config: Config) -> PrefetchPolicy:
    return plugins.prefetch(config.prefetch.policy)(**config.prefetch.options)


def _part(nbytes: int, share: float) -> int:
    """A tenant's share of a tier, whole extents, at least one."""
    return max(EXTENT_NBYTES, int(nbytes * share) // EXTENT_NBYTES * EXTENT_NBYTES)
