"""The blocks of an SSD volume: what zarr reads, what damage is noticed, what is recovered."""

import asyncio
import errno
import os
import shutil
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import tensorstore
import zarr
from crc32c import crc32c

from storage.base import BlockFault, CorruptBlock, Row
from storage.slab import PAGE
from storage.testing import assert_equal, make_rows, random_rows
from tests.ssd_blocks import (
    GEOMETRY,
    NBYTES,
    SLOTS,
    faults,
    flip,
    lose_catalog,
    open_store,
    open_volume,
    put,
    slab,
)


def tensorstore_open(path: Path) -> tensorstore.TensorStore:
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{path}/store.zarr/a/"}}
    return tensorstore.open(spec, read=True).result()


async def test_zarr_and_tensorstore_read_every_live_block(tmp_path: Path) -> None:
    async with open_store(tmp_path) as store:
        ids = list(range(0, 3 * SLOTS, 2))
        await put(store, ids)
        await put(store, ids[::3], generation=1)
        await store.copy(ids[1], 1)
        await store.flush()
        live = dict(await store.recover())
        assert set(live) == {*ids, 1}
        group = zarr.open(tmp_path / "store.zarr", mode="r")
        assert list(group.array_keys()) == ["a"]
        assert group["a"].attrs["tierd"] == {"group": 0}
        foreign = await asyncio.to_thread(tensorstore_open, tmp_path)
        for block_id in range(3 * SLOTS):
            tag = live.get(block_id)
            [row] = make_rows(1, NBYTES) if tag is None else random_rows([int(tag)], NBYTES)
            assert np.array_equal(group["a"][block_id], row)
            assert np.array_equal(foreign[block_id].read().result(), row)


async def test_zarr_and_tensorstore_refuse_a_flipped_bit(tmp_path: Path) -> None:
    async with open_store(tmp_path) as store:
        await put(store, [0, 1])
    flip(tmp_path, 1, 100)
    array = zarr.open(tmp_path / "store.zarr", mode="r")["a"]
    foreign = tensorstore_open(tmp_path)
    assert_equal([array[0], foreign[0].read().result()], random_rows([0, 0], NBYTES))
    with pytest.raises(ValueError, match="checksum"):
        array[1]
    with pytest.raises(ValueError, match="Digest mismatch"):
        foreign[1].read().result()


@pytest.mark.parametrize("offset", [0, NBYTES - 1, NBYTES, NBYTES + 5, NBYTES + 13, NBYTES + 40])
@pytest.mark.parametrize("catalog_is_lost", [False, True])
async def test_a_flipped_bit_is_a_corrupt_block(
    tmp_path: Path, offset: int, catalog_is_lost: bool
) -> None:
    async with open_store(tmp_path) as store:
        await put(store, range(SLOTS))
        tags = dict(await store.recover())
    flip(tmp_path, 3, offset)
    if catalog_is_lost:
        lose_catalog(tmp_path)
    async with open_store(tmp_path) as store:
        failed = await faults(store, tags)
        assert list(failed) == [3]
        assert isinstance(failed[3], CorruptBlock)
        assert "array a, block 3:" in str(failed[3])
        assert str(slab(tmp_path, 0)) in str(failed[3])
        assert set(dict(await store.recover())) == set(tags) - {3}
    async with open_store(tmp_path) as store:
        assert set(dict(await store.recover())) == set(tags) - {3}


async def test_a_slab_truncated_under_way_fails_only_the_blocks_it_lost(tmp_path: Path) -> None:
    async with open_store(tmp_path) as store:
        await put(store, range(2 * SLOTS))
        tags = dict(await store.recover())
        os.truncate(slab(tmp_path, 1), GEOMETRY.locate(SLOTS + 2)[1] + NBYTES)
        failed = await faults(store, tags)
        assert set(failed) == set(range(SLOTS + 2, 2 * SLOTS))
        assert all(isinstance(error, CorruptBlock) for error in failed.values())
    lost = set(range(SLOTS, 2 * SLOTS))
    async with open_store(tmp_path) as store:  # a slab that is not whole is removed at open
        assert set(dict(await store.recover())) == set(tags) - lost
        assert set(await faults(store, tags)) == lost
        await put(store, range(2 * SLOTS))
        assert not await faults(store, tags)


@pytest.mark.parametrize("catalog_is_lost", [False, True])
async def test_swapped_slots_are_corrupt_blocks(tmp_path: Path, catalog_is_lost: bool) -> None:
    async with open_store(tmp_path) as store:
        await put(store, range(SLOTS))
        tags = dict(await store.recover())
    with slab(tmp_path, 0).open("r+b") as file:
        places = [GEOMETRY.locate(block_id)[1] for block_id in (2, 5)]
        slots = [os.pread(file.fileno(), GEOMETRY.stride, place) for place in places]
        for place, slot in zip(places, reversed(slots), strict=True):
            os.pwrite(file.fileno(), slot, place)
    if catalog_is_lost:
        lose_catalog(tmp_path)
    async with open_store(tmp_path) as store:
        assert catalog_is_lost == (set(tags) - set(dict(await store.recover())) == {2, 5})
        assert set(await faults(store, tags)) == {2, 5}


