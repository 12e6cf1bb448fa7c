"""Runs: neighbouring slots go to the disk in one call, and fail one by one."""

import errno
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from storage.base import BlockFault, BlockStore, CorruptBlock
from storage.slab import MOST_A_CALL, Geometry
from storage.ssd import NUM_READERS, NUM_WRITERS
from storage.testing import assert_equal, make_rows, random_rows
from tests.ssd_blocks import GEOMETRY, NBYTES, SLOTS, faults, open_store, put

IDS = [5, 0, SLOTS - 1, 3, SLOTS + 1, 1, 2, 4, SLOTS, 6]  # up to 6, and across a slab's end
TAGS = {block_id: str(block_id).encode() for block_id in IDS}


def runs(num_threads: int) -> list[int]:
    """How long the runs of `IDS` are, each thread having as many blocks as the next."""
    found, step = [], -(-len(IDS) // num_threads)
    for number, slot in enumerate(sorted(IDS)):
        if number % step and slot - 1 in IDS and slot != SLOTS:
            found[-1] += 1
        else:
            found.append(1)
    return sorted(found)


class Calls:
    """How many blocks each of a system call's calls was for; `lets` says how many bytes pass."""

    def __init__(self, patch: pytest.MonkeyPatch, name: str) -> None:
        self.blocks: list[int] = []
        self.lets: Callable[[int, int], int] = lambda offset, nbytes: nbytes
        self._real = getattr(os, name)
        patch.setattr(os, name, self)

    def __call__(self, fd: int, pages: list[memoryview], offset: int) -> int:
        nbytes = sum(map(len, pages))
        self.blocks.append(nbytes // GEOMETRY.stride)
        left, parts = self.lets(offset, nbytes), []
        for page in pages:
            parts.append(memoryview(page)[:left])
            left -= len(parts[-1])
        return int(self._real(fd, [part for part in parts if part], offset))

    def break_at(self, slot: int) -> None:
        """From here on the medium fails at a slot of the first slab, and stops there."""
        bad = GEOMETRY.locate(slot)[1]

        def lets(offset: int, nbytes: int) -> int:
            if offset == bad:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return bad - offset if offset < bad < offset + nbytes else nbytes

        self.lets = lets


@pytest.fixture
def writes(monkeypatch: pytest.MonkeyPatch) -> Calls:
    return Calls(monkeypatch, "pwritev")


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Calls:
    return Calls(monkeypatch, "preadv")


async def put_old(store: BlockStore, calls: Calls) -> None:
    """Have something in every slot, so that no slab is made afterwards."""
    await put(store, range(2 * SLOTS), generation=9)
    calls.blocks.clear()


def test_a_run_ends_at_a_gap_at_a_slab_and_at_what_one_call_takes() -> None:
    geometry = Geometry(4096, 1000)
    slots = [0, 1, 2, 4, 998, 999, 1000, *range(2000, 2000 + MOST_A_CALL + 1)]
    runs = [slots[run] for run in geometry.runs(slots)]
    assert runs[:4] == [[0, 1, 2], [4], [998, 999], [1000]]
    assert [len(run) for run in runs[4:]] == [MOST_A_CALL, 1]
    assert list(geometry.runs([])) == []


async def test_neighbours_are_one_call_in_whatever_order_they_come(
    tmp_path: Path, writes: Calls, reads: Calls
) -> None:
    async with open_store(tmp_path) as store:
        await put_old(store, writes)
        await put(store, IDS)
        assert sorted(writes.blocks) == runs(NUM_WRITERS)
        assert not await faults(store, TAGS)
        assert sorted(reads.blocks) == runs(NUM_READERS)
        assert max(writes.blocks) == 3
        assert max(reads.blocks) == 2


async def test_rows_that_direct_io_does_not_take_go_one_by_one(
    tmp_path: Path, writes: Calls, reads: Calls
) -> None:
    async with open_store(tmp_path) as store:
        await put_old(store, writes)
        memory = np.zeros(3 * NBYTES + 1, np.uint8)
        rows = list(memory[1:].reshape(3, NBYTES))
        for row, data in zip(rows, random_rows([1, 2, 3], NBYTES), strict=True):
            row[:] = data
        await store.write([0, 1, 2], [rows[0], make_rows(1, NBYTES)[0], rows[2]], [b""] * 3)
        out = [row[:] for row in rows]
        memory[:] = 0
        await store.read([0, 1, 2], out)
        assert_equal(out, [*random_rows([1], NBYTES), *make_rows(1, NBYTES), rows[2]])
        assert_equal([out[2]], random_rows([3], NBYTES))
        assert set(writes.blocks) == set(reads.blocks) == {1}


async def test_a_run_that_was_cut_short_is_done_block_by_block(
    tmp_path: Path, writes: Calls, reads: Calls
) -> None:
    async with open_store(tmp_path) as store:
        await put_old(store, writes)
        half = GEOMETRY.stride * 3 // 2
        for calls in (writes, reads):
            calls.lets = lambda _, nbytes: half if nbytes > half else nbytes
        await put(store, IDS)
        assert not await faults(store, TAGS)
        for calls, number in ((writes, NUM_WRITERS), (reads, NUM_READERS)):
            again = [1 for run in runs(number) for _ in range(run - 1)]  # all but the first of it
            assert sorted(calls.blocks) == sorted(runs(number) + again)


async def test_a_block_that_cannot_be_written_is_the_only_one_of_its_run_to_fail(
    tmp_path: Path, writes: Calls
) -> None:
    async with open_store(tmp_path) as store:
        await put_old(store, writes)
        writes.break_at(4)
        with pytest.raises(BlockFault) as fault:
            await put(store, IDS)
        assert set(fault.value.failed) == {4}
        assert fault.value.failed[4].errno == errno.EIO
        assert not isinstance(fault.value.failed[4], CorruptBlock)
        writes.lets = lambda _, nbytes: nbytes
        assert set(await faults(store, TAGS)) == {4}  # neither its old bytes nor its new ones
        await put(store, [4])
        assert not await faults(store, TAGS)


async def test_a_block_that_cannot_be_read_is_the_only_one_of_its_run_to_fail(
    tmp_path: Path, reads: Calls
) -> None:
    async with open_store(tmp_path) as store:
        await put(store, IDS)
        reads.break_at(4)
        failed = await faults(store, TAGS)
        assert set(failed) == {4}
        assert not isinstance(failed[4], CorruptBlock)
        reads.lets = lambda _, nbytes: nbytes
        assert not await faults(store, TAGS)  # it was the medium's failure, so it is kept


async def test_a_short_write_is_no_corrupt_block(tmp_path: Path, writes: Calls) -> None:
    async with open_store(tmp_path) as store:
        await put_old(store, writes)
        writes.lets = lambda _, nbytes: min(nbytes, 4096)
        with pytest.raises(BlockFault, match="only 4096 bytes") as fault:
            await put(store, [0, 1])
        assert set(fault.value.failed) == {0, 1}
        assert not any(isinstance(error, CorruptBlock) for error in fault.value.failed.values())
        writes.lets = lambda _, nbytes: nbytes
