"""`tierd verify` and `inspect` on damaged folders: what is wrong is named, nothing touched."""

import os
from pathlib import Path

import pytest

from storage.survey import Survey
from tests.content import BLOCK_NBYTES, content, key_of
from tests.ssd_blocks import lose_catalog
from tests.ssd_folder import GEOMETRY, change, run, slabs, snapshot, told


def block_at(ssd: Path, slot: int) -> tuple[str, bytes]:
    """The name and bytes of the block in a slot."""
    with Survey(ssd / "default") as survey:
        [array] = survey.arrays
        block = next(block for block in array.blocks if block.slot == slot)
        data = array.read(block)
    key = key_of(block.tag)
    assert data == content(key, 0, BLOCK_NBYTES)
    return key.hex(), data


@pytest.mark.parametrize(
    ("offset", "what"),
    [(100, "checksum"), (BLOCK_NBYTES + 1, "trailer"), (BLOCK_NBYTES + 20, "trailer")],
)
def test_verify_names_a_block_with_a_flipped_byte(
    ssd: Path, capsys: pytest.CaptureFixture[str], offset: int, what: str
) -> None:
    name, _ = block_at(ssd, 3)
    at = GEOMETRY.locate(3)[1] + offset
    byte = slabs(ssd)[0].read_bytes()[at]
    change(slabs(ssd)[0], at, bytes([byte ^ 8]))
    before = snapshot(ssd)
    out, err = run(capsys, "verify", ssd, status=1)
    assert err == "80 of 80 blocks checked, 1 damaged\n"
    [line] = out.splitlines()
    assert line.startswith(f"{ssd / 'default'}: array ")
    assert f"slot 3, block {name}: its " in line
    assert what in line
    [damage] = told(capsys, "verify", ssd, status=1)["damaged"]
    assert (damage["slot"], damage["name"]) == (3, name)
    assert snapshot(ssd) == before


def test_a_truncated_slab_loses_what_was_cut_off(
    ssd: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    [volume] = told(capsys, "inspect", ssd, "--blocks")
    held = [block["slot"] for block in volume["arrays"][0]["block_list"]]
    os.truncate(slabs(ssd)[1], GEOMETRY.locate(GEOMETRY.num_slots + 2)[1] + 5)
    before = snapshot(ssd)
    damaged = told(capsys, "verify", ssd, status=1)["damaged"]
    cut_off = GEOMETRY.slots(1)[2:]
    assert [d["slot"] for d in damaged] == [slot for slot in held if slot in cut_off] != []
    assert all("bytes are left" in d["what"] for d in damaged)
    assert told(capsys, "inspect", ssd)[0]["arrays"][0]["slabs_not_whole"] == 1
    assert "1 of 6 slabs are not whole" in run(capsys, "inspect", ssd)[0]
    assert snapshot(ssd) == before


def test_a_missing_slab_is_missed(ssd: Path, capsys: pytest.CaptureFixture[str]) -> None:
    slabs(ssd)[0].unlink()
    damaged = told(capsys, "verify", ssd, status=1)["damaged"]
    assert {d["slot"] for d in damaged} <= set(GEOMETRY.slots(0))
    assert {d["what"] for d in damaged} == {"its slab is missing"}


@pytest.mark.parametrize("how", ["missing", "no database"])
def test_a_lost_catalog_is_said_and_not_made_anew(
    ssd: Path, capsys: pytest.CaptureFixture[str], how: str
) -> None:
    [sound] = told(capsys, "inspect", ssd, "--blocks")
    if how == "missing":
        lose_catalog(ssd / "default")
    else:
        (ssd / "default" / "catalog.sqlite").write_bytes(b"not a database" * 1000)
    before = snapshot(ssd)
    [volume] = told(capsys, "inspect", ssd, "--blocks")
    assert volume.pop("catalog") == "lost"
    assert volume == {key: sound[key] for key in volume}
    assert "the catalog is lost" in run(capsys, "inspect", ssd)[0]
    assert told(capsys, "verify", ssd) == {"blocks": 80, "damaged": []}
    assert snapshot(ssd) == before


def test_an_array_without_a_readable_document_is_damage(
    ssd: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    [document] = ssd.glob("default/store.zarr/*/zarr.json")
    document.write_text("{}")
    [damage] = told(capsys, "verify", ssd, status=1)["damaged"]
    assert damage["array"] == document.parent.name
    assert "not an array" in run(capsys, "inspect", ssd)[0]
