"""`tierd replay`: what a cache would have made of traces."""

import argparse
import sys
from pathlib import Path

from tierd.daemon.config import Config
from tierd.daemon.values import Size


def add(parser: argparse.ArgumentParser) -> None:
    """What it may be told."""
    add = parser.add_argument
    add("traces", type=Path, nargs="+", metavar="TRACE", help="lines of JSON, maybe gzip'ed")
    add("--config", type=Path, metavar="FILE", help="tierd.toml; default: defaults")
    add("--policy", type=_names, default=[], metavar="P,..", help="instead of the tiers' own")
    add("--sizes", type=_names, default=[], metavar="S,..", help="as 9139 (blocks), 40GiB/1TiB")
    add("--token-bytes", type=Size(1), default=None, metavar="N", help="of K and V; 128KiB")
    add("--coarse", type=int, default=1, metavar="M", help="M blocks as one")
    add("--closing", action="store_true", help="the last request of a session says that it is")
    add("--csv", type=Path, metavar="FILE", help="write one line a replay")
    add("--plot", type=Path, metavar="FILE", help="draw miss-ratio curves; needs matplotlib")


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def run(arguments: argparse.Namespace) -> int:
    """Replay, and print a table."""
    from tierd.daemon import lab, lab_report
    from tierd.daemon.trace import Trace

    closing, coarse = arguments.closing, arguments.coarse
    traces = [Trace.read(path, coarse=coarse, closing=closing) for path in arguments.traces]
    progress = sys.stderr if sys.stderr.isatty() else None
    nbytes = arguments.token_bytes or lab.TOKEN_NBYTES
    config = Config.load(arguments.config) if arguments.config else Config.default()
    replays = lab.Lab(config, arguments.policy, arguments.sizes, nbytes, progress)
    rows = list(replays.run(traces))
    print("\n".join(lab_report.table(rows)))
    if arguments.csv:
        lab_report.write_csv(rows, arguments.csv)
    if arguments.plot:
        lab_report.draw(rows, arguments.plot)
    return 0
