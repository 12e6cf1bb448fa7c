"""Conformance of volumes: subclass `VolumeTests` and say which class; see `storage.testing`."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest

from storage.base import BlockFault, BlockStore, Durability, Volume
from storage.testing import assert_equal, make_rows, random_rows


class VolumeTests:
    """What any volume does with arrays, slabs and its budget."""

    volume_cls: ClassVar[type[Volume]]
    block_nbytes: ClassVar[int] = 8192
    slab_nbytes: ClassVar[int] = 1 << 17
    budget: ClassVar[int] = 1 << 20

    def open(
        self,
        path: Path,
        nbytes: int | None = None,
        min_free_nbytes: int = 0,
        durability: Durability = Durability.BATCH,
    ) -> Volume:
        return self.volume_cls.open(
            path,
            nbytes=self.budget if nbytes is None else nbytes,
            min_free_nbytes=min_free_nbytes,
            slab_nbytes=self.slab_nbytes,
            durability=durability,
        )

    @asynccontextmanager
    async def opened(self, path: Path) -> AsyncIterator[tuple[Volume, BlockStore]]:
        """A volume with the array `a`, grown by one slab if it was empty."""
        with closing(self.open(path)) as volume:
            store = volume.array("a", self.block_nbytes, {"made": "here"})
            if not volume.slabs("a"):
                assert volume.grow("a")
            yield volume, store

    async def fill(self, store: BlockStore, ids: range) -> None:
        rows = random_rows(ids, store.block_nbytes)
        await store.write(ids, rows, [str(block_id).encode() for block_id in ids])

    async def check(self, store: BlockStore, ids: range) -> None:
        out = make_rows(len(ids), store.block_nbytes)
        await store.read(ids, out)
        assert_equal(out, random_rows(ids, store.block_nbytes))

    def test_a_new_volume_is_empty(self, tmp_path: Path) -> None:
        with closing(self.open(tmp_path / "new" / "volume")) as volume:
            assert not volume.arrays()
            assert volume.nbytes == 0

    async def test_growth_is_by_slabs_until_the_budget_is_spent(self, tmp_path: Path) -> None:
        with closing(self.open(tmp_path)) as volume:
            store = volume.array("a", self.block_nbytes, {})
            assert volume.slabs("a") == []
            slab, end = volume.slab("a"), 0
            while (ids := volume.grow("a")) is not None:
                assert ids == range(end, end + slab.num_blocks)
                end = ids.stop
                assert volume.nbytes <= self.budget
                assert volume.slabs("a")[-1] == ids
                assert len(volume.slabs("a")) * slab.num_blocks == end
            assert end * self.block_nbytes > self.budget / 4
            await self.fill(store, range(end))
            await store.flush()
            assert volume.nbytes <= len(volume.slabs("a")) * slab.nbytes <= self.budget
            assert volume.grow("a") is None
            await self.check(store, range(end))

    async def test_what_is_beyond_the_capacity_cannot_be_written(self, tmp_path: Path) -> None:
        async with self.opened(tmp_path) as (volume, store):
            last = volume.slabs("a")[-1].stop
            with pytest.raises(BlockFault) as fault:
                await self.fill(store, range(last - 1, last + 2))
            assert set(fault.value.failed) == {last, last + 1}
            await self.check(store, range(last - 1, last))

    def test_arrays_share_one_budget(self, tmp_path: Path) -> None:
        with closing(self.open(tmp_path)) as volume:
            for name in ("a", "b"):
                volume.array(name, self.block_nbytes, {})
                assert volume.grow(name)
            while volume.grow("a"):
                assert volume.nbytes <= self.budget
            assert volume.grow("b") is None

    async def test_a_smaller_budget_takes_nothing_and_gives_nothing_more(
        self, tmp_path: Path
    ) -> None:
        async with self.opened(tmp_path) as (volume, store):
            while volume.grow("a"):
                pass
            slabs, slab = volume.slabs("a"), volume.slab("a")
            await self.fill(store, slabs[0])
            volume.limit(2 * slab.nbytes, 0)
            assert volume.slabs("a") == slabs
            assert volume.grow("a") is None
            for ids in slabs[2:]:
                assert volume.grow("a") is None
                volume.give_back("a", ids)
            await self.check(store, slabs[0])
            volume.give_back("a", slabs[1])
            assert volume.grow("a") == slabs[1]

    async def test_a_larger_budget_is_room_for_more_slabs(self, tmp_path: Path) -> None:
        async with self.opened(tmp_path) as (volume, store):
            while volume.grow("a"):
                pass
            volume.limit(2 * self.budget, 0)
            more = volume.grow("a")
            assert more
            await self.fill(store, more)
            await self.check(store, more)

    async def test_another_floor_holds_from_then_on(self, tmp_path: Path) -> None:
        async with self.opened(tmp_path) as (volume, store):
            [ids] = volume.slabs("a")
            volume.limit(self.budget, 1 << 60)
            with pytest.raises(BlockFault):
                await self.fill(store, ids)
            volume.limit(self.budget, 0)
            await self.fill(store, ids)

    async def test_a_volume_reopens_as_it_was_left(self, tmp_path: Path) -> None:
        async with self.opened(tmp_path) as (volume, store):
            [ids] = volume.slabs("a")
            await self.fill(store, ids)
            facts, nbytes = dict(volume.arrays()), volume.nbytes
        with closing(self.open(tmp_path)) as volume:
            assert volume.nbytes == nbytes
            again = dict(volume.arrays())
            assert again["a"].written_at >= facts["a"].written_at > 0  # closing may write
            assert again == {"a": replace(facts["a"], written_at=again["a"].written_at)}
            assert facts["a"].attributes == {"made": "here"}
            assert facts["a"].block_nbytes == self.block_nbytes
            assert volume.slabs("a") == [ids]
            store = volume.array("a", self.block_nbytes, {"made": "elsewhere"})
            assert volume.arrays()["a"].attributes == {"made": "here"}
            assert len(list(await store.recover())) == len(ids)
            await self.check(store, ids)

    @pytest.mark.parametrize("durability", Durability)
    async def test_every_durability_keeps_what_was_written(
        self, tmp_path: Path, durability: Durability
    ) -> None:
        with closing(self.open(tmp_path, durability=durability)) as volume:
            store = volume.array("a", self.block_nbytes, {})
            ids = volume.grow("a")
            assert ids
            await asyncio.gather(*(self.fill(store, range(at, at + 1)) for at in ids))
            await store.copy(ids[0], ids[1])
            await self.fill(store, ids[1:2])
            await self.check(store, ids)
        with closing(self.open(tmp_path, durability=durability)) as volume:
            store = volume.array("a", self.block_nbytes, {})
            assert len(list(await store.recover())) == len(ids)
            await self.check(store, ids)

    async def test_a_store_closed_alone_can_be_opened_again(self, tmp_path: Path) -> None:
        async with self.opened(tmp_path) as (volume, store):
            await self.fill(store, range(3))
            await store.close()
            await store.close()
            again = volume.array("a", self.block_nbytes, {})
            await self.check(again, range(3))

    async def test_another_block_size_is_refused(self, tmp_path: Path) -> None:
        async with self.opened(tmp_path) as (volume, store):
            await store.close()
            with pytest.raises(ValueError, match=str(self.block_nbytes)):
                volume.array("a", 2 * self.block_nbytes, {})

    def test_an_open_array_is_not_opened_twice(self, tmp_path: Path) -> None:
        with closing(self.open(tmp_path)) as volume:
            volume.array("a", self.block_nbytes, {})
            with pytest.raises(ValueError, match="open"):
                volume.array("a", self.block_nbytes, {})

    def test_an_open_volume_is_locked_until_it_is_closed(self, tmp_path: Path) -> None:
        volume = self.open(tmp_path)
        with pytest.raises(BlockingIOError):
            self.open(tmp_path)
        volume.close()
        volume.close()
        self.open(tmp_path).close()

    async def test_dropping_an_array_gives_its_bytes_back(self, tmp_path: Path) -> None:
        async with self.opened(tmp_path) as (volume, store):
            await self.fill(store, volume.slabs("a")[0])
            with pytest.raises(ValueError, match="open"):
                volume.drop("a")
            await store.close()
            volume.drop("a")
            assert volume.nbytes == 0
            assert "a" not in volume.arrays()
            again = volume.array("a", self.block_nbytes, {})
            assert volume.slabs("a") == []
            assert volume.grow("a")
            assert list(await again.recover()) == []

    async def grown(self, volume: Volume, num_slabs: int) -> tuple[BlockStore, list[range]]:
        """The array `a`, with every block of so many slabs written."""
        store = volume.array("a", self.block_nbytes, {})
        for _ in range(num_slabs):
            assert volume.grow("a")
        for ids in volume.slabs("a"):
            await self.fill(store, ids)
        return store, volume.slabs("a")

    @pytest.mark.parametrize("which", range(3))
    async def test_a_slab_given_back_is_gone_and_the_others_stay(
        self, tmp_path: Path, which: int
    ) -> None:
        with closing(self.open(tmp_path)) as volume:
            store, slabs = await self.grown(volume, 3)
            before, gone = volume.nbytes, slabs.pop(which)
            volume.give_back("a", gone)
            assert volume.nbytes < before
            for _ in range(2):
                assert volume.slabs("a") == slabs
                assert volume.arrays()["a"].nbytes == volume.nbytes
                assert sorted(i for i, _ in await store.recover()) == [i for s in slabs for i in s]
                for ids in slabs:
                    await self.check(store, ids)
                with pytest.raises(BlockFault) as fault:
                    await self.check(store, gone)
                assert set(fault.value.failed) == set(gone)
                with pytest.raises(BlockFault):
                    await self.fill(store, gone)
                await store.close()  # the same in its next life
                store = volume.array("a", self.block_nbytes, {})
        with closing(self.open(tmp_path)) as volume:
            assert volume.slabs("a") == slabs
            store = volume.array("a", self.block_nbytes, {})
            assert sorted(i for i, _ in await store.recover()) == [i for s in slabs for i in s]
            for ids in slabs:
                await self.check(store, ids)

    async def test_what_is_given_back_can_be_reserved_again_and_is_empty(
        self, tmp_path: Path
    ) -> None:
        with closing(self.open(tmp_path)) as volume:
            store, slabs = await self.grown(volume, 3)
            volume.give_back("a", slabs[1])
            other = volume.array("b", self.block_nbytes, {})
            while volume.grow("b"):
                assert volume.nbytes <= self.budget
            await self.fill(other, volume.slabs("b")[0])
            volume.give_back("a", slabs[0])
            assert volume.grow("b") or volume.grow("a")
            if len(volume.slabs("a")) == 1:
                volume.give_back("b", volume.slabs("b")[-1])
                assert volume.grow("a")
            [again] = [ids for ids in volume.slabs("a") if ids != slabs[2]]
            with pytest.raises(BlockFault) as fault:
                await self.check(store, again)
            assert set(fault.value.failed) == set(again)
            await self.fill(store, again)
            await self.check(store, again)
            await self.check(store, slabs[2])
            await self.check(other, volume.slabs("b")[0])

    async def test_what_lay_in_a_slab_does_not_come_back_with_it(self, tmp_path: Path) -> None:
        with closing(self.open(tmp_path)) as volume:
            _, [ids] = await self.grown(volume, 1)
            volume.give_back("a", ids)
        with closing(self.open(tmp_path)) as volume:
            store = volume.array("a", self.block_nbytes, {})
            again = volume.grow("a")
            assert again
            await self.fill(store, again[:1])
        with closing(self.open(tmp_path)) as volume:
            store = volume.array("a", self.block_nbytes, {})
            assert [block_id for block_id, _ in await store.recover()] == [again[0]]

    async def test_a_block_copied_out_of_a_slab_outlives_it(self, tmp_path: Path) -> None:
        for durability in Durability:
            path = tmp_path / durability
            with closing(self.open(path, durability=durability)) as volume:
                store, slabs = await self.grown(volume, 2)
                source, target = slabs[0][-1], slabs[1][0]
                await store.copy(source, target)
                volume.give_back("a", slabs[0])
                out = make_rows(1, self.block_nbytes)
                await store.read([target], out)
                assert_equal(out, random_rows([source], self.block_nbytes))
            with closing(self.open(path, durability=durability)) as volume:
                store = volume.array("a", self.block_nbytes, {})
                assert dict(await store.recover())[target] == str(source).encode()

    def test_a_slab_that_is_reserved_and_not_written_is_given_back_too(
        self, tmp_path: Path
    ) -> None:
        with closing(self.open(tmp_path)) as volume:
            volume.array("a", self.block_nbytes, {})
            ids = volume.grow("a")
            assert ids
            volume.give_back("a", ids)
            assert volume.nbytes == 0
            assert volume.slabs("a") == []

    async def test_only_a_whole_slab_of_an_open_array_is_given_back(self, tmp_path: Path) -> None:
        with closing(self.open(tmp_path)) as volume:
            store, [ids] = await self.grown(volume, 1)
            for wrong in (ids[1:], range(ids.stop, ids.stop + len(ids)), range(0)):
                with pytest.raises(ValueError, match="slab"):
                    volume.give_back("a", wrong)
            await self.check(store, ids)
            await store.close()
            with pytest.raises(ValueError, match="open"):
                volume.give_back("a", ids)

    async def test_an_array_nobody_opens_counts_and_can_be_dropped(self, tmp_path: Path) -> None:
        async with self.opened(tmp_path) as (volume, store):
            await self.fill(store, volume.slabs("a")[0])
        with closing(self.open(tmp_path)) as volume:
            assert volume.nbytes == volume.arrays()["a"].nbytes > 0
            volume.drop("a")
            assert volume.nbytes == 0
        with closing(self.open(tmp_path)) as volume:
            assert not volume.arrays()
