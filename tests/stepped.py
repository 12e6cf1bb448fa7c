"""Stores whose operations end when a test says so, and how: the bytes of a stepped world.

Half of a block is copied when an operation begins and half when it ends, so whoever touches a
place in between makes a torn block that a comparison sees.
"""

import asyncio
import errno
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np

from storage.base import BlockFault, BlockStore, CorruptBlock, MemoryStore, Row

NBYTES = 64


def content(key: bytes) -> Row:
    """What a block of that name holds."""
    return np.frombuffer(blake2b(key, digest_size=NBYTES).digest(), np.uint8)


@dataclass(eq=False)
class Operation:
    """One batch under way. `end` it: with the ids that fail."""

    kind: str
    level: int
    ids: list[int]
    done: asyncio.Future[set[int]]

    def end(self, failed: set[int] | None = None) -> None:
        self.done.set_result(failed or set())


class World:
    """Every operation under way, in the order they began."""

    def __init__(self) -> None:
        self.under_way: list[Operation] = []

    async def perform(self, kind: str, level: int, ids: Sequence[int]) -> set[int]:
        operation = Operation(kind, level, list(ids), asyncio.get_running_loop().create_future())
        self.under_way.append(operation)
        try:
            return await operation.done
        finally:
            self.under_way.remove(operation)


class SteppedStore(BlockStore):
    """Rows of memory, reached only through stepped operations."""

    def __init__(self, world: World, level: int, blocks: Row) -> None:
        self.block_nbytes = NBYTES
        self.level, self._world = level, world
        self.blocks = blocks  # [number, NBYTES]

    async def read(self, ids: Sequence[int], out: Sequence[Row]) -> None:
        await self._move("read", ids, [self.blocks[i] for i in ids], out)

    async def write(self, ids: Sequence[int], data: Sequence[Row], tags: Sequence[bytes]) -> None:
        await self._move("write", ids, data, [self.blocks[i] for i in ids])

    async def _move(
        self, kind: str, ids: Sequence[int], source: Sequence[Row], target: Sequence[Row]
    ) -> None:
        half = NBYTES // 2
        for row, out in zip(source, target, strict=True):
            out[:half] = row[:half]
        failed = await self._world.perform(kind, self.level, ids)
        for row, out in zip(source, target, strict=True):
            out[half:] = row[half:]
        if failed:
            bad = CorruptBlock("bad") if kind == "read" else OSError(errno.ENOSPC, "full")
            raise BlockFault({i: bad for i in failed})

    async def copy(self, src: int, dst: int) -> None:
        await self._move("copy", [src], [self.blocks[src]], [self.blocks[dst]])


class SteppedMemory(SteppedStore, MemoryStore):
    """The same, as memory that others may copy from and to."""

    def rows(self, ids: Sequence[int]) -> list[Row]:
        return [self.blocks[i] for i in ids]
