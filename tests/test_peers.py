"""Ours against other projects' simulators, on the same requests: kvcache-simulator, libcachesim.

TIERD_TRACES names a folder of real traces to compare on as well. Peers are installed by
`pip install -c scripts/constraints.txt .[peer]`.
"""

import json
import os
import random
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from policies.arc import ARC
from policies.belady import Belady
from policies.fifo import FIFO
from policies.lfu import LFU
from policies.lru import LRU
from policies.s3fifo import S3FIFO
from policies.sieve import Sieve
from tests.test_replay import conversations
from tierd.daemon.optimum import Optimum
from tierd.daemon.replay import Replay, TierPlan
from tierd.daemon.trace import Trace, TraceRequest

pytestmark = pytest.mark.peer

BLOCK = 512  # tokens
MIB = 64  # a block of them in Llama 3 8B


def needs(module: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(not find_spec(module), reason=f"{module} is not installed: .[peer]")


# -- plain accesses, against libcachesim -----------------------------------------------------------


def accesses(count: int, seed: int) -> list[int]:
    """Ids with a favourite that drifts, scans, and many that come once."""
    rng, ids = random.Random(seed), list[int]()
    while len(ids) < count:
        chance = rng.random()
        if chance < 0.7:
            ids.append((int(rng.paretovariate(0.6)) + len(ids) // 40) % 2000)
        elif chance < 0.75:
            start = rng.randrange(3000)
            ids += range(start, start + rng.randrange(20, 200))
        else:
            ids.append(100_000 + len(ids))
    return ids[:count]


def plain(ids: Sequence[int], folder: Path) -> Trace:
    """Requests of one block each."""
    path = folder / "plain.jsonl"
    lines = (
        f'{{"timestamp": {at}, "input_length": 1, "hash_ids": [{number}]}}\n'
        for at, number in enumerate(ids)
    )
    path.write_text("".join(lines))
    return Trace.read(path)


def ours(trace: Trace, policy: type, capacity: int) -> int:
    replay = Replay(trace, [TierPlan("device", capacity, policy, {})])
    list(replay.run())
    return sum(replay.result.hits)


def theirs(ids: Sequence[int], policy: str, capacity: int) -> int:
    import libcachesim

    cache = getattr(libcachesim, policy)(cache_size=capacity)
    request, hits = libcachesim.Request(), 0
    request.obj_size = 1
    for at, (number, following) in enumerate(zip(ids, next_uses(ids), strict=True)):
        request.obj_id, request.clock_time, request.next_access_vtime = number, at, following
        hits += cache.get(request)
    return hits


def next_uses(ids: Sequence[int]) -> list[int]:
    """When each access's id comes again."""
    following, latest = [1 << 62] * len(ids), dict[int, int]()
    for at in range(len(ids) - 1, -1, -1):
        following[at] = latest.get(ids[at], following[at])
        latest[ids[at]] = at
    return following


EXACT = {"LRU": LRU, "FIFO": FIFO, "LFU": LFU, "Sieve": Sieve, "Belady": Belady}


@needs("libcachesim")
@pytest.mark.parametrize("capacity", [50, 200, 1000, 3000])
@pytest.mark.parametrize("name", EXACT)
def test_plain_policies_hit_exactly_what_libcachesims_do(
    tmp_path: Path, name: str, capacity: int
) -> None:
    ids = accesses(20_000, 1)
    assert ours(plain(ids, tmp_path), EXACT[name], capacity) == theirs(ids, name, capacity)


@needs("libcachesim")
@pytest.mark.parametrize("capacity", [50, 200, 1000, 3000])
@pytest.mark.parametrize(("name", "policy"), [("ARC", ARC), ("S3FIFO", S3FIFO)])
def test_policies_with_ghosts_hit_what_libcachesims_do_to_a_fifth_of_a_point(
    tmp_path: Path, name: str, policy: type, capacity: int
) -> None:
    """Not exactly: they learn of a ghost's return before they choose who goes for it, ours after,
    since a pool makes room for a whole request at once."""
    ids = accesses(20_000, 1)
    found, expected = ours(plain(ids, tmp_path), policy, capacity), theirs(ids, name, capacity)
    assert abs(found - expected) <= 0.002 * len(ids)


def real() -> list[Path]:
    folder = os.environ.get("TIERD_TRACES")
    return sorted(Path(folder).glob("mooncake*.jsonl.gz")) if folder else []


@needs("libcachesim")
@pytest.mark.skipif(not real(), reason="TIERD_TRACES names no folder with mooncake's traces")
@pytest.mark.parametrize("capacity", [200, 2000])
@pytest.mark.parametrize(("name", "policy"), [*EXACT.items(), ("ARC", ARC), ("S3FIFO", S3FIFO)])
def test_on_a_real_trace_they_hit_the_same(
    tmp_path: Path, name: str, policy: type, capacity: int
) -> None:
    runs = (run for request in Trace.read(real()[0]).requests for run in request.runs)
    ids = [first + at for first, count in runs for at in range(count)][:100_000]
    assert ours(plain(ids, tmp_path), policy, capacity) == theirs(ids, name, capacity)


# -- paths, against kvcache-simulator --------------------------------------------------------------


@pytest.fixture(params=["made", *real()], ids=lambda of: Path(of).name.partition(".")[0])
def paths(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A trace as the simulator wants it: blocks of 512 tokens, and every record says so."""
    path = tmp_path / "paths.jsonl"
    if request.param == "made":
        records: list[dict[str, Any]] = [
            {"timestamp": at, "input_length": BLOCK * len(ids), "hash_ids": list(ids)}
            for at, ids in enumerate(conversations(3000))
        ]
    else:
        requests = Trace.read(request.param).requests
        records = [
            {
                "timestamp": at,
                "input_length": one.num_tokens,
                "hash_ids": [first + n for first, count in one.runs for n in range(count)],
            }
            for at, one in enumerate(requests)
        ]
    path.write_text("".join(json.dumps({**r, "block_size": BLOCK}) + "\n" for r in records))
    return path


def share(requests: Sequence[TraceRequest], hits: Sequence[int]) -> float:
    """Tokens hit of those asked for, in the second half of the requests."""
    half = len(requests) // 2
    pairs = list(zip(requests, hits, strict=True))[half:]
    hit = sum(min(blocks * BLOCK, request.num_tokens) for request, blocks in pairs)
    return hit / sum(request.num_tokens for request, _ in pairs)


def lru_hits(trace: Trace, capacity: int) -> list[int]:
    """Blocks of each request."""
    replay, totals = Replay(trace, [TierPlan("device", capacity, LRU, {})]), [0]
    for _ in replay.run():
        totals.append(sum(replay.result.hits))
    return [later - earlier for earlier, later in pairwise(totals)]


@needs("kvcache_sim")
def test_lru_and_the_optimum_are_kvcache_simulators_to_a_tenth_of_a_point(paths: Path) -> None:
    trace = Trace.read(paths)
    unique = len({name for request in trace.requests for name in trace.path(request)})
    capacities = [unique // part for part in (200, 50, 10, 3)]
    budgets = ",".join(str(blocks * MIB / 1024) for blocks in capacities)
    command = [sys.executable, "-m", "kvcache_sim", "run", "--trace", paths]
    command += ["--model", "llama-3.1-8b", "--format", "json", "--no-progress", "--backend"]
    command += ["python", "--policies", "lru,optimal", "--budgets-gib", budgets]
    ran = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=True)
    points = json.loads(ran.stdout)["points"]
    assert [point["cacheBlocks"] for point in points] == capacities
    optimum = Optimum(trace)
    for point, capacity in zip(points, capacities, strict=True):
        for policy, hits in (
            ("lru", lru_hits(trace, capacity)),
            ("optimal", optimum.hits(capacity)),
        ):
            expected = point["results"][policy]["hitRate"]
            assert share(trace.requests, hits) == pytest.approx(expected, abs=0.001), policy
