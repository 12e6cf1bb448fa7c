"""How much of what LRU misses the learned policy gets, on real traces, beside the classic ones.

Read `CELLS`: it is the list, with the least hit rate that `learned` must have in each, and the
least when sessions say that they are closed. Every policy goes through the production cache, so
that the speeds are those of deciding: blocks asked for, a second of CPU. The share of a gap is
(learned - LRU) / (MIN - LRU); a cell whose gap is below half a point says nothing.
"""

import argparse
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

import bench_chain
from bench_report import BenchReport, Figure

from tierd.daemon import plugins
from tierd.daemon.optimum import Optimum
from tierd.daemon.replay import Replay, TierPlan
from tierd.daemon.trace import Trace

# By trace and blocks: the bars, without and with the hint; None where there is none but LRU's.
CELLS: Mapping[str, Mapping[int, tuple[float | None, float | None]]] = {
    "mooncake_conversation": {3655: (0.14, None), 9139: (0.223, None), 18279: (0.296, None)},
    "ragpulse_days1-4": {133: (0.316, None), 1334: (0.3193, None)},
    "claude_code_71": {
        6323: (0.3, 0.303),
        15808: (0.651, 0.659),
        31617: (0.875, 0.883),
        63235: (0.9435, 0.953),
    },
}
SLOW: Mapping[str, Mapping[int, tuple[float | None, float | None]]] = {
    "claude_code_426": {21301: (0.48, 0.486), 106509: (0.934, 0.941)},
    "claude_code_shared_227": dict.fromkeys((4022, 8043, 16086, 40215, 80430), (None, None)),
}
HELD_OUT = "claude_code_shared_227"  # nothing was chosen by it, and no mean counts it
CLASSICS = ("arc", "lru2", "slru", "lfu", "sieve", "s3fifo", "wtinylfu", "gdsf", "fifo")
SPEEDS = {"mooncake_conversation": (1e5, 6e4), "claude_code_71": (3e5, 6e4)}  # of LRU, of learned
_LEAST_GAP = 0.005
_SHARE = 0.23  # of the gap, on average
_BELOW = 0.002  # that learned may be below LRU


@dataclass(frozen=True, slots=True)
class Cell:
    """What came of one trace at one size: hit rates and speeds by policy, `closing` among them
    where sessions end."""

    trace: str
    blocks: int
    optimum: float
    rates: Mapping[str, float]
    speeds: Mapping[str, float]

    @property
    def gap(self) -> float:
        return self.optimum - self.rates["lru"]

    @property
    def closed(self) -> float:
        """The share of the gap that `learned` closes."""
        return (self.rates["learned"] - self.rates["lru"]) / self.gap

    @property
    def line(self) -> str:
        classics = [(rate, name) for name, rate in self.rates.items() if name in CLASSICS]
        classic = "{:.4f} {:<8}".format(*max(classics)) if classics else "-"
        closing = f"{self.rates['closing']:.4f}" if "closing" in self.rates else "-"
        share = f"{self.closed:.0%}" if self.gap >= _LEAST_GAP else "-"
        return (
            f"{self.trace:<24} {self.blocks:>7} {self.rates['lru']:.4f} {classic:>15} "
            f"{self.rates['learned']:7.4f} {closing:>7} {self.optimum:.4f} {share:>6} "
            f"{self.speeds['lru']:9.0f} {self.speeds['learned']:9.0f}"
        )


def main() -> int:
    """Measure; 0 if every bar is met."""
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("traces", nargs="?", type=Path, default=os.environ.get("TIERD_TRACES"), metavar="TRACES")
    add("--only", metavar="WORD", default="", help="traces whose name has this word")
    add("--classics", metavar="P,..", default=",".join(CLASSICS), help="the policies beside it")
    add("--tiers", action="store_true", help="three tiers instead: admission and placement")
    add("--slow", action="store_true", help="the long traces, too")
    add("--coarse", type=int, default=1, metavar="N", help="N blocks as one, and so for sizes")
    add("--json", metavar="FILE", help="write one line a check; - for stdout")
    arguments = parser.parse_args()
    if arguments.traces is None:
        parser.error("name the folder of the traces, or set TIERD_TRACES")
    if arguments.tiers:
        return tiers(arguments.traces, arguments.only, arguments.json)
    classics = [name for name in arguments.classics.split(",") if name]
    chosen = {**CELLS, **(SLOW if arguments.slow else {})}
    report = BenchReport()
    with redirect_stdout(sys.stderr if arguments.json == "-" else sys.stdout):
        print(_HEAD)
        cells = []
        for name in (name for name in chosen if arguments.only in name):
            path = Path(arguments.traces) / f"{name}.jsonl.gz"
            for cell in measure(path, list(chosen[name]), classics, arguments.coarse):
                print(cell.line, flush=True)
                cells.append(cell)
        judge(report, cells, bars={} if arguments.coarse > 1 else chosen)
        share(report, cells, judged=not arguments.only)
        print(f"\n{report.table()}")
    if arguments.json:
        report.write(arguments.json)
    return 0 if report.ok else 1


