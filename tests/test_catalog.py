"""The catalog: what it gives back, and what damage to it costs, which is never a wrong block."""

import os
import random
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import pytest

from storage.catalog import Catalog
from storage.slab import Trailer
from storage.testing import random_rows
from tests.ssd_blocks import NBYTES, SLOTS, faults, open_store, put

PAGE_NBYTES = 2048


def trailers(slots: Sequence[int], seq: int = 5) -> list[Trailer]:
    return [Trailer(slot, seq + slot, slot, b"%d" % slot) for slot in slots]


def rows(catalog: Catalog, array: str) -> list[tuple[int, int, int, bytes]]:
    return [row for some in catalog.rows(array) for row in some]


@pytest.mark.parametrize("count", [0, 1, 1000, 1001, 12_345])
def test_any_number_of_rows_is_put_and_read_back_in_the_order_of_slots(
    tmp_path: Path, count: int
) -> None:
    with closing(Catalog.create(tmp_path / "c")) as catalog:
        catalog.put("b", trailers([3, 4]))
        catalog.put("a", trailers(range(count))[::-1])
        assert rows(catalog, "a") == trailers(range(count))
        assert rows(catalog, "b") == trailers([3, 4])
        catalog.put("a", trailers([0, 7], seq=90_000))
        assert rows(catalog, "a")[0] == (0, 90_000, 0, b"0")
        assert catalog.last_seq == 90_007


def test_rows_are_put_all_or_none(tmp_path: Path) -> None:
    with closing(Catalog.create(tmp_path / "c")) as catalog:
        catalog.put("a", trailers([1]))
        bad = [*trailers(range(2, 2500)), Trailer(2500, 1, None, b"")]  # type: ignore[arg-type]
        with pytest.raises(OSError, match="NOT NULL"):
            catalog.put("a", bad)
        assert rows(catalog, "a") == trailers([1])


def test_the_last_seq_is_found_again(tmp_path: Path) -> None:
    with closing(Catalog.create(tmp_path / "c")) as catalog:
        catalog.put("a", trailers([1, 5, 2]))
        catalog.put("b", trailers([3]))
        catalog.seal()
    reopened = Catalog.open(tmp_path / "c")
    assert reopened is not None
    with closing(reopened):
        assert reopened.last_seq == 10


async def fill(path: Path) -> dict[int, bytes]:
    """Blocks under long tags, so that the catalog has some pages."""
    tags = {block_id: b"%0100d" % block_id for block_id in range(3 * SLOTS)}
    async with open_store(path) as store:
        await store.write(list(tags), random_rows(list(tags), NBYTES), list(tags.values()))
    return tags


async def test_a_catalog_with_a_page_of_garbage_is_made_anew(tmp_path: Path) -> None:
    tags, path = await fill(tmp_path), tmp_path / "catalog.sqlite"
    sound = path.read_bytes()
    num_pages = len(sound) // PAGE_NBYTES
    assert num_pages > 3
    for page in range(num_pages):
        at = page * PAGE_NBYTES
        path.write_bytes(sound[:at] + os.urandom(PAGE_NBYTES) + sound[at + PAGE_NBYTES :])
        async with open_store(tmp_path) as store:
            assert dict(await store.recover()) == tags, f"page {page}"
            assert not await faults(store, tags)


def test_a_damaged_catalog_that_is_opened_can_be_read(tmp_path: Path) -> None:
    """Damage that a walk from row to row passes over may still stop who looks for an array."""
    path, chance, opened = tmp_path / "c", random.Random(7), 0
    with closing(Catalog.create(path)) as catalog:
        for array in ("a", "b", "c"):
            catalog.put(array, [Trailer(slot, slot, 0, b"%040d" % slot) for slot in range(90)])
        catalog.seal()
    sound = path.read_bytes()
    for _ in range(600):
        damaged = bytearray(sound)
        at, nbytes = chance.randrange(len(sound)), chance.randint(1, 32)
        damaged[at : at + nbytes] = bytes(nbytes) if chance.random() < 0.5 else os.urandom(nbytes)
        path.write_bytes(damaged)
        if (catalog := Catalog.open(path)) is not None:
            opened += 1
            with closing(catalog):
                seqs = [row[1] for array in ("a", "b", "c") for row in rows(catalog, array)]
                assert max(seqs) <= catalog.last_seq
    assert opened > 100


@pytest.mark.parametrize("seq", ["'text'", "9e99", "x'00'", str(1 << 62), "-7"])
async def test_a_catalog_whose_last_seq_is_none_is_made_anew(tmp_path: Path, seq: str) -> None:
    tags = await fill(tmp_path)
    loosen(tmp_path)
    with closing(sqlite3.connect(tmp_path / "catalog.sqlite")) as db, db:
        where = "" if seq == "-7" else "WHERE slot = 3"
        db.execute(f"UPDATE block SET seq = {seq} {where}")
    async with open_store(tmp_path) as store:
        assert dict(await store.recover()) == tags
        await put(store, [4])  # the seqs that come next are those of a clock
        assert not await faults(store, {4: b"4"})


@pytest.mark.parametrize("change", ["slot = 'x'", "seq = NULL", "crc = 1.5", "tag = 'text'"])
async def test_a_row_of_another_type_is_a_block_less(tmp_path: Path, change: str) -> None:
    tags = await fill(tmp_path)
    loosen(tmp_path)
    with closing(sqlite3.connect(tmp_path / "catalog.sqlite")) as db, db:
        db.execute(f"UPDATE block SET {change} WHERE slot = 3")
    async with open_store(tmp_path) as store:
        found = dict(await store.recover())
        assert found == {block_id: tag for block_id, tag in tags.items() if block_id != 3}
        assert set(await faults(store, tags)) == {3}
        await put(store, [3])
        assert not await faults(store, {3: b"3"})


def loosen(path: Path) -> None:
    """Let the table hold any type, as damage does."""
    with closing(sqlite3.connect(path / "catalog.sqlite")) as db, db:
        db.execute("ALTER TABLE block RENAME TO strict")
        db.execute("CREATE TABLE block (array, slot, seq, crc, tag, PRIMARY KEY (array, slot))")
        db.execute("INSERT INTO block SELECT * FROM strict")
        db.execute("DROP TABLE strict")
