"""The space of an SSD volume: what it may occupy, what it counts, who may open it."""

import errno
import json
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest
import zarr

import storage.slab_files
from storage.base import BlockFault
from storage.slab import PAGE, Geometry
from storage.ssd import SsdVolume
from storage.testing import make_rows
from tests.ssd_blocks import (
    GEOMETRY,
    NBYTES,
    SLOTS,
    faults,
    names,
    open_store,
    open_volume,
    put,
    slab,
)


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
        volume.array("a", NBYTES, {})
        assert volume.slabs("a") == [GEOMETRY.slots(1)]
        assert volume.grow("a") == GEOMETRY.slots(0)


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
    slab(tmp_path, 3).parent.mkdir()  # one whose file was deleted just now
    (tmp_path / "tmp" / "b").mkdir()
    with closing(open_volume(tmp_path)) as volume:
        assert volume.slabs("a") == [GEOMETRY.slots(0)]
        assert volume.nbytes == slab(tmp_path, 0).stat().st_blocks * 512
        assert len(list(await volume.array("a", NBYTES, {}).recover())) == SLOTS
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


async def test_a_slab_may_go_while_its_array_is_looked_at(tmp_path: Path) -> None:
    async with open_store(tmp_path, num_slabs=2) as store:
        await put(store, [0, SLOTS])
    with closing(open_volume(tmp_path)) as volume:
        left = slab(tmp_path, 1).stat().st_mtime
        slab(tmp_path, 0).unlink()  # in the midst of `give_back` this is what others see
        assert volume.arrays()["a"].written_at == left


async def test_zarr_sees_zeros_where_a_slab_was_given_back(tmp_path: Path) -> None:
    with closing(open_volume(tmp_path)) as volume:
        store = volume.array("a", NBYTES, {})
        for _ in range(3):
            volume.grow("a")
        await put(store, range(3 * SLOTS))
        volume.give_back("a", GEOMETRY.slots(1))
        assert names(tmp_path / "store.zarr/a", "c/*") == ["c/0", "c/2"]
    array = zarr.open(tmp_path / "store.zarr", mode="r")["a"]
    for slot, lives in ((SLOTS - 1, True), (SLOTS, False), (2 * SLOTS - 1, False), (2 * SLOTS, 1)):
        assert array[slot].any() == lives


async def test_a_slab_that_cannot_be_deleted_stays_and_holds_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(open_volume(tmp_path)) as volume:
        store = volume.array("a", NBYTES, {})
        ids = volume.grow("a")
        assert ids
        await put(store, ids)

        def refuse(path: Path) -> None:
            raise OSError(errno.EROFS, "read-only", str(path))

        with monkeypatch.context() as broken:
            broken.setattr(Path, "unlink", refuse)
            with pytest.raises(OSError, match="read-only"):
                volume.give_back("a", ids)
        assert volume.slabs("a") == [ids]
        await put(store, ids[:1], generation=7)
        tags = dict(await store.recover())
        assert tags == {0: b"7000"}
        assert not await faults(store, tags)
        volume.give_back("a", ids)
        assert volume.nbytes == 0
