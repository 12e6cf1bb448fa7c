"""A slab of a real volume is emptied and given back, or stays and nothing is lost."""

import asyncio
import errno
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass
from pathlib import Path

import pytest

from policies.base import Access
from policies.lru import LRU
from storage.base import BlockStore
from storage.ssd import SsdVolume
from storage.testing import assert_equal, make_rows, random_rows
from tests.rig import PLAIN
from tests.ssd_blocks import GEOMETRY, NBYTES, SLOTS, open_volume
from tierd.block import Block, BlockHash, State
from tierd.daemon.cache import TieredCache
from tierd.daemon.fair import Claim
from tierd.daemon.holder import Holder, Part
from tierd.daemon.pool import BlockPool
from tierd.daemon.slabs import Slabs, array_name
from tierd.daemon.tier import Tier
from tierd.daemon.transfer import StoreTransfer
from tierd.daemon.vacate import vacate

OWNER = (BlockHash(b"\1" * 16), 0)


@dataclass
class Rig:
    """A pool over three slabs, with blocks whose names are the seeds of their bytes."""

    volume: SsdVolume
    store: BlockStore
    space: Slabs
    holder: Holder

    @property
    def pool(self) -> BlockPool:
        return self.holder.pool

    async def write(self, *numbers: int) -> list[Block]:
        """Committed blocks in the next free places."""
        blocks = self.pool.allocate(len(numbers))
        ids = [block.block_id for block in blocks]
        await self.store.write(ids, random_rows(numbers, NBYTES), [b""] * len(ids))
        for block, number in zip(blocks, numbers, strict=True):
            assert self.pool.commit(block, _name(number), None, Access(0.0))
            self.pool.unpin(block)
        return blocks

    async def check(self, *numbers: int) -> None:
        """They are found, and hold what they must."""
        blocks = [self.pool.get(_name(number)) for number in numbers]
        out = make_rows(len(numbers), NBYTES)
        await self.store.read([block.block_id for block in blocks if block], out)
        assert_equal(out, random_rows(numbers, NBYTES))

    def part(self, slab: int) -> Part:
        return self.space.parts(self.holder, self.holder)[slab]

    async def vacate(self, slab: int, *, evict: bool = False) -> bool:
        return await vacate(self.space, self.holder, self.part(slab), evict=evict)


def _name(number: int) -> BlockHash:
    return BlockHash(b"%d" % number)


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    async with opened(tmp_path) as made:
        yield made
        await made.holder.transfer.drain()
        assert not made.pool.counts[State.PRIVATE]
        assert made.holder.cache.loads.idle


@asynccontextmanager
async def opened(path: Path) -> AsyncIterator[Rig]:
    with closing(open_volume(path)) as volume, ThreadPoolExecutor(1) as thread:
        store = volume.array(array_name(OWNER), NBYTES, {})
        pool = BlockPool(LRU(0), SLOTS)
        pool.grow(i for _ in range(3) for i in volume.grow(array_name(OWNER)) or ())
        transfer = StoreTransfer([[store]], lambda level: None)
        cache = TieredCache(PLAIN, [Tier("ssd", [pool], lambda group: None)], transfer)
        space = Slabs(volume, 1 << 20, thread)
        claim = Claim(OWNER, 0, 1.0, 0, active=True)
        yield Rig(
            volume, store, space, Holder(OWNER, 0, NBYTES, cache, transfer, lambda held: claim)
        )
        await transfer.close()


