"""Engines that die: what they held is free again, and nothing they had not committed is findable.

I7: their blocks come back at once where they said goodbye, else when their process is really gone.
"""

import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.content import BLOCK, BLOCKS, LAYOUT, ask, prompt
from tests.daemon import Daemon, Status, held, tiers
from tests.engine import Engine

PROMPT = 8 * BLOCK


def device(status: Status) -> dict[str, int]:
    return tiers(status)["device"][0]


def all_back(status: Status) -> bool:
    return held(status) == 0 and not [s for s in status["sessions"] if s["namespace"]]


def test_a_killed_engines_private_blocks_come_back(daemon: Daemon) -> None:
    with Engine(daemon.socket) as engine:
        engine.ask("serve", tokens=prompt(1, PROMPT))
        lease = engine.ask("acquire", tokens=prompt(2, PROMPT), room=2 * PROMPT)["lease"]
        engine.ask("write", lease=lease, start=0, stop=PROMPT)
        assert device(daemon.status())["private"] == 16
        engine.kill9()
        status = daemon.until(all_back)
    assert device(status)["committed"] == 8
    assert device(status)["free"] == BLOCKS - 8
    assert not [session for session in status["sessions"] if session["quarantined"]]
    with daemon.client() as client, client.attach(LAYOUT) as pool:
        assert ask(pool, [*prompt(2, PROMPT), 7]) == 0  # never committed, never findable
        assert ask(pool, [*prompt(1, PROMPT), 7]) == PROMPT
        assert ask(pool, prompt(3, (BLOCKS - 1) * BLOCK)) == 0  # every place can be used


def test_an_engine_killed_in_the_middle_of_loads_leaves_nothing(tmp_path: Path) -> None:
    """Kill at six different moments while it acquires what lies on SSD."""
    with Daemon(tmp_path) as daemon, daemon.client() as client, client.attach(LAYOUT) as pool:
        for seed in range(16):
            ask(pool, prompt(seed, PROMPT))
        for life in range(6):
            with Engine(daemon.socket) as engine:
                served = requests(daemon.status())
                engine.ask("endless", trunks=16, longest=PROMPT)
                daemon.until(partial(has_served, served + 5 * life))
                engine.kill9()
            status = daemon.until(lambda status: held(status) == 0)
            assert device(status)["free"] + device(status)["committed"] == BLOCKS
        for seed in range(16):  # every byte is still right
            ask(pool, [*prompt(seed, PROMPT), 7])


def requests(status: Status) -> int:
    found: int = status["tenants"][0]["namespaces"][0]["requests"]
    return found


def has_served(more_than: int, status: Status) -> bool:
    return requests(status) > more_than


def test_a_load_goes_on_for_the_other_who_waits_for_it(tmp_path: Path) -> None:
    with Daemon(tmp_path) as daemon, Engine(daemon.socket) as a, Engine(daemon.socket) as b:
        for seed in range(9):
            b.ask("release", lease=b.ask("serve", tokens=prompt(seed, PROMPT))["lease"])
        cold = [*prompt(0, PROMPT), 7]
        a.ask("acquire", tokens=cold)
        lease = b.ask("acquire", tokens=cold)["lease"]
        a.kill9()
        assert b.ask("wait", lease=lease)["hit"] == PROMPT
        b.ask("release", lease=lease)
        daemon.until(lambda status: held(status) == 0)


def test_what_a_living_process_may_still_write_is_quarantined_until_it_is_gone(
    daemon: Daemon,
) -> None:
    with Engine(daemon.socket) as engine:
        engine.ask("serve", tokens=prompt(1, PROMPT))
        place = engine.ask("acquire", tokens=prompt(2, PROMPT))["tables"][0][0]
        engine.ask("hang_up")
        status = daemon.until(lambda status: device(status)["quarantined"] == 8)
        assert device(status)["committed"] == 8
        assert device(status)["private"] == 0
        [session] = [s for s in status["sessions"] if s["quarantined"]]
        assert (session["pid"], session["connected"]) == (engine.pid, False)
        with daemon.client() as client, client.attach(LAYOUT) as pool:
            assert ask(pool, [*prompt(2, PROMPT), 7]) == 0
            # It writes on, and what others have is not what it writes.
            engine.ask("poke", group=0, block_id=place, byte=3)
            with pool.acquire(prompt(3, 20 * BLOCK)) as lease:
                assert place not in lease.tables[0]
            assert device(daemon.status())["quarantined"] == 8
        engine.kill9()
    assert device(daemon.until(all_back))["quarantined"] == 0


def test_goodbye_frees_at_once(daemon: Daemon) -> None:
    with Engine(daemon.socket) as engine:
        engine.ask("acquire", tokens=prompt(1, PROMPT))
        engine.ask("goodbye")
        assert device(daemon.status())["free"] == BLOCKS  # without waiting; and it lives on


def test_a_child_that_keeps_the_socket_does_not_keep_the_blocks(daemon: Daemon) -> None:
    child: dict[str, Any] = {}
    with Engine(daemon.socket) as engine:
        engine.ask("acquire", tokens=prompt(1, PROMPT))
        child = engine.ask("fork")
        engine.kill9()
        try:
            os.kill(child["pid"], 0)  # it is there
            assert device(daemon.until(all_back))["free"] == BLOCKS
        finally:
            os.kill(child["pid"], signal.SIGKILL)


@pytest.mark.parametrize("how", ["hang_up", "kill"])
def test_the_daemon_ends_well_while_blocks_are_quarantined(tmp_path: Path, how: str) -> None:
    with Daemon(tmp_path) as daemon, Engine(daemon.socket) as engine:
        engine.ask("acquire", tokens=prompt(1, PROMPT))
        if how == "hang_up":
            engine.ask("hang_up")
            daemon.until(lambda status: device(status)["quarantined"] == 8)
        else:
            engine.kill9()
        daemon.terminate(seconds=3)
