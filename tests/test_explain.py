"""`auto` in a real daemon: its choice is explained, kept, and made by what was seen."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import tierd
from tests.content import ask, prompt
from tests.daemon import PATIENCE_S, Daemon
from tierd.layout import KVLayout

# Four KiB a token in full attention, and as much in windows of 64 tokens.
MIXED = KVLayout("mixed", 4, 2, 128, "float32", windows=(None, 64, None, 64), revision="r1")
AUTO = 'blocks.policy = "auto"\n'


def explain(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tierd", "config", "explain", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )


def explained(*arguments: object) -> Any:
    """What it says as JSON of the one layout that there is."""
    ran = explain("--json", *arguments)
    assert (ran.returncode, ran.stderr) == (0, "")
    (found,) = json.loads(ran.stdout)
    return found


def chosen(found: Any, by: str) -> list[list[int]]:
    """The sizes that somebody chose for each kind of layers."""
    return [
        [size["size"] for size in kind["sizes"] if by in size["chosen_by"]]
        for kind in found["kinds"]
    ]


def sizes(layout: KVLayout) -> list[list[int]]:
    """The layout's sizes for full attention and for windows."""
    groups = sorted(layout.groups, key=lambda group: group.layers)
    return [[group.block_size] for group in groups]


def test_a_layout_is_explained_without_a_daemon(tmp_path: Path) -> None:
    file, nobody = tmp_path / "layout.json", tmp_path / "none.sock"
    file.write_text(json.dumps(MIXED.to_json()))
    ran = explain("--layout", file, "--socket", nobody)
    assert (ran.returncode, ran.stderr) == (0, "")
    for text in (
        "mixed: 4 layers, 2 KV heads of 128, float32; blocks.policy is 'uniform'",
        "requests: 3,584 tokens on average (assumed",
        "from host: 10 µs a burst",
        "2 layers with full attention, 4.0 KiB a token",
        "2 layers with a window of 64 tokens",
        "0.00  auto",
        "uniform",
    ):
        assert text in ran.stdout
    assert "from ssd" not in ran.stdout
    again = explain("--layout", file.read_text(), "--socket", nobody)
    assert again.stdout == ran.stdout
    (tmp_path / "tierd.toml").write_text(f'ssd.path = "{tmp_path}/ssd"\n')
    ran = explain("--layout", file, "--socket", nobody, "--config", tmp_path / "tierd.toml")
    assert "from ssd: 100 µs a burst" in ran.stdout
    assert not (tmp_path / "ssd").exists()


def test_the_terms_add_up_and_the_least_is_what_auto_takes(tmp_path: Path) -> None:
    found = explained("--layout", json.dumps(MIXED.to_json()), "--socket", tmp_path / "none.sock")
    for kind in found["kinds"]:
        for size in kind["sizes"]:
            terms = sum(size[term] for term in ("tail", "shared", "table", "transfer"))
            assert size["total"] == pytest.approx(terms)
        best = min(kind["sizes"], key=lambda size: size["total"])
        assert "auto" in best["chosen_by"]


def test_a_policy_that_cannot_serve_a_layout_is_named(tmp_path: Path) -> None:
    file = tmp_path / "tierd.toml"
    file.write_text(
        'blocks.policy = "hierarchical"\nblocks.options.sizes = { "0-9" = 64, "90" = 8 }\n'
    )
    layout = json.dumps(MIXED.to_json())
    ran = explain("--config", file, "--layout", layout, "--socket", tmp_path / "none.sock")
    assert "hierarchical cannot serve it: layer range '90' matches none of the 4" in ran.stdout
    file.write_text('blocks.policy = "hierarchical"\nblocks.options.sizes = { "0-1" = 48 }\n')
    found = explained("--config", file, "--layout", layout, "--socket", tmp_path / "none.sock")
    assert chosen(found, "hierarchical") == [[16, 48], [16, 48]]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--layout", "{"], "--layout: "),
        (["--layout", '{"model": "m"}'], "--layout: layout: "),
        (["--layout", "/nowhere.json"], "No such file"),
    ],
)
def test_a_layout_that_cannot_be_read_is_one_line(
    tmp_path: Path, arguments: list[str], told: str
) -> None:
    ran = explain(*arguments, "--socket", tmp_path / "none.sock")
    assert (ran.returncode, ran.stdout) == (2, "")
    assert told in ran.stderr
    assert len(ran.stderr.splitlines()) == 1


def test_without_a_daemon_and_a_layout_there_is_nothing_to_explain(tmp_path: Path) -> None:
    ran = explain("--socket", tmp_path / "none.sock")
    assert (ran.returncode, ran.stdout) == (1, "")
    assert "no daemon answers" in ran.stderr


