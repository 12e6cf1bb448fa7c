"""A real daemon for the tests: `python -m tierd serve` in a folder of its own.

It is ready when it says so (sd_notify), and at its end every test checks the same things: exit
status 0 after SIGTERM, no socket, no shared memory with a name, no process, no error in its log,
and that its event loop never blocked (I9, I11).
"""

import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil

import tierd

# What one turn of the loop may take of the CPU (I11). Measured are less than 1 ms; the rest is for
# a busy machine with cold caches, and still far from what a big copy or an import there takes.
LONGEST_TURN_MS = 25.0
PATIENCE_S = 30.0  # for what takes milliseconds on a machine that is not busy

# For tests that count copies: none is made ahead.
NOT_AHEAD = "device.watermarks = [0, 0]\nhost.watermarks = [0, 0]\n"

Status = dict[str, Any]


class Daemon:
    """A context manager. `more` is TOML in dotted keys and tables, after the tiers' sizes."""

    def __init__(
        self,
        folder: Path,
        *,
        device: str = "2MiB",
        host: str = "2MiB",
        ssd: str | None = "16MiB",
        more: str = "",
    ) -> None:
        self.folder, self.socket = folder, folder / "tierd.sock"
        self.log = folder / "log"
        self.status_at_end: Status | None = None
        self.complaints = 0  # ERROR lines of the log that a test provoked
        self.config = folder / "tierd.toml"
        self.configure(device=device, host=host, ssd=ssd, more=more)
        self._process: subprocess.Popen[bytes] | None = None
        self._strangers: set[int] = set()

    def configure(
        self,
        *,
        device: str = "2MiB",
        host: str = "2MiB",
        ssd: str | None = "16MiB",
        more: str = "",
    ) -> None:
        """Write the file, of which a running daemon knows nothing before it reloads."""
        self.config.write_text(_config(self.folder, self.socket, device, host, ssd) + more)

    @property
    def pid(self) -> int:
        assert self._process is not None, "the daemon is not started"
        return self._process.pid

    def client(self, tenant: str = "", tier: str = "device") -> tierd.Client:
        return tierd.connect(self.socket, tenant=tenant, tier=tier)

    def status(self) -> Status:
        with self.client() as client:
            return client.status()

    def until(self, true: Callable[[Status], object], seconds: float = PATIENCE_S) -> Status:
        """The first status of which `true` holds; there must be one before long."""
        deadline = time.monotonic() + seconds
        while not true(status := self.status()):
            assert time.monotonic() < deadline, f"this never came true: {status}"
            time.sleep(0.005)
        return status

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill9(self) -> None:
        """End it at once; `__exit__` then has nothing to say about how it ended."""
        assert self._process is not None, "the daemon is not started"
        self._process.kill()
        self._process.wait()
        self._process = None

    def terminate(self, seconds: float = PATIENCE_S) -> None:
        """SIGTERM, and everything that must be true afterwards."""
        assert self._process is not None, "the daemon is not started"
        self.status_at_end = self.status()
        assert not psutil.Process(self.pid).children(), "a daemon has no children"
        self.signal(signal.SIGTERM)
        self.ended(seconds)

    def ended(self, seconds: float = PATIENCE_S) -> None:
        """It was told to end: wait, and check what must be true afterwards."""
        assert self._process is not None, "the daemon is not started"
        assert self._process.wait(seconds) == 0, self.log.read_text()
        self._process = None
        assert not self.socket.exists()
        log = self.log.read_text()
        assert "stopped" in log
        assert log.count(" ERROR ") == self.complaints, log
        if self.status_at_end is not None:
            loop = self.status_at_end["process"]["loop"]
            note_turns(loop)
            assert loop["max_cpu_ms"] < LONGEST_TURN_MS, f"the loop was blocked (I11): {loop}"

    def __enter__(self) -> Self:
        self._strangers = _children()
        with _notifications(self.folder / "notify.sock") as (address, wait):
            with self.log.open("ab") as log:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "tierd", "serve", "--config", str(self.config)],
                    env=os.environ | {"NOTIFY_SOCKET": address, "PYTHONWARNINGS": "error"},
                    stderr=log,
                )
            try:
                assert wait(self._process.pid) == "READY=1", self.log.read_text()
            except BaseException:
                self.kill9()
                raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        if self._process is not None and error is not None:
            self.kill9()
            print(self.log.read_text())
        if error is not None:
            return
        try:
            if self._process is not None:
                self.terminate()
        finally:
            if self._process is not None:
                self.kill9()
        assert not [name for name in os.listdir("/dev/shm") if "tierd" in name]
        assert _children() <= self._strangers, "a process is left"


def note_turns(loop: Status) -> None:
    """Keep the loop's figures where TIERD_LOOP_TURNS says, for whoever asks how long they were."""
    if path := os.environ.get("TIERD_LOOP_TURNS"):
        with open(path, "a") as file:
            test = os.environ.get("PYTEST_CURRENT_TEST", "")
            print(loop["max_cpu_ms"], loop["max_wall_ms"], loop["turns"], test, file=file)


def _config(folder: Path, path: Path, device: str, host: str, ssd: str | None) -> str:
    lines = [f'socket = "{path}"', f'device.size = "{device}"', f'host.size = "{host}"']
    if ssd is not None:
        lines += [f'ssd.path = "{folder}/ssd"', f'ssd.size = "{ssd}"']
        lines += ['ssd.slab = "1MiB"', 'ssd.min_free = "0B"']
    return "\n".join([*lines, ""])


def _children() -> set[int]:
    return {process.pid for process in psutil.Process().children(recursive=True)}


@contextmanager
def _notifications(path: Path) -> Iterator[tuple[str, Callable[[int], str]]]:
    """An address for sd_notify, and how to wait for the next word of a process, or its end."""
    path.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as inbox:
        inbox.bind(str(path))

        def wait(pid: int) -> str:
            pidfd = os.pidfd_open(pid)
            try:
                ready, _, _ = select.select([inbox.fileno(), pidfd], [], [], PATIENCE_S)
            finally:
                os.close(pidfd)
            told = inbox.fileno() in ready
            return inbox.recv(4096).decode() if told else "it ended, or said nothing"

        yield str(path), wait
        path.unlink()


def tiers(status: Status, tenant: int = 0, namespace: int = 0) -> dict[str, list[dict[str, int]]]:
    """The groups' places by tier of one namespace."""
    found = status["tenants"][tenant]["namespaces"][namespace]["tiers"]
    return {tier["name"]: tier["groups"] for tier in found}


def held(status: Status) -> int:
    """Places that are neither free nor committed, in every tier: what somebody still holds."""
    return sum(
        group[state]
        for tenant in status["tenants"]
        for namespace in tenant["namespaces"]
        for tier in namespace["tiers"]
        for group in tier["groups"]
        for state in ("private", "loading", "quarantined")
    )
