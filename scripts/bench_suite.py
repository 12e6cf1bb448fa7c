"""A suite: benchmarks by name, run in turn; then the table, the sum, and one line a check.

It says how the command line of every suite is read. What is measured, and how, it does not know.
"""

import argparse
import os
import platform
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout

from bench_report import BenchReport

Bench = Callable[[BenchReport, bool], None]  # report, whether it must be quick


def run(what: str | None, benches: Mapping[str, Bench]) -> int:
    """Read the command line and measure; 0 if every bar is met."""
    parser = argparse.ArgumentParser(description=what)
    parser.add_argument("--json", metavar="FILE", help="write one line a check; - for stdout")
    parser.add_argument("--quick", action="store_true", help="half a minute: less of all")
    parser.add_argument("--only", metavar="WORD", default="", help="those whose name has this word")
    arguments = parser.parse_args()
    with redirect_stdout(sys.stderr if arguments.json == "-" else sys.stdout):
        chosen = [bench for name, bench in benches.items() if arguments.only in name]
        report = _perform(chosen, arguments.quick)
    if arguments.json:
        report.write(arguments.json)
    return 0 if report.ok else 1


def _perform(benches: list[Bench], quick: bool) -> BenchReport:
    """Every benchmark, then the table and its sum."""
    begin, report = time.perf_counter(), BenchReport()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that it also tidies up
    print(machine())
    for bench in benches:
        bench(report, quick)
    missed = [check.check for check in report.checks if not check.ok]
    bars = sum(check.bar is not None for check in report.checks)
    print(f"\n{report.table()}\n")
    verdict = f"{len(missed)} missed" if missed else "all met"
    print(f"{bars} bars, {verdict}. It took {time.perf_counter() - begin:.0f} s.")
    return report


def machine() -> str:
    """The machine in one line."""
    with open("/proc/cpuinfo") as file:
        model = next((x.split(":")[1].strip() for x in file if x.startswith("model name")), "?")
    load = ", ".join(f"{n:.1f}" for n in os.getloadavg())
    kernel = platform.release()
    return (
        f"{os.cpu_count()} cores of {model}, Linux {kernel}, load {load}, {tempfile.gettempdir()}"
    )
