"""`tierd serve`: the daemon itself, until SIGTERM."""

import argparse
import logging
import sys
from pathlib import Path

from tierd.daemon.config import Config


def add(parser: argparse.ArgumentParser) -> None:
    """What it may be told."""
    parser.add_argument("--config", type=Path, metavar="FILE", help="tierd.toml; default: defaults")
    parser.add_argument("--verbose", action="store_true", help="log more")


def run(arguments: argparse.Namespace) -> int:
    """Serve."""
    from tierd.daemon.server import run as serve

    level = logging.DEBUG if arguments.verbose else logging.INFO
    logging.basicConfig(
        level=level, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr
    )
    logging.getLogger("asyncio").setLevel(logging.WARNING)
    config = Config.load(arguments.config) if arguments.config else Config.default()
    serve(config, arguments.config)
    return 0
