"""Models share an SSD by slabs, and what is mostly empty is given back: every byte stays right."""

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from random import Random

import pytest

import tierd
from tests.content import BLOCK, LAYOUT, ask, prompt, write
from tests.daemon import PATIENCE_S, Daemon, Status, held, tiers
from tests.engine import Engine
from tests.test_elastic import MIB, OTHER, fill
from tests.torture import Count, orphans

KEPT = 2  # blocks of a prompt that stays
DROPPED = 14  # blocks of a sequence that rests on the SSD until it is given up
SMALL = {"device": "2MiB", "host": "0B"}  # everything that goes down goes to the SSD


def slabs(folder: Path) -> list[Path]:
    return list((folder / "ssd" / "default").glob("store.zarr/*/c/*/0"))


def occupied(folder: Path) -> int:
    nbytes = 0
    for slab in slabs(folder):
        with suppress(FileNotFoundError):  # swept at this moment
            nbytes += slab.stat().st_blocks * 512
    return nbytes


def ssd(status: Status) -> dict[str, int]:
    """Bytes of slabs that each model holds."""
    return {
        namespace["name"]: sum(
            group["fragmentation"]["nbytes_held"] for group in namespace["tiers"][-1]["groups"]
        )
        for namespace in status["tenants"][0]["namespaces"]
    }


@contextmanager
def attached(daemon: Daemon) -> Iterator[tierd.Pool]:
    with daemon.client() as client, client.attach(LAYOUT) as pool:
        yield pool


def spread(daemon: Daemon, pool: tierd.Pool, first: int, count: int) -> list[tierd.Lease]:
    """Leave few committed blocks in each of many slabs, between those of the leases returned."""
    leases = []
    for seed in range(first, first + count):
        lease = pool.acquire(prompt(10_000 + seed, DROPPED * BLOCK))
        lease.wait()
        write(lease, lease.hit, DROPPED * BLOCK)
        lease.suspend(DROPPED * BLOCK)
        daemon.until(lambda status: not tiers(status)["device"][0]["private"])
        leases.append(lease)
        ask(pool, prompt(seed, KEPT * BLOCK))
    return leases


def test_two_models_share_a_budget_that_is_too_small_for_both(tmp_path: Path) -> None:
    with (
        Daemon(tmp_path, device="8MiB", host="0B", ssd="16MiB") as daemon,
        daemon.client() as one,
        one.attach(LAYOUT) as a,
    ):
        fill(a, 24 * MIB)
        assert ssd(daemon.status())["model"] > 14 * MIB
        with daemon.client() as two, two.attach(OTHER) as b:
            deadline = time.monotonic() + 4 * PATIENCE_S
            while (shares := ssd(daemon.status()))["other"] <= 6 * MIB:
                assert time.monotonic() < deadline, f"the other never got its share: {shares}"
                fill(b, 12 * MIB)  # who asks for nothing is given nothing
                fill(a, 12 * MIB)
            assert shares["model"] >= 7 * MIB
            assert sum(shares.values()) <= 16 * MIB
            assert occupied(tmp_path) <= 16 * MIB
            status = daemon.until(lambda status: held(status) == 0)
            assert status["tenants"][0]["ssd"]["nbytes_rebalanced"] >= 6 * MIB
            for namespace in status["tenants"][0]["namespaces"]:
                assert namespace["lost"] == namespace["failed"] == 0


def test_a_model_without_engines_gives_its_slabs_down_to_its_floor(tmp_path: Path) -> None:
    more = '[models.model]\nfloor = "4MiB"\n'
    with Daemon(tmp_path, device="8MiB", host="0B", ssd="16MiB", more=more) as daemon:
        with attached(daemon) as a:
            fill(a, 24 * MIB)
        with daemon.client() as two, two.attach(OTHER) as b:

            def asked(status: Status) -> bool:
                fill(b, 12 * MIB)
                return ssd(status)["other"] > 10 * MIB

            daemon.until(asked)
            fill(b, 12 * MIB)
            assert ssd(daemon.status())["model"] >= 4 * MIB


