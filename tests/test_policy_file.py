"""What policies know outlives the daemon, and a file that is not whole is as good as none."""

import logging
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from policies.base import Access
from policies.learned import Learned
from tests.content import BLOCK, LAYOUT, ask, prompt
from tests.daemon import NOT_AHEAD, Daemon, held, tiers
from tests.engine import Engine
from tests.test_elastic import OTHER
from tierd.block import BlockHash
from tierd.daemon.policy_file import PolicyFile, Remembered, remember, revive, tidy
from tierd.daemon.rules import Choice

PROMPT = 8 * BLOCK
LRU, LEARNED = Choice("lru", {}, "ssd.policy"), Choice("learned", {}, "ssd.policy")
S3FIFO = Choice("s3fifo", {"small": 0.2}, "rules.1")
MOST = 1 << 30


def key(number: int) -> BlockHash:
    return BlockHash(number.to_bytes(16, "little"))


def learned(number: int) -> list[Remembered]:
    """What a policy knows of a sequence of so many keys, used twice."""
    policy = Learned(number)
    path = [key(at) for at in range(number)]
    for at in range(number):
        policy.insert(path[at], path[at - 1] if at else None, Access(1.0))
    policy.touch(path, Access(1.0))
    policy.touch(path, Access(2.0))
    return remember("ssd", 0, LEARNED, policy)


def test_what_a_policy_knew_is_what_it_knows(tmp_path: Path) -> None:
    file, known = PolicyFile(tmp_path / "policies", "root"), learned(100)
    file.write(known, MOST, 0)
    assert file.read() == known
    again = revive(file.read(), "ssd", 0, LEARNED)
    assert again.state() == known[0].state
    assert [path.name for path in (tmp_path / "policies").iterdir()] == ["root"]


@pytest.mark.parametrize(
    ("tier", "group", "choice"),
    [
        ("ssd", 1, S3FIFO),
        ("host", 0, S3FIFO),
        ("ssd", 0, LRU),
        ("ssd", 0, Choice("s3fifo", {"small": 0.3}, "rules.1")),
    ],
)
def test_another_pool_or_policy_begins_anew(tier: str, group: int, choice: Choice) -> None:
    policy = S3FIFO.make(8)
    policy.insert(key(1), None, Access(0.0))
    known = remember("ssd", 0, S3FIFO, policy)
    assert list(revive(known, "ssd", 0, Choice("s3fifo", {"small": 0.2}, "x")).victims())
    assert not list(revive(known, tier, group, choice).victims())


def test_a_state_that_the_policy_cannot_read_is_none(caplog: pytest.LogCaptureFixture) -> None:
    known = [Remembered("ssd", 0, "policies.lru:LRU", {}, {"ordre": []})]
    with caplog.at_level(logging.WARNING, "tierd.policies"):
        assert not list(revive(known, "ssd", 0, LRU).victims())
    assert "begins anew" in caplog.text


def test_whatever_is_wrong_with_a_file_it_is_read_as_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file, path = PolicyFile(tmp_path, "root"), tmp_path / "root"
    assert file.read() == []
    assert not caplog.text
    file.write(learned(3), MOST, 0)
    whole = path.read_bytes()
    wrong = [whole[:stop] for stop in range(0, len(whole), 97)]
    wrong += [
        whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :] for at in range(0, len(whole), 31)
    ]
    wrong += [b"", b"{}\n", b"[]\n", b"\x80\n", b'{"at": 0, "body": 2, "keys": 0, "crc32c": 1}\n[]']
    for data in wrong:
        path.write_bytes(data)
        if data[20:] != whole[20:]:  # a time that is a little another is no fault
            caplog.clear()
            with caplog.at_level(logging.WARNING, "tierd.policies"):
                assert file.read() == [], data
            assert caplog.text.count("is of no use") == 1


def test_what_was_written_in_a_time_to_come_is_of_no_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.time()
    file = PolicyFile(tmp_path, "root")
    monkeypatch.setattr(time, "time", lambda: now + 3600)
    file.write(learned(3), MOST, 0)
    assert file.read()
    monkeypatch.undo()
    assert file.read() == []


def test_what_would_take_too_much_is_not_written(tmp_path: Path) -> None:
    file = PolicyFile(tmp_path, "root")
    file.write(learned(3), MOST, 0)
    file.write(learned(1000), 10_000, 0)
    assert not list(tmp_path.iterdir())
    file.write(learned(3), MOST, 1 << 62)
    assert not list(tmp_path.iterdir())


def test_tidying_leaves_the_files_of_those_there_are(tmp_path: Path) -> None:
    for name in ("a", "b", "a.new"):
        (tmp_path / name).write_bytes(b"")
    tidy(tmp_path, ["a", "c"])
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


WRITER = """
import sys; from pathlib import Path; from tests.test_policy_file import *
file = PolicyFile(Path(sys.argv[1]), "root"); known = [learned(n) for n in (500, 900)]
file.write(known[0], MOST, 0); print(flush=True)
while True:
    for some in known: file.write(some, MOST, 0)
"""


def test_kill_9_while_it_is_written_leaves_the_old_file_or_the_new(tmp_path: Path) -> None:
    known = [learned(500), learned(900)]
    for delay in range(6):
        command = [sys.executable, "-c", WRITER, str(tmp_path)]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as writer:
            assert writer.stdout is not None
            writer.stdout.readline()
            time.sleep(0.013 * delay)
            writer.kill()
        assert PolicyFile(tmp_path, "root").read() in known
        tidy(tmp_path, ["root"])
        assert os.listdir(tmp_path) == ["root"]


