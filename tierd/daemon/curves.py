"""Miss-ratio curves: what each policy misses of a trace, by how much one tier holds.

LRU's is exact, from one pass, and so is the optimum's; others are replayed at a few sizes.
"""

import csv
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tierd.daemon.distances import StackDistances
from tierd.daemon.lab import Lab
from tierd.daemon.optimum import Optimum
from tierd.daemon.trace import Trace
from tierd.errors import ConfigError

OPTIMUM = "MIN"
_FINE, _COARSE = 64, 8  # sizes
_RANGE = 1000  # from such a part of all blocks to all of them


@dataclass(frozen=True, slots=True)
class Point:
    """One policy at one size."""

    trace: str
    policy: str
    blocks: int
    nbytes: int
    miss_ratio: float


def points(traces: Sequence[Trace], lab: Lab) -> Iterator[Point]:
    """The curves of the lab's policies, of LRU and of the optimum; progress is the lab's."""
    for trace in traces:
        nbytes = trace.block_size * lab.token_nbytes_of(trace)
        unique = max(first + count for request in trace.requests for first, count in request.runs)
        fine, distances, optimum = _sizes(unique, _FINE), StackDistances(trace), Optimum(trace)
        for policy, hit_rate in (("lru", distances.hit_rate), (OPTIMUM, optimum.hit_rate)):
            for size in fine:
                yield Point(trace.name, policy, size, size * nbytes, 1 - hit_rate(size))
        others = [policy for policy in lab.policies if policy != "lru"]
        if others:
            sizes = [str(size) for size in _sizes(unique, _COARSE)]
            for row in replace(lab, policies=others, sizes=sizes).run([trace]):
                (size,) = row.capacities
                miss = 1 - row.result.hit_rate
                yield Point(trace.name, row.policy, size, size * nbytes, miss)


def write_csv(found: Sequence[Point], path: Path) -> None:
    """One line a point."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["trace", "policy", "blocks", "bytes", "miss_ratio"])
        for point in found:
            rate = round(point.miss_ratio, 6)
            writer.writerow([point.trace, point.policy, point.blocks, point.nbytes, rate])


def draw(found: Sequence[Point], path: Path) -> None:
    """One picture, the traces below each other. Raises ConfigError without matplotlib, or if it
    does not know the kind of file."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("a picture needs matplotlib, which is not installed") from error
    traces = list(dict.fromkeys(point.trace for point in found))
    figure = Figure(figsize=(7, 4 * len(traces)), layout="constrained")
    for axes, trace in zip(figure.subplots(len(traces), squeeze=False)[:, 0], traces, strict=True):
        of = [point for point in found if point.trace == trace]
        for policy in dict.fromkeys(point.policy for point in of):
            mine = sorted((p.nbytes / 2**30, p.miss_ratio) for p in of if p.policy == policy)
            style = "k--" if policy == OPTIMUM else "-" if policy == "lru" else "o-"
            axes.plot(*zip(*mine, strict=True), style, markersize=3, label=policy)
        axes.set(title=trace, xscale="log", xlabel="GiB in one tier", ylabel="miss ratio of blocks")
        axes.set_ylim(0, 1)
        axes.grid(alpha=0.3)
        axes.legend()
    try:
        figure.savefig(path)
    except ValueError as error:
        raise ConfigError(f"{path}: cannot be drawn: {error}") from error


def _sizes(unique: int, count: int) -> list[int]:
    """Numbers of blocks up to `unique`, each so many times the one before."""
    low = max(1, unique // _RANGE)
    steps = (low * (unique / low) ** (at / (count - 1)) for at in range(count))
    return sorted({round(size) for size in steps})
