"""What came of replays, for a person (a table) or a program (CSV).

It knows rows, and not how they came about.
"""

import csv
from collections.abc import Iterator, Sequence
from pathlib import Path

from tierd.daemon.lab import TIERS, Row


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
