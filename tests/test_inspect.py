"""`tierd inspect` and `tierd verify` on whole folders that real daemons leave."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from storage.survey import Survey
from tests.content import BLOCK_NBYTES, LAYOUT, ask, prompt
from tests.daemon import PATIENCE_S, Daemon
from tests.ssd_folder import GEOMETRY, PROMPT, fill, run, slabs, snapshot, told


@pytest.fixture
def unchanged(ssd: Path) -> Iterator[None]:
    """Whatever a test does in between, the folder is left as it was at its start."""
    before = snapshot(ssd)
    yield
    assert snapshot(ssd) == before


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
    assert array["slabs_by_fill"] == [0, 0, 1, 5]  # 80 blocks in slabs of 14
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
