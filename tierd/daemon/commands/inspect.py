"""`tierd inspect` and `tierd verify`: a folder of the SSD tier, while no daemon runs."""

import argparse
import json
import sys
from pathlib import Path


def add(parser: argparse.ArgumentParser) -> None:
    """What `inspect` may be told."""
    parser.add_argument("--blocks", action="store_true", help="every block, too")
    add_verify(parser)


def add_verify(parser: argparse.ArgumentParser) -> None:
    """What `verify` may be told."""
    parser.add_argument("path", type=Path, metavar="PATH", help="ssd.path, or a tenant's part")
    parser.add_argument("--json", action="store_true", help="as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Print what the folder holds."""
    from tierd.daemon import inspect

    with inspect.surveys(arguments.path) as found:
        volumes = [inspect.facts(survey, blocks=arguments.blocks) for survey in found]
    lines = [line for volume in volumes for line in inspect.report(volume)]
    print(json.dumps(volumes, indent=2) if arguments.json else "\n".join(lines))
    return 0


def verify(arguments: argparse.Namespace) -> int:
    """Read and check every block; 1 if any is damaged."""
    from tierd.daemon import inspect

    with inspect.surveys(arguments.path) as found:
        result = inspect.verify(found, sys.stderr)
    if arguments.json:
        print(json.dumps(result, indent=2))
    else:
        for damage in result["damaged"]:
            print(inspect.describe(damage))
    return 1 if result["damaged"] else 0