def test_an_array_whose_blocks_were_dropped_shrinks_while_an_engine_asks(tmp_path: Path) -> None:
    with Daemon(tmp_path, **SMALL, ssd="64MiB") as daemon, attached(daemon) as pool:
        leases = spread(daemon, pool, 0, 30)
        before = occupied(tmp_path)
        assert before > 28 * MIB
        with Engine(daemon.socket) as engine:
            engine.tell("many", seed=1, requests=150, trunks=8, longest=6 * BLOCK)
            for lease in leases:
                lease.release()
            daemon.until(lambda status: occupied(tmp_path) < before / 2)
            assert engine.answer()["hit"] > 0  # it checks every byte
        status = daemon.until(lambda status: held(status) == 0)
        assert status["tenants"][0]["ssd"]["slabs_swept"] > 12
        [group] = tiers(status)["ssd"]
        assert group["free"] + group["committed"] == group["capacity"]
        assert status["tenants"][0]["namespaces"][0]["lost"] == 0
        for seed in range(30):  # nothing had to go for it
            assert ask(pool, [*prompt(seed, KEPT * BLOCK), 1]) == KEPT * BLOCK
    assert orphans(tmp_path / "ssd" / "default") == []


def test_a_sequence_that_rests_on_the_ssd_stays_where_it_is(tmp_path: Path) -> None:
    with Daemon(tmp_path, **SMALL, ssd="64MiB") as daemon, attached(daemon) as pool:
        leases = spread(daemon, pool, 0, 20)
        kept = leases.pop(10)
        for lease in leases:
            lease.release()
        daemon.until(lambda status: len(slabs(tmp_path)) < 10)
        pool.resume([kept])
        kept.wait()
        assert kept.hit == DROPPED * BLOCK
        kept.commit(DROPPED * BLOCK)
        kept.release()
        again = prompt(10_010, DROPPED * BLOCK)
        assert ask(pool, [*again, 1]) == DROPPED * BLOCK  # and checks what it holds


def test_what_a_restart_finds_mostly_empty_is_swept(tmp_path: Path) -> None:
    with Daemon(tmp_path, **SMALL, ssd="64MiB") as daemon, attached(daemon) as pool:
        spread(daemon, pool, 0, 30)
        daemon.kill9()  # what the sequences held is nobody's
    before = occupied(tmp_path)
    with Daemon(tmp_path, **SMALL, ssd="64MiB") as daemon, attached(daemon) as pool:
        daemon.until(lambda status: occupied(tmp_path) < before / 2)
        assert sum(ask(pool, [*prompt(seed, KEPT * BLOCK), 1]) > 0 for seed in range(30)) >= 8


def test_nothing_is_swept_where_nothing_counts_as_sparse(tmp_path: Path) -> None:
    more = "ssd.sparse = 0\n"
    with Daemon(tmp_path, **SMALL, ssd="64MiB", more=more) as daemon, attached(daemon) as pool:
        leases = spread(daemon, pool, 0, 20)
        before = len(slabs(tmp_path))
        for lease in leases:
            lease.release()
        status = daemon.until(lambda status: held(status) == 0)
        assert status["tenants"][0]["ssd"]["slabs_swept"] == 0
        assert len(slabs(tmp_path)) == before


@pytest.mark.parametrize("rounds", [6, pytest.param(60, marks=pytest.mark.slow)])
def test_a_daemon_killed_while_it_sweeps_leaves_nothing_wrong(tmp_path: Path, rounds: int) -> None:
    chance, count, swept = Random(rounds), Count(), 0
    path = tmp_path / "ssd" / "default"
    for life in range(rounds):
        with Daemon(tmp_path, **SMALL, ssd="64MiB") as daemon, attached(daemon) as pool:
            daemon.until(lambda status: orphans(path) == [])
            leases = spread(daemon, pool, 100 * life, 20)
            before = len(slabs(tmp_path))
            pool.release(leases)
            time.sleep(chance.uniform(0, 0.05))
            daemon.kill9()
        swept += len(slabs(tmp_path)) < before
        count.blocks_of(path)
        assert not count.wrong, f"life {life}: {count.wrong}"
    with Daemon(tmp_path, **SMALL, ssd="64MiB") as daemon, attached(daemon) as pool:
        for life in range(rounds):
            for seed in range(100 * life, 100 * life + 20):
                ask(pool, [*prompt(seed, KEPT * BLOCK), 1])
        status = daemon.until(lambda status: held(status) == 0)
        assert orphans(path) == []
        [group] = tiers(status)["ssd"]
        assert group["free"] + group["committed"] == group["capacity"]
        assert status["tenants"][0]["namespaces"][0]["lost"] == 0
    assert swept > rounds // 3, "the kills came before the sweeps"
    assert count.right > 0
