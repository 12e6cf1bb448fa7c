"""Load or recompute: an engine that says how fast it is gets the hit that is fastest for it."""

import re
from pathlib import Path

import pytest

from tests.content import BLOCK, LAYOUT, ask, prompt
from tests.daemon import Daemon, Status
from tests.rig import HOST, NOW, SSD, Rig, chain
from tests.test_cli import command
from tierd.pool import Pool

# No machine computes, or loads, so fast or so slowly.
FAST, SLOW = 1e15, 1e-6
HIT = 8 * BLOCK


def namespace(daemon: Daemon) -> Status:
    found: Status = daemon.status()["tenants"][0]["namespaces"][0]
    return found


def hit(pool: Pool, seed: int, prefill: float) -> int:
    with pool.acquire(prompt(seed, HIT + 1), prefill=prefill) as lease:
        return lease.wait()


def test_a_fast_engine_computes_what_a_slow_one_loads_from_the_ssd(tmp_path: Path) -> None:
    with Daemon(tmp_path) as daemon:
        with daemon.client() as client:
            pool = client.attach(LAYOUT)
            for seed in (1, 2, 3):
                ask(pool, prompt(seed, HIT + 1))
        daemon.terminate()
        with daemon, daemon.client() as client:
            pool = client.attach(LAYOUT)
            assert hit(pool, 1, FAST) == HIT  # no route has been measured yet
            speeds = namespace(daemon)["speeds"]
            assert set(speeds) == {"2>1", "1>0"}
            assert all(speed["seconds_per_gib"] > 0 for speed in speeds.values())
            printed = command("status", "--socket", daemon.socket).stdout
            assert re.search(r"  ssd to host: \S+ ms, then \S+ GiB/s, over 1 bursts\n", printed)
            assert hit(pool, 2, FAST) == 0
            assert namespace(daemon)["blocks_hit"] == [0, 0, 8]
            assert hit(pool, 3, SLOW) == HIT
            assert namespace(daemon)["blocks_hit"] == [0, 0, 16]
            assert hit(pool, 3, FAST) == HIT  # it lies in the device tier now
            # What the fast engine left out has come nearer meanwhile.
            daemon.until(lambda _: namespace(daemon)["prefetched"] == 8)
            assert hit(pool, 2, SLOW) == HIT
            assert namespace(daemon)["blocks_hit"] == [8, 8, 16]


@pytest.mark.parametrize("prefill", [-1.0, float("nan"), float("inf")])
def test_what_is_no_speed_is_refused_before_anything_is_sent(
    daemon: Daemon, prefill: float
) -> None:
    with daemon.client() as client, client.attach(LAYOUT) as pool:
        with pytest.raises(ValueError, match=f"prefill: {prefill} tokens a second"):
            pool.acquire([1], prefill=prefill)
        assert namespace(daemon)["requests"] == 0


def test_a_hit_of_at_most_so_many_tokens_leaves_the_rest_of_the_table_to_be_written() -> None:
    rig = Rig(8, 8, 8)
    rig.place(HOST, "ab")
    rig.place(SSD, "abcd")
    tokens = rig.tokens("abcd")
    lease = rig.cache.acquire(chain("abcd"), tokens, tokens, NOW, most=4)
    assert (lease.hit, len(lease.tables[0])) == (4, 5)
    assert [level for _, level, _ in rig.transfer.routes] == [HOST, HOST]