def test_what_is_attached_is_explained_by_what_the_daemon_has_seen(tmp_path: Path) -> None:
    with Daemon(tmp_path, device="64MiB", host="8MiB", more=AUTO) as daemon:
        file = tmp_path / "tierd.toml"
        with daemon.client() as client, client.attach(MIXED) as pool:
            before = explained("--config", file)
            assert chosen(before, "auto") == chosen(before, "the layout") == sizes(pool.layout)
            for _ in range(70):
                ask(pool, prompt(1, 40))
            lengths = daemon.status()["tenants"][0]["lengths"]
            assert sum(lengths.values()) == 70
            after = explained("--config", file, "--model", "mixed")
            assert set(after["facts"]["lengths"]) == set(lengths)
            assert chosen(after, "the layout") == sizes(pool.layout)
            # Requests are short, so it would choose otherwise now; and does not.
            assert chosen(after, "auto")[0] < chosen(before, "auto")[0]
            assert "70 requests" in explain("--config", file).stdout
        ran = explain("--config", file, "--model", "other")
        assert (ran.returncode, ran.stdout) == (2, "")
        assert "no layout to explain" in ran.stderr


def attached(daemon: Daemon, layout: KVLayout = MIXED) -> KVLayout:
    """The layout that an engine gets; it asks for a long prompt, and for many short ones."""
    with daemon.client() as client, client.attach(layout) as pool:
        ask(pool, prompt(1000, 600))
        for seed in range(70):
            ask(pool, prompt(seed, 40))
        return pool.layout


def test_a_choice_is_kept_by_the_array_on_the_ssd_whatever_was_seen_since(tmp_path: Path) -> None:
    with Daemon(tmp_path, device="64MiB", host="8MiB", more=AUTO) as daemon:
        first = attached(daemon)
        # Another model has sizes for what was seen in the meantime.
        other = attached(daemon, replace(MIXED, model="other"))
        assert sizes(other) != sizes(first)
        # The first keeps those it has.
        assert attached(daemon) == first
    with Daemon(tmp_path, device="64MiB", host="8MiB", more=AUTO) as daemon:
        assert attached(daemon, replace(MIXED, model="other")) == other
        with daemon.client() as client, client.attach(MIXED) as pool:
            assert pool.layout == first
            with pool.acquire(prompt(1000, 601)) as lease:
                assert lease.wait() >= 512
    with Daemon(tmp_path, device="64MiB", host="8MiB") as daemon:  # another policy
        assert sizes(attached(daemon)) == [[16], [16]]
    more = AUTO + "blocks.options.largest = 32\n"  # another choice
    with Daemon(tmp_path, device="64MiB", host="8MiB", more=more) as daemon:
        assert max(sizes(attached(daemon)))[0] <= 32


def test_of_two_choices_that_are_kept_the_one_written_last_counts(tmp_path: Path) -> None:
    room = Daemon(tmp_path, device="64MiB", host="8MiB", ssd="256MiB", more=AUTO)
    for given in (replace(MIXED, granule=4), MIXED.with_block_sizes([8] * 4)):
        with room as daemon:
            last = attached(daemon, given)
    with room as daemon:
        assert attached(daemon) == last


def test_an_engine_that_gives_groups_or_a_granule_gets_them(tmp_path: Path) -> None:
    with Daemon(tmp_path, device="64MiB", host="8MiB", more=AUTO) as daemon:
        given = MIXED.with_block_sizes([8, 8, 8, 8])
        assert attached(daemon, given) == given
        fine = attached(daemon, replace(MIXED, model="fine", granule=4))
        assert fine.granule == 4


def test_two_engines_of_a_model_get_one_layout(tmp_path: Path) -> None:
    with Daemon(tmp_path, device="64MiB", host="8MiB", ssd=None, more=AUTO) as daemon:
        client = daemon.client()
        with client, client.attach(MIXED) as pool:
            for seed in range(70):
                ask(pool, prompt(seed, 40))
            with tierd.connect(daemon.socket) as two, two.attach(MIXED) as again:
                assert again.layout == pool.layout


def test_it_says_which_policy_each_pool_gets_and_by_what(tmp_path: Path) -> None:
    more = """
        host.policy = "slru"
        [[rules]]
        tier = "device"
        attention = "window"
        policy = "s3fifo"
        options = { small = 0.2 }
        [[rules]]
        model = "alias"
        layers = "0-2"
        policy = "arc"
    """
    with Daemon(tmp_path, more=more) as daemon:
        with daemon.client() as client:
            client.attach(MIXED.with_block_sizes([16] * 4), name="alias")
            said = explain("--config", daemon.config).stdout
        full, window = sorted({group.layers for group in MIXED.with_block_sizes([16] * 4).groups})
        assert "policies, for tenant 'default' and model 'alias':" in said
        assert f"device, group 0 (layers {full[0]} to {full[-1]}): arc, by rules.2" in said
        where = f"device, group 1 (layers {window[0]} to {window[-1]})"
        assert f"{where}: s3fifo {{small = 0.2}}, by rules.1" in said
        assert f"host, group 1 (layers {window[0]} to {window[-1]}): slru, by host.policy" in said
