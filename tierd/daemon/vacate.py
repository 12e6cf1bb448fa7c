"""A part of a medium is emptied and given back, while engines go on.

    its free places leave the pool -> what it holds moves elsewhere, a few blocks at a time
    -> nobody reads or writes there any more -> the part is given back

A block that is in use stays where it is; if it still does when the rest has moved, so does the
part, and its places are the pool's again. It looks at some places at a time, and breathes between,
for there may be many. Why a part has to go is decided elsewhere.
"""

import asyncio
import logging
from collections.abc import Iterator

from policies.base import Access
from tierd.block import BlockId
from tierd.daemon.copy import Place
from tierd.daemon.holder import Holder, Part, Space

log = logging.getLogger("tierd.vacate")

_LOOK = 256  # places looked at before the loop may go on
_MOVE = 8  # blocks on their way at once, each a task of the loop; of large ones, so many bytes:
_MOVE_NBYTES = 8 << 20
_PASSES = 2  # a block may be in use for a moment only


async def vacate(space: Space, holder: Holder, part: Part, *, evict: bool) -> bool:
    """Empty a part of a holder's and give it back; whether that worked.

    `evict`: where the pool has no room for what lies there, its coldest blocks go. One part of a
    pool at a time.
    """
    pool, emptied = holder.pool, False
    try:
        emptied = await _empty(holder, part.ids, evict=evict)
        if emptied:
            emptied = await _given_back(space, holder, part)
        for some in _pieces(part.ids, _LOOK):
            (pool.gone if emptied else pool.stay)(some)
            await asyncio.sleep(0)
    finally:  # of what is left, if this was cancelled
        (pool.gone if emptied else pool.stay)(part.ids)
    return emptied


async def _given_back(space: Space, holder: Holder, part: Part) -> bool:
    try:
        await space.give_back(holder, part)
    except OSError as error:
        log.warning("cannot give back a part of tier %d: %s", holder.level, error)
        return False
    return True


async def _empty(holder: Holder, ids: range, *, evict: bool) -> bool:
    pool = holder.pool
    for some in _pieces(ids, _LOOK):
        pool.leave(some)
        await asyncio.sleep(0)
    step = max(1, min(_MOVE, _MOVE_NBYTES // holder.block_nbytes))
    for _ in range(_PASSES):
        for some in _pieces(ids, _LOOK):
            left = [block_id for block_id in some if pool.at(block_id)]
            for start in range(0, len(left), step):
                if not await _move(holder, left[start : start + step], evict=evict):
                    return False
            await asyncio.sleep(0)
        if not await _remains(holder, ids):
            return True
    return False


async def _move(holder: Holder, ids: list[int], *, evict: bool) -> bool:
    """Move some blocks, and wait for whoever reads them; False if they have no room elsewhere."""
    access = Access(asyncio.get_running_loop().time())
    compaction = holder.cache.compaction
    if not compaction.move(holder.level, holder.group, ids, access, evict=evict):
        return False
    await _idle(holder, ids)
    return True


async def _remains(holder: Holder, ids: range) -> bool:
    """Whether some place is still in the pool; if none is, nobody reads or writes them either."""
    for some in _pieces(ids, _LOOK):
        if any(holder.pool.at(block_id) for block_id in some):
            return True
        await _idle(holder, some)
        await asyncio.sleep(0)
    return False


async def _idle(holder: Holder, ids: range | list[int]) -> None:
    await holder.transfer.idle([Place(holder.level, holder.group, BlockId(i)) for i in ids])


def _pieces(ids: range, size: int) -> Iterator[range]:
    return (ids[start : start + size] for start in range(0, len(ids), size))
