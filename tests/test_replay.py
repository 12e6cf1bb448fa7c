"""Traces, the optimum, and replays through the production cache."""

import csv
import gzip
import json
import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from policies.belady import Belady
from policies.learned import Learned
from policies.lru import LRU
from tierd.block import BlockHash
from tierd.daemon.cli import main
from tierd.daemon.config import Config
from tierd.daemon.distances import StackDistances
from tierd.daemon.lab import Lab
from tierd.daemon.optimum import Optimum
from tierd.daemon.replay import Replay, Result, TierPlan
from tierd.daemon.trace import Trace, TraceError
from tierd.errors import TierdError

Paths = Sequence[Sequence[int]]


def write(path: Path, paths: Paths, **more: Sequence[object]) -> Path:
    """Requests for `paths`, a second apart, of 64-token blocks; `more` gives values by request."""
    lines = [
        {"timestamp": 1000 * at, "input_length": 64 * len(ids), "hash_ids": list(ids)}
        | {name: values[at] for name, values in more.items()}
        for at, ids in enumerate(paths)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture
def trace(tmp_path: Path) -> Trace:
    """400 requests of some 40 conversations that go on, end, and branch: real paths of a tree."""
    return Trace.read(write(tmp_path / "t.jsonl", conversations(400)))


def conversations(count: int) -> Paths:
    rng, ids, paths = random.Random(5), iter(range(10**6)), list[list[int]]()
    open_ones: list[list[int]] = [[]]
    for _ in range(count):
        if rng.random() < 0.2:
            open_ones.append(list(rng.choice(open_ones)[: rng.randrange(6)]))
        path = open_ones[-1 - min(len(open_ones) - 1, int(rng.expovariate(0.4)))]
        path += [next(ids) for _ in range(rng.randrange(1, 4))]
        paths.append(list(path))
    return paths


def replayed(trace: Trace, *capacities: int, policy: type = LRU) -> Result:
    names = ("device", "host", "ssd")
    tiers = [TierPlan(n, c, policy, {}) for n, c in zip(names, capacities, strict=False)]
    replay = Replay(trace, tiers)
    done = list(replay.run())
    assert done == list(range(1, len(trace.requests) + 1))
    return replay.result


def test_runs_and_ids_are_the_same_trace(tmp_path: Path) -> None:
    one = write(tmp_path / "a.jsonl", [[0, 1, 2, 7, 8], [0, 1, 9]])
    lines = [json.loads(line) for line in one.read_text().splitlines()]
    for line, runs in zip(lines, ([[0, 3], [7, 2]], [[0, 2], [9, 1]]), strict=True):
        del line["hash_ids"]
        line["hash_runs"] = runs
    two = tmp_path / "a.jsonl.gz"
    with gzip.open(two, "wt") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)
    first, second = Trace.read(one), Trace.read(two)
    assert first == second
    assert first.block_size == 64
    assert [len(set(first.path(request))) for request in first.requests] == [5, 3]


def test_a_coarser_block_has_the_id_of_its_last(tmp_path: Path) -> None:
    trace = Trace.read(write(tmp_path / "t.jsonl", [[0, 1, 2, 3, 4], [0, 1, 7]]), coarse=2)
    assert [request.runs for request in trace.requests] == [[(1, 1), (3, 1)], [(1, 1)]]
    assert trace.block_size == 128


