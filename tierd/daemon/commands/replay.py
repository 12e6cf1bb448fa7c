"""`tierd replay`: what a cache would have made of traces."""

import argparse
import sys
from pathlib import Path

from tierd.daemon.config import Config
from tierd.daemon.trace import Trace
from tierd.daemon.values import Size
from tierd.errors import ConfigError


def add(parser: argparse.ArgumentParser) -> None:
    """What it may be told."""
    add = parser.add_argument
    add_trace(parser, "traces", nargs="+")
    add("--config", type=Path, metavar="FILE", help="tierd.toml; default: defaults")
    add("--policy", type=names, default=[], metavar="P,..", help="instead of the tiers' own")
    add("--sizes", type=names, default=[], metavar="S,..", help="as 9139 (blocks), 40GiB/1TiB")
    add("--closing", action="store_true", help="the last request of a session says that it is")
    add("--csv", type=Path, metavar="FILE", help="write one line a replay")
    add("--curve", type=Path, metavar="FILE", help="miss-ratio curves as FILE.png and FILE.csv")


def add_trace(parser: argparse.ArgumentParser, name: str, nargs: str | None = None) -> None:
    """What says which trace is read, and how."""
    add = parser.add_argument
    what = "a recording's folder, or lines of JSON, maybe gzip'ed"
    add(name, type=Path, nargs=nargs, metavar="TRACE", help=what)
    add("--model", metavar="NAME", help="whose requests of a recording, as [TENANT/]NAME")
    add("--block-size", type=int, metavar="N", help="tokens: a multiple of the trace's own")
    add("--token-bytes", type=Size(1), metavar="N", help="of K and V; the trace's own, or 128KiB")


def read(path: Path, arguments: argparse.Namespace, *, closing: bool = False) -> Trace:
    """The trace at `path`, as it was asked for."""
    trace = Trace.read(path, closing=closing, model=arguments.model)
    if (size := arguments.block_size) is None:
        return trace
    times, rest = divmod(size, trace.block_size)
    if rest or times < 1:
        raise ConfigError(f"--block-size {size} is no multiple of the trace's {trace.block_size}")
    return trace.coarser(times)


def names(text: str) -> list[str]:
    """The words between commas."""
    return [name.strip() for name in text.split(",") if name.strip()]


def run(arguments: argparse.Namespace) -> int:
    """Replay, and print a table; or compute curves, and write them."""
    from tierd.daemon import curves, lab, lab_report

    traces = [read(path, arguments, closing=arguments.closing) for path in arguments.traces]
    config = Config.load(arguments.config) if arguments.config else Config.default()
    progress = sys.stderr if sys.stderr.isatty() else None
    replays = lab.Lab(config, arguments.policy, arguments.sizes, arguments.token_bytes, progress)
    if arguments.curve:
        found = list(curves.points(traces, replays))
        curves.write_csv(found, arguments.curve.with_suffix(".csv"))
        curves.draw(found, arguments.curve.with_suffix(".png"))
        if not arguments.sizes:
            return 0
    rows = list(replays.run(traces))
    print("\n".join(lab_report.table(rows)))
    if arguments.csv:
        lab_report.write_csv(rows, arguments.csv)
    return 0