def test_the_ssd_gives_up_after_a_restart_what_it_would_have_before(tmp_path: Path) -> None:
    sizes = {"host": "0B", "ssd": "2MiB", "more": NOT_AHEAD}
    with Daemon(tmp_path, **sizes) as daemon, daemon.client() as client:
        pool = client.attach(LAYOUT)
        for seed in (0, 1, 2, 0):
            ask(pool, prompt(seed, PROMPT))
    with Daemon(tmp_path, **sizes) as daemon, daemon.client() as client:
        pool = client.attach(LAYOUT)
        ssd = tiers(daemon.status())["ssd"][0]
        assert (ssd["committed"], ssd["capacity"]) == (24, 28)
        for seed in range(3, 8):  # 40 blocks for 32 places: 8 go down, where 4 are free
            ask(pool, prompt(seed, PROMPT))
        assert "anew" not in daemon.log.read_text()
        assert ask(pool, prompt(0, PROMPT + 1)) == PROMPT
        assert ask(pool, prompt(1, PROMPT + 1)) < PROMPT


def test_what_was_known_a_few_requests_before_kill_9_is_not_lost(tmp_path: Path) -> None:
    more = NOT_AHEAD + 'ssd.remember = 4\ndevice.policy = "s3fifo"\n'
    with Daemon(tmp_path, more=more) as daemon, daemon.client() as client:
        pool = client.attach(LAYOUT)
        for seed in range(12):
            ask(pool, prompt(seed, PROMPT))
        folder = tmp_path / "ssd" / "default" / "policies"
        daemon.until(lambda _: folder.exists() and any(not f.suffix for f in folder.iterdir()))
        [file] = [file for file in folder.iterdir() if not file.suffix]
        first = file.read_bytes()
        for seed in range(12, 24):
            ask(pool, prompt(seed, PROMPT))
        daemon.until(lambda _: file.read_bytes() != first)
        daemon.kill9()
    known = PolicyFile(folder, file.name).read()
    assert [(of.tier, of.policy) for of in known] == [
        ("device", "policies.s3fifo:S3FIFO"),
        ("host", "policies.lru:LRU"),
        ("ssd", "policies.lru:LRU"),
    ]
    assert known[2].state["order"]
    with Daemon(tmp_path, more=more) as daemon, daemon.client() as client:
        ask(client.attach(LAYOUT), prompt(0, PROMPT))
        assert "anew" not in daemon.log.read_text()


def test_engines_go_on_while_policies_are_read_and_written(tmp_path: Path) -> None:
    more = 'ssd.remember = 3\ndevice.policy = "learned"\n'
    with (
        Daemon(tmp_path, device="4MiB", more=more) as daemon,
        Engine(daemon.socket) as a,
        Engine(daemon.socket) as b,
    ):
        for seed, engine in enumerate((a, b)):
            engine.tell("many", seed=seed, requests=100, trunks=20, longest=160)
        for engine in (a, b):
            assert engine.answer()["hit"] > 0
        status = daemon.until(lambda status: held(status) == 0)
        for groups in tiers(status).values():
            assert groups[0]["free"] + groups[0]["committed"] == groups[0]["capacity"]


@pytest.mark.parametrize("policy", ["learned", "arc", "s3fifo", "wtinylfu", "lru2"])
def test_every_policy_goes_on_after_a_restart(tmp_path: Path, policy: str) -> None:
    more = "".join(f'{tier}.policy = "{policy}"\n' for tier in ("device", "host", "ssd"))
    for life in range(3):
        with Daemon(tmp_path, more=more) as daemon, daemon.client() as client:
            pool = client.attach(LAYOUT)
            for seed in range(6):
                assert ask(pool, prompt(seed, PROMPT + 1)) == (PROMPT if life else 0)
            for seed in range(12):
                ask(pool, prompt(100 * life + seed, PROMPT))
        assert "anew" not in daemon.log.read_text()
        assert len(list((tmp_path / "ssd" / "default" / "policies").iterdir())) == 1


def test_a_torn_file_costs_the_order_and_nothing_else(tmp_path: Path) -> None:
    with Daemon(tmp_path) as daemon, daemon.client() as client:
        ask(client.attach(LAYOUT), prompt(0, PROMPT))
    [file] = (tmp_path / "ssd" / "default" / "policies").iterdir()
    file.write_bytes(file.read_bytes()[:-1])
    file.with_name(file.name + ".new").write_bytes(b"half")
    with Daemon(tmp_path) as daemon, daemon.client() as client:
        assert ask(client.attach(LAYOUT), prompt(0, PROMPT + 1)) == PROMPT
        assert daemon.log.read_text().count("is of no use, policies begin anew") == 1
        assert list(file.parent.iterdir()) == [file]


def test_what_is_known_of_arrays_goes_with_them(tmp_path: Path) -> None:
    sizes = {"device": "2MiB", "host": "0B", "ssd": "2MiB"}
    with Daemon(tmp_path, **sizes) as daemon, daemon.client() as client:
        pool = client.attach(LAYOUT)
        for seed in range(3):
            ask(pool, prompt(seed, PROMPT))
    [file] = (tmp_path / "ssd" / "default" / "policies").iterdir()
    with Daemon(tmp_path, **sizes) as daemon, daemon.client() as client:
        pool = client.attach(OTHER)
        for seed in range(12):
            ask(pool, prompt(seed, PROMPT))
        daemon.until(lambda _: not file.exists())
