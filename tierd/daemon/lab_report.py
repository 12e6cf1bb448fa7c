"""What came of replays, for a person (a table, a picture) or a program (CSV).

It knows rows, and not how they came about.
"""

import csv
from collections.abc import Iterator, Sequence
from pathlib import Path

from tierd.daemon.lab import TIERS, Row
from tierd.errors import ConfigError


def table(rows: Sequence[Row]) -> Iterator[str]:
    """The rows for a person: rates in per cent of blocks, GiB between tiers."""
    head = f"{'trace':<24} {'policy':<10} {'blocks':>20} {'hit %':>6} "
    yield head + "device   host    ssd    MIN regret  blocks/s  GiB moved"
    for row in rows:
        rates = [100 * count / row.result.num_accesses for count in row.result.hits]
        levels = " ".join(f"{rate:6.2f}" for rate in rates) + "      -" * (len(TIERS) - len(rates))
        blocks = "/".join(map(str, row.capacities))
        moved = ", ".join(f"{route} {gib:.0f}" for route, gib in row.gib_moved.items())
        yield (
            f"{row.trace:<24} {row.policy:<10} {blocks:>20} {100 * row.result.hit_rate:6.2f} "
            f"{levels} {100 * row.optimum:6.2f} {100 * row.regret:6.2f} {row.result.speed:9.0f}  "
            f"{moved}"
        )


def write_csv(rows: Sequence[Row], path: Path) -> None:
    """One line a row."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0].facts()))
        writer.writeheader()
        writer.writerows(row.facts() for row in rows)


def draw(rows: Sequence[Row], path: Path) -> None:
    """Miss-ratio curves, a picture a trace below another. Raises ConfigError without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("a picture needs matplotlib, which is not installed") from error
    traces = list(dict.fromkeys(row.trace for row in rows))
    figure = Figure(figsize=(7, 4 * len(traces)), layout="constrained")
    for axes, trace in zip(figure.subplots(len(traces), squeeze=False)[:, 0], traces, strict=True):
        of = sorted((row for row in rows if row.trace == trace), key=lambda r: sum(r.capacities))
        for policy in dict.fromkeys(row.policy for row in of):
            mine = [row for row in of if row.policy == policy]
            sizes = [sum(row.capacities) for row in mine]
            axes.plot(sizes, [1 - row.result.hit_rate for row in mine], "o-", label=policy)
        sizes = [sum(row.capacities) for row in of]
        axes.plot(sizes, [1 - row.optimum for row in of], "k--", label="MIN")
        axes.set(title=trace, xscale="log", xlabel="blocks", ylabel="miss ratio of blocks")
        axes.legend()
    figure.savefig(path)
