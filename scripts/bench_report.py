"""What a benchmark found: rows of ours beside a ceiling or a peer, and whether the bar is met.

The lines of `--json` are the demo's: check, ours, against, ratio, bar, ok. It measures nothing.
"""

from dataclasses import dataclass, field

from demo_report import Check, Report, columns

TITLES = ("what", "ours", "against", "", "ratio", "bar", "")


@dataclass(frozen=True, slots=True)
class Figure:
    """Something measured: `ours` and `against` in `unit`; `peer` says what the other one is.

    `ratio` is given where it is better known than by dividing two medians: measured in pairs.
    """

    what: str
    ours: float
    against: float
    unit: str
    peer: str
    ratio: float | None = None

    def compared(self) -> float:
        return self.ours / self.against if self.ratio is None else self.ratio


@dataclass(slots=True)
class BenchReport(Report):
    """Figures in the order in which they were found, each printed at once."""

    lines: list[tuple[str, ...]] = field(default_factory=list)

    def at_least(self, figure: Figure, bar: float) -> None:
        """More is better: the ratio must reach the bar."""
        self._compare(figure, f">= {bar:g}", figure.compared() >= bar)

    def ratio_at_most(self, figure: Figure, bar: float) -> None:
        """Less is better: the ratio must not exceed the bar."""
        self._compare(figure, f"<= {bar:g}", figure.compared() <= bar)

    def limit(self, figure: Figure, bar: float) -> None:
        """Less is better, and the bar is one for `ours` itself, whatever it stands beside."""
        self._compare(figure, f"<= {bar:g} {figure.unit}", figure.ours <= bar)

    def reaches(self, figure: Figure, bar: float) -> None:
        """More is better, and the bar is one for `ours` itself, whatever it stands beside."""
        self._compare(figure, f">= {bar:.4g}", figure.ours >= bar)

    def note(self, figure: Figure) -> None:
        """A figure without a bar: it helps to read another."""
        self._compare(figure, "", True)

    def skip(self, what: str, why: str) -> None:
        """A row that cannot be measured here, or not yet."""
        self._line((what, "-", "-", why, "-", "", "skipped"))

    def heading(self, text: str) -> None:
        print(f"\n{text}", flush=True)

    def _compare(self, figure: Figure, bar: str, ok: bool) -> None:
        ratio = round(figure.compared(), 3)
        ours, against = (float(f"{n:.4g}") for n in (figure.ours, figure.against))
        name = f"{figure.what}, {figure.unit} (against {figure.peer})"
        self.checks.append(Check(name, ours, against, ratio, bar or None, ok))
        verdict = ("ok" if ok else "MISSED") if bar else ""
        cells = (f"{ours:g} {figure.unit}", f"{against:g}", figure.peer, f"{ratio:.2f}", bar)
        self._line((figure.what, *cells, verdict))

    def _line(self, line: tuple[str, ...]) -> None:
        self.lines.append(line)
        print("  " + "  ".join(cell for cell in line if cell), flush=True)

    def table(self) -> str:
        return columns([TITLES, *self.lines], left=(0, 3, 6))
