"""What admission and placement make of three tiers, on real traces: hits, and bytes moved.

Read `CELLS`: it is the list, and `BARS` what the defaults must reach. Every combination goes
through the production cache.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench_report import BenchReport, Figure

from tierd.daemon.config import Config
from tierd.daemon.lab import Lab, Row
from tierd.daemon.trace import Trace


@dataclass(frozen=True, slots=True)
class Choice:
    """The policies of one replay: eviction in every tier, admission to the SSD, placement."""

    policy: str = "lru"
    admission: str = "learned"
    placement: str = "inclusive"

    def __str__(self) -> str:
        return f"{self.policy}, {self.admission}, {self.placement}"


DEFAULT, EVERYTHING = Choice(), Choice(admission="all")
CHOICES = (
    EVERYTHING,
    Choice(admission="second-hit"),
    DEFAULT,
    Choice(placement="write-through"),
    Choice(policy="learned"),
)
PLACES = (DEFAULT, Choice(placement="exclusive"))


@dataclass(frozen=True, slots=True)
class Cell:
    """One trace at one size; `coarse` blocks of it are one."""

    trace: str
    sizes: str
    choices: Sequence[Choice]
    coarse: int = 1


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a replay: blocks missed in per cent, GiB moved down."""

    miss: float
    to_host: float
    to_ssd: float


CELLS = (
    Cell("mooncake_conversation", "40GiB/200GiB/2TiB", CHOICES),
    Cell("ragpulse_days1-4", "4GiB/20GiB/200GiB", CHOICES),
    Cell("claude_code_71", "40GiB/200GiB/1TiB", CHOICES, coarse=8),
    Cell("claude_code_71", "40GiB/200GiB/1TiB", (EVERYTHING, DEFAULT)),
    # Nothing was chosen on this one.
    Cell("claude_code_shared_227", "40GiB/200GiB/1TiB", CHOICES[:3], coarse=8),
    # Host tiers that are no larger than the device tier.
    Cell("mooncake_conversation", "200GiB/200GiB/2TiB", PLACES),
    Cell("claude_code_71", "100GiB/100GiB/1TiB", PLACES, coarse=8),
)
# At most so much, by trace and blocks made one: of the cells that have the defaults and everything.
BARS: Mapping[tuple[str, int], Outcome] = {
    ("mooncake_conversation", 1): Outcome(65.4, float("inf"), 11_800),
    ("ragpulse_days1-4", 1): Outcome(68.2, float("inf"), 20),
    ("claude_code_71", 1): Outcome(9.9, 2500, 2200),
}
_HEAD = (
    f"{'trace':<22} {'tokens':>6} {'sizes':>18}  {'eviction, admission, placement':<34} "
    "device   host    ssd   miss  device>host  host>ssd   ssd>"
)


def measure(report: BenchReport, folder: Path, only: str) -> None:
    """Every cell whose trace has the word `only`; the bars are checked in `report`."""
    print(_HEAD)
    for cell in (cell for cell in CELLS if only in cell.trace):
        trace = Trace.read(folder / f"{cell.trace}.jsonl.gz", coarse=cell.coarse)
        found = {choice: _replay(trace, cell, choice) for choice in cell.choices}
        if DEFAULT in found and EVERYTHING in found:
            _judge(report, cell, found[DEFAULT], found[EVERYTHING])


def _replay(trace: Trace, cell: Cell, choice: Choice) -> Outcome:
    lab = Lab(
        Config.default(),
        [choice.policy],
        [cell.sizes],
        progress=sys.stderr if sys.stderr.isatty() else None,
        admission=choice.admission,
        placement=choice.placement,
    )
    (row,) = lab.run([trace])
    hits = [100 * count / row.result.num_accesses for count in row.result.hits]
    outcome = Outcome(100 - sum(hits), _moved(row, 0, 1), _moved(row, 0, 2) + _moved(row, 1, 2))
    read = _moved(row, 2, 0) + _moved(row, 2, 1)
    rates = " ".join(f"{rate:6.2f}" for rate in (*hits, outcome.miss))
    print(
        f"{trace.name:<22} {trace.block_size:>6} {cell.sizes:>18}  {choice!s:<34} {rates} "
        f"{outcome.to_host:12,.0f} {outcome.to_ssd:9,.0f} {read:6,.0f}",
        flush=True,
    )
    return outcome


def _moved(row: Row, src: int, dst: int) -> float:
    return row.result.moved.get((src, dst), 0) * row.block_nbytes / 2**30


def _judge(report: BenchReport, cell: Cell, ours: Outcome, everything: Outcome) -> None:
    bar = BARS.get((cell.trace, cell.coarse))
    for what, unit in (("miss", "%"), ("to_host", "GiB"), ("to_ssd", "GiB")):
        label = {"miss": "missed", "to_host": "device>host", "to_ssd": "written to SSD"}[what]
        values = getattr(ours, what), getattr(everything, what)
        figure = Figure(f"{cell.trace} {cell.sizes}, {label}", *values, unit, "admission all")
        if bar is not None and getattr(bar, what) < float("inf"):
            report.limit(figure, getattr(bar, what))
        else:
            report.note(figure)
