"""Two models share one memory: who needs more gets it, and every byte stays right."""

from pathlib import Path
from typing import Any

import pytest

from tests.content import BLOCK, LAYOUT, ask, check, prompt, serve
from tests.daemon import Daemon, Status
from tierd.errors import OutOfBlocks
from tierd.layout import KVLayout

OTHER = KVLayout("other", 3, 2, 80, "float32")  # blocks of 62 KiB: not a part of an extent
MIB = 1 << 20


def device(status: Status) -> dict[str, int]:
    """Bytes of the device tier that each model's pools hold."""
    return {
        namespace["name"]: sum(
            group["capacity"] * group["block_nbytes"] for group in namespace["tiers"][0]["groups"]
        )
        for namespace in status["tenants"][0]["namespaces"]
    }


def fill(pool: Any, nbytes: int) -> None:
    """Serve prompts of that many bytes in all."""
    size = pool.layout.block_nbytes(0)
    for seed in range(nbytes // (8 * size)):
        ask(pool, prompt(seed, 8 * BLOCK))


def test_a_second_model_gets_its_share_of_what_the_first_has_filled(tmp_path: Path) -> None:
    with (
        Daemon(tmp_path, device="16MiB", host="64MiB", ssd=None) as daemon,
        daemon.client() as one,
        one.attach(LAYOUT) as a,
    ):
        fill(a, 20 * MIB)
        assert device(daemon.status())["model"] == 16 * MIB
        with daemon.client() as two, two.attach(OTHER) as b:
            fill(b, 20 * MIB)  # its first request finds no free place, and is served
            found = daemon.until(lambda status: device(status)["other"] > 7 * MIB)
            assert device(found)["model"] >= 7 * MIB
            for seed in range(20):  # nothing was lost: what had to go is in host memory
                assert ask(a, [*prompt(seed, 8 * BLOCK), 1]) == 8 * BLOCK


def test_what_an_engine_holds_is_not_taken(tmp_path: Path) -> None:
    with (
        Daemon(tmp_path, device="8MiB", ssd=None) as daemon,
        daemon.client() as one,
        one.attach(LAYOUT) as a,
    ):
        held = [serve(a, prompt(seed, 8 * BLOCK)) for seed in range(15)]
        with daemon.client() as two, two.attach(OTHER) as b:
            with pytest.raises(OutOfBlocks):
                ask(b, prompt(1, 40 * BLOCK))
            for lease in held:
                check(lease)
            for lease in held[2:]:
                lease.release()
            assert ask(b, prompt(1, 40 * BLOCK)) == 0
            for lease in held[:2]:
                check(lease)


def test_a_model_without_engines_gives_what_it_does_not_need(tmp_path: Path) -> None:
    with Daemon(tmp_path, device="8MiB", host="16MiB", ssd=None) as daemon:
        with daemon.client() as one, one.attach(LAYOUT) as a:
            fill(a, 8 * MIB)
        with daemon.client() as two, two.attach(OTHER) as b:
            fill(b, 12 * MIB)
            daemon.until(lambda status: device(status)["other"] > 7 * MIB)


def test_a_floor_is_kept_for_a_model_without_engines(tmp_path: Path) -> None:
    more = '[models.model]\nfloor = "4MiB"\n'
    with Daemon(tmp_path, device="8MiB", host="16MiB", ssd=None, more=more) as daemon:
        with daemon.client() as one, one.attach(LAYOUT) as a:
            fill(a, 8 * MIB)
        with daemon.client() as two, two.attach(OTHER) as b:
            fill(b, 12 * MIB)
            assert device(daemon.status())["model"] >= 4 * MIB


def test_where_there_is_too_little_for_all_groups_a_request_is_refused(tmp_path: Path) -> None:
    """The groups once took the one extent there is from each other, for ever."""
    mixed = KVLayout("mixed", 4, 2, 64, "float32", windows=(None, None, 24, 24))
    with Daemon(tmp_path, device="2MiB") as daemon, daemon.client() as client:
        pool = client.attach(mixed)
        for _ in range(3):
            with pytest.raises(OutOfBlocks, match="holds 0"):
                pool.acquire(prompt(1, BLOCK))
