"""The SSD volume on disk: what zarr reads of it, what damage it notices, what it may occupy."""

import asyncio
import errno
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, closing
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tensorstore
import zarr

import storage.slab_files
from storage.base import BlockFault, BlockStore, CorruptBlock
from storage.slab import PAGE, Geometry
from storage.ssd import SsdVolume
from storage.testing import assert_equal, make_rows, random_rows

NBYTES = 8192
GEOMETRY = Geometry.fitting(NBYTES, 1 << 17)
SLOTS = GEOMETRY.num_slots


def open_volume(path: Path, *, nbytes: int = 1 << 20, min_free_nbytes: int = 0) -> SsdVolume:
    return SsdVolume.open(path, nbytes=nbytes, min_free_nbytes=min_free_nbytes, slab_nbytes=1 << 17)


@asynccontextmanager
async def open_store(path: Path, num_slabs: int = 3) -> AsyncIterator[BlockStore]:
    with closing(open_volume(path)) as volume:
        store = volume.array("a", NBYTES, {"group": 0})
        while len(volume.capacity("a")) < num_slabs * SLOTS:
            assert volume.grow("a")
        yield store


async def put(store: BlockStore, ids: Sequence[int], generation: int = 0) -> None:
    seeds = [1000 * generation + block_id for block_id in ids]
    tags = [str(seed).encode() for seed in seeds]
    await store.write(ids, random_rows(seeds, NBYTES), tags)


async def faults(store: BlockStore, tags: dict[int, bytes]) -> dict[int, OSError]:
    """Read blocks whose tags name their seeds; those that do not fail must be right."""
    out = make_rows(len(tags), NBYTES)
    failed: dict[int, OSError] = {}
    try:
        await store.read(list(tags), out)
    except BlockFault as fault:
        failed = fault.failed
    for (block_id, tag), row in zip(tags.items(), out, strict=True):
        if block_id not in failed:
            assert_equal([row], random_rows([int(tag)], NBYTES))
    return failed


def slab(path: Path, k: int) -> Path:
    return path / "store.zarr" / "a" / "c" / str(k) / "0"


def names(path: Path, pattern: str) -> list[str]:
    return sorted(str(file.relative_to(path)) for file in path.glob(pattern))


def flip(path: Path, block_id: int, offset: int) -> None:
    """Flip one bit of a slot, `offset` bytes after its start."""
    k, start = GEOMETRY.locate(block_id)
    with slab(path, k).open("r+b") as file:
        file.seek(start + offset)
        [byte] = file.read(1)
        file.seek(start + offset)
        file.write(bytes([byte ^ 4]))


def lose_catalog(path: Path) -> None:
    for file in path.glob("catalog.sqlite*"):
        file.unlink()


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


