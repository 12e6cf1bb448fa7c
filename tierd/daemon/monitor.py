"""How the daemon is doing: how long its event loop was away from its sockets, and its memory.

The loop must never block (I11), so every turn of it is measured: from the moment it wakes with
something to do until it asks for more. A turn's CPU time says what Python did; wall time beyond
that is waiting (or, on a busy machine, another process's turn). It knows nothing of blocks.
"""

import selectors
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

LONG_S = 0.001  # I11


@dataclass(slots=True)
class LoopTurns:
    """What the turns of an event loop took, in seconds."""

    count: int = 0
    long: int = 0  # over LONG_S of CPU time
    max_cpu: float = 0.0
    max_wall: float = 0.0

    def took(self, cpu: float, wall: float) -> None:
        self.count += 1
        self.long += cpu > LONG_S
        self.max_cpu = max(self.max_cpu, cpu)
        self.max_wall = max(self.max_wall, wall)


class WatchedSelector(selectors.EpollSelector):
    """A selector that measures what an event loop does between two of its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.turns = LoopTurns()
        self._woke: tuple[float, float] | None = None

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if self._woke is not None:
            cpu, wall = self._woke
            self.turns.took(time.thread_time() - cpu, time.perf_counter() - wall)
        ready = super().select(timeout)
        self._woke = (time.thread_time(), time.perf_counter())
        return ready

    def forget(self) -> None:
        """Start over: what came before (imports, start-up) was nobody's wait."""
        self.turns, self._woke = LoopTurns(), None


def process_facts(turns: LoopTurns) -> dict[str, Any]:
    """Facts of this process for `tierd status`, as JSON."""
    process = psutil.Process()
    memory = process.memory_info()
    return {
        "rss_nbytes": memory.rss,
        "cpu_seconds": sum(process.cpu_times()[:2]),
        "threads": process.num_threads(),
        "fds": process.num_fds(),
        "memory_limit_nbytes": memory_limit(),
        "loop": {
            "turns": turns.count,
            "long": turns.long,
            "max_cpu_ms": round(turns.max_cpu * 1e3, 3),
            "max_wall_ms": round(turns.max_wall * 1e3, 3),
        },
    }


def memory_limit() -> int:
    """Bytes of memory this process may use: the cgroup's limit, or what the machine has."""
    total = int(psutil.virtual_memory().total)
    try:
        own = Path("/proc/self/cgroup").read_text().split("::", 1)[1].split("\n", 1)[0]
        limit = (Path("/sys/fs/cgroup") / own.lstrip("/") / "memory.max").read_text().strip()
    except (OSError, IndexError):
        return total  # no cgroup v2
    return total if limit == "max" else min(total, int(limit))
