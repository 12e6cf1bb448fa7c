"""A tenant's memory tiers: made, pinned for a GPU, backed with pages, resized, given back.

Each is made as large as it may become; of that, as much is in use as the configuration says. What
lives in a tier is the business of its `Memory`.
"""

import asyncio
import logging
import mmap
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from typing import Any

import numpy as np

from storage.base import Row
from storage.host import pin
from tierd.block import BlockHash
from tierd.daemon import plugins
from tierd.daemon.arena import EXTENT_NBYTES
from tierd.daemon.config import Config, MemoryConfig
from tierd.daemon.memory import Memory
from tierd.errors import Refused
from tierd.shm import CudaMemory, SharedMemory

log = logging.getLogger("tierd.memory")

_STAGING_ROWS = 8  # host rows for SSD <-> GPU copies that find no place in host memory


class Memories:
    """`tiers`, hottest first, are there at once; `open` makes them ready, `close` ends them."""

    def __init__(self, tenant: str, config: Config, copiers: ThreadPoolExecutor) -> None:
        """Make them; `copiers` are the threads that move bytes between them."""
        self._tenant = tenant
        device, host, share = config.device, config.host, config.tenants[tenant].share
        # Found here, because looking for what is installed takes the loop too long later.
        kinds = plugins.store(device.store), plugins.store("host")
        self.device: SharedMemory | CudaMemory = (
            CudaMemory.create(_part(device.reserved, share))
            if device.store == "cuda"
            else SharedMemory.create(f"tierd-device-{tenant}", _part(device.reserved, share))
        )
        self.tiers = [_memory("device", kinds[0], self.device, copiers, self._gives_back)]
        self.host: SharedMemory | None = None
        if host:
            self.host = SharedMemory.create(f"tierd-host-{tenant}", _part(host.reserved, share))
            self.tiers.append(_memory("host", kinds[1], self.host, copiers, self._gives_back))
        self._stop = threading.Event()  # of what goes on in threads
        self._backing: set[asyncio.Task[None]] = set()
        self._huge: int | None = None  # bytes of the device tier on huge pages, once known
        self._pins = ExitStack()
        self._staging_pins: dict[BlockHash, ExitStack] = {}

    @property
    def _gives_back(self) -> bool:
        """Whether what is not in use goes back to the system: not what a GPU's driver has."""
        return isinstance(self.device, SharedMemory)

    @property
    def nbytes(self) -> int:
        """Bytes of the hottest tier that are in use."""
        return self.tiers[0].arena.nbytes

    async def open(self, config: Config) -> None:
        """Begin to use them, and pin host memory where there is a GPU."""
        for memory in self.tiers:
            memory.balance.start()
            await memory.resize(self._size(config, memory))
        self._back([(0, self._size(config, self.tiers[0]))])
        if self.host and isinstance(self.device, CudaMemory):
            self._pins = await asyncio.to_thread(pin, self.host.array)

    async def resize(self, config: Config) -> None:
        """Have as much in use as `config` says: more at once, less in the background."""
        for memory in self.tiers:
            more = await memory.resize(self._size(config, memory))
            if memory is self.tiers[0]:
                self._back(more)

    def tier(self, config: Config, level: int) -> MemoryConfig:
        """What `config` says of a tier."""
        return _tier(config, self.tiers[level])

    def lend(self, name: object) -> tuple[int, SharedMemory | CudaMemory]:
        """The level and the memory of the tier of that name, for an engine to map.

        Raises Refused if there is none.
        """
        names = [memory.name for memory in self.tiers]
        if name not in names:
            raise Refused(f"tier {name!r} cannot be mapped; an engine may ask for {names}")
        level = names.index(str(name))
        memory = (self.device, self.host)[level]
        assert memory is not None, "a tier that has a name has memory"
        return level, memory

    def stage(self, owner: BlockHash, nbytes: int) -> list[Row]:
        """Pinned rows for the way between an SSD and a GPU, until `unstage`; elsewhere one end is
        memory, and it takes none."""
        if not isinstance(self.device, CudaMemory):
            return []
        stride = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE  # direct I/O takes whole pages
        memory = np.frombuffer(mmap.mmap(-1, _STAGING_ROWS * stride), np.uint8)
        self._staging_pins[owner] = pin(memory)
        return list(memory.reshape(_STAGING_ROWS, stride))

    def unstage(self, owner: BlockHash) -> None:
        self._staging_pins.pop(owner, ExitStack()).close()

    async def rest(self) -> None:
        """Move no more blocks, and back no more memory: the daemon is about to end."""
        self._stop.set()
        if self._backing:
            await asyncio.wait(self._backing)
        for memory in self.tiers:
            await memory.close()

    def close(self) -> None:
        """Give all of it back; nobody reads or writes it any more."""
        for pins in (*self._staging_pins.values(), self._pins):
            pins.close()
        for memory in (self.device, self.host):
            if memory:
                memory.close()

    def status(self) -> dict[str, dict[str, int | None]]:
        """Facts for `tierd status`, as JSON."""
        facts: dict[str, dict[str, int | None]] = {
            memory.name: {**memory.status()} for memory in self.tiers
        }
        facts["device"]["nbytes_huge"] = self._huge
        return facts

    def _size(self, config: Config, memory: Memory) -> int:
        return _part(_tier(config, memory).size, config.tenants[self._tenant].share)

    def _back(self, parts: Sequence[tuple[int, int]]) -> None:
        """Back parts, `(offset, bytes)`, of the memory that engines compute on, meanwhile."""
        if isinstance(self.device, SharedMemory) and parts:
            task = asyncio.create_task(self._back_all(self.device, parts))
            self._backing.add(task)
            task.add_done_callback(self._backing.discard)

    async def _back_all(self, memory: SharedMemory, parts: Sequence[tuple[int, int]]) -> None:
        huge = await self.tiers[0].back(parts, partial(memory.populate, self._stop))
        self._huge = (self._huge or 0) + huge
        log.info("%s: %d bytes of the device tier lie on huge pages", self._tenant, self._huge)


def _memory(
    name: str,
    kind: Any,
    made: SharedMemory | CudaMemory,
    copiers: ThreadPoolExecutor,
    gives_back: bool,
) -> Memory:
    if isinstance(made, CudaMemory):
        return Memory(name, kind, made.tensor, copiers)
    return Memory(name, kind, made.array, copiers, made.discard if gives_back else None)


def _tier(config: Config, memory: Memory) -> MemoryConfig:
    tier = config.device if memory.name == "device" else config.host
    assert tier is not None, "a tier comes and goes with the daemon"
    return tier


def _part(nbytes: int, share: float) -> int:
    """A tenant's share of a tier, whole extents, at least one."""
    return max(EXTENT_NBYTES, int(nbytes * share) // EXTENT_NBYTES * EXTENT_NBYTES)