async def test_the_array_is_declared_as_large_as_the_budget(tmp_path: Path) -> None:
    async with open_store(tmp_path) as store:
        await put(store, [0])
    array = zarr.open(tmp_path / "store.zarr", mode="r")["a"]
    assert array.shape == ((1 << 20) // GEOMETRY.footprint * SLOTS, NBYTES)
    with closing(open_volume(tmp_path, nbytes=1 << 22)) as volume:
        store = volume.array("a", NBYTES, {})
        assert not await faults(store, {0: b"0"})
    assert zarr.open(tmp_path / "store.zarr", mode="r")["a"].shape[0] > array.shape[0]
    assert not names(tmp_path, "tmp/*")


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
        assert await volume.array("a", NBYTES, {}).recover() == []
        assert len(await volume.array("b", NBYTES, {}).recover()) == SLOTS


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
        assert set(await faults(store, old)) == {1}
    async with open_store(tmp_path) as store:
        assert set(await faults(store, old)) == {1}


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


async def test_a_slab_is_made_at_its_first_write_and_counts_before_and_after(
    tmp_path: Path,
) -> None:
    with closing(open_volume(tmp_path)) as volume:
        store = volume.array("a", NBYTES, {})
        volume.grow("a")
        volume.grow("a")
        assert volume.nbytes == 2 * GEOMETRY.footprint
        assert not names(tmp_path / "store.zarr/a", "c/*/0")
        await put(store, [SLOTS])
        assert names(tmp_path / "store.zarr/a", "c/*/0") == ["c/1/0"]
        occupied = slab(tmp_path, 1).stat().st_blocks * 512
        assert volume.nbytes == GEOMETRY.footprint + occupied
    with closing(open_volume(tmp_path)) as volume:
        assert volume.capacity("a") == range(2 * SLOTS)


async def test_a_fragmented_slab_stays_within_its_footprint(tmp_path: Path) -> None:
    volume = SsdVolume.open(tmp_path, nbytes=1 << 24, min_free_nbytes=0, slab_nbytes=1 << 24)
    with closing(volume):
        store = volume.array("a", PAGE, {})
        ids = volume.grow("a")
        assert ids is not None
        rows = make_rows(1, PAGE) * len(ids[::2])
        await store.write(ids[::2], rows, [b""] * len(rows))
        await store.flush()
        assert volume.nbytes == slab(tmp_path, 0).stat().st_blocks * 512
        assert volume.nbytes <= Geometry.fitting(PAGE, 1 << 24).footprint <= 1 << 24


async def test_a_free_space_floor_fails_blocks_that_need_a_new_slab(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = SimpleNamespace(f_bavail=1 << 20, f_frsize=PAGE)
    with closing(open_volume(tmp_path, min_free_nbytes=1 << 30)) as volume:
        store = volume.array("a", NBYTES, {})
        volume.grow("a")
        volume.grow("a")
        monkeypatch.setattr(storage.slab_files.os, "statvfs", lambda path: free)
        await put(store, range(SLOTS))
        free.f_bavail = (1 << 30) // PAGE
        with pytest.raises(BlockFault) as fault:
            await put(store, range(SLOTS - 2, SLOTS + 2))
        failed = fault.value.failed
        assert {key: error.errno for key, error in failed.items()} == dict.fromkeys(
            (SLOTS, SLOTS + 1), errno.ENOSPC
        )
        free.f_bavail = 1 << 20
        await put(store, [SLOTS])
        assert not await faults(store, {SLOTS: str(SLOTS).encode()})


async def test_what_a_killed_life_left_half_made_is_removed(tmp_path: Path) -> None:
    async with open_store(tmp_path) as store:
        await put(store, range(SLOTS))
    for k, name in ((1, "0.partial"), (2, "0")):
        slab(tmp_path, k).parent.mkdir()
        slab(tmp_path, k).with_name(name).write_bytes(b"\0" * PAGE)
    (tmp_path / "tmp" / "b").mkdir()
    with closing(open_volume(tmp_path)) as volume:
        assert volume.capacity("a") == range(SLOTS)
        assert volume.nbytes == slab(tmp_path, 0).stat().st_blocks * 512
        assert len(await volume.array("a", NBYTES, {}).recover()) == SLOTS
    assert names(tmp_path / "store.zarr/a", "c/*") == ["c/0"]
    assert not names(tmp_path, "tmp/*")


def test_two_processes_cannot_open_one_volume(tmp_path: Path) -> None:
    program = (
        "import sys, pathlib, storage.ssd as s\n"
        "s.SsdVolume.open(pathlib.Path(sys.argv[1]), nbytes=0, min_free_nbytes=0, slab_nbytes=1)"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    with closing(open_volume(tmp_path)):
        other = subprocess.run(command, capture_output=True, text=True, check=False)
        assert "BlockingIOError" in other.stderr
    subprocess.run(command, check=True)


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", ".hidden", "__group__", "ü"])
def test_a_name_that_is_no_directory_name_is_refused(tmp_path: Path, name: str) -> None:
    with closing(open_volume(tmp_path)) as volume:
        with pytest.raises(ValueError, match="name"):
            volume.array(name, NBYTES, {})
        assert not volume.arrays()


def test_a_volume_of_another_version_is_refused_and_left_alone(tmp_path: Path) -> None:
    open_volume(tmp_path).close()
    document = tmp_path / "store.zarr" / "zarr.json"
    group = json.loads(document.read_text())
    group["attributes"]["tierd"]["version"] = 99
    document.write_text(json.dumps(group))
    for _ in range(2):  # the refusal gives the lock back
        with pytest.raises(ValueError, match="version 99"):
            open_volume(tmp_path)