async def test_what_lies_in_a_slab_moves_and_the_slab_is_gone(rig: Rig) -> None:
    await rig.write(*range(2 * SLOTS + 3))
    for number in range(SLOTS):  # room in the first slab, and little in the third
        block = rig.pool.get(_name(number))
        assert block
        rig.pool.evict(block)
    assert rig.pool.live(range(SLOTS)) == 0
    assert await rig.vacate(1)
    assert rig.space.parts(rig.holder, rig.holder) == [
        Part(ids.start, ids.stop, ids, GEOMETRY.footprint)
        for ids in (GEOMETRY.slots(0), GEOMETRY.slots(2))
    ]
    assert rig.pool.capacity == 2 * SLOTS
    await rig.check(*range(SLOTS, 2 * SLOTS + 3))
    rig.pool.grow(rig.space.grow(rig.holder) or ())  # and it may come again
    assert rig.pool.capacity == 3 * SLOTS
    rest = await rig.write(*range(100, 100 + rig.pool.num_free))
    assert {block.block_id for block in rest} >= set(GEOMETRY.slots(1))
    await rig.check(*range(100, 100 + len(rest)))


async def test_a_pinned_block_stays_and_so_does_its_slab(rig: Rig) -> None:
    blocks = await rig.write(*range(SLOTS))
    rig.pool.pin(blocks[3])
    place = blocks[3].block_id
    assert not await rig.vacate(0)
    assert rig.holder.cache.chain.counts.moved == SLOTS - 1  # the others, once
    assert rig.pool.get(_name(3)) is blocks[3]
    assert blocks[3].block_id == place
    assert rig.pool.capacity == 3 * SLOTS
    await rig.check(*range(SLOTS))
    rig.pool.unpin(blocks[3])
    assert await rig.vacate(0)
    await rig.check(*range(SLOTS))


async def test_nothing_is_evicted_for_it_unless_it_may(rig: Rig) -> None:
    await rig.write(*range(3 * SLOTS))
    assert not await rig.vacate(1)
    assert rig.pool.capacity == 3 * SLOTS
    await rig.check(*range(3 * SLOTS))
    assert await rig.vacate(1, evict=True)
    assert rig.pool.counts[State.COMMITTED] == rig.pool.capacity == 2 * SLOTS
    await rig.check(*range(SLOTS, 3 * SLOTS))  # the coldest had to go


async def test_one_that_is_cancelled_has_changed_nothing(rig: Rig) -> None:
    await rig.write(*range(SLOTS + 5))
    for turns in range(1, 40, 3):
        task = asyncio.create_task(rig.vacate(1))
        for _ in range(turns):
            await asyncio.sleep(0)
        if task.done():
            break
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        if len(rig.volume.slabs(array_name(OWNER))) < 3:
            break
        assert rig.pool.capacity == 3 * SLOTS
        await rig.holder.transfer.drain()
        assert rig.pool.counts[State.COMMITTED] == SLOTS + 5
        await rig.check(*range(SLOTS + 5))
    assert turns > 1
    await rig.check(*range(SLOTS + 5))


async def test_a_slab_that_cannot_be_deleted_is_the_pools_again(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    await rig.write(*range(SLOTS))

    def refuse(path: Path) -> None:
        raise OSError(errno.EROFS, "read-only", str(path))

    with monkeypatch.context() as broken:
        broken.setattr(Path, "unlink", refuse)
        assert not await rig.vacate(0)
    assert rig.pool.capacity == 3 * SLOTS
    assert rig.pool.num_free == 2 * SLOTS
    await rig.check(*range(SLOTS))
    await rig.write(*range(50, 50 + SLOTS))  # some of it there
    await rig.check(*range(50, 50 + SLOTS))


async def test_who_needs_a_place_is_not_refused_because_it_is_leaving(rig: Rig) -> None:
    await rig.write(*range(3 * SLOTS))
    part = rig.part(2)
    rig.pool.leave(part.ids)
    victims = rig.pool.victims(3 * SLOTS)
    assert [block.block_id in part.ids for block in victims] == [False] * 2 * SLOTS + [True] * SLOTS
    rig.pool.evict(victims[-1])
    assert [block.block_id for block in rig.pool.allocate(1)] == [victims[-1].block_id]
    rig.pool.unpin(victims[-1])
    rig.pool.stay(part.ids)
    assert rig.pool.capacity == 3 * SLOTS