async def test_a_slab_of_another_array_proves_nothing(tmp_path: Path) -> None:
    with closing(open_volume(tmp_path)) as volume:
        for name in ("a", "b"):
            store = volume.array(name, NBYTES, {})
            assert volume.grow(name)
            await put(store, range(SLOTS))
    slab(tmp_path, 0).write_bytes((tmp_path / "store.zarr/b/c/0/0").read_bytes())
    lose_catalog(tmp_path)
    with closing(open_volume(tmp_path)) as volume:
        assert not list(await volume.array("a", NBYTES, {}).recover())
        assert len(list(await volume.array("b", NBYTES, {}).recover())) == SLOTS


@pytest.mark.parametrize("damage", ["missing", "no database", "torn", "unsealed"])
async def test_a_lost_catalog_is_made_anew_from_the_slots(tmp_path: Path, damage: str) -> None:
    async with open_store(tmp_path) as store:
        await put(store, range(0, 3 * SLOTS, 2))
        await put(store, [0, 2, 4], generation=1)
        await store.copy(6, 7)
        tags = dict(await store.recover())
    catalog = tmp_path / "catalog.sqlite"
    if damage == "missing":
        lose_catalog(tmp_path)
    elif damage == "no database":
        catalog.write_bytes(b"not a database" * 1000)
    elif damage == "torn":
        catalog.write_bytes(catalog.read_bytes()[:PAGE] + os.urandom(PAGE))
    else:  # as if killed while it was being made
        catalog.write_bytes(b"")
    async with open_store(tmp_path) as store:
        assert dict(await store.recover()) == tags
        assert not await faults(store, tags)


async def test_a_write_whose_row_is_not_committed_leaves_no_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_store(tmp_path) as store:
        await put(store, [0, 1, 2])
        old = dict(await store.recover())
        with monkeypatch.context() as patch:
            error = OSError(errno.EIO, "no commit")
            patch.setattr("storage.catalog.Catalog.put", lambda *_: (_ for _ in ()).throw(error))
            with pytest.raises(BlockFault):
                await put(store, [1], generation=1)
        assert set(dict(await store.recover())) == {0, 2}
        assert set(await faults(store, old)) == {1}
    async with open_store(tmp_path) as store:
        assert set(await faults(store, old)) == {1}


def collide(row: Row) -> None:
    """Change a row and not its checksum: a CRC cannot see a multiple of its polynomial."""
    bits = f"1{0x1EDC6F41:032b}"
    crc = crc32c(row.data)
    row[100:105] ^= np.frombuffer(int(bits[::-1], 2).to_bytes(5, "little"), np.uint8)
    assert crc32c(row.data) == crc


async def test_an_old_row_never_vouches_for_newer_bytes_even_of_the_same_checksum(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    [row] = random_rows([0], NBYTES)
    async with open_store(tmp_path) as store:
        await store.write([0], [row], [b"0"])
        collide(row)
        with monkeypatch.context() as patch:
            patch.setattr("storage.catalog.Catalog.put", lambda *_: None)
            await store.write([0], [row], [b"newer"])
    async with open_store(tmp_path) as store:
        assert dict(await store.recover()) == {0: b"0"}
        assert set(await faults(store, {0: b"0"})) == {0}


async def test_what_a_killed_life_wrote_is_found_by_zarr_after_the_next_flush(
    tmp_path: Path,
) -> None:
    async with open_store(tmp_path / "killed") as store:
        await put(store, [0, SLOTS])
        await asyncio.to_thread(shutil.copytree, tmp_path / "killed", tmp_path / "next")
    async with open_store(tmp_path / "next") as store:
        await store.flush()
    array = zarr.open(tmp_path / "next" / "store.zarr", mode="r")["a"]
    assert_equal([array[0], array[SLOTS]], random_rows([0, SLOTS], NBYTES))


async def test_an_error_of_the_medium_is_passed_on_and_the_block_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def preadv(fd: int, buffers: object, offset: int) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    async with open_store(tmp_path) as store:
        await put(store, [0])
        with monkeypatch.context() as patch:
            patch.setattr(os, "preadv", preadv)
            failed = await faults(store, {0: b"0"})
        assert failed[0].errno == errno.EIO
        assert not isinstance(failed[0], CorruptBlock)
        assert str(slab(tmp_path, 0)) in str(failed[0])
        assert not await faults(store, {0: b"0"})


def seq_on_disk(path: Path, block_id: int) -> int:
    k, start = GEOMETRY.locate(block_id)
    with slab(path, k).open("rb") as file:
        return int.from_bytes(os.pread(file.fileno(), 8, start + NBYTES + 20), "little")


@pytest.mark.parametrize("catalog_is_lost", [False, True])
async def test_no_life_uses_a_sequence_number_again(tmp_path: Path, catalog_is_lost: bool) -> None:
    seqs = []
    for life in range(3):
        async with open_store(tmp_path) as store:
            await put(store, [0, 1, 2])
            seqs += [seq_on_disk(tmp_path, block_id) for block_id in (0, 1, 2)]
        if catalog_is_lost:
            lose_catalog(tmp_path)
            flip(tmp_path, life, NBYTES + 20)
    assert seqs == sorted(set(seqs))


async def test_a_corrupt_block_that_the_catalog_cannot_forget_fails_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_store(tmp_path) as store:
        await put(store, range(SLOTS))
        tags = dict(await store.recover())
        flip(tmp_path, 3, 100)
        with monkeypatch.context() as patch:
            error = OSError(errno.EIO, "no commit")
            patch.setattr("storage.catalog.Catalog.forget", lambda *_: (_ for _ in ()).throw(error))
            assert await faults(store, tags) == {3: error}
        assert set(dict(await store.recover())) == set(tags) - {3}
    async with open_store(tmp_path) as store:
        assert set(await faults(store, tags)) == {3}
