"""How the daemon is doing: how long its event loop was away from its sockets, and its memory.

The loop must never block (I11), so every turn of it is measured: from the moment it wakes with
something to do until it asks for more. A turn's CPU time says what Python did; wall time beyond
that is waiting (or, on a busy machine, another process's turn). It knows nothing of blocks.
"""

import resource
import selectors
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

LONG_S = 0.001  # I11
_SAMPLED_S = LONG_S / 10


@dataclass(slots=True)
class LoopTurns:
    """What the turns of an event loop took, in seconds."""

    count: int = 0
    long: int = 0  # over LONG_S of CPU time
    max_cpu: float = 0.0
    max_wall: float = 0.0


class WatchedSelector(selectors.EpollSelector):
    """A selector that measures what an event loop does between two of its calls.

    A thread's CPU time is a system call that is felt in a round trip, so it is asked for after a
    turn that, with short ones before it, makes `_SAMPLED_S`: a turn may be charged that much more.
    """

    def __init__(self) -> None:
        super().__init__()
        self.turns = LoopTurns()
        self._woke, self._cpu, self._unsampled = time.perf_counter(), time.thread_time(), 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        wall = time.perf_counter() - self._woke
        self._unsampled += wall
        turns = self.turns
        turns.count += 1
        if wall > turns.max_wall:
            turns.max_wall = wall
        if self._unsampled > _SAMPLED_S:
            self._sample()
        ready = super().select(timeout)
        self._woke = time.perf_counter()
        return ready

    def _sample(self) -> None:
        now = time.thread_time()
        cpu = now - self._cpu
        self._cpu, self._unsampled = now, 0.0
        self.turns.long += cpu > LONG_S
        self.turns.max_cpu = max(self.turns.max_cpu, cpu)

    def forget(self) -> None:
        """Start over: what came before (imports, start-up) was nobody's wait."""
        self.turns = LoopTurns()
        self._woke, self._cpu, self._unsampled = time.perf_counter(), time.thread_time(), 0.0


def process_facts(turns: LoopTurns, loop_cpu: float) -> dict[str, Any]:
    """Facts of this process for `tierd status`, as JSON; `loop_cpu`: seconds of the loop's."""
    process = psutil.Process()
    memory = process.memory_info()
    return {
        "rss_nbytes": memory.rss,
        "cpu_seconds": sum(process.cpu_times()[:2]),
        "threads": process.num_threads(),
        "fds": process.num_fds(),
        "memory_limit_nbytes": memory_limit(),
        "memlock_limit_nbytes": memlock_limit(),
        "loop": {
            "cpu_seconds": round(loop_cpu, 6),
            "turns": turns.count,
            "long": turns.long,
            "max_cpu_ms": round(turns.max_cpu * 1e3, 3),
            "max_wall_ms": round(turns.max_wall * 1e3, 3),
        },
    }


def memory_limit(
    groups: Path = Path("/proc/self/cgroup"), tree: Path = Path("/sys/fs/cgroup")
) -> int:
    """Bytes of memory this process may use: the least of its cgroups' limits (v2 or v1), and of
    what the machine has."""
    limits = [int(psutil.virtual_memory().total)]
    for line in _text(groups).splitlines():
        _, controllers, group = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        root = tree / ("memory" if controllers else "")
        name = "memory.limit_in_bytes" if controllers else "memory.max"
        own = root / group.lstrip("/")
        # A container may see only its own part of the tree: then `own` is not there, its root is.
        for folder in (own, *own.parents[: len(own.parents) - len(root.parents)]):
            if (limit := _text(folder / name).strip()).isdigit():
                limits.append(int(limit))
    return min(limits)


def memlock_limit() -> int | None:
    """Bytes of memory this process may lock (RLIMIT_MEMLOCK); None: as many as there are."""
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return None if limit == resource.RLIM_INFINITY else limit


def memory_warnings(shared: int, pinned: int, limit: int, memlock: int | None) -> Iterator[str]:
    """What is wrong with tiers of so many bytes of `shared` memory, of which `pinned` are pinned
    for a GPU, under these two limits."""
    if shared > limit:
        yield (
            f"the tiers in memory may grow to {shared} bytes, but this process may use only "
            f"{limit} (its cgroup's limit, or the machine's memory): it may be killed for that"
        )
    if memlock is not None and pinned > memlock:
        yield (
            f"the host tier pins {pinned} bytes for the GPU, but this process may lock only "
            f"{memlock} (RLIMIT_MEMLOCK): raise it (LimitMEMLOCK= in a systemd unit, ulimit -l)"
        )


def _text(path: Path) -> str:
    """What a file of the kernel's says; nothing where there is none."""
    try:
        return path.read_text()
    except OSError:
        return ""
