"""The command line: `tierd serve`, `status`, `reload`, `config`, `inspect`, `verify`, `replay`,
`advise`.

It finds the command and reports errors: the user's are one line and exit status 2, a daemon that is
not there is 1. What a command is told, and does, is in `commands`.
"""

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from tierd.daemon.commands import advise, config, inspect, reload, replay, serve, status
from tierd.errors import DaemonLost, TierdError


class Command(NamedTuple):
    """What a command is for, how its arguments are added, and what runs it."""

    help: str
    add: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


COMMANDS: Mapping[str, Command] = {
    "serve": Command("run the daemon until SIGTERM", serve.add, serve.run),
    "status": Command("what the daemon holds, and for whom", status.add, status.run),
    "reload": Command("have the daemon read its configuration again", reload.add, reload.run),
    "config": Command("look at a configuration file", config.add, config.run),
    "inspect": Command("what a folder of the SSD tier holds", inspect.add, inspect.run),
    "verify": Command(
        "read and check every block of such a folder", inspect.add_verify, inspect.verify
    ),
    "replay": Command("what a cache would have made of a trace", replay.add, replay.run),
    "advise": Command("what would have served a trace best", advise.add, advise.run),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit status."""
    arguments = _parser().parse_args(argv)
    try:
        return COMMANDS[arguments.command].run(arguments)
    except DaemonLost as error:
        print(f"tierd: {error}", file=sys.stderr)
        return 1
    except (TierdError, OSError) as error:
        print(f"tierd: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="tierd", description=__doc__)
    parsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, command in COMMANDS.items():
        command.add(parsers.add_parser(name, help=command.help))
    return parser
