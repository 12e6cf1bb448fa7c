"""An arena: host memory of somebody else's, cut into equal blocks.

Block i is bytes [i * block_nbytes, (i + 1) * block_nbytes) of the whole arena, whichever parts of
it are the caller's to use. The store does not know who made the memory or who else maps it, and
keeps nothing: tags are ignored, and there is nothing to recover.
"""

from collections.abc import Sequence
from concurrent.futures import Executor

import numpy as np

from storage.base import MemoryStore, Row
from storage.batch import check_batch, hop


class ArenaStore(MemoryStore):
    """Blocks of one arena; a batch is one hop of plain copies."""

    def __init__(self, memory: Row, block_nbytes: int, executor: Executor) -> None:
        if memory.ndim != 1 or memory.dtype != np.uint8:
            raise ValueError(f"an arena is a row of bytes, not {memory.dtype}{memory.shape}")
        self.block_nbytes = block_nbytes
        self._executor = executor
        num_blocks = memory.nbytes // block_nbytes
        self._blocks = memory[: num_blocks * block_nbytes].reshape(num_blocks, block_nbytes)

    def rows(self, ids: Sequence[int]) -> list[Row]:
        return [self._blocks[block_id] for block_id in ids]

    async def read(self, ids: Sequence[int], out: Sequence[Row]) -> None:
        check_batch(self.block_nbytes, ids, out)
        await hop(self._executor, _copy, out, self.rows(ids))

    async def write(self, ids: Sequence[int], data: Sequence[Row], tags: Sequence[bytes]) -> None:
        check_batch(self.block_nbytes, ids, data, tags)
        await hop(self._executor, _copy, self.rows(ids), data)

    async def copy(self, src: int, dst: int) -> None:
        await hop(self._executor, _copy, self.rows([dst]), self.rows([src]))


def _copy(targets: Sequence[Row], sources: Sequence[Row]) -> None:
    for target, source in zip(targets, sources, strict=True):
        np.copyto(target, source)
