"""A recording: real daemons and engines, and what is read back of what they did."""

import gzip
import json
import os
import random
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from hashlib import blake2b
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from policies.base import NO_HINTS, Access, Hints
from policies.lru import LRU
from tests.content import BLOCK, LAYOUT, ask, prompt, serve
from tests.daemon import PATIENCE_S, Daemon
from tierd.block import BlockHash
from tierd.daemon.cli import main
from tierd.daemon.config import TraceConfig
from tierd.daemon.lease import Lease
from tierd.daemon.optimum import Optimum
from tierd.daemon.recorder import Recorder
from tierd.daemon.recording import Encoder, Served
from tierd.daemon.replay import Replay, TierPlan
from tierd.daemon.trace import Trace, TraceError
from tierd.errors import ConfigError
from tierd.layout import KVLayout


def recording(folder: Path, size: str = "8MiB") -> str:
    """The lines of a configuration that records into a folder."""
    return f'trace.path = "{folder}"\ntrace.size = "{size}"\n'


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "trace"


def test_what_a_daemon_is_asked_is_read_back_as_a_trace(tmp_path: Path, folder: Path) -> None:
    first, second = prompt(1, 4 * BLOCK), prompt(2, 2 * BLOCK + 5)
    with (
        Daemon(tmp_path, more=recording(folder)) as daemon,
        daemon.client() as client,
        client.attach(LAYOUT) as pool,
    ):
        assert ask(pool, first) == 0
        assert ask(pool, second) == 0
        with pool.acquire(prompt(1, 6 * BLOCK)) as lease:  # goes on, and generates a block
            assert lease.wait() == 4 * BLOCK
            lease.extend(8 * BLOCK)
            lease.append(prompt(1, 8 * BLOCK)[6 * BLOCK :])
            lease.commit(7 * BLOCK)
    trace = Trace.read(folder)
    assert (trace.block_size, trace.token_nbytes) == (BLOCK, LAYOUT.nbytes_per_token())
    paths = [trace.path(request) for request in trace.requests]
    assert [len(path) for path in paths] == [4, 2, 7]
    assert paths[2][:4] == paths[0]
    assert not set(paths[1]) & set(paths[2])
    asked = [(r.num_tokens, r.num_asked, r.num_kept, r.num_hit) for r in trace.requests]
    assert asked == [(64, 3, 4, 0), (37, 2, 2, 0), (96, 5, 7, 64)]
    assert [r.time for r in trace.requests] == sorted(r.time for r in trace.requests)


def test_a_replay_of_a_recording_hits_what_the_daemon_hit(tmp_path: Path, folder: Path) -> None:
    with (
        Daemon(tmp_path, ssd=None, host="0", more=recording(folder)) as daemon,
        daemon.client() as client,
        client.attach(LAYOUT) as pool,
    ):
        hit = sum(ask(pool, prompt(n * n % 7, (3 + n % 9) * BLOCK)) for n in range(60))
    trace = Trace.read(folder)
    assert sum(request.num_hit or 0 for request in trace.requests) == hit
    replay = Replay(trace, [TierPlan("device", 32, LRU, {})])
    list(replay.run())
    assert sum(replay.result.hits) * BLOCK == hit
    assert 0 < replay.result.hit_rate <= Optimum(trace).hit_rate(32)


def test_files_of_several_lives_are_one_trace(tmp_path: Path, folder: Path) -> None:
    for life in range(3):
        with (
            Daemon(tmp_path, more=recording(folder)) as daemon,
            daemon.client() as client,
            client.attach(LAYOUT) as pool,
        ):
            ask(pool, prompt(1, (3 + life) * BLOCK))
    assert len(list(folder.iterdir())) == 3
    trace = Trace.read(folder)
    paths = [trace.path(request) for request in trace.requests]
    assert [len(path) for path in paths] == [3, 4, 5]
    assert paths[2][:3] == paths[1][:3] == paths[0]


