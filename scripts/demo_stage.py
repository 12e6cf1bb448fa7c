"""The demo's processes and its folder: whatever is started here ends here, also on an error.

Processes say when they are ready (the daemon by systemd's protocol, engines by a line), so nothing
sleeps. It does not know what the processes are asked to do.
"""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psutil

from tierd.client import connect

SCRIPTS = Path(__file__).parent
# Two threads of one engine wait for each other, so they would measure who else has the machine.
THREADS = 1
CONFIG = """\
socket = "{folder}/tierd.sock"
[device]
size = "96MiB"
[host]
size = "128MiB"
[ssd]
path = "{folder}/ssd"
size = "2GiB"
slab = "16MiB"
min_free = "256MiB"
"""


class Engine:
    """An engine process: `ask` sends a request and waits, `send` and `answer` are its halves."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self.process = process

    @property
    def pid(self) -> int:
        return self.process.pid

    def send(self, do: str, **request: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": do, **request}) + "\n")
        self.process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        if not (line := self.process.stdout.readline()):
            raise RuntimeError(f"engine {self.pid} died; its log is in the demo's folder")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def ask(self, do: str, **request: Any) -> dict[str, Any]:
        self.send(do, **request)
        return self.answer()

    def leave(self) -> None:
        """Let it end by itself."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(30)


class Stage:
    """The folder, the daemon and the engines. `daemon` and `engines` may be gone already."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder, self._stack = folder, stack
        self.socket = folder / "tierd.sock"
        self.processes: list[subprocess.Popen[Any]] = []
        self.daemon: subprocess.Popen[Any] | None = None
        (folder / "tierd.toml").write_text(CONFIG.format(folder=folder))
        # Whatever would like to leave something somewhere leaves it in the folder.
        places = ("HOME", "TMPDIR", "XDG_CACHE_HOME", "XDG_RUNTIME_DIR", "HF_HOME")
        self._environment = {
            **os.environ,
            **dict.fromkeys(places, str(folder)),
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": str(THREADS),
            "MKL_NUM_THREADS": str(THREADS),
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONPATH": str(SCRIPTS),
            "PYTHONWARNINGS": "ignore",
        }

    def _start(self, name: str, *arguments: str, **facts: Any) -> "subprocess.Popen[Any]":
        facts = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, **facts}
        with (self.folder / f"{name}.log").open("ab") as log:
            environment = {**self._environment, **facts.pop("environment", {})}
            process = subprocess.Popen(
                [sys.executable, *arguments], stderr=log, env=environment, cwd=self.folder, **facts
            )
        self.processes.append(process)
        self._stack.callback(end, process)
        return process

    def prepare(self) -> dict[str, Any]:
        """Make the model and the prompts; returns the prompts."""
        script = str(SCRIPTS / "demo_engine.py")
        process = self._start("prepare", script, "prepare", str(self.folder))
        if process.wait():
            raise RuntimeError((self.folder / "prepare.log").read_text())
        prompts: dict[str, Any] = json.loads((self.folder / "prompts.json").read_text())
        return prompts

    def start_daemon(self) -> float:
        """Start `tierd serve`; returns the seconds until it was ready."""
        address = self.folder / "notify.sock"
        address.unlink(missing_ok=True)
        # It stays open, because the daemon also says when it stops.
        notify = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._stack.callback(notify.close)
        notify.bind(str(address))
        notify.settimeout(60)
        begin = time.perf_counter()
        self.daemon = self._start(
            "daemon", "-m", "tierd", "serve", "--config", str(self.folder / "tierd.toml"),
            environment={"NOTIFY_SOCKET": str(address)},
        )  # fmt: skip
        notify.recv(64)
        return time.perf_counter() - begin

    def stop_daemon(self, number: signal.Signals) -> float:
        """Signal the daemon; returns the seconds until it was gone."""
        assert self.daemon is not None
        begin = time.perf_counter()
        self.daemon.send_signal(number)
        self.daemon.wait(60)
        return time.perf_counter() - begin

    def start_engines(self, number: int, script: str = "demo_engine.py") -> list[Engine]:
        """Start engines beside each other; returns them when all have loaded and attached."""
        engines = [
            Engine(
                self._start(
                    f"engine-{index}", str(SCRIPTS / script), "serve", str(self.folder),
                    str(self.socket), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                )
            )
            for index in range(number)
        ]  # fmt: skip
        for engine in engines:
            engine.answer()
        return engines

    def tierd(self, *arguments: str) -> str:
        """What the command line prints."""
        command = [sys.executable, "-m", "tierd", *arguments]
        return subprocess.run(
            command, env=self._environment, cwd=self.folder, check=True, text=True,
            stdout=subprocess.PIPE,
        ).stdout  # fmt: skip

    def status(self) -> dict[str, Any]:
        """What `tierd status --json` prints."""
        with connect(self.socket) as client:
            return client.status()

    def daemon_cpu(self) -> float:
        """Seconds of CPU the daemon has used."""
        assert self.daemon is not None
        times = psutil.Process(self.daemon.pid).cpu_times()
        return float(times.user + times.system)

    def strays(self) -> list[str]:
        """Files outside the folder that a living process of ours has open for writing."""
        living = [psutil.Process(p.pid) for p in self.processes if p.poll() is None]
        return [
            f"{process.pid}: {file.path}"
            for process in living
            for file in process.open_files()
            if file.mode != "r" and not Path(file.path).is_relative_to(self.folder)
        ]

    def survivors(self) -> list[int]:
        """Processes that were started here and still live, and their children."""
        return [p.pid for p in self.processes if p.poll() is None] + [
            child.pid for child in psutil.Process().children(recursive=True)
        ]


def end(process: "subprocess.Popen[Any]") -> None:
    """End a process that should have ended by itself."""
    if process.poll() is None:
        process.kill()
    process.wait()
    for stream in (process.stdin, process.stdout):
        if stream:
            stream.close()


@contextmanager
def stage() -> Iterator[Stage]:
    """A stage in a new folder. If something goes wrong, the logs are shown before it is removed."""
    folder = Path(tempfile.mkdtemp(prefix="tierd-demo-"))
    try:
        with ExitStack() as stack:
            yield Stage(folder, stack)
    except BaseException:
        for log in sorted(folder.glob("*.log")):
            print(f"--- {log.name}\n{log.read_text()[-3000:]}", file=sys.stderr)
        raise
    finally:
        shutil.rmtree(folder)
