"""What sharing blocks costs and saves, each figure beside what copying takes.

Read `BENCHES`: it is the list. Daemons are real and run beside this process, which is the engine;
what stands beside each other is measured in turn, because the machine may be shared.
"""

import bench_sharing_calls
import bench_sharing_copies
import bench_sharing_forks
import bench_waste
from bench_report import BenchReport
from bench_suite import Bench, run


def waste(report: BenchReport, quick: bool) -> None:
    """Arithmetic, and no time at all."""
    for name, layout in bench_waste.MODELS.items():
        bench_waste.measure(report, name, layout, bench_waste.EVEN)


BENCHES: dict[str, Bench] = {
    "calls": bench_sharing_calls.measure,
    "copies": bench_sharing_copies.measure,
    "forks": bench_sharing_forks.measure,
    "waste": waste,
}

if __name__ == "__main__":
    raise SystemExit(run(__doc__, BENCHES))
