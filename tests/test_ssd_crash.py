"""Kill -9 of a writer at any moment: what still reads is what was written under its tag."""

import asyncio
import multiprocessing
import random
from contextlib import closing, suppress
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from storage.base import BlockFault
from storage.ssd import SsdVolume
from storage.testing import assert_equal, make_rows, random_rows
from tests.ssd_blocks import lose_catalog

NBYTES = 16384
NUM_LIVES = 8


def open_volume(path: Path) -> SsdVolume:
    return SsdVolume.open(path, nbytes=2 << 20, min_free_nbytes=0, slab_nbytes=1 << 18)


def write_until_killed(path: Path, life: int, alive: Connection) -> None:
    asyncio.run(_write_until_killed(path, life, alive))


async def _write_until_killed(path: Path, life: int, alive: Connection) -> None:
    """Rewrite, copy and flush at random; a block's tag is the seed of its bytes."""
    chance = random.Random(life)
    volume = open_volume(path)
    store = volume.array("a", NBYTES, {})
    volume.grow("a")
    alive.send(None)
    while True:
        slabs = volume.slabs("a")
        if len(slabs) > 2 and chance.random() < 0.1:
            gone = slabs.pop(chance.randrange(len(slabs)))
            with suppress(BlockFault):  # nothing may be there, or something a kill has torn
                await store.copy(gone[0], slabs[0][0])
            await asyncio.to_thread(volume.give_back, "a", gone)
        ids = chance.sample([i for slab in slabs for i in slab], chance.randint(1, 12))
        seeds = [chance.getrandbits(60) for _ in ids]
        tags = [str(seed).encode() for seed in seeds]
        await store.write(ids, random_rows(seeds, NBYTES), tags)
        await store.copy(ids[0], ids[-1])
        if chance.random() < 0.1:
            volume.grow("a")
        if chance.random() < 0.1:
            await store.flush()


def live(path: Path, life: int) -> None:
    """Let a writer live for a moment."""
    spawn = multiprocessing.get_context("spawn")
    here, there = spawn.Pipe()
    with here, there:
        writer = spawn.Process(target=write_until_killed, args=(path, life, there))
        writer.start()
        assert here.poll(60), "the writer never came up"
        writer.join(timeout=random.Random(life).uniform(0, 0.3))
        writer.kill()
        writer.join()
        assert writer.exitcode == -9
        writer.close()


async def check(path: Path) -> tuple[int, int]:
    """How many blocks are right and how many are refused; none may be wrong."""
    with closing(open_volume(path)) as volume:
        store = volume.array("a", NBYTES, {})
        capacity = {i for slab in volume.slabs("a") for i in slab}
        found = dict(await store.recover())
        assert set(found) <= capacity
        assert volume.nbytes <= 2 << 20
        out = make_rows(len(found), NBYTES)
        failed: dict[int, OSError] = {}
        try:
            await store.read(list(found), out)
        except BlockFault as fault:
            failed = fault.failed
        for (block_id, tag), row in zip(found.items(), out, strict=True):
            if block_id not in failed:
                assert_equal([row], random_rows([int(tag)], NBYTES))
        # Every place, used or not, can be written again.
        free = sorted(set(capacity) - set(found))
        await store.write(free, random_rows(free, NBYTES), [str(at).encode() for at in free])
        return len(found) - len(failed), len(failed)


@pytest.mark.parametrize("catalog_is_lost", [False, True])
async def test_nothing_wrong_is_served_after_kill_9(tmp_path: Path, catalog_is_lost: bool) -> None:
    right = refused = 0
    for life in range(NUM_LIVES):
        await asyncio.to_thread(live, tmp_path, life + NUM_LIVES * catalog_is_lost)
        if catalog_is_lost:
            lose_catalog(tmp_path)
        served, failed = await check(tmp_path)
        right, refused = right + served, refused + failed
        assert failed <= 13, "only the batch under way can be lost"
    assert right > 50
