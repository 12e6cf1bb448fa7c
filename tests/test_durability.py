"""What is synced when: group commit of an SSD volume, and the copies the file system makes."""

import asyncio
import errno
import os
import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from storage.base import BlockFault, BlockStore, Durability
from storage.group_commit import GROUP, WINDOW_S
from storage.ssd import SsdVolume
from tests.ssd_blocks import NBYTES, SLOTS, faults, put

PATIENCE_S = 10.0


class Syncs:
    """Counts the syncs of files by name; fails those after `fail` is set."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.fail = False
        self.slow_s = 0.0
        self._real = os.fdatasync

    def __call__(self, fd: int) -> None:
        if self.fail:
            self.names.append("failed")
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        time.sleep(self.slow_s)
        self.names.append(Path(os.readlink(f"/proc/self/fd/{fd}")).name)
        self._real(fd)

    @property
    def count(self) -> Counter[str]:
        return Counter(self.names)

    async def until(self, true: Callable[[Counter[str]], object]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not true(self.count):
            assert time.monotonic() < deadline, self.count
            await asyncio.sleep(0.001)


@pytest.fixture
def syncs(monkeypatch: pytest.MonkeyPatch) -> Syncs:
    found = Syncs()
    monkeypatch.setattr(os, "fdatasync", found)
    return found


def opened(path: Path, durability: Durability, num_slabs: int = 3) -> tuple[SsdVolume, BlockStore]:
    volume = SsdVolume.open(
        path, nbytes=1 << 20, min_free_nbytes=0, slab_nbytes=1 << 17, durability=durability
    )
    store = volume.array("a", NBYTES, {})
    while len(volume.slabs("a")) < num_slabs:
        assert volume.grow("a")
    return volume, store


async def test_none_syncs_nothing_until_the_flush(tmp_path: Path, syncs: Syncs) -> None:
    volume, store = opened(tmp_path, Durability.NONE)
    with closing(volume):
        await put(store, range(2 * SLOTS))
        await asyncio.sleep(2 * WINDOW_S)
        assert not syncs.names
        await store.flush()
        assert syncs.count == {"0": 2}


async def test_sync_is_durable_before_it_is_acknowledged(tmp_path: Path, syncs: Syncs) -> None:
    volume, store = opened(tmp_path, Durability.SYNC)
    with closing(volume):
        for count in range(1, 4):
            await put(store, [SLOTS])
            assert syncs.count == {"0": count, "catalog.sqlite-wal": count}


async def test_writes_that_wait_together_share_a_sync(tmp_path: Path, syncs: Syncs) -> None:
    volume, store = opened(tmp_path, Durability.SYNC)
    with closing(volume):
        await put(store, range(SLOTS))
        before, syncs.slow_s = syncs.count["0"], 0.02
        await asyncio.gather(*(put(store, [slot]) for slot in range(12)))
        assert 4 <= syncs.count["0"] - before < 12
        syncs.slow_s = 0.0


async def test_batch_acknowledges_first_and_syncs_soon(tmp_path: Path, syncs: Syncs) -> None:
    volume, store = opened(tmp_path, Durability.BATCH)
    with closing(volume):
        await put(store, [0])
        assert not syncs.names
        began = time.monotonic()
        await syncs.until(lambda count: count["catalog.sqlite-wal"])
        assert time.monotonic() - began > WINDOW_S / 2
        assert syncs.count == {"0": 1, "catalog.sqlite-wal": 1}
        await asyncio.sleep(2 * WINDOW_S)
        assert syncs.count == {"0": 1, "catalog.sqlite-wal": 1}  # nothing more to do


async def test_batch_does_not_wait_once_a_group_is_full(
    tmp_path: Path, syncs: Syncs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("storage.group_commit.WINDOW_S", 3600.0)
    volume, store = opened(tmp_path, Durability.BATCH)
    with closing(volume):
        await put(store, range(GROUP - 1))
        await asyncio.sleep(0.02)
        assert not syncs.names
        await put(store, [GROUP])
        await syncs.until(lambda count: count["catalog.sqlite-wal"] == 1)
        await put(store, [1])
        await asyncio.sleep(0.02)
        assert syncs.count["catalog.sqlite-wal"] == 1
    assert syncs.count["catalog.sqlite-wal"] == 2  # at the end nothing is left out


async def test_a_sync_that_fails_fails_the_write_that_waits_for_it(
    tmp_path: Path, syncs: Syncs
) -> None:
    volume, store = opened(tmp_path, Durability.SYNC)
    with closing(volume):
        await put(store, [0, 1])
        syncs.fail = True
        with pytest.raises(BlockFault) as fault:
            await put(store, [0], generation=1)
        assert fault.value.failed[0].errno == errno.EIO
        syncs.fail = False
        assert set(await faults(store, {0: b"0", 1: b"1"})) == {0}
        await put(store, [0], generation=2)
        assert not await faults(store, {0: b"2000", 1: b"1"})


async def test_a_sync_that_fails_under_batch_fails_the_next_write_once(
    tmp_path: Path, syncs: Syncs
) -> None:
    volume, store = opened(tmp_path, Durability.BATCH)
    with closing(volume):
        await put(store, [0])
        await syncs.until(lambda count: count["catalog.sqlite-wal"])
        syncs.fail = True
        await put(store, [1])
        await syncs.until(lambda count: count["failed"])
        await asyncio.sleep(WINDOW_S)
        with pytest.raises(BlockFault) as fault:
            await put(store, [2])
        syncs.fail = False
        assert fault.value.failed[2].errno == errno.EIO
        await put(store, [2])
        assert not await faults(store, {0: b"0", 1: b"1", 2: b"2"})  # all can be read
