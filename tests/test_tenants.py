"""Tenants, and namespaces within one: nothing is ever shared across them (I10)."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

import tierd
from tests.content import BLOCK, BLOCKS, LAYOUT, ask, prompt, row, serve
from tests.daemon import Daemon, tiers
from tests.engine import Engine
from tierd.errors import OutOfBlocks

TENANTS = f"""
[tenants.a]
uids = [{os.getuid()}]
share = 0.5
[tenants.b]
uids = [{os.getuid()}, 12345]
share = 0.25
[tenants.c]
uids = [12345]
share = 0.25
"""


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    with Daemon(tmp_path, device="8MiB", host="8MiB", ssd="64MiB", more=TENANTS) as running:
        yield running


def test_two_tenants_never_hit_each_others_blocks(daemon: Daemon) -> None:
    tokens = [*prompt(1, 4 * BLOCK), 7]
    with Engine(daemon.socket, tenant="a") as a, Engine(daemon.socket, tenant="b") as b:
        assert [a.ask("serve", tokens=tokens)["hit"] for _ in range(2)] == [0, 4 * BLOCK]
        assert [b.ask("serve", tokens=tokens)["hit"] for _ in range(2)] == [0, 4 * BLOCK]


def test_two_tenants_have_their_own_arenas(daemon: Daemon) -> None:
    with daemon.client("a") as a, daemon.client("b") as b:
        one, other = a.attach(LAYOUT), b.attach(LAYOUT)
        with serve(one, prompt(1, BLOCK)) as lease:
            place = int(lease.tables[0][0])
            row(other, 0, place)[:] = 5
            assert not (row(one, 0, place) == 5).all()
            assert os.fstat(one._memory.fd).st_ino != os.fstat(other._memory.fd).st_ino  # type: ignore[union-attr]


def test_a_tenant_has_its_share_and_no_more(daemon: Daemon) -> None:
    with daemon.client("a") as a, daemon.client("b") as b:
        wide, narrow = a.attach(LAYOUT), b.attach(LAYOUT)
        assert ask(wide, range(2 * BLOCKS * BLOCK)) == 0
        assert ask(narrow, range(BLOCKS * BLOCK)) == 0
        with pytest.raises(OutOfBlocks, match="holds 32"):
            narrow.acquire(range(2 * BLOCKS * BLOCK))
        memory = [tenant["memory"]["device"]["nbytes"] for tenant in a.status()["tenants"]]
        assert memory == [4 << 20, 2 << 20, 2 << 20]


def test_who_names_no_tenant_gets_the_first_that_serves_him(daemon: Daemon) -> None:
    with daemon.client() as client:
        assert client.tenant == "a"
    with daemon.client("b") as client:
        assert client.tenant == "b"
    with pytest.raises(tierd.Refused, match=f"uid {os.getuid()} is not served as 'c'"):
        daemon.client("c")


def test_tenants_have_their_own_folders_and_restart_apart(tmp_path: Path) -> None:
    tokens = prompt(1, 4 * BLOCK)
    with Daemon(tmp_path, device="8MiB", more=TENANTS) as daemon, daemon.client("a") as client:
        ask(client.attach(LAYOUT), tokens)
    assert sorted(path.name for path in (tmp_path / "ssd").iterdir()) == ["a", "b", "c"]
    with (
        Daemon(tmp_path, device="8MiB", more=TENANTS) as daemon,
        daemon.client("a") as a,
        daemon.client("b") as b,
    ):
        assert ask(b.attach(LAYOUT), [*tokens, 7]) == 0
        assert ask(a.attach(LAYOUT), [*tokens, 7]) == 4 * BLOCK


def test_what_differs_in_salt_adapter_revision_or_rank_is_never_shared(tmp_path: Path) -> None:
    """Not in memory, and not by way of the SSD tier."""
    others = [
        replace(LAYOUT, salt="pepper"),
        replace(LAYOUT, adapter="lora"),
        replace(LAYOUT, revision="r2"),
        replace(LAYOUT, num_ranks=2),
        replace(LAYOUT, rank=1, num_ranks=2),
        replace(LAYOUT, model="other"),
    ]
    tokens = prompt(1, 4 * BLOCK)
    with Daemon(tmp_path, device="16MiB", host="16MiB") as daemon:
        for number, layout in enumerate([LAYOUT, *others]):
            with daemon.client() as client, client.attach(layout, f"engine {number}") as pool:
                assert ask(pool, [*tokens, 7]) == 0
                assert ask(pool, [*tokens, 7]) == 4 * BLOCK
        for layout in [LAYOUT, *others]:
            with daemon.client() as client, client.attach(layout, "another") as pool:
                assert ask(pool, [*tokens, 7]) == 4 * BLOCK


def test_a_name_goes_to_another_layout_once_nobody_uses_it(tmp_path: Path) -> None:
    """The old one's blocks go to SSD, and come back with it."""
    other = replace(LAYOUT, revision="r2")
    tokens = prompt(1, 4 * BLOCK)
    with Daemon(tmp_path) as daemon:
        for layout, hit in ((LAYOUT, 0), (other, 0), (LAYOUT, 64), (other, 64)):
            with daemon.client() as client, client.attach(layout) as pool:
                assert ask(pool, [*tokens, 7]) == hit
                assert tiers(client.status())["device"][0]["capacity"] == BLOCKS


def test_a_namespace_gives_way_to_a_request_without_room(tmp_path: Path) -> None:
    with Daemon(tmp_path, device="4MiB", host="4MiB", ssd="64MiB") as daemon:
        with daemon.client() as first:
            pool = first.attach(LAYOUT)
            assert ask(pool, range(2 * BLOCKS * BLOCK)) == 0  # it has all of the device tier
            with daemon.client() as second:
                other = second.attach(replace(LAYOUT, salt="other"), name="other")
                assert ask(other, range(BLOCK)) == 0  # while the first is attached
                pool.close()
                assert ask(other, range(BLOCKS * BLOCK)) == BLOCK
        with daemon.client() as again:
            pool, tokens = again.attach(LAYOUT), range(2 * BLOCKS * BLOCK)
            daemon.until(lambda _: served(pool, tokens))
            assert ask(pool, tokens) == (2 * BLOCKS - 1) * BLOCK  # nothing was lost


def served(pool: tierd.Pool, tokens: Sequence[int] = range(BLOCK)) -> bool:
    try:
        pool.acquire(tokens).release()
    except OutOfBlocks:
        return False
    return True
