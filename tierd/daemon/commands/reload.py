"""`tierd reload`: the daemon reads its configuration again, and says what differs."""

import argparse
import sys

from tierd.errors import ConfigError


def add(parser: argparse.ArgumentParser) -> None:
    """What it may be told."""
    parser.add_argument("--socket", metavar="PATH", help="where it listens")


def run(arguments: argparse.Namespace) -> int:
    """Have it reload and print what changed; 1 if the file is wrong, and nothing has changed."""
    from tierd.client import connect

    with connect(arguments.socket) as client:
        try:
            told = client.reload()
        except ConfigError as error:
            print(f"tierd: {error}; nothing has changed", file=sys.stderr)
            return 1
    for changes, when in (("changed", ""), ("needs_restart", " (after a restart)")):
        for change in told[changes]:
            print(f"{change['key']}: {change['old'] or '-'} -> {change['new'] or '-'}{when}")
    print(f"{told['path']} is in force")
    return 0
