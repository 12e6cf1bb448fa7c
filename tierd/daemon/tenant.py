"""One tenant: its memory, its folder of the SSD, and the namespaces that share them.

Tenants share nothing: no arena, no index, no file (I10). A namespace's pools grow out of the
tenant's memory and folder, an extent run or a slab at a time.
"""

import asyncio
import logging
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

from policies.base import AdmissionPolicy, EvictionPolicy, PlacementPolicy, PrefetchPolicy
from tierd.daemon import collector, plugins, rules, sizing
from tierd.daemon.config import Config, ModelConfig
from tierd.daemon.disk import Disk
from tierd.daemon.fragmentation import internal
from tierd.daemon.handover import Handover
from tierd.daemon.lease import Lease
from tierd.daemon.lengths import Lengths
from tierd.daemon.memories import Memories
from tierd.daemon.memory import Memory
from tierd.daemon.namespace import Namespace
from tierd.daemon.policy_file import Remembered, revive
from tierd.daemon.rules import Choice
from tierd.errors import LayoutMismatch
from tierd.layout import KVLayout
from tierd.shm import CudaMemory, SharedMemory

log = logging.getLogger("tierd.tenant")


class Tenant:
    """Made by `open`; `close` gives everything back."""

    def __init__(self, name: str, config: Config, copiers: ThreadPoolExecutor) -> None:
        """Make the memory tiers; `copiers` are the threads that move bytes between them."""
        self.name, self._config = name, config
        self._memories = Memories(name, config, copiers)
        self._disk: Disk | None = None
        self.namespaces: dict[str, Namespace] = {}
        self.lengths = Lengths()  # of the requests of all engines
        self._chosen_by = {"policy": config.blocks.policy, "options": dict(config.blocks.options)}
        self._attaching = asyncio.Lock()
        self._exchanging = asyncio.Lock()  # policies, or reading them
        self._remembering: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Pin host memory where there is a GPU, and open the tenant's folder of the SSD."""
        await self._memories.open(self._config)
        if (ssd := self._config.ssd) is not None:
            self._disk = await Disk.open(self.name, ssd, self._config.tenants[self.name].share)

    @property
    def memory_names(self) -> list[str]:
        """The tiers whose memory an engine can map, by level."""
        return [memory.name for memory in self._memories.tiers]

    def lend(self, tier: object) -> tuple[int, SharedMemory | CudaMemory]:
        """The level and the memory of the tier that an engine asks for by name.

        Raises Refused if it cannot map that.
        """
        return self._memories.lend(tier)

    @property
    def device(self) -> SharedMemory | CudaMemory:
        """The memory of the hottest tier."""
        return self._memories.device

    @property
    def gpu(self) -> int:
        """Which GPU the device tier lies on. Raises ValueError if on none."""
        if not isinstance(self.device, CudaMemory):
            raise ValueError("the device tier lies on no GPU")
        return self.device.device

    async def reconfigure(self, config: Config) -> None:
        """Go on by another configuration, which differs in what is `LIVE`. What is to be smaller
        shrinks in the background."""
        async with self._attaching:  # whoever attaches meanwhile waits
            old, self._config = self._config, config
            await self._memories.resize(config)
            if self._disk and config.ssd:
                in_use = [known.layout.root(self.name) for known in self.namespaces.values()]
                await self._disk.resize(config.ssd, config.tenants[self.name].share, in_use)
            for namespace in self.namespaces.values():
                await self._change(namespace, old, config)

    async def _change(self, namespace: Namespace, old: Config, new: Config) -> None:
        if new.prefetch != old.prefetch:
            namespace.upkeep.guess_by(_prefetch(new))
        cache = namespace.cache
        if new.placement != old.placement:
            cache.chain.place_by(_placement(new))
        if _admitting(new) != _admitting(old):
            cache.chain.tiers[-1].admissions = _admissions(new, len(namespace.layout.groups))
        self._join(namespace)
        for level in range(len(self._memories.tiers)):
            cache.ahead.keep(level, self._memories.tier(new, level).watermarks)
        namespace.upkeep.stir()
        for level, tier in enumerate(namespace.tiers):
            before, after = (self._choices(of, tier.name, namespace) for of in (old, new))
            for group, (was, now) in enumerate(zip(before, after, strict=True)):
                if now != was:
                    async with self._exchanging:
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

    def asked(self, namespace: Namespace, num_tokens: int) -> None:
        """A request came for so many tokens. Now and then what the policies know is kept, so that
        not all of it is lost if the daemon is killed."""
        self.lengths.add(num_tokens)
        every = self._config.ssd.remember if self._config.ssd else 0
        busy = self._remembering is not None and not self._remembering.done()
        if every and not namespace.cache.chain.counts.requests % every and not busy:
            self._remembering = asyncio.create_task(self._remember_meanwhile(namespace))

    async def _with_blocks(self, wanted: KVLayout) -> KVLayout:
        """The layout with the layer groups that the configured policy chooses, if it has none."""
        if wanted.nbytes_per_token() > self._memories.nbytes:  # before anything is made of its size
            raise ValueError(
                f"layout: a token takes {wanted.nbytes_per_token()} bytes, the device tier has "
                f"{self._memories.nbytes}"
            )
        layout = wanted if wanted.groups else await self._with_groups(wanted)
        for group in range(len(layout.groups)):
            if layout.block_nbytes(group) > self._memories.nbytes:
                raise ValueError(
                    f"layout: a block of group {group} takes {layout.block_nbytes(group)} bytes, "
                    f"the device tier has {self._memories.nbytes}"
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
        self._memories.unstage(owner)
        for memory in self._memories.tiers:
            memory.left(owner, len(namespace.layout.groups))
        log.info("%s: retired", namespace.name)

    async def _close(self, namespace: Namespace) -> None:
        """Close a namespace, and keep what its policies know."""
        async with self._exchanging:
            await namespace.close()
            await self._remember(namespace)

    async def _remember_meanwhile(self, namespace: Namespace) -> None:
        async with self._exchanging:
            if namespace in self.namespaces.values():
                await self._remember(namespace)

    async def _remember(self, namespace: Namespace) -> None:
        if self._disk is None:
            return
        known: list[Remembered] = []
        for level, tier in enumerate(namespace.tiers):
            for group, choice in enumerate(self._choices(self._config, tier.name, namespace)):
                # Half of what is handed over is known to each of two: the daemon ends meanwhile.
                if not isinstance(tier.pools[group].policy, Handover):
                    ask = partial(self._disk.ask, tier.name, group, choice)
                    known += await namespace.read(level, group, ask)
        await self._disk.remember(namespace.layout.root(self.name), known)

    async def _create(self, name: str, layout: KVLayout) -> Namespace:
        owner = layout.root(self.name)
        known = await self._disk.remembered(owner) if self._disk else []
        tiers = []
        for level, memory in enumerate(self._memories.tiers):
            policies = await self._policies(memory.name, name, layout, known)
            tiers.append(memory.tier(layout, owner, policies))
            tiers[-1].watermarks = self._memories.tier(self._config, level).watermarks
        stores = [memory.stores(layout) for memory in self._memories.tiers]
        async with AsyncExitStack() as undo:
            if self._disk:
                in_use = [n.layout.root(self.name) for n in self.namespaces.values()]
                arrays = await self._disk.arrays(name, layout, in_use, self._chosen_by)
                for array in arrays:
                    undo.push_async_callback(array.close)
                stores.append(arrays)
                policies = await self._policies("ssd", name, layout, known)
                admissions = _admissions(self._config, len(policies))
                tiers.append(await self._disk.tier(layout, policies, admissions))
            largest = max(layout.block_nbytes(group) for group in range(len(layout.groups)))
            staging = self._memories.stage(owner, largest) if self._disk else []
            prefetch = _prefetch(self._config)
            placement = _placement(self._config)
            namespace = Namespace(name, layout, tiers, stores, prefetch, placement, staging)
            adopted = await namespace.recover()
            undo.pop_all()
        self._join(namespace)
        namespace.more_room = partial(self._memories.tiers[0].more, owner)
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

    async def save(self, deadline: float) -> int:
        """Write what only memory holds to the SSD until `deadline`. Returns the blocks left out."""
        if self._disk is None:
            return 0
        await self._rest()
        return sum([await namespace.save(deadline) for namespace in self.namespaces.values()])

    async def _rest(self) -> None:
        """Nothing goes on at the SSD but what is asked for."""
        if self._remembering:
            self._remembering.cancel()
            await asyncio.wait([self._remembering])
        if self._disk:
            await self._disk.rest()

    async def close(self) -> None:
        """Close every namespace and give the memory and the folder back."""
        await self._memories.rest()
        await self._rest()
        for namespace in self.namespaces.values():
            await self._close(namespace)
        self.namespaces.clear()
        if self._disk:
            await self._disk.close()
        self._memories.close()

    def status(self) -> dict[str, Any]:
        """Facts for `tierd status`, as JSON."""
        return {
            "name": self.name,
            "memory": self._memories.status(),
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
        memories = len(self._memories.tiers)
        facts["faults"] = {"minor": sum(hits[:memories]), "major": sum(hits[memories:])}
        return facts

    def _shared(self) -> list[Memory | Disk]:
        """The media that namespaces share, hottest first."""
        return [*self._memories.tiers, *([self._disk] if self._disk else [])]


def _prefetch(config: Config) -> PrefetchPolicy:
    return plugins.prefetch(config.prefetch.policy)(**config.prefetch.options)


def _placement(config: Config) -> PlacementPolicy:
    return plugins.placement(config.placement.policy)(**config.placement.options)


def _admitting(config: Config) -> tuple[str, Mapping[str, object]] | None:
    """What says what is worth writing to the SSD; None where there is none."""
    ssd = config.ssd
    return None if ssd is None else (ssd.admission, ssd.admission_options)


def _admissions(config: Config, count: int) -> list[AdmissionPolicy]:
    """One for each of so many pools of the SSD tier."""
    if (chosen := _admitting(config)) is None:
        return []
    admission, options = chosen
    return [plugins.admission(admission)(**options) for _ in range(count)]
