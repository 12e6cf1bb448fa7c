"""What the tiers reach of what the machine can do, each figure beside its ceiling or a peer.

Read `BENCHES`: it is the list. Everything is measured in turn with what it stands beside, because
the machine may be shared: the ratios are what counts. Whatever is made is in one temporary folder
and gone at the end.
"""

import signal
import tempfile
from collections.abc import Callable
from pathlib import Path

import bench_disk
import bench_hit
import bench_loop
import bench_memory
import bench_overlap
import bench_reopen
import bench_rpc
from bench_report import BenchReport
from bench_suite import Bench, run
from demo_stage import stage


def with_folder(measure: Callable[[BenchReport, Path, bool], None]) -> Bench:
    """A benchmark in a folder of its own."""

    def bench(report: BenchReport, quick: bool) -> None:
        with tempfile.TemporaryDirectory(prefix="tierd-bench-") as folder:
            measure(report, Path(folder), quick)

    return bench


def with_daemon(measure: Callable[..., None], start: bool = True) -> Bench:
    """On the demo's stage: a folder with a daemon that has 96 MiB, 128 MiB and 2 GiB."""

    def bench(report: BenchReport, quick: bool) -> None:
        with stage() as on:
            if start:
                on.start_daemon()
            measure(report, on, quick)
            on.stop_daemon(signal.SIGTERM if start else signal.SIGKILL)

    return bench


BENCHES: dict[str, Bench] = {
    "disk": with_folder(bench_disk.measure),
    "loop": with_folder(bench_loop.measure),
    "memory": bench_memory.measure,
    "rpc": with_daemon(bench_rpc.measure),
    "hit": with_daemon(bench_hit.measure),
    "overlap": with_daemon(bench_overlap.measure, start=False),
    "reopen": with_daemon(bench_reopen.measure, start=False),
}

if __name__ == "__main__":
    raise SystemExit(run(__doc__, BENCHES))