def test_a_session_closes_with_its_last_request_if_asked(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", [[0], [1], [0, 2], [1, 3]], session_id=["a", "b", "a", "b"])
    assert [r.hints.closed for r in Trace.read(path).requests] == [False] * 4
    closing = Trace.read(path, closing=True)
    assert [r.hints.closed for r in closing.requests] == [False, False, True, True]
    assert [r.hints.session for r in closing.requests] == ["a", "b", "a", "b"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "no request"),
        ("[1]\n", "not an object"),
        ("{", "not lines of JSON"),
        ('{"timestamp": 1}\n', "record 1 is no request"),
        ('{"timestamp": 1, "input_length": 9, "hash_ids": [-4]}\n', "below 0"),
        (
            '{"timestamp": 1, "input_length": 9, "hash_ids": [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]}\n',
            "how",
        ),
    ],
)
def test_what_is_no_trace_says_why(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(text)
    with pytest.raises(TraceError, match=says):
        Trace.read(path)


def test_times_that_go_back_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", [[0], [1]], timestamp=[2, 1])
    with pytest.raises(TraceError, match="order of time"):
        Trace.read(path)


def best_by_trying(paths: Paths, capacity: int) -> int:
    """The most hits of any cache that may keep any set of beginnings, by trying all of them."""
    states = {frozenset[int](): 0}
    for path in paths:
        after: dict[frozenset[int], int] = {}
        for kept, hits in states.items():
            hit = next((n for n, key in enumerate(path) if key not in kept), len(path))
            for chosen in subsets(sorted(kept | set(path)), capacity):
                after[chosen] = max(after.get(chosen, 0), hits + hit)
        states = after
    return max(states.values())


def subsets(keys: Sequence[int], most: int) -> list[frozenset[int]]:
    found = [frozenset[int]()]
    for key in keys:
        found += [one | {key} for one in found if len(one) < most]
    return [one for one in found if len(one) == min(most, len(keys))]


@pytest.mark.parametrize("seed", range(6))
def test_the_optimum_is_what_trying_everything_finds(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    paths = []
    for _ in range(7):  # paths of a tree of seven keys: n's parent is (n - 1) // 2
        path = [rng.randrange(7)]
        while path[-1]:
            path.append((path[-1] - 1) // 2)
        paths.append(path[::-1])
    trace = Trace.read(write(tmp_path / "t.jsonl", paths))
    for capacity in (1, 2, 3):
        found = Optimum(trace).hit_rate(capacity) * trace.num_accesses
        assert round(found) == best_by_trying(paths, capacity)


def lru_by_hand(trace: Trace, capacity: int) -> int:
    """Hits of an LRU list that is touched from the tail."""
    order: list[BlockHash] = []  # the oldest first
    hits = 0
    for request in trace.requests:
        path = trace.path(request)[:capacity]
        hit = next((n for n, key in enumerate(path) if key not in order), len(path))
        hits += hit
        order = [key for key in order if key not in path] + path[::-1]
        order = order[max(0, len(order) - capacity) :]
    return hits


@pytest.mark.parametrize("capacity", [1, 7, 30, 100, 10_000])
def test_a_replay_of_lru_agrees_with_a_list(trace: Trace, capacity: int) -> None:
    assert sum(replayed(trace, capacity).hits) == lru_by_hand(trace, capacity)


def test_no_policy_beats_the_optimum_and_belady_is_near(trace: Trace) -> None:
    optimum = Optimum(trace)
    for capacity in (20, 60, 200):
        best = optimum.hit_rate(capacity)
        for policy in (LRU, Learned, Belady):
            assert replayed(trace, capacity, policy=policy).hit_rate <= best + 1e-9
        lru = replayed(trace, capacity).hit_rate
        assert lru < replayed(trace, capacity, policy=Belady).hit_rate


def test_an_endless_cache_misses_each_block_once(trace: Trace) -> None:
    names = {name for request in trace.requests for name in trace.path(request)}
    result = replayed(trace, 100_000)
    assert trace.num_accesses - sum(result.hits) == len(names)
    assert result.hit_rate == pytest.approx(Optimum(trace).hit_rate(100_000))
    assert not result.moved


def test_what_the_top_tier_gives_up_is_hit_below(trace: Trace) -> None:
    result = replayed(trace, 40, 60, 10_000)
    assert sum(result.hits) == sum(replayed(trace, 100_000).hits)
    assert all(result.hits)
    assert result.moved[0, 1] > 0
    assert result.moved[1, 2] > 0
    up = sum(count for (src, dst), count in result.moved.items() if dst == 0)
    assert up == result.hits[1] + result.hits[2]


def test_the_pools_are_whole_after_a_replay(trace: Trace) -> None:
    replay = Replay(trace, [TierPlan("device", 40, Learned, {}, (0.1, 0.2))] * 2)
    list(replay.run())
    for tier in replay.cache.chain.tiers:
        (pool,) = tier.pools
        assert sum(pool.counts.values()) == pool.capacity == 40
        assert all(block.ref_cnt == 0 for block in pool)
    assert replay.cache.loads.idle


def test_a_tier_without_a_place_is_refused(trace: Trace) -> None:
    with pytest.raises(TierdError, match="'device' does not hold one block"):
        replayed(trace, 0)


def test_the_command_prints_a_table_and_writes_csv(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / "mine.jsonl", conversations(50))
    out = tmp_path / "out.csv"
    sizes = "20,2MiB/4MiB"
    options = ["--policy", "lru,learned", "--sizes", sizes, "--token-bytes", "1024", "--csv", out]
    assert main(["replay", str(path), *map(str, options)]) == 0
    printed = capsys.readouterr()
    assert [line.split()[:3] for line in printed.out.splitlines()[1:]] == [
        ["mine", "lru", "20"],
        ["mine", "learned", "20"],
        ["mine", "lru", "32/64"],
        ["mine", "learned", "32/64"],
    ]
    assert printed.err == ""
    header, *lines = out.read_text().splitlines()
    assert header.startswith("trace,policy,blocks,hit_rate,hit_device")
    assert len(lines) == 4
    rates = [float(line.split(",")[3]) for line in lines]
    assert all(first <= second + 0.2 for first, second in pairwise(rates))


@pytest.mark.parametrize("capacity", [1, 7, 30, 100, 10_000])
def test_stack_distances_are_lru_at_every_size(trace: Trace, capacity: int) -> None:
    hits = StackDistances(trace).hit_rate(capacity) * trace.num_accesses
    assert round(hits) == sum(replayed(trace, capacity).hits)


@pytest.mark.parametrize("capacity", [7, 30, 100])
def test_what_is_generated_is_hit_by_others_and_asked_of_nobody(
    trace: Trace, capacity: int
) -> None:
    requests = [replace(r, num_asked=max(1, r.num_blocks - 2)) for r in trace.requests]
    trace = replace(trace, requests=requests)
    found = replayed(trace, capacity)
    assert found.num_accesses == sum(request.num_asked for request in requests)
    # Not exactly: what is generated again takes places of its own until its request is over.
    assert found.hit_rate == pytest.approx(StackDistances(trace).hit_rate(capacity), abs=0.02)
    assert found.hit_rate <= Optimum(trace).hit_rate(capacity)


def test_the_optimum_hits_only_what_is_asked_for(tmp_path: Path) -> None:
    trace = Trace.read(write(tmp_path / "t.jsonl", [[0, 1], [0, 1], [0, 1, 2]]))
    requests = [
        replace(r, num_asked=asked) for r, asked in zip(trace.requests, (1, 1, 2), strict=True)
    ]
    optimum = Optimum(replace(trace, requests=requests))
    assert optimum.hits(3) == [0, 1, 2]
    assert optimum.hits(1) == [0, 1, 1]


def test_what_was_not_kept_is_not_hit(trace: Trace) -> None:
    requests = [replace(request, num_kept=0) for request in trace.requests]
    assert sum(replayed(replace(trace, requests=requests), 1000).hits) == 0


def test_curves_are_drawn_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, out = write(tmp_path / "mine.jsonl", conversations(100)), tmp_path / "out.png"
    options = ["--policy", "lru,fifo", "--curve", str(out)]
    assert main(["replay", str(path), *options]) == 0, capsys.readouterr().err
    assert out.read_bytes().startswith(b"\x89PNG")
    lines = list(csv.DictReader(out.with_suffix(".csv").read_text().splitlines()))
    curves = {
        policy: [float(line["miss_ratio"]) for line in lines if line["policy"] == policy]
        for policy in ("lru", "MIN", "fifo")
    }
    for curve in (curves["lru"], curves["MIN"]):
        assert curve == sorted(curve, reverse=True)
    assert all(best <= lru for best, lru in zip(curves["MIN"], curves["lru"], strict=True))
    assert len(curves["fifo"]) > 3
    assert curves["lru"][-1] == curves["MIN"][-1]


def test_without_sizes_the_configuration_says_what_is_replayed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, config = write(tmp_path / "mine.jsonl", conversations(50)), tmp_path / "tierd.toml"
    config.write_text(
        '[device]\nsize = "2MiB"\npolicy = "sieve"\n[host]\nsize = "4MiB"\npolicy = "slru"\n'
        "options = { protected = 0.5 }\n"
    )
    options = ["--config", str(config), "--token-bytes", "1024"]
    assert main(["replay", str(path), *options]) == 0
    assert capsys.readouterr().out.splitlines()[1].split()[:3] == ["mine", "sieve/slru", "32/64"]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--policy", "nonsense"], "'nonsense' is not installed in tierd.policies"),
        (["--sizes", "1/2/3/4"], "more than 3 tiers"),
        (["--sizes", "many"], "or a number of blocks"),
        (["--block-size", "96"], "--block-size 96 is no multiple of the trace's 64"),
        (["--model", "other"], "is no recording"),
        (["--sizes", "0"], "does not hold one block"),
    ],
)
def test_a_mistake_is_one_line_and_status_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], says: str
) -> None:
    path = write(tmp_path / "mine.jsonl", [[0]])
    assert main(["replay", str(path), *options]) == 2
    assert says in capsys.readouterr().err


