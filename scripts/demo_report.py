"""What the demo found: a table of times, and a list of checks that either hold or do not.

It prints and counts; it measures nothing.
"""

import json
import sys
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Row:
    """One way to the first token, beside stock's own on the same prompt in the same process."""

    name: str
    hit: int  # tokens
    tier: str  # that served the hit
    wall: float
    cpu: float
    daemon_cpu: float
    stock_wall: float
    stock_cpu: float
    equal: bool
    nbytes: list[int]  # in each tier, afterwards

    @property
    def speedup(self) -> float:
        return self.stock_wall / self.wall


@dataclass(frozen=True, slots=True)
class Check:
    """`ours` against `against`; where a bar is given, it is one for their ratio."""

    check: str
    ours: Any
    against: Any
    ratio: float | None
    bar: Any
    ok: bool


@dataclass(slots=True)
class Report:
    """Rows and checks in the order in which they were found; checks are printed at once."""

    rows: list[Row] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)

    def row(self, row: Row) -> None:
        """Add a row; that its tokens are stock's is a check."""
        self.rows.append(row)
        self.equal(f"{row.name}: tokens", "equal" if row.equal else "different", "equal")

    def equal(self, name: str, ours: Any, expected: Any) -> None:
        """`ours` must be what is expected."""
        self._add(Check(name, ours, expected, None, "equal", ours == expected))

    def at_most(self, name: str, ours: float, bar: float, unit: str = "s") -> None:
        """`ours` must not exceed the bar."""
        ours = round(ours, 3)
        self._add(Check(f"{name}, {unit}", ours, bar, None, bar, ours <= bar))

    def faster(self, row: Row, bar: float) -> None:
        """A row's first token must come that much sooner than stock's."""
        ratio = round(row.speedup, 2)
        ours, stock = round(row.wall * 1e3, 1), round(row.stock_wall * 1e3, 1)
        name = f"{row.name}: time to first token, ms"
        self._add(Check(name, ours, stock, ratio, bar, ratio >= bar))

    def _add(self, check: Check) -> None:
        self.checks.append(check)
        text = f"{'ok  ' if check.ok else 'FAIL'} {check.check}: {check.ours}"
        if check.ratio is not None:
            text += f", stock {check.against}: {check.ratio}x, at least {check.bar}x wanted"
        elif check.bar != "equal":
            text += f", at most {check.bar} wanted"
        elif not check.ok:
            text += f", {check.against} expected"
        print(f"  {text}", flush=True)

    def table(self) -> str:
        """Times in milliseconds, bytes in MiB."""
        titles = ("time to first token", "hit", "from", "wall ms", "CPU ms", "daemon CPU", "stock",
                  "stock CPU", "speed-up", "tokens", "device", "host", "ssd MiB")  # fmt: skip
        lines = [titles]
        for row in self.rows:
            ms = (row.wall, row.cpu, row.daemon_cpu, row.stock_wall, row.stock_cpu)
            times = [f"{value * 1e3:.0f}" for value in ms]
            tiers = [f"{nbytes / (1 << 20):.0f}" for nbytes in row.nbytes]
            equal = "equal" if row.equal else "DIFFER"
            lines.append(
                (row.name, str(row.hit), row.tier, *times, f"{row.speedup:.1f}x", equal, *tiers)
            )
        return columns(lines, left=(0, 2))

    def write(self, path: str) -> None:
        """One JSON object a line and check, to a file or, for "-", to standard output."""
        text = "".join(json.dumps(asdict(check)) + "\n" for check in self.checks)
        if path == "-":
            sys.stdout.write(text)
        else:
            Path(path).write_text(text)

    @property
    def ok(self) -> bool:
        return all(check.ok for check in self.checks)


def columns(lines: Sequence[Sequence[str]], left: Collection[int]) -> str:
    """Lines as a table, the first being its titles; the columns in `left` go to the left."""
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    text = [
        "  ".join(
            cell.ljust(width) if i in left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    ]
    return "\n".join([text[0], "-" * len(text[0]), *text[1:]])