def tiers(folder: Path, only: str, json_file: str | None) -> int:
    """Measure `bench_chain`'s cells; 0 if every bar is met."""
    report = BenchReport()
    with redirect_stdout(sys.stderr if json_file == "-" else sys.stdout):
        bench_chain.measure(report, Path(folder), only)
        print(f"\n{report.table()}")
    if json_file:
        report.write(json_file)
    return 0 if report.ok else 1


def measure(
    path: Path, sizes: Sequence[int], classics: Sequence[str], coarse: int
) -> Iterator[Cell]:
    """Every cell of one trace."""
    trace = Trace.read(path, coarse=coarse)
    closing = Trace.read(path, coarse=coarse, closing=True)
    optimum = Optimum(trace)
    for size in (size // coarse for size in sizes):
        runs = [(name, name, trace) for name in ("lru", "learned", *classics)]
        if any(request.hints.closed for request in closing.requests):
            runs.append(("closing", "learned", closing))
        rates, speeds = {}, {}
        for title, policy, requests in runs:
            rates[title], speeds[title] = replay(requests, policy, size)
        yield Cell(trace.name, size, optimum.hit_rate(size), rates, speeds)


def replay(trace: Trace, policy: str, size: int) -> tuple[float, float]:
    """The hit rate of one policy, and blocks asked for in a second of CPU."""
    one = Replay(trace, [TierPlan("device", size, plugins.policy(policy), {})])
    begin = time.process_time()
    for _ in one.run():
        pass
    seconds = time.process_time() - begin
    return one.result.hit_rate, one.result.num_accesses / seconds


def judge(
    report: BenchReport,
    cells: Sequence[Cell],
    bars: Mapping[str, Mapping[int, tuple[float | None, float | None]]],
) -> None:
    """Hold the cells against the bars."""
    for cell in cells:
        name = f"{cell.trace} {cell.blocks}"
        least, with_hint = bars.get(cell.trace, {}).get(cell.blocks, (None, None))
        floor = max(least or 0, cell.rates["lru"] - _BELOW)
        rates = (cell.rates["learned"], cell.rates["lru"])
        report.reaches(Figure(name, *rates, "hit rate", "LRU"), floor)
        if with_hint is not None and "closing" in cell.rates:
            closing = (cell.rates["closing"], cell.rates["learned"])
            report.reaches(Figure(f"{name}, closed", *closing, "hit rate", "no hint"), with_hint)
    for trace, (lru, learned) in SPEEDS.items():
        of = [cell for cell in cells if cell.trace == trace]
        for policy, bar in (("lru", lru), ("learned", learned)):
            if of and bars:
                slowest = min(cell.speeds[policy] for cell in of)
                figure = Figure(f"{trace}, {policy}", slowest, bar, "blocks/s", "its bar")
                report.reaches(figure, bar)


def share(report: BenchReport, cells: Sequence[Cell], *, judged: bool) -> None:
    """The mean share of the gap; a bar only for all traces together."""
    gaps = [c.closed for c in cells if c.gap >= _LEAST_GAP and c.trace != HELD_OUT]
    if gaps:
        figure = Figure(f"mean share of {len(gaps)} gaps", mean(gaps), 1.0, "", "MIN")
        if judged:
            report.reaches(figure, _SHARE)
        else:
            report.note(figure)


_HEAD = (
    f"{'trace':<24} {'blocks':>7} {'LRU':>6} {'best classic':>15} {'learned':>7} "
    f"{'closing':>7} {'MIN':>6} {'gap':>6} {'LRU/s':>9} {'learned/s':>9}"
)


if __name__ == "__main__":
    sys.exit(main())
