"""Advice: from what a real daemon recorded, what would have served it best."""

import random
from pathlib import Path

import pytest

from tests.content import BLOCK, LAYOUT, ask, prompt
from tests.daemon import Daemon
from tests.test_replay import conversations, write
from tierd.daemon.advice import Advisor, splits
from tierd.daemon.cli import main
from tierd.daemon.config import Config
from tierd.daemon.trace import Trace
from tierd.errors import ConfigError

MIB = 2**20


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    """What a daemon of one small tier was asked: 24 prompts in turn, more than it holds."""
    folder = tmp_path / "trace"
    more = f'trace.path = "{folder}"\nblocks.granule = 4\n'
    rng = random.Random(1)
    with (
        Daemon(tmp_path, ssd=None, host="0", more=more) as daemon,
        daemon.client() as client,
        client.attach(LAYOUT) as pool,
    ):
        for turn in range(120):
            ask(pool, prompt(turn % 24 if turn % 3 else 0, (2 + rng.randrange(4)) * BLOCK + 5))
    return folder


def test_advice_of_a_recording_is_a_configuration_that_the_daemon_takes(
    recording: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "best.toml"
    options = ["--memory", "16MiB", "--ssd", "64MiB", "--policy", "lru,lfu,arc"]
    assert main(["advise", str(recording), *options, "--toml", str(out)]) == 0
    printed = capsys.readouterr().out
    assert out.read_text() in printed
    assert main(["config", "check", str(out)]) == 0
    config = Config.load(out)
    assert config.ssd is not None
    assert config.ssd.size == 64 * MIB
    assert config.blocks.granule == 4
    assert config.blocks.options["size"] in [4 << power for power in range(8)]
    memory = config.device.size + (config.host.size if config.host else 0)
    assert memory == 16 * MIB
    assert "From 120 requests" in printed
    assert "That is little" in printed
    assert "The daemon that recorded this hit" in printed


def test_what_it_expects_of_the_configuration_that_ran_is_what_that_hit(recording: Path) -> None:
    trace = Trace.read(recording)
    assert trace.token_nbytes
    advisor = Advisor(trace, trace.token_nbytes, 10_000.0, None)
    (outcome,) = advisor.best(["lru"], [BLOCK], [(2 * MIB, 0, 0)])
    tokens = sum(request.num_tokens for request in trace.requests)
    hit = sum(request.num_hit or 0 for request in trace.requests)
    assert outcome.hit_rate == pytest.approx(hit / tokens, abs=0.01)
    assert 0.2 < outcome.hit_rate < 0.9
    assert 1 < len(set(outcome.costs())) <= 10


def test_more_memory_is_never_worse_for_lru(recording: Path) -> None:
    trace = Trace.read(recording)
    rates = [
        Advisor(trace, 4096, 10_000.0, None).best(["lru"], [BLOCK], [(size * MIB, 0, 0)])[0]
        for size in (2, 4, 8, 64)
    ]
    assert [one.hit_rate for one in rates] == sorted(one.hit_rate for one in rates)
    assert [one.cost for one in rates] == sorted((one.cost for one in rates), reverse=True)


def test_a_hit_may_end_inside_a_block(tmp_path: Path) -> None:
    """Two prompts that share five granules, in blocks of four."""
    path = write(tmp_path / "t.jsonl", [list(range(8)), [*range(5), *range(100, 103)]] * 10)
    trace = Trace.read(path)
    fine, coarse = (
        Advisor(trace, 64, 1e4, None).best(["lru"], [64 * size], [(2 * MIB, 0, 0)])[0]
        for size in (1, 4)
    )
    assert fine.hit_rate == pytest.approx((5 + 18 * 8) / 160)
    assert coarse.hit_rate == pytest.approx(fine.hit_rate)


def test_the_best_policy_is_found_for_a_trace_that_scans(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One prompt that comes again and again between many that come once."""
    ids = iter(range(10, 10**6))
    paths = [
        list(range(8)) if turn % 8 < 2 else [next(ids) for _ in range(8)] for turn in range(800)
    ]
    path = write(tmp_path / "scan.jsonl", paths)
    options = ["--device", "2MiB", "--token-bytes", "1024", "--policy", "fifo,lfu"]
    assert main(["advise", str(path), *options]) == 0
    printed = capsys.readouterr().out
    assert printed.splitlines()[1].startswith("lfu")
    assert "lfu was better than fifo in 10 of 10 tenths, beyond chance" in printed
    assert "granule" not in printed


def test_memory_is_split_into_whole_extents() -> None:
    for device, host, ssd in splits(10 * MIB, 5):
        assert device % (2 * MIB) == host % (2 * MIB) == 0
        assert 0 < device + host <= 10 * MIB
        assert ssd == 5


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--device", "2MiB", "--block-sizes", "96"], "a block of 96 tokens is no multiple of 64"),
        (["--device", "2MiB", "--policy", "nonsense"], "'nonsense' is not installed"),
        (["--device", "2MiB", "--prefill", "0"], "--prefill 0 is not above 0"),
        (["--memory", "4MiB", "--host", "2MiB"], "--host is beside --device"),
        (["--device", "2MiB", "--token-bytes", "1MiB"], "does not hold one block"),
    ],
)
def test_a_mistake_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], says: str
) -> None:
    path = write(tmp_path / "mine.jsonl", conversations(20))
    assert main(["advise", str(path), *options]) == 2
    err = capsys.readouterr().err
    assert says in err
    assert len(err.splitlines()) == 1


def test_a_block_size_has_to_be_a_multiple(tmp_path: Path) -> None:
    trace = Trace.read(write(tmp_path / "t.jsonl", conversations(20)))
    with pytest.raises(ConfigError, match="no multiple of 64"):
        Advisor(trace, 64, 1e4, None).best(["lru"], [32], [(2 * MIB, 0, 0)])
