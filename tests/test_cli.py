"""The command line: what it prints, its exit status, and what a daemon process is made of."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

import tierd
from tests.content import BLOCK, LAYOUT, prompt, serve
from tests.daemon import PATIENCE_S, Daemon
from tests.healthy import nothing_lost
from tierd.daemon.cli import main
from tierd.hints import Hints


def command(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Run `tierd` with arguments."""
    return subprocess.run(
        [sys.executable, "-m", "tierd", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )


def test_status_tells_a_person_what_there_is(daemon: Daemon) -> None:
    with daemon.client() as client, client.attach(LAYOUT) as pool:
        with serve(pool, prompt(1, 4 * BLOCK)) as lease:
            lease.advise(Hints("chat", priority=2))
            ran = command("status", "--socket", daemon.socket)
        assert (ran.returncode, ran.stderr) == (0, "")
        for text in (
            f"tierd {daemon.pid} on {daemon.socket}",
            client.boot[:8],
            "event loop:",
            "tenant default",
            "model: 1 requests, 64 tokens, hit 0.0%",
            "1 engines attached",
            f"pid {os.getpid()} uid {os.getuid()}: model, 1 leases, 4 blocks",
            "faults: 0 blocks from memory (minor), 0 from SSD (major)",
            "leases, group 0: 0 of 64 slots past their tokens (0.0%), 0 B",
            "device, group 0: 2.0 MiB in extents, 1.8 MiB of them free, 0 B at their edges",
            "hints: 1 session, 1 priority; 0 sessions known, 0 expected back",
            "ssd, group 0: 0 B in 0 slabs, 0 B live; full 0 to 25%, 0 to 50%, 0 to 75%, 0 to 100%",
        ):
            assert text in ran.stdout


def test_status_as_json_is_what_the_client_gets(daemon: Daemon) -> None:
    with daemon.client() as client, client.attach(LAYOUT):
        ran = command("status", "--socket", daemon.socket, "--json")
        assert (ran.returncode, ran.stderr) == (0, "")
        printed, status = json.loads(ran.stdout), client.status()
        assert printed["tenants"] == status["tenants"]
        assert printed["boot"] == status["boot"] == client.boot
        assert [s["pid"] for s in printed["sessions"]] == [os.getpid()]


def test_status_of_no_daemon_is_1(tmp_path: Path) -> None:
    ran = command("status", "--socket", tmp_path / "none.sock")
    assert (ran.returncode, ran.stdout) == (1, "")
    assert ran.stderr.startswith("tierd: no daemon answers at ")
    assert len(ran.stderr.splitlines()) == 1


def test_config_check_prints_what_it_reads_back(tmp_path: Path) -> None:
    file = tmp_path / "tierd.toml"
    file.write_text('grace = 5\ndevice.size = "4MiB"\n')
    ran = command("config", "check", file)
    assert (ran.returncode, ran.stderr) == (0, "")
    file.write_text(ran.stdout)
    assert 'size = "4MiB"' in ran.stdout
    assert command("config", "check", file).stdout == ran.stdout


@pytest.mark.parametrize(
    ("toml", "told"),
    [
        ("colour = 1", ["colour"]),
        ('device.sise = "4MiB"', ["device.sise", "size"]),
        ('device.size = "4 parsecs"', ["device.size", "4 parsecs", "MiB"]),
        ("device.size = 0", ["device.size", "2MiB"]),
        ('host.policy = "oracle"', ["host.policy", "oracle", "installed: ", "lru"]),
        ('blocks.policy = "oracle"', ["blocks.policy", "uniform", "hierarchical"]),
        ('device.store = "tape"', ["device.store", "installed: ", "cpu"]),
        ("tenants.a.uids = []", ["tenants.a.uids", "integers"]),
        ("device = [", ["TOML"]),
    ],
)
def test_a_bad_file_is_one_line_that_names_key_and_value(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], toml: str, told: list[str]
) -> None:
    file = tmp_path / "tierd.toml"
    file.write_text(toml)
    assert main(["config", "check", str(file)]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert len(printed.err.splitlines()) == 1
    for text in (str(file), *told):
        assert text in printed.err


@pytest.mark.parametrize(
    ("toml", "told"),
    [
        ("colour = 1", "colour"),
        ('device.size = "4 parsecs"', "4 parsecs"),
        ('ssd.policy = "oracle"\nssd.path = "/tmp/none"', "oracle"),
    ],
)
def test_serve_refuses_a_bad_file_and_makes_nothing(tmp_path: Path, toml: str, told: str) -> None:
    file = tmp_path / "tierd.toml"
    file.write_text(f'socket = "{tmp_path}/tierd.sock"\n{toml}')
    ran = command("serve", "--config", file)
    assert (ran.returncode, ran.stdout) == (2, "")
    assert len(ran.stderr.splitlines()) == 1
    assert told in ran.stderr
    assert list(tmp_path.iterdir()) == [file]


def test_serve_says_what_it_cannot_have(tmp_path: Path) -> None:
    """A file that is not there, a place where no socket can be, and another daemon's folder."""
    ran = command("serve", "--config", tmp_path / "none.toml")
    assert ran.returncode == 2
    assert "none.toml: cannot be read" in ran.stderr
    file = tmp_path / "tierd.toml"
    (tmp_path / "text").write_text("I am no socket")
    file.write_text(f'socket = "{tmp_path}/text"\nhost.size = 0\ndevice.size = "2MiB"\n')
    ran = command("serve", "--config", file)
    assert ran.returncode == 2
    assert "text exists and is no socket" in ran.stderr
    assert (tmp_path / "text").read_text() == "I am no socket"


def test_a_live_daemon_keeps_its_socket_and_its_folder(daemon: Daemon) -> None:
    with nothing_lost(daemon):
        ran = command("serve", "--config", daemon.folder / "tierd.toml")
        assert ran.returncode == 2
        assert f"a daemon is listening on {daemon.socket} already" in ran.stderr
        other = daemon.folder / "other.toml"
        text = (daemon.folder / "tierd.toml").read_text()
        other.write_text(text.replace("tierd.sock", "other.sock"))
        ran = command("serve", "--config", other)
        assert ran.returncode == 2
        assert f"{daemon.folder}/ssd/default" in ran.stderr
        assert "in use by another" in ran.stderr
        assert not (daemon.folder / "other.sock").exists()


def test_a_stale_socket_is_replaced(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as gone:
        gone.bind(str(tmp_path / "tierd.sock"))
    with Daemon(tmp_path) as daemon:
        assert daemon.status()["pid"] == daemon.pid
    assert "was a stale socket" in daemon.log.read_text()


def test_the_socket_is_only_for_those_it_serves(tmp_path: Path) -> None:
    with Daemon(tmp_path) as daemon:
        assert daemon.socket.stat().st_mode & 0o777 == 0o600


def test_a_daemon_without_a_gpu_loads_no_torch_and_is_ready_soon(tmp_path: Path) -> None:
    began = time.monotonic()
    with Daemon(tmp_path) as daemon, daemon.client() as client, client.attach(LAYOUT) as pool:
        print(f"ready and attached after {time.monotonic() - began:.2f} s")
        with serve(pool, prompt(1, 4 * BLOCK)):
            maps = Path(f"/proc/{daemon.pid}/maps").read_text()
    assert "numpy" in maps  # so names of packages are found there
    assert "/torch/" not in maps
    assert "zarr" not in maps
    assert "numcodecs" not in maps


def test_sigint_ends_it_as_sigterm_does(tmp_path: Path) -> None:
    with Daemon(tmp_path) as daemon:
        daemon.signal(signal.SIGINT)
        daemon.ended()


def test_systemd_is_told_when_it_is_ready_and_when_it_stops(tmp_path: Path) -> None:
    file = tmp_path / "tierd.toml"
    file.write_text(f'socket = "{tmp_path}/tierd.sock"\nhost.size = 0\ndevice.size = "2MiB"\n')
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as inbox:
        address = f"\0tierd-test-{os.getpid()}"  # an abstract one, as systemd's may be
        inbox.bind(address)
        inbox.settimeout(PATIENCE_S)
        with subprocess.Popen(
            [sys.executable, "-m", "tierd", "serve", "--config", file],
            env=os.environ | {"NOTIFY_SOCKET": "@" + address[1:]},
            stderr=subprocess.DEVNULL,
        ) as process:
            try:
                assert inbox.recv(100) == b"READY=1"
                tierd.connect(tmp_path / "tierd.sock").close()
                process.terminate()
                assert inbox.recv(100) == b"STOPPING=1"
                assert process.wait(PATIENCE_S) == 0
            finally:
                process.kill()
