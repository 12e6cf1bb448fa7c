"""A transfer between stores that move no bytes and whose operations end when the test says so."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from storage.base import BlockFault, BlockStore, CorruptBlock, MemoryStore, Row
from tierd.block import Block, BlockHash, BlockId
from tierd.daemon.copy import Copy, Outcome
from tierd.daemon.transfer import StoreTransfer

DEVICE, HOST, SSD = range(3)
KEY = BlockHash(b"key")
CORRUPT = BlockFault({5: CorruptBlock("bad checksum")})


@dataclass(eq=False)
class Operation:
    """One call of a store that has begun: `end` it, well or with an error."""

    name: str
    ids: list[int]
    ended: asyncio.Future[None]

    async def end(self, error: BaseException | None = None) -> None:
        if error is None:
            self.ended.set_result(None)
        else:
            self.ended.set_exception(error)
        await turn()


async def turn() -> None:
    """Let everything run that can."""
    for _ in range(8):
        await asyncio.sleep(0)


class FakeStore(BlockStore):
    """No bytes are moved; each call is noted in `log`, and waits."""

    def __init__(self, name: str, log: list[Operation], block_nbytes: int = 8) -> None:
        self.block_nbytes, self._name, self._log = block_nbytes, name, log
        self.tags: list[bytes] = []

    async def read(self, ids: Sequence[int], out: Sequence[Row]) -> None:
        await self._operation("read", ids, out)

    async def write(self, ids: Sequence[int], data: Sequence[Row], tags: Sequence[bytes]) -> None:
        self.tags += tags
        await self._operation("write", ids, data)

    async def copy(self, src: int, dst: int) -> None:
        raise NotImplementedError("nothing is copied within a store here")

    async def _operation(self, verb: str, ids: Sequence[int], rows: Sequence[Row]) -> None:
        assert [row.nbytes for row in rows] == [self.block_nbytes] * len(ids)
        ended = asyncio.get_running_loop().create_future()
        self._log.append(Operation(f"{verb} {self._name}", list(ids), ended))
        await ended


class FakeMemory(FakeStore, MemoryStore):
    def rows(self, ids: Sequence[int]) -> list[Row]:
        return [np.zeros(self.block_nbytes, np.uint8) for _ in ids]


class Bench:
    """A transfer over three levels, what its stores were asked, and how each copy ended."""

    def __init__(self, *, staging: Sequence[Row] = (), groups: int = 1) -> None:
        self.log: list[Operation] = []
        self.full: list[int] = []
        self.outcomes: dict[Copy, Outcome] = {}
        device = FakeStore if staging else FakeMemory  # a GPU's memory is no host memory
        kinds = ((device, "device"), (FakeMemory, "host"), (FakeStore, "ssd"))
        self.stores = [
            [kind(name, self.log, 8 << group) for group in range(groups)] for kind, name in kinds
        ]
        self.transfer = StoreTransfer(self.stores, self.full.append, staging)

    def copy(self, src: tuple[int, int], dst: tuple[int, int], group: int = 0) -> Copy:
        """Submit a copy from `(level, id)` to `(level, id)`."""
        source, target = (Block(BlockId(block_id)) for _, block_id in (src, dst))
        copy = Copy(KEY, None, group, src[0], source, dst[0], target, False)
        self.transfer.submit([copy], self.settle)
        return copy

    async def finish(self) -> None:
        """End well whatever is under way, and what waits for it."""
        while self.transfer.busy:
            for operation in [o for o in self.log if not o.ended.done()]:
                await operation.end()
            await turn()

    def settle(self, copy: Copy, outcome: Outcome) -> None:
        assert copy not in self.outcomes, "settled twice"
        self.outcomes[copy] = outcome

    @property
    def asked(self) -> list[tuple[str, list[int]]]:
        return [(operation.name, operation.ids) for operation in self.log]
