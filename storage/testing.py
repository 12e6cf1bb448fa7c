"""Conformance: the tests that every block store passes, shipped for third parties.

Subclass and supply what opens one; pytest, with pytest-asyncio, runs the rest:

    class TestMyStore(BlockStoreTests):
        persistent = True

        @asynccontextmanager
        async def open_store(self, path: Path) -> AsyncIterator[BlockStore]:
            ...  # blocks of `block_nbytes` with at least the ids of `ids`; close it at the end

The tests see only the contract in `storage.base`.
"""

import asyncio
import mmap
import random
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from storage.base import MAX_TAG_NBYTES, BlockFault, BlockStore, MemoryStore, Row

BATCHES = [1, 2, 3, 15, 16, 17, 33, 40]


def make_rows(num_rows: int, nbytes: int, *, misaligned: int = 0) -> list[Row]:
    """Rows of zeros on pages of their own, `misaligned` bytes after a page's start."""
    stride = nbytes + (mmap.PAGESIZE if misaligned else 0)
    memory = np.frombuffer(mmap.mmap(-1, max(1, num_rows * stride)), np.uint8)
    return [memory[at + misaligned :][:nbytes] for at in range(0, num_rows * stride, stride)]


def random_rows(seeds: Sequence[int], nbytes: int, *, misaligned: int = 0) -> list[Row]:
    """Rows of random bytes, the same for the same seed."""
    rows = make_rows(len(seeds), nbytes, misaligned=misaligned)
    for row, seed in zip(rows, seeds, strict=True):
        row[:] = np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)
    return rows


def assert_equal(rows: Sequence[Row], expected: Sequence[Row]) -> None:
    for at, (row, other) in enumerate(zip(rows, expected, strict=True)):
        assert np.array_equal(row, other), f"row {at} of {len(rows)} differs"