def test_a_replay_writes_to_ssd_what_the_admission_of_the_configuration_lets_through(
    tmp_path: Path, trace: Trace
) -> None:
    def run(ssd: dict[str, object], **more: str) -> Result:
        config = Config.of({"ssd": {"path": str(tmp_path), **ssd}})
        (row,) = Lab(config, ["lru"], ["40/60/10000"], **more).run([trace])
        return row.result

    everything = run({"admission": "all"})
    assert run({}) != everything
    twice = run({"admission": "second-hit"})
    assert 0 < twice.moved[1, 2] < everything.moved[1, 2]
    assert sum(twice.hits) < sum(everything.hits)
    assert run({"admission": "all"}, admission="second-hit").moved == twice.moved
    options = {"admission": "second-hit", "admission_options": {"memory": 1}}
    assert run(options).moved.get((1, 2), 0) < twice.moved[1, 2]


def test_a_replay_keeps_copies_where_the_placement_of_the_configuration_says(trace: Trace) -> None:
    def run(config: Config, **more: str) -> Result:
        (row,) = Lab(config, ["lru"], ["60/60"], **more).run([trace])
        return row.result

    inclusive = run(Config.default())
    exclusive = run(Config.of({"placement": {"policy": "exclusive"}}))
    assert sum(exclusive.hits) > sum(inclusive.hits)  # two tiers of one size are one of twice that
    assert run(Config.default(), placement="exclusive").moved == exclusive.moved
    through = run(Config.of({"placement": {"policy": "write-through"}}))
    assert through.moved[0, 1] >= inclusive.moved[0, 1]
