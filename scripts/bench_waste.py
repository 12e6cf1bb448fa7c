"""What block sizes waste on models with sliding windows: bytes that are held and not needed.

Arithmetic over lengths of requests, by the daemon's own rules: a block takes whole pages, and a
group with a window holds the blocks that its window touches. It runs no daemon.
"""

import argparse
import random
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from math import log
from pathlib import Path

from bench_granule import trace
from bench_report import BenchReport, Figure

from policies.base import SizingFacts
from policies.block_size import Auto
from tierd.daemon import sizing
from tierd.daemon.lengths import Lengths
from tierd.daemon.match import first_block
from tierd.layout import KVLayout

MIB = 1 << 20
SMALL = 16  # tokens a block
AUTO = "a size for each kind of layers, auto"
UNIFORM = f"one size for all, {SMALL} tokens"
AS_MANY = "one size for all, about as many blocks"
PADDED = f"one page size for all, {SMALL} tokens"
WHOLE = f"windows kept whole, {SMALL} tokens"


def _gemma(layers: int, heads: int, dim: int, window: int) -> KVLayout:
    """Five layers with a window to one with full attention, as Gemma 3 has them."""
    windows = tuple(None if layer % 6 == 5 else window for layer in range(layers))
    return KVLayout("gemma", layers, heads, dim, "bfloat16", windows=windows)


MODELS = {
    "Gemma 3 270M": _gemma(18, 1, 256, 512),
    "Gemma 3 1B": _gemma(26, 1, 256, 512),
    "Gemma 3 27B": _gemma(62, 16, 128, 1024),
}
EVEN = random.Random(1).choices(range(64, 8192), k=1000)


@dataclass(frozen=True, slots=True)
class Holding:
    """What requests hold, all at once and sharing nothing: blocks, and their bytes."""

    blocks: int
    nbytes: int


def waste(layout: KVLayout, lengths: Sequence[int]) -> dict[str, int]:
    """Bytes that requests of `lengths` hold beyond the K and V they need, by how sizes are chosen.

    Groups and granule of `layout` do not count.
    """
    need = needed(layout, lengths)
    return {scheme: held.nbytes - need for scheme, held in holdings(layout, lengths).items()}


def holdings(layout: KVLayout, lengths: Sequence[int]) -> dict[str, Holding]:
    """What requests of `lengths` hold, by how sizes are chosen."""
    plain, seen = replace(layout, groups=(), granule=0), Lengths()
    for length in lengths:
        seen.add(length)
    facts = SizingFacts(seen.counts(), [sizing.SSD, sizing.MEMORY])
    auto = _hold(sizing.choose(plain, Auto(), facts), lengths)
    uniform = [_hold(_one_size(plain, size), lengths) for size in (16, 32, 64, 128, 256, 512)]
    small = _one_size(plain, SMALL)
    return {
        AUTO: auto,
        UNIFORM: _hold(small, lengths),
        AS_MANY: min(uniform, key=lambda held: abs(log(held.blocks / auto.blocks))),
        PADDED: _hold(small, lengths, pad=max),
        WHOLE: _hold(_one_size(replace(plain, windows=()), SMALL), lengths),
    }


def needed(layout: KVLayout, lengths: Sequence[int]) -> int:
    """Bytes of K and V that attention still reads of requests so long."""
    return sum(
        shape.nbytes_per_token * min(length, shape.window or length)
        for shape in sizing.shapes_of(layout)
        for length in lengths
    )


def _one_size(layout: KVLayout, size: int) -> KVLayout:
    return layout.with_block_sizes([size] * layout.num_layers)


def _hold(
    layout: KVLayout, lengths: Sequence[int], pad: Callable[[Sequence[int]], int] | None = None
) -> Holding:
    """`pad`: what a block of every group takes, of what each would take by itself."""
    nbytes = [layout.block_nbytes(group) for group in range(len(layout.groups))]
    if pad:
        nbytes = [pad(nbytes)] * len(nbytes)
    blocks = [
        sum(
            -(-length // group.block_size)
            - first_block(length, layout.window(index), group.block_size)
            for length in lengths
        )
        for index, group in enumerate(layout.groups)
    ]
    return Holding(sum(blocks), sum(n * size for n, size in zip(blocks, nbytes, strict=True)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", metavar="FILE", help="write one line a figure; - for stdout")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="lengths: .jsonl.gz or .csv.gz")
    arguments = parser.parse_args()
    lengths = trace(arguments.trace) if arguments.trace else EVEN
    with redirect_stdout(sys.stderr if arguments.json == "-" else sys.stdout):
        report = BenchReport()
        for name, layout in MODELS.items():
            measure(report, name, layout, lengths)
        print(f"\n{report.table()}")
    if arguments.json:
        report.write(arguments.json)
    return 0


def measure(report: BenchReport, name: str, layout: KVLayout, lengths: Sequence[int]) -> None:
    """Each way's waste beside the bytes that are needed, of a request."""
    report.heading(f"Bytes held and not needed, a request: {name}")
    each = len(lengths) * MIB
    need, wasted = needed(layout, lengths), waste(layout, lengths)
    for scheme, held in holdings(layout, lengths).items():
        what = f"{name}: {scheme} ({held.blocks / len(lengths):.0f} blocks)"
        report.note(Figure(what, wasted[scheme] / each, need / each, "MiB", "needed"))


if __name__ == "__main__":
    raise SystemExit(main())
