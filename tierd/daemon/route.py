"""One way that blocks go: from a store of one tier to the store of another, a batch at a time.

A batch is large enough that neither the event loop's part of it nor a thread's start is felt, and
small enough that a load that comes later finds the threads free soon. Whoever calls keeps batches
from conflicting; this knows two stores, not what waits for their blocks.
"""

import asyncio
import errno
import logging
from collections.abc import Callable, Sequence

from storage.base import BlockFault, BlockStore, MemoryStore, Row
from tierd.daemon.copy import Copy, Outcome
from tierd.daemon.tag import pack

log = logging.getLogger("tierd.route")

# Blocks and bytes in a batch, by how many of its ends are memory. Staged rows go one by one; with
# an SSD a batch is several hops to threads; between memories it is one, a millisecond.
BATCH = 256
_MOST = ((16, 16 << 20), (BATCH, 64 << 20), (BATCH, 16 << 20))
MEDIUM_IS_FULL = {
    errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO,
}  # fmt: skip

Failed = dict[Copy, Outcome]


def batch_size(block_nbytes: int, memories: int) -> int:
    """Blocks in a batch of a route of which so many ends are memory."""
    blocks, nbytes = _MOST[memories]
    return max(1, min(blocks, nbytes // block_nbytes))


class Route:
    """From `source` to `target`; `on_full` is called when the target refuses writes.

    `staging` holds host rows, each as long as the largest block, for when neither end is memory.
    """

    def __init__(
        self,
        source: BlockStore,
        target: BlockStore,
        staging: asyncio.Queue[Row] | None,
        on_full: Callable[[], None],
    ) -> None:
        self._source, self._target = source, target
        self._staging, self._on_full = staging, on_full
        self.block_nbytes = source.block_nbytes
        memories = isinstance(source, MemoryStore) + isinstance(target, MemoryStore)
        self.batch = batch_size(source.block_nbytes, memories)

    async def move(self, copies: Sequence[Copy]) -> Failed:
        """Move the bytes of a batch; returns those that did not arrive."""
        sources = [copy.src.block_id for copy in copies]
        targets = [copy.dst.block_id for copy in copies]
        if isinstance(self._target, MemoryStore):
            return await self._read(copies, sources, self._target.rows(targets))
        if self._source is self._target:
            return await self._copy_within(copies)
        if isinstance(self._source, MemoryStore):
            return await self._write(copies, targets, self._source.rows(sources))
        return await self._stage(copies)

    async def _read(
        self, copies: Sequence[Copy], ids: Sequence[int], rows: Sequence[Row]
    ) -> Failed:
        try:
            await self._source.read(ids, rows)
        except BlockFault as fault:
            _report("read", fault)
            return {c: Outcome.LOST for c in copies if c.src.block_id in fault.failed}
        return {}

    async def _write(
        self, copies: Sequence[Copy], ids: Sequence[int], rows: Sequence[Row]
    ) -> Failed:
        try:
            await self._target.write(ids, rows, [tag_of(copy) for copy in copies])
        except BlockFault as fault:
            _report("write", fault)
            if any(error.errno in MEDIUM_IS_FULL for error in fault.failed.values()):
                self._on_full()
            return {c: Outcome.FAILED for c in copies if c.dst.block_id in fault.failed}
        return {}

    async def _copy_within(self, copies: Sequence[Copy]) -> Failed:
        """Blocks move within a medium, tags and all: the store knows how."""
        ended = await asyncio.gather(
            *(self._source.copy(copy.src.block_id, copy.dst.block_id) for copy in copies),
            return_exceptions=True,
        )
        failed: Failed = {}
        for copy, error in zip(copies, ended, strict=True):
            if isinstance(error, BlockFault):
                _report("copy", error)
                lost = copy.src.block_id in error.failed
                failed[copy] = Outcome.LOST if lost else Outcome.FAILED
            elif error is not None:
                raise error
        return failed

    async def _stage(self, copies: Sequence[Copy]) -> Failed:
        """Through host rows, as many at once as there are."""
        failed: Failed = {}
        assert self._staging is not None, "neither end is memory, and there are no rows to stage in"
        for copy in copies:
            staging = await self._staging.get()
            row = staging[: self.block_nbytes]
            try:
                failed |= await self._read([copy], [copy.src.block_id], [row])
                if copy not in failed:
                    failed |= await self._write([copy], [copy.dst.block_id], [row])
            finally:
                self._staging.put_nowait(staging)
        return failed


def _report(verb: str, fault: BlockFault) -> None:
    for block_id, error in fault.failed.items():
        log.warning("cannot %s block %d: %s", verb, block_id, error)


def tag_of(copy: Copy) -> bytes:
    """What is kept with a block so that a restart can find it."""
    return b"" if copy.private else pack(copy.key, copy.parent, copy.dst.inner)
