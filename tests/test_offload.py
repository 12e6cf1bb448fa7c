"""Engines that only offload: they compute elsewhere, and lease blocks of host memory.

What they write is shared with engines on the device tier, and copy-on-write is from host to host.
"""

from pathlib import Path

import pytest

import tierd
from tests.content import BLOCK, LAYOUT, prompt
from tests.daemon import NOT_AHEAD, Daemon, Status, held, tiers
from tests.engine import Engine
from tests.written import FINE, Written, attached
from tierd.errors import OutOfBlocks, Refused

TOKENS = prompt(1, 4 * BLOCK + 5)


def host(status: Status) -> dict[str, int]:
    return tiers(status)["host"][0]


def moved(daemon: Daemon) -> dict[str, int]:
    """Blocks that were copied, by from and to which level."""
    (namespace,) = daemon.status()["tenants"][0]["namespaces"]
    found: dict[str, int] = namespace["moved"]
    return found


@pytest.fixture
def quiet(tmp_path: Path) -> Daemon:
    """A daemon that copies nothing unless it is asked to."""
    return Daemon(tmp_path, more=NOT_AHEAD)


def test_what_an_offloading_engine_writes_stays_in_host_memory(quiet: Daemon) -> None:
    with quiet as daemon, attached(daemon, tier="host") as pool:
        Written.serve(pool, TOKENS).lease.release()
        again = Written.serve(pool, TOKENS)
        assert again.lease.hit == 4 * BLOCK
        status = daemon.status()
        assert host(status)["committed"] == 4
        assert tiers(status)["device"][0]["capacity"] == 0
        assert moved(daemon) == {}
        assert {session["tier"] for session in status["sessions"]} == {"host", "device"}


def test_engines_of_both_tiers_find_what_the_other_wrote(quiet: Daemon) -> None:
    theirs = prompt(2, 3 * BLOCK + 1)
    with quiet as daemon, attached(daemon) as device, attached(daemon, tier="host") as offload:
        Written.serve(device, TOKENS)
        Written.serve(offload, theirs)
        up = Written.serve(device, theirs)
        down = Written.serve(offload, TOKENS)
        assert (up.lease.hit, down.lease.hit) == (3 * BLOCK, 4 * BLOCK)
        up.go_on([1] * BLOCK)
        down.go_on([2] * BLOCK)
        up.check()
        down.check()
        assert moved(daemon) == {"1>0": 3, "0>1": 4}


def test_a_fork_in_host_memory_is_copied_from_host_to_host(quiet: Daemon) -> None:
    with quiet as daemon, attached(daemon, tier="host") as pool:
        parent = Written.serve(pool, TOKENS, room=len(TOKENS) + BLOCK)
        forks = [parent.fork() for _ in range(3)]
        for number, fork in enumerate(forks):
            fork.go_on([number] * 3)
            parent.check()
        parent.go_on([9] * 3)
        for sequence in (parent, *forks):
            sequence.check()
        assert moved(daemon) == {"1>1": 3}


def test_a_published_sequence_is_forked_by_another_offloading_process(quiet: Daemon) -> None:
    with (
        quiet as daemon,
        attached(daemon, tier="host") as one,
        attached(daemon, tier="host") as two,
    ):
        first = Written.serve(one, TOKENS)
        first.lease.publish()
        second = Written.serve(two, [*TOKENS, 1])
        assert second.lease.hit == len(TOKENS)
        second.go_on([2] * BLOCK)
        first.go_on([3] * BLOCK)
        first.check()
        second.check()
        assert moved(daemon) == {"1>1": 2}


def test_what_lies_on_ssd_comes_to_host_memory_and_no_further(tmp_path: Path) -> None:
    with Daemon(tmp_path) as daemon, attached(daemon, tier="host") as pool:
        Written.serve(pool, TOKENS).lease.release()
    with Daemon(tmp_path) as daemon, attached(daemon, tier="host") as pool:
        again = Written.serve(pool, TOKENS)
        assert again.lease.hit == 4 * BLOCK
        part = Written.serve(pool, [*TOKENS[: 2 * BLOCK + 7], 1, 2])
        assert part.lease.hit == 2 * BLOCK + 7
        again.check()
        assert tiers(daemon.status())["device"][0]["capacity"] == 0


def test_an_offloading_sequence_rests_on_ssd(quiet: Daemon) -> None:
    with quiet as daemon, attached(daemon, tier="host") as pool:
        sequence = Written.serve(pool, TOKENS)
        sequence.lease.suspend(sequence.length)
        daemon.until(lambda status: host(status)["private"] == 0)  # once its copy has left
        sequence.lease.resume()
        assert sequence.lease.wait() == len(TOKENS)
        sequence.check()
        sequence.go_on([1] * BLOCK)
        sequence.check()


def test_host_memory_full_of_leases_says_so_and_an_engine_on_the_device_goes_on(
    quiet: Daemon,
) -> None:
    with quiet as daemon, attached(daemon, tier="host") as pool, attached(daemon) as device:
        kept = Written.serve(pool, prompt(3, 31 * BLOCK))
        with pytest.raises(OutOfBlocks, match="'host'"):
            pool.acquire(prompt(4, 2 * BLOCK))
        for seed in range(5, 9):  # what the device gives up has no room in host memory
            Written.serve(device, prompt(seed, 20 * BLOCK)).lease.release()
        kept.check()


def test_a_killed_offloading_engines_blocks_come_back(daemon: Daemon) -> None:
    with Engine(daemon.socket, FINE, tier="host") as engine:
        engine.ask("branch", tokens=TOKENS)
        engine.ask("acquire", tokens=prompt(2, 4 * BLOCK))
        assert host(daemon.status())["private"] > 4
        engine.kill9()
    status = daemon.until(lambda status: not held(status))
    assert host(status)["committed"] >= 4


def test_what_a_living_offloading_process_may_still_write_is_quarantined(daemon: Daemon) -> None:
    with Engine(daemon.socket, tier="host") as engine:
        engine.ask("acquire", tokens=prompt(2, 4 * BLOCK))
        engine.ask("hang_up")
        daemon.until(lambda status: host(status)["quarantined"] == 4)
        engine.kill9()
    daemon.until(lambda status: host(status)["quarantined"] == 0)


@pytest.mark.parametrize("tier", ["ssd", "gpu", "", 7, None])
def test_a_tier_that_cannot_be_mapped_is_refused_by_name(daemon: Daemon, tier: str) -> None:
    with pytest.raises(Refused, match=r"\['device', 'host'\]") as refused:
        daemon.client(tier=tier)
    assert repr(tier) in str(refused.value)


def test_without_host_memory_there_is_none_to_map(tmp_path: Path) -> None:
    with Daemon(tmp_path, host="0") as daemon, pytest.raises(Refused, match="'host'"):
        tierd.connect(daemon.socket, tier="host").attach(LAYOUT)
