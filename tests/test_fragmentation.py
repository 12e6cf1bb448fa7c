"""What is held and of no use: in the blocks of leases, in extents, in slabs; and faults."""

from pathlib import Path
from typing import Any

from tests.content import BLOCK, BLOCK_NBYTES, LAYOUT, ask, prompt
from tests.daemon import Daemon, Status
from tests.ssd_folder import GEOMETRY
from tests.test_elastic import MIB, OTHER, fill
from tierd.layout import KVLayout, LayerGroup

# Two groups: blocks of 16 and of 64 tokens, the latter of layers that see a window only.
GROUPS = KVLayout(
    "model",
    2,
    1,
    64,
    "float32",
    (LayerGroup((0,), 16), LayerGroup((1,), 64)),
    (None, 128),
)


def namespace(status: Status) -> dict[str, Any]:
    found: dict[str, Any] = status["tenants"][0]["namespaces"][0]
    return found


def test_slots_past_the_tokens_of_leases_are_counted_by_group(tmp_path: Path) -> None:
    with (
        Daemon(tmp_path, device="8MiB", ssd=None) as daemon,
        daemon.client() as client,
        client.attach(GROUPS) as pool,
    ):
        assert [g["slots"] for g in namespace(client.status())["leased"]] == [0, 0]
        first, second = pool.acquire(prompt(1, 20)), pool.acquire(prompt(2, 64))
        small, large = namespace(client.status())["leased"]
        assert (small["slots"], small["slots_unused"]) == (32 + 64, 12)
        assert (large["slots"], large["slots_unused"]) == (64 + 64, 44)
        per_token = GROUPS.block_nbytes(1) // 64
        assert large["nbytes_unused"] == 44 * per_token
        with pool.fork([(first, 20)])[0]:  # it shares the tail
            assert namespace(client.status())["leased"][1]["slots_unused"] == 44
        first.release()
        second.release()
        assert [g["slots_unused"] for g in namespace(client.status())["leased"]] == [0, 0]


def test_what_extents_hold_is_places_free_ones_and_edges(tmp_path: Path) -> None:
    with (
        Daemon(tmp_path, device="16MiB", ssd=None) as daemon,
        daemon.client() as client,
        client.attach(OTHER) as pool,
    ):
        fill(pool, MIB)
        [group] = namespace(client.status())["tiers"][0]["groups"]
        facts, nbytes = group["fragmentation"], group["block_nbytes"]
        assert facts["nbytes_held"] == 4 * MIB  # a run that holds a block wherever it begins
        assert facts["nbytes_free"] == group["free"] * nbytes > 0
        assert facts["nbytes_edges"] == 4 * MIB - group["capacity"] * nbytes
        assert 0 < facts["nbytes_edges"] < 2 * nbytes


def test_slabs_are_told_by_how_full_they_are_and_faults_by_where_blocks_lay(
    tmp_path: Path,
) -> None:
    slots = GEOMETRY.num_slots
    with Daemon(tmp_path) as daemon, daemon.client() as client, client.attach(LAYOUT) as pool:
        for seed in range(3):
            ask(pool, prompt(seed, 8 * BLOCK))
        assert ask(pool, [*prompt(2, 8 * BLOCK), 1]) == 8 * BLOCK
        assert namespace(client.status())["faults"] == {"minor": 8, "major": 0}
    with Daemon(tmp_path) as daemon, daemon.client() as client, client.attach(LAYOUT) as pool:
        found = namespace(client.status())["tiers"][-1]["groups"][0]
        assert found["committed"] == 24
        facts = found["fragmentation"]
        assert facts["slabs"] == -(-24 // slots)
        assert facts["slabs_by_fill"] == [0, 0, 1, 1]  # 14 of 14, and 10
        assert facts["nbytes_live"] == 24 * BLOCK_NBYTES
        assert facts["nbytes_held"] == facts["slabs"] * GEOMETRY.footprint
        assert ask(pool, [*prompt(0, 8 * BLOCK), 1]) == 8 * BLOCK
        assert namespace(client.status())["faults"] == {"minor": 0, "major": 8}
