"""`tierd inspect` and `tierd verify` on the folders real daemons leave, whole and damaged."""

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from storage.slab import Geometry
from storage.survey import Survey
from tests.content import BLOCK, BLOCK_NBYTES, LAYOUT, ask, content, names, prompt, serve
from tests.daemon import PATIENCE_S, Daemon
from tests.ssd_blocks import lose_catalog
from tierd.block import BlockHash
from tierd.daemon.cli import main

PROMPT = 8 * BLOCK
GEOMETRY = Geometry.fitting(BLOCK_NBYTES, 1 << 20)


def fill(folder: Path, kill: bool = False) -> list[str]:
    """Let a daemon save some prompts in `folder`; the names of one prompt's blocks."""
    with Daemon(folder) as daemon, daemon.client() as client, client.attach(LAYOUT) as pool:
        with serve(pool, prompt(0, PROMPT)) as lease:
            known = [key.hex() for key in names(lease, 0)]
        for seed in range(1, 10):
            ask(pool, prompt(seed, PROMPT))
        if kill:
            daemon.kill9()
    return known


@pytest.fixture
def ssd(tmp_path: Path) -> Path:
    """An SSD folder of one tenant with 80 blocks."""
    fill(tmp_path)
    return tmp_path / "ssd"


def snapshot(path: Path) -> dict[str, str]:
    """Every file below a path and its content, and every folder."""
    return {
        str(file): hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else "folder"
        for file in path.rglob("*")
    }


@pytest.fixture
def unchanged(ssd: Path) -> Iterator[None]:
    """Whatever a test does in between, the folder is left as it was at its start."""
    before = snapshot(ssd)
    yield
    assert snapshot(ssd) == before


def run(capsys: pytest.CaptureFixture[str], *arguments: object, status: int = 0) -> tuple[str, str]:
    capsys.readouterr()
    assert main([str(argument) for argument in arguments]) == status
    printed = capsys.readouterr()
    return printed.out, printed.err


def told(capsys: pytest.CaptureFixture[str], *arguments: object, status: int = 0) -> Any:
    return json.loads(run(capsys, *arguments, "--json", status=status)[0])


def slabs(ssd: Path) -> list[Path]:
    return sorted(ssd.glob("default/store.zarr/*/c/*/0"), key=lambda path: int(path.parts[-2]))