def test_a_daemon_that_is_killed_leaves_what_it_had_written(
    tmp_path: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with (
        Daemon(tmp_path, more=recording(folder)) as daemon,
        daemon.client() as client,
        client.attach(LAYOUT) as pool,
    ):
        ask(pool, prompt(1, 4 * BLOCK))
        daemon.until(lambda status: status["trace"]["recorded"])
        assert main(["status", "--socket", str(daemon.socket)]) == 0
        assert f"recording to {folder}, 1 requests, 0 dropped" in capsys.readouterr().out
        daemon.kill9()
    assert [len(trace_path) for trace_path in paths_of(folder)] == [4]
    (file,) = folder.iterdir()
    whole = file.read_bytes()
    for stop in range(2, len(whole)):  # as a medium that lost the end would have it
        file.write_bytes(whole[:stop])
        with suppress(TraceError):
            assert [len(path) for path in paths_of(file)] == [4]


def paths_of(folder: Path) -> list[list[BlockHash]]:
    trace = Trace.read(folder)
    return [trace.path(request) for request in trace.requests]


def test_an_engine_that_dies_leaves_its_requests_in_the_recording(
    tmp_path: Path, folder: Path
) -> None:
    with Daemon(tmp_path, more=recording(folder)) as daemon:
        with daemon.client() as client:
            pool = client.attach(LAYOUT)
            serve(pool, prompt(1, 4 * BLOCK))
        daemon.until(lambda status: not status["sessions"][:-1])
    assert [len(path) for path in paths_of(folder)] == [4]


class Source(NamedTuple):
    """As much of a namespace as a recording looks at."""

    name: str
    layout: KVLayout


@pytest.fixture
def namespace() -> Any:
    return Source("model", LAYOUT.with_block_sizes([BLOCK] * 4))


class Asked(NamedTuple):
    """What a daemon would hand over: whose, and the lease of a request that is over."""

    namespace: Any
    lease: Lease


def asked(
    namespace: Any, names: Sequence[int], *, hints: Hints = NO_HINTS, began: float = 10.0
) -> Asked:
    """A request that computed and kept the blocks of such names."""
    hashes = [BlockHash(number.to_bytes(16, "little")) for number in names]
    num_tokens = len(names) * BLOCK
    access = Access(began, hints)
    lease = Lease(hashes, [], [], committed=num_tokens, access=access, asked=num_tokens + 1)
    return Asked(namespace, lease)


def record(recorder: Recorder, request: Asked) -> None:
    recorder.record("default", *request, 11.0)


def encoded(batch: Sequence[Asked], salt: bytes = b"key") -> bytes:
    """The lines of a file."""
    encoder = Encoder(1000.0, 0.0, salt)
    return encoder.head() + b"".join(
        encoder.encode(
            [
                Served(
                    "default", of, lease.access.time, 11.0, lease.asked, 0, lease.committed,
                    lease.access.hints, False, *encoder.split(lease.hashes),
                )
            ]
        )
        for of, lease in batch
    )  # fmt: skip


def write(path: Path, batch: Sequence[Asked]) -> None:
    path.write_bytes(gzip.compress(encoded(batch)))


@pytest.mark.parametrize("seed", range(5))
def test_paths_of_many_files_are_read_back_as_they_were(
    folder: Path, namespace: Any, seed: int
) -> None:
    rng, ids, folder_paths = random.Random(seed), count(), list[list[int]]()
    folder.mkdir()
    for file in range(3):
        paths = []
        for _ in range(40):
            known = rng.choice(folder_paths) if folder_paths else []
            new = [next(ids) for _ in range(rng.randrange(1, 6))]
            path = known[: rng.randrange(len(known) + 1)] + new
            paths.append(path)
            folder_paths.append(paths[-1])
        write(folder / f"{file}.jsonl.gz", [asked(namespace, path) for path in paths])
    trace = Trace.read(folder)
    assert len(trace.requests) == len(folder_paths)
    names: dict[BlockHash, int] = {}
    for request, path in zip(trace.requests, folder_paths, strict=True):
        ids = trace.path(request)
        assert [
            names.setdefault(name, number) for name, number in zip(ids, path, strict=True)
        ] == path
    assert len(set(names.values())) == len(names)


def test_names_that_lie_about_what_is_before_them_do_no_harm(folder: Path, namespace: Any) -> None:
    folder.mkdir()
    paths = [[1, 2, 3], [3, 2, 1], [2, 3, 4, 1], [1, 2, 5], [6]]
    write(folder / "0.jsonl.gz", [asked(namespace, path) for path in paths])
    trace = Trace.read(folder)
    replay = Replay(trace, [TierPlan("device", 4, LRU, {})])
    assert list(replay.run())[-1] >= 3


def test_a_recording_of_several_models_asks_which(folder: Path) -> None:
    folder.mkdir()
    of = LAYOUT.with_block_sizes([BLOCK] * 4)
    batch = [asked(Source(name, of), [at]) for at, name in enumerate(["a", "b", "a"])]
    write(folder / "0.jsonl.gz", batch)
    with pytest.raises(TraceError, match="default/a@16, default/b@16; choose one"):
        Trace.read(folder)
    with pytest.raises(TraceError, match="does not hold c"):
        Trace.read(folder, model="c")
    for name, number in (("a", 2), ("default/b", 1), ("default/a@16", 2)):
        assert len(Trace.read(folder, model=name).requests) == number


def test_a_coarser_trace_leaves_out_what_fills_no_block(folder: Path, namespace: Any) -> None:
    folder.mkdir()
    write(folder / "0.jsonl.gz", [asked(namespace, range(7)), asked(namespace, range(3))])
    trace = Trace.read(folder).coarser(4)
    assert trace.block_size == 4 * BLOCK
    assert [(r.num_blocks, r.num_asked, r.num_kept) for r in trace.requests] == [(1, 1, 1)]


def test_neither_tokens_nor_names_of_sessions_are_written(namespace: Any) -> None:
    hints = Hints("alice@example.org", closed=True, priority=3, returns_at=12.5, will_need=True)
    text = encoded([asked(namespace, [1, 2], hints=hints)] * 2)
    assert b"alice" not in text
    first, second = (json.loads(line) for line in text.splitlines()[2:])
    assert first["session_id"] == second["session_id"]
    assert (first["closed"], first["priority"], first["will_need"]) == (True, 3, True)
    assert first["returns"] == 2.5
    other = encoded([asked(namespace, [1], hints=hints)], b"another")
    assert json.loads(other.splitlines()[2])["session_id"] != first["session_id"]


def test_hints_are_read_back(folder: Path, namespace: Any) -> None:
    folder.mkdir()
    hints = Hints("me", closed=True, priority=3, returns_at=12.5, will_need=True, dont_need=True)
    write(folder / "0.jsonl.gz", [asked(namespace, [1], hints=hints)])
    (request,) = Trace.read(folder).requests
    assert request.hints.session not in (None, "me")
    assert request.time == 0.0
    assert replace(request.hints, session="me") == replace(hints, returns_at=2.5)


def test_files_are_changed_for_new_ones_and_the_oldest_go(folder: Path, namespace: Any) -> None:
    size, length, number = 1 << 20, 5000, 40  # 1.6 MB of names
    recorder = Recorder.open(TraceConfig(path=folder, size=size), 0.0)
    for start in range(0, length * number, length):
        record(recorder, asked(namespace, [rng_id(start + at) for at in range(length)]))
        while recorder.status()["waiting"]:
            time.sleep(0.001)
    recorder.close()
    assert recorder.status()["recorded"] == number
    assert total(folder) <= size
    trace = Trace.read(folder)
    assert number // 3 < len(trace.requests) < number
    assert {request.num_asked for request in trace.requests} == {length}


def total(folder: Path) -> int:
    """Bytes of its files."""
    return sum(file.stat().st_size for file in folder.iterdir())


def rng_id(number: int) -> int:
    """A name as a hash makes it: no packer makes it shorter."""
    return int.from_bytes(blake2b(number.to_bytes(8, "big"), digest_size=16).digest(), "big")


def test_what_comes_faster_than_it_is_written_is_dropped_and_counted(
    folder: Path, namespace: Any
) -> None:
    recorder = Recorder.open(TraceConfig(path=folder), 0.0)
    long = asked(namespace, range(100_000))
    for _ in range(5):  # without a turn of the loop in between
        record(recorder, long)
    recorder.close()
    assert (recorder.status()["recorded"], recorder.status()["dropped"]) == (2, 3)
    assert len(Trace.read(folder).requests) == 2


def test_a_medium_that_is_full_ends_recording_and_nothing_else(
    folder: Path, namespace: Any, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = Recorder.open(TraceConfig(path=folder), 0.0)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))  # as a full disk: writes fail
    try:
        record(recorder, asked(namespace, [rng_id(number) for number in range(2000)]))
        recorder.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert recorder.status()["stopped"] == "File too large"
    record(recorder, asked(namespace, [1]))
    assert (recorder.status()["recorded"], recorder.status()["dropped"]) == (0, 2)
    assert [r.levelname for r in caplog.records if r.name == "tierd.recorder"] == ["WARNING"]


def test_a_folder_that_cannot_be_written_is_an_error_at_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r'^trace.path = ".*/file/trace": cannot be recorded to'):
        Recorder.open(TraceConfig(path=tmp_path / "file" / "trace"), 0.0)


def test_a_daemon_that_cannot_record_does_not_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    config = tmp_path / "tierd.toml"
    config.write_text(f'socket = "{tmp_path}/s"\ntrace.path = "{tmp_path}/file/trace"\n')
    command = [sys.executable, "-m", "tierd", "serve", "--config", config]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert ran.returncode == 2
    assert ran.stderr.splitlines()[-1].startswith('tierd: trace.path = "')


def test_a_life_without_a_request_leaves_no_file(folder: Path) -> None:
    recorder = Recorder.open(TraceConfig(path=folder), 0.0)
    assert len(os.listdir(folder)) == 1
    recorder.close()
    assert os.listdir(folder) == []
