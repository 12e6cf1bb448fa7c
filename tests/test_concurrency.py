"""Many at once on tiers too small for them: every byte of every hit is right, nothing is lost."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.content import BLOCK, LAYOUT, ask, prompt
from tests.daemon import Daemon, Status, held, tiers
from tests.engine import Engine

REQUESTS = 100
TRUNKS = 16  # of up to 7 blocks: 112 blocks, where the device has 32 and the host 32
LONGEST = 7 * BLOCK + 5


def settled(daemon: Daemon) -> Status:
    """The status once nothing is on its way, which must account for every place."""
    status = daemon.until(lambda status: held(status) == 0)
    for name, groups in tiers(status).items():
        for group in groups:
            assert group["free"] + group["committed"] == group["capacity"], name
    return status


def test_four_processes_see_only_right_bytes(tmp_path: Path) -> None:
    with Daemon(tmp_path) as daemon:
        with ExitStack() as stack:
            engines = [stack.enter_context(Engine(daemon.socket)) for _ in range(4)]
            for seed, engine in enumerate(engines):
                engine.tell("many", seed=seed, requests=REQUESTS, trunks=TRUNKS, longest=LONGEST)
            answers = [engine.answer() for engine in engines]
        found = settled(daemon)["tenants"][0]["namespaces"][0]
    assert found["tokens_hit"] == sum(answer["hit"] for answer in answers)
    assert found["tokens_asked"] == sum(answer["asked"] for answer in answers)
    assert found["requests"] == 4 * REQUESTS
    assert found["moved"]["1>2"] > 0, "nothing was evicted to SSD"
    assert found["blocks_hit"][2] > 0, "nothing came from SSD"
    assert found["lost"] == found["failed"] == 0


@pytest.mark.parametrize("connections", [1, 4])
def test_four_threads_see_only_right_bytes(tmp_path: Path, connections: int) -> None:
    """A thread has a connection of its own, or all share one."""
    with Daemon(tmp_path) as daemon, ExitStack() as stack:
        clients = [stack.enter_context(daemon.client()) for _ in range(connections)]
        pools = [client.attach(LAYOUT) for client in clients]

        def many(thread: int) -> int:
            pool, hit = pools[thread % connections], 0
            for number in range(REQUESTS):
                chance = hash((thread, number))
                hit += ask(pool, prompt(chance % TRUNKS, 1 + chance // TRUNKS % LONGEST))
            return hit

        with ThreadPoolExecutor(4) as threads:
            hits = sum(threads.map(many, range(4)))
        found = settled(daemon)["tenants"][0]["namespaces"][0]
        assert found["tokens_hit"] == hits > 0
        assert found["moved"]["1>2"] > 0
        assert found["lost"] == found["failed"] == 0