def change(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as file:
        os.pwrite(file.fileno(), data, offset)


@pytest.mark.usefixtures("unchanged")
def test_inspect_lists_the_arrays(ssd: Path, capsys: pytest.CaptureFixture[str]) -> None:
    [volume] = told(capsys, "inspect", ssd)
    assert told(capsys, "inspect", ssd / "default") == [volume]
    assert (volume["path"], volume["catalog"]) == (str(ssd / "default"), "sound")
    [array] = volume["arrays"]
    assert (array["model"], array["group"], array["tenant"]) == ("model", 0, "default")
    assert array["layout"]["num_layers"] == 4
    assert (array["blocks"], array["block_nbytes"]) == (80, BLOCK_NBYTES)
    assert array["slots"] == len(slabs(ssd)) * GEOMETRY.num_slots >= 80
    assert array["nbytes"] == sum(slab.stat().st_blocks * 512 for slab in slabs(ssd))
    assert array["written_at"] == max(slab.stat().st_mtime for slab in slabs(ssd))
    out, err = run(capsys, "inspect", ssd)
    assert not err
    for text in ("model model, group 0", f"80 blocks of {BLOCK_NBYTES} bytes", "last written 2"):
        assert text in out


@pytest.mark.usefixtures("unchanged")
def test_inspect_names_the_blocks_and_their_parents(
    tmp_path: Path, ssd: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    [volume] = told(capsys, "inspect", ssd, "--blocks")
    blocks = volume["arrays"][0]["block_list"]
    assert len({block["slot"] for block in blocks}) == len({block["seq"] for block in blocks}) == 80
    parents = {block["name"]: block["parent"] for block in blocks}
    assert len(parents) == 80
    assert sum(parent not in parents for parent in parents.values()) == 10  # the first of each
    assert "after" in run(capsys, "inspect", "--blocks", ssd)[0]


def test_the_blocks_survive_kill_9_and_are_seen_before_any_daemon_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The catalog's newest rows are in its log then, and the survey may not touch that."""
    known = fill(tmp_path, kill=True)
    before = snapshot(tmp_path / "ssd")
    assert any(name.endswith("-wal") for name in before)
    [volume] = told(capsys, "inspect", tmp_path / "ssd", "--blocks")
    assert {block["name"] for block in volume["arrays"][0]["block_list"]} & set(known)
    assert told(capsys, "verify", tmp_path / "ssd")["damaged"] == []
    assert snapshot(tmp_path / "ssd") == before


@pytest.mark.usefixtures("unchanged")
def test_verify_reads_every_block_and_finds_nothing(
    ssd: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, err = run(capsys, "verify", ssd)
    assert (out, err) == ("", "80 of 80 blocks checked, 0 damaged\n")
    assert told(capsys, "verify", ssd) == {"blocks": 80, "damaged": []}


def block_at(ssd: Path, slot: int) -> tuple[str, bytes]:
    """The name and bytes of the block in a slot."""
    with Survey(ssd / "default") as survey:
        [array] = survey.arrays
        block = next(block for block in array.blocks if block.slot == slot)
        data = array.read(block)
    assert data == content(BlockHash(block.tag[:16]), 0, BLOCK_NBYTES)
    return block.tag[:16].hex(), data


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


def test_several_tenants_are_shown_below_one_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    uid = os.getuid()
    more = f"tenants.a = {{uids = [{uid}], share = 0.5}}\n"
    more += f"tenants.b = {{uids = [{uid}], share = 0.5}}\n"
    with Daemon(tmp_path, device="4MiB", host="4MiB", more=more) as daemon:
        for tenant in ("a", "b"):
            with daemon.client(tenant) as client, client.attach(LAYOUT) as pool:
                ask(pool, prompt(1, PROMPT))
    a, b = told(capsys, "inspect", tmp_path / "ssd")
    assert [Path(volume["path"]).name for volume in (a, b)] == ["a", "b"]
    assert [volume["arrays"][0]["tenant"] for volume in (a, b)] == ["a", "b"]
    assert told(capsys, "verify", tmp_path / "ssd")["blocks"] == 16


def test_while_a_daemon_runs_both_refuse_and_name_it(daemon: Daemon) -> None:
    for verb in ("inspect", "verify"):
        ran = subprocess.run(
            [sys.executable, "-m", "tierd", verb, str(daemon.folder / "ssd")],
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
        assert (ran.returncode, ran.stdout) == (2, "")
        assert f"in use by a daemon, process {daemon.pid}" in ran.stderr
        assert len(ran.stderr.splitlines()) == 1
    assert daemon.status()["pid"] == daemon.pid


def test_a_folder_that_is_looked_at_is_not_opened_by_a_daemon(ssd: Path) -> None:
    with Survey(ssd / "default"), Survey(ssd / "default"):
        config = ssd.parent / "tierd.toml"
        ran = subprocess.run(
            [sys.executable, "-m", "tierd", "serve", "--config", str(config)],
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
        assert ran.returncode == 2
        assert "in use" in ran.stderr


def test_where_there_is_nothing_to_look_at(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in (tmp_path, tmp_path / "none"):
        _, err = run(capsys, "inspect", path, status=2)
        assert f"{path}: no folder of the SSD tier" in err
    (tmp_path / "store.zarr").mkdir()
    (tmp_path / "store.zarr" / "zarr.json").write_text("{}")
    (tmp_path / "LOCK").touch()
    assert "not a volume of tierd" in run(capsys, "verify", tmp_path, status=2)[1]


def test_after_a_survey_a_daemon_serves_what_the_folder_held(ssd: Path) -> None:
    with Survey(ssd / "default") as survey:
        assert len(survey.arrays[0].blocks) == 80
    with Daemon(ssd.parent) as daemon, daemon.client() as client, client.attach(LAYOUT) as pool:
        assert ask(pool, [*prompt(3, PROMPT), 7]) == PROMPT
