"""Copies the file system makes within a volume, and tags that only a damaged catalog has."""

import errno
import os
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

import storage.ssd
from storage.base import BlockFault, CorruptBlock
from tests.ssd_blocks import NBYTES, SLOTS, faults, flip, lose_catalog, open_store, put


def clones(monkeypatch: pytest.MonkeyPatch, refuse: int = 0, part: int = NBYTES) -> list[int]:
    """Let the store believe that the file system shares blocks; the sizes it was asked for."""
    asked: list[int] = []
    real = os.copy_file_range

    def copy_file_range(src: int, dst: int, count: int, src_at: int, dst_at: int) -> int:
        asked.append(count)
        if refuse:
            raise OSError(refuse, os.strerror(refuse))
        return real(src, dst, min(count, part), src_at, dst_at)

    monkeypatch.setattr(storage.ssd, "_clones", lambda path: True)
    monkeypatch.setattr(os, "copy_file_range", copy_file_range)
    return asked


@pytest.mark.parametrize("part", [NBYTES, 4096])
@pytest.mark.parametrize("catalog_is_lost", [False, True])
async def test_a_copy_by_the_file_system_is_a_block_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: int, catalog_is_lost: bool
) -> None:
    asked = clones(monkeypatch, part=part)
    async with open_store(tmp_path) as store:
        await put(store, [0, 1])
        await store.copy(0, SLOTS + 1)  # into a slab that is not made yet
        await store.copy(1, 2)
        await put(store, [0], generation=5)
        tags = dict(await store.recover())
        assert tags == {0: b"5000", 1: b"1", 2: b"1", SLOTS + 1: b"0"}
        assert not await faults(store, tags)
    assert sum(asked) >= 2 * NBYTES
    if catalog_is_lost:
        lose_catalog(tmp_path)
    async with open_store(tmp_path) as store:
        assert dict(await store.recover()) == tags
        assert not await faults(store, tags)


@pytest.mark.parametrize("refuse", [errno.EOPNOTSUPP, errno.EXDEV, errno.EINVAL])
async def test_a_refused_copy_is_read_and_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refuse: int
) -> None:
    asked = clones(monkeypatch, refuse=refuse)
    async with open_store(tmp_path) as store:
        await put(store, [0])
        await store.copy(0, 7)
        assert asked == [NBYTES]
        assert not await faults(store, {0: b"0", 7: b"0"})


async def test_a_copy_the_medium_breaks_off_leaves_no_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clones(monkeypatch, refuse=errno.EIO)
    async with open_store(tmp_path) as store:
        await put(store, [0, 7])
        with pytest.raises(BlockFault) as fault:
            await store.copy(0, 7)
        assert fault.value.failed[7].errno == errno.EIO
        assert set(await faults(store, {0: b"0", 7: b"7"})) == {7}


@pytest.mark.parametrize("shared", [False, True])
async def test_a_damaged_source_is_not_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shared: bool
) -> None:
    if shared:
        clones(monkeypatch)
    async with open_store(tmp_path) as store:
        await put(store, [0, 7])
        flip(tmp_path, 0, 100)
        with pytest.raises(BlockFault) as fault:
            await store.copy(0, 7)
        assert isinstance(fault.value.failed[0], CorruptBlock)
        assert not await faults(store, {7: b"7"})  # the target is as it was


async def test_a_tag_that_only_the_catalog_has_is_refused(tmp_path: Path) -> None:
    async with open_store(tmp_path) as store:
        await put(store, [0, 1])
    with closing(sqlite3.connect(tmp_path / "catalog.sqlite")) as db, db:
        db.execute("UPDATE block SET tag = x'35' WHERE slot = 1")  # as a flipped bit would
    async with open_store(tmp_path) as store:
        tags = dict(await store.recover())
        assert tags == {0: b"0", 1: b"5"}
        assert set(await faults(store, tags)) == {1}
        assert dict(await store.recover()) == {0: b"0"}


async def test_a_slot_with_two_rows_is_known_by_the_tag_that_proves_it(tmp_path: Path) -> None:
    """A flipped bit can make one slot's row another's, and the key no longer unique."""
    async with open_store(tmp_path) as store:
        await put(store, [0, 1])
    with closing(sqlite3.connect(tmp_path / "catalog.sqlite")) as db, db:
        rows = db.execute("SELECT slot, seq, crc, tag FROM block ORDER BY slot").fetchall()
        db.execute("ALTER TABLE block RENAME TO whole")
        db.execute(
            "CREATE TABLE block (array TEXT NOT NULL, slot INTEGER NOT NULL, seq INTEGER NOT NULL,"
            " crc INTEGER NOT NULL, tag BLOB NOT NULL)"
        )
        for slot, seq, crc, tag in (*rows, (1, *rows[0][1:]), rows[1]):
            db.execute("INSERT INTO block VALUES ('a', ?, ?, ?, ?)", (slot, seq, crc, tag))
        db.execute("DELETE FROM block WHERE rowid = 2")
        db.execute("DROP TABLE whole")
    async with open_store(tmp_path) as store:
        found = list(await store.recover())
        assert sorted(found) == [(0, b"0"), (1, b"1")]
        assert not await faults(store, dict(found))
