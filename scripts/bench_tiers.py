"""What the tiers reach of what the machine can do, each figure beside its ceiling or a peer.

Read `perform`: it is the list. Everything is measured in turn with what it stands beside, because
the machine may be shared: the ratios are what counts. Whatever is made is in one temporary folder
and gone at the end.
"""

import argparse
import os
import platform
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path

import bench_disk
import bench_hit
import bench_loop
import bench_memory
import bench_overlap
import bench_reopen
import bench_rpc
from bench_report import BenchReport
from demo_stage import stage


def main() -> int:
    """Measure; 0 if every bar is met."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", metavar="FILE", help="write one line a check; - for stdout")
    parser.add_argument("--quick", action="store_true", help="half a minute: less of all")
    parser.add_argument("--only", metavar="WORD", default="", help="those whose name has this word")
    arguments = parser.parse_args()
    with redirect_stdout(sys.stderr if arguments.json == "-" else sys.stdout):
        report = perform(arguments.quick, arguments.only)
    if arguments.json:
        report.write(arguments.json)
    return 0 if report.ok else 1


def perform(quick: bool, only: str) -> BenchReport:
    """Every benchmark, then the table and its sum."""
    begin, report = time.perf_counter(), BenchReport()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that it also tidies up
    print(machine())
    benches: dict[str, Callable[[], None]] = {
        "disk": lambda: with_folder(bench_disk.measure, report, quick),
        "loop": lambda: with_folder(bench_loop.measure, report, quick),
        "memory": lambda: bench_memory.measure(report, quick),
        "rpc": lambda: with_daemon(bench_rpc.measure, report, quick),
        "hit": lambda: with_daemon(bench_hit.measure, report, quick),
        "overlap": lambda: with_daemon(bench_overlap.measure, report, quick, start=False),
        "reopen": lambda: with_daemon(bench_reopen.measure, report, quick, start=False),
    }
    for name, bench in benches.items():
        if only in name:
            bench()
    missed = [check.check for check in report.checks if not check.ok]
    bars = sum(check.bar is not None for check in report.checks)
    print(f"\n{report.table()}\n")
    verdict = f"{len(missed)} missed" if missed else "all met"
    print(f"{bars} bars, {verdict}. It took {time.perf_counter() - begin:.0f} s.")
    return report


def with_folder(
    measure: Callable[[BenchReport, Path, bool], None], report: BenchReport, quick: bool
) -> None:
    with tempfile.TemporaryDirectory(prefix="tierd-bench-") as folder:
        measure(report, Path(folder), quick)


def with_daemon(
    measure: Callable[..., None], report: BenchReport, quick: bool, start: bool = True
) -> None:
    """On the demo's stage: a folder with a daemon that has 96 MiB, 128 MiB and 2 GiB."""
    with stage() as on:
        if start:
            on.start_daemon()
        measure(report, on, quick)
        on.stop_daemon(signal.SIGTERM if start else signal.SIGKILL)


def machine() -> str:
    """The machine in one line."""
    with open("/proc/cpuinfo") as file:
        model = next((x.split(":")[1].strip() for x in file if x.startswith("model name")), "?")
    load = ", ".join(f"{n:.1f}" for n in os.getloadavg())
    kernel = platform.release()
    return (
        f"{os.cpu_count()} cores of {model}, Linux {kernel}, load {load}, {tempfile.gettempdir()}"
    )


if __name__ == "__main__":
    raise SystemExit(main())
