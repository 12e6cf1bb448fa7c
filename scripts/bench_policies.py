"""How much of what LRU misses the learned policy gets, on real traces, beside the classic ones.

Read `CELLS`: it is the list. A cell is a trace and a number of blocks; every policy goes through it
in the production cache, so that the speeds are those of deciding. The share of a gap is
(learned - LRU) / (MIN - LRU); a cell whose gap is below half a point says nothing.
"""

import argparse
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from statistics import mean
from typing import Any

import bench_chain
from bench_report import BenchReport

from tierd.daemon.config import Config
from tierd.daemon.lab import Lab, Row
from tierd.daemon.trace import Trace

CELLS: Mapping[str, Sequence[int]] = {
    "mooncake_conversation": (3655, 9139, 18279),
    "ragpulse_days1-4": (133, 1334),
    "claude_code_71": (6323, 15808, 31617, 63235),
}
SLOW: Mapping[str, Sequence[int]] = {"claude_code_426": (21301, 106509)}
CLASSICS = ("arc", "lru2", "slru", "lfu", "sieve", "s3fifo", "wtinylfu", "gdsf", "fifo")
_LEAST_GAP = 0.005


def main() -> int:
    """Measure; 0 if the learned policy is nowhere 0.2 point below LRU."""
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("traces", nargs="?", type=Path, default=os.environ.get("TIERD_TRACES"), metavar="TRACES")
    add("--only", metavar="WORD", default="", help="traces whose name has this word")
    add("--classics", metavar="P,..", default=",".join(CLASSICS), help="the policies beside it")
    add("--tiers", action="store_true", help="three tiers instead: admission and placement")
    add("--slow", action="store_true", help="the long trace, too")
    add("--json", metavar="FILE", help="write one line a cell; - for stdout")
    arguments = parser.parse_args()
    if arguments.traces is None:
        parser.error("name the folder of the traces, or set TIERD_TRACES")
    if arguments.tiers:
        return tiers(arguments.traces, arguments.only, arguments.json)
    classics = [name for name in arguments.classics.split(",") if name]
    cells = {**CELLS, **(SLOW if arguments.slow else {})}
    found = []
    with redirect_stdout(sys.stderr if arguments.json == "-" else sys.stdout):
        print(_head())
        for name in (name for name in cells if arguments.only in name):
            for facts in measure(
                Path(arguments.traces) / f"{name}.jsonl.gz", cells[name], classics
            ):
                print(_line(facts), flush=True)
                found.append(facts)
        gaps = [f["gap_closed"] for f in found if f["gap"] >= _LEAST_GAP]
        if gaps:
            print(f"mean share of the gap closed over {len(gaps)} cells: {mean(gaps):.1%}")
    if arguments.json:
        text = "".join(json.dumps(facts) + "\n" for facts in found)
        sys.stdout.write(text) if arguments.json == "-" else Path(arguments.json).write_text(text)
    return 0 if all(f["learned"] > f["lru"] - 0.002 for f in found) else 1


def tiers(folder: Path, only: str, json_file: str | None) -> int:
    """Measure `bench_chain`'s cells; 0 if every bar is met."""
    report = BenchReport()
    with redirect_stdout(sys.stderr if json_file == "-" else sys.stdout):
        bench_chain.measure(report, Path(folder), only)
        print(f"\n{report.table()}")
    if json_file:
        report.write(json_file)
    return 0 if report.ok else 1


def measure(path: Path, sizes: Sequence[int], classics: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Every cell of one trace, as flat facts."""
    plain, closing = Trace.read(path), Trace.read(path, closing=True)
    knows_ends = any(request.hints.closed for request in closing.requests)
    for size in sizes:
        rows = {row.policy: row for row in _rows(plain, size, ("lru", "learned", *classics))}
        lru, learned = rows.pop("lru"), rows.pop("learned")
        facts: dict[str, Any] = {
            "trace": plain.name,
            "blocks": size,
            "lru": lru.result.hit_rate,
            "learned": learned.result.hit_rate,
            "min": lru.optimum,
            "gap": lru.regret,
            "gap_closed": (learned.result.hit_rate - lru.result.hit_rate) / lru.regret,
            "lru_blocks_per_second": lru.result.speed,
            "learned_blocks_per_second": learned.result.speed,
            **{name: row.result.hit_rate for name, row in rows.items()},
        }
        if rows:
            facts["best_classic"] = max(rows, key=lambda name: rows[name].result.hit_rate)
        if knows_ends:
            (row,) = _rows(closing, size, ["learned"])
            facts["learned_closing"] = row.result.hit_rate
        yield facts


def _rows(trace: Trace, size: int, policies: Sequence[str]) -> Iterator[Row]:
    progress = sys.stderr if sys.stderr.isatty() else None
    return Lab(Config.default(), policies, [str(size)], progress=progress).run([trace])


def _head() -> str:
    return (
        f"{'trace':<24} {'blocks':>7} {'LRU':>6} {'best classic':>15} {'learned':>7} "
        f"{'closing':>7} {'MIN':>6} {'gap':>6} {'LRU/s':>9} {'learned/s':>9}"
    )


def _line(facts: dict[str, Any]) -> str:
    best = facts.get("best_classic")
    classic = f"{facts[best]:.4f} {best:<8}" if best else "-"
    closing = f"{facts['learned_closing']:.4f}" if "learned_closing" in facts else "-"
    share = f"{facts['gap_closed']:.0%}" if facts["gap"] >= _LEAST_GAP else "-"
    return (
        f"{facts['trace']:<24} {facts['blocks']:>7} {facts['lru']:.4f} {classic:>15} "
        f"{facts['learned']:7.4f} {closing:>7} {facts['min']:.4f} {share:>6} "
        f"{facts['lru_blocks_per_second']:9.0f} {facts['learned_blocks_per_second']:9.0f}"
    )


if __name__ == "__main__":
    sys.exit(main())
