"""Kill -9 at random instants under load, and power cuts: no wrong byte, no slot unaccounted for.

The load is engine processes that check every byte of every hit; between two lives of the daemon
every block on the medium is read and compared with what its name says. `-m slow` does it 500 times;
`-s` shows the counts.
"""

import time
from pathlib import Path
from random import Random

import pytest

from storage.slab import Geometry
from tests.content import BLOCK, BLOCK_NBYTES, LAYOUT, ask
from tests.daemon import Daemon, Status, held, tiers
from tests.torture import LONGEST, TRUNKS, Count, PowerCut, Tally, engine, engines, kill9, orphans
from tests.torture import trunk as prompt_of

NUM_ENGINES = 2
NUM_SLOTS = Geometry.fitting(BLOCK_NBYTES, 1 << 20).num_slots  # of a slab of 1 MiB
TIMES = [pytest.param(25), pytest.param(500, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])]


def accounted_for(status: Status) -> None:
    """Nobody holds anything, and every place is free or holds a block (I4)."""
    assert held(status) == 0
    for groups in tiers(status).values():
        for group in groups:
            assert group["free"] + group["committed"] == group["capacity"]


def live(daemon: Daemon, tally: Tally, ssd: Path, chance: Random) -> int:
    """One life: what was recovered is right; then load, and death. Returns blocks checked."""
    with daemon.client() as client, client.attach(LAYOUT) as pool:
        accounted_for(daemon.until(lambda status: held(status) == 0))
        assert orphans(ssd) == []

        def counted(status: Status) -> bool:  # what is sparse may be on its way out
            slabs = list(ssd.glob("store.zarr/*/c/*/0"))
            return tiers(status)["ssd"][0]["capacity"] == len(slabs) * NUM_SLOTS

        daemon.until(counted)
        hits = [
            ask(pool, prompt_of(trunk, LONGEST * BLOCK)) // BLOCK
            for trunk in chance.sample(range(TRUNKS), 8)
        ]
    tally.go(True)
    time.sleep(chance.uniform(0, 0.25))
    daemon.kill9()
    tally.go(False)
    return sum(hits)


@pytest.mark.parametrize("cut", [False, True], ids=["kill", "power cut"])
@pytest.mark.parametrize("times", TIMES)
def test_a_daemon_killed_under_load_never_serves_a_wrong_byte(
    tmp_path: Path, times: int, cut: bool
) -> None:
    ssd, chance, count, served = tmp_path / "ssd" / "default", Random(times), Count(), 0
    storm = PowerCut(ssd, times)
    with engines(tmp_path / "tierd.sock", tmp_path, NUM_ENGINES, seed=times) as tally:
        for life in range(times):
            with Daemon(tmp_path) as daemon:
                served += live(daemon, tally, ssd, chance)
            count.kills += 1
            if cut:
                storm.remember()
                what = storm.strike()
                print(f"life {life}: {what}")
            count.blocks_of(ssd)
            assert not count.wrong, f"life {life}: {count.wrong}"
            assert not tally.wrong, f"life {life}: an engine was served wrong bytes"
        with Daemon(tmp_path):  # and the last life ends well
            pass
        served += tally.blocks
    print(
        f"\n{count.kills} kills, {tally.requests} requests; blocks on the medium: {count.right} "
        f"right, {count.refused} refused, {len(count.wrong)} wrong; blocks served and checked: "
        f"{served}, {tally.wrong} wrong"
    )
    assert count.right > 20 * times
    assert tally.requests > 0


@pytest.mark.parametrize("times", TIMES)
def test_an_engine_killed_under_load_leaves_nothing_behind(tmp_path: Path, times: int) -> None:
    chance, count = Random(times), Count()
    with (
        engines(tmp_path / "tierd.sock", tmp_path, NUM_ENGINES, seed=times) as tally,
        Daemon(tmp_path) as daemon,
        daemon.client() as client,
        client.attach(LAYOUT) as pool,
    ):
        for life in range(times):
            tally.go(True)
            victim = engine(daemon.socket, tmp_path, NUM_ENGINES, seed=1000 + life)
            time.sleep(chance.uniform(0, 0.2))
            kill9(victim)
            tally.go(False)
            count.kills += 1
            accounted_for(daemon.until(lambda status: held(status) == 0))
            assert not tally.wrong, f"life {life}: an engine was served wrong bytes"
        served = tally.blocks + sum(
            ask(pool, prompt_of(trunk, LONGEST * BLOCK)) // BLOCK for trunk in range(TRUNKS)
        )
        accounted_for(daemon.until(lambda status: held(status) == 0))
    count.blocks_of(tmp_path / "ssd" / "default")
    print(
        f"\n{count.kills} engines killed, {tally.requests} requests; blocks served and checked: "
        f"{served}, {tally.wrong} wrong; on the medium at the end {count.right} right, "
        f"{count.refused} refused, {len(count.wrong)} wrong"
    )
    assert not count.wrong
    assert not count.refused  # the daemon ended well
    assert tally.rows[NUM_ENGINES, 0] > 0  # the victims did ask