class BlockStoreTests:
    """What any block store does, whether it keeps blocks for ever or until it closes."""

    block_nbytes: ClassVar[int] = 8192
    ids: ClassVar[range] = range(96)
    persistent: ClassVar[bool] = False

    def open_store(self, path: Path) -> AbstractAsyncContextManager[BlockStore]:
        """Open the store kept under `path`: empty at first, after that as the last one left it."""
        raise NotImplementedError

    def damage(self, store: BlockStore, path: Path, block_id: int) -> None:
        """Make the next read of a block fail; a store that cannot fail leaves this alone."""
        pytest.skip("this store cannot be made to fail")

    def scattered(self, num_blocks: int) -> list[int]:
        order = np.random.default_rng(num_blocks).permutation(len(self.ids))
        return [self.ids[at] for at in order[:num_blocks]]

    async def put(self, store: BlockStore, ids: Sequence[int], seed: int = 0) -> list[Row]:
        rows = random_rows([seed + block_id for block_id in ids], self.block_nbytes)
        await store.write(ids, rows, [f"tag {seed} {block_id}".encode() for block_id in ids])
        return rows

    async def get(self, store: BlockStore, ids: Sequence[int]) -> list[Row]:
        out = make_rows(len(ids), self.block_nbytes)
        await store.read(ids, out)
        return out

    @pytest.mark.parametrize("num_blocks", BATCHES)
    async def test_a_batch_reads_back_as_it_was_written(
        self, tmp_path: Path, num_blocks: int
    ) -> None:
        async with self.open_store(tmp_path) as store:
            ids = self.scattered(num_blocks)
            rows = await self.put(store, ids)
            assert_equal(await self.get(store, ids), rows)
            assert_equal(await self.get(store, ids[::-1]), rows[::-1])

    async def test_an_empty_batch_is_a_batch(self, tmp_path: Path) -> None:
        async with self.open_store(tmp_path) as store:
            await store.write([], [], [])
            await store.read([], [])

    async def test_a_rewritten_block_reads_as_the_last_write(self, tmp_path: Path) -> None:
        async with self.open_store(tmp_path) as store:
            ids = self.scattered(20)
            rows = await self.put(store, ids)
            again = await self.put(store, ids[::2], seed=1000)
            assert_equal(await self.get(store, ids[::2]), again)
            assert_equal(await self.get(store, ids[1::2]), rows[1::2])

    @pytest.mark.parametrize("misaligned", [1, 64, 4095])
    async def test_rows_may_lie_anywhere(self, tmp_path: Path, misaligned: int) -> None:
        async with self.open_store(tmp_path) as store:
            ids = self.scattered(5)
            rows = random_rows(ids, self.block_nbytes, misaligned=misaligned)
            await store.write(ids, rows, [b""] * 5)
            out = make_rows(5, self.block_nbytes, misaligned=misaligned)
            await store.read(ids, out)
            assert_equal(out, rows)

    async def test_a_row_that_is_not_one_block_is_refused(self, tmp_path: Path) -> None:
        async with self.open_store(tmp_path) as store:
            [row] = await self.put(store, self.ids[:1])
            wrong_rows: list[Any] = [row[:-1], row[:1], row.view(np.uint16), row.reshape(2, -1)]
            for wrong in wrong_rows:
                with pytest.raises(ValueError, match="row"):
                    await store.write(self.ids[:1], [wrong], [b""])
                with pytest.raises(ValueError, match="row"):
                    await store.read(self.ids[:1], [wrong])
            assert_equal(await self.get(store, self.ids[:1]), [row])

    async def test_a_tag_is_kept_whole_up_to_the_longest_and_refused_beyond(
        self, tmp_path: Path
    ) -> None:
        longest = random.Random(1).randbytes(MAX_TAG_NBYTES)
        async with self.open_store(tmp_path) as store:
            rows = random_rows([1], self.block_nbytes)
            await store.write(self.ids[:1], rows, [longest])
            with pytest.raises(ValueError, match="tag"):
                await store.write(self.ids[:1], rows, [longest + b"t"])
            assert_equal(await self.get(store, self.ids[:1]), rows)
        async with self.open_store(tmp_path) as store:
            if self.persistent:
                assert list(await store.recover()) == [(self.ids[0], longest)]
                assert_equal(await self.get(store, self.ids[:1]), rows)

    async def test_a_copy_equals_its_source_and_outlives_it(self, tmp_path: Path) -> None:
        async with self.open_store(tmp_path) as store:
            src, dst, *_ = self.scattered(2)
            rows = await self.put(store, [src])
            await store.copy(src, dst)
            await self.put(store, [src], seed=7)
            assert_equal(await self.get(store, [dst]), rows)

    async def test_batches_at_the_same_time_do_not_mix(self, tmp_path: Path) -> None:
        async with self.open_store(tmp_path) as store:
            ids = self.scattered(90)
            parts = [ids[at : at + 15] for at in range(0, 90, 15)]
            wrote = await asyncio.gather(*(self.put(store, part) for part in parts[:3]))
            results = await asyncio.gather(
                *(self.get(store, part) for part in parts[:3]),
                *(self.put(store, part) for part in parts[3:]),
            )
            for rows, expected in zip(results[:3], wrote, strict=True):
                assert_equal(rows, expected)
            for part, expected in zip(parts[3:], results[3:], strict=True):
                assert_equal(await self.get(store, part), expected)

    async def test_a_cancelled_read_leaves_the_rows_alone_once_it_is_over(
        self, tmp_path: Path
    ) -> None:
        async with self.open_store(tmp_path) as store:
            ids = self.scattered(40)
            await self.put(store, ids)
            out = make_rows(40, self.block_nbytes)
            reading = asyncio.create_task(store.read(ids, out))
            await asyncio.sleep(0)
            reading.cancel()
            with pytest.raises(asyncio.CancelledError):
                await reading
            for row in out:
                row[:] = 7
            await self.get(store, ids)
            assert all((row == 7).all() for row in out)

    async def test_a_fault_names_its_block_and_spares_the_others(self, tmp_path: Path) -> None:
        async with self.open_store(tmp_path) as store:
            ids = self.scattered(20)
            rows = await self.put(store, ids)
            self.damage(store, tmp_path, ids[3])
            out = make_rows(20, self.block_nbytes)
            with pytest.raises(BlockFault) as fault:
                await store.read(ids, out)
            assert set(fault.value.failed) == {ids[3]}
            assert all(isinstance(error, OSError) for error in fault.value.failed.values())
            assert_equal(out[:3] + out[4:], rows[:3] + rows[4:])
            again = await self.put(store, ids[3:4])
            assert_equal(await self.get(store, ids[3:4]), again)

    async def test_the_next_life_has_the_blocks_and_tags_of_the_last(self, tmp_path: Path) -> None:
        ids = self.scattered(40)
        async with self.open_store(tmp_path) as store:
            assert list(await store.recover()) == []
            await self.put(store, ids)
            rows = await self.put(store, ids, seed=500)
            await store.copy(ids[0], ids[1])
        async with self.open_store(tmp_path) as store:
            found = dict(await store.recover())
            if not self.persistent:
                assert not found
                return
            tags = {block_id: f"tag 500 {block_id}".encode() for block_id in ids}
            assert found == tags | {ids[1]: tags[ids[0]]}
            assert_equal(await self.get(store, ids), [rows[0], rows[0], *rows[2:]])

    async def test_rows_of_a_memory_store_are_its_blocks(self, tmp_path: Path) -> None:
        async with self.open_store(tmp_path) as store:
            if not isinstance(store, MemoryStore):
                pytest.skip("not memory")
            ids = self.scattered(3)
            rows = await self.put(store, ids)
            assert_equal(store.rows(ids), rows)
            store.rows(ids)[1][:] = 3
            assert (await self.get(store, ids))[1].tolist() == [3] * self.block_nbytes
            with pytest.raises(IndexError):
                store.rows([1 << 40])
