"""`tierd config`: look at a configuration file, and at what it comes to."""

import argparse
import json
from pathlib import Path
from typing import Any

from tierd.daemon.config import Config, describe
from tierd.errors import ConfigError, DaemonLost


def add(parser: argparse.ArgumentParser) -> None:
    """Its verbs, and what each may be told."""
    verbs = parser.add_subparsers(required=True, metavar="VERB")
    check = verbs.add_parser("check", help="check FILE and print what it says in full")
    check.add_argument("file", type=Path, metavar="FILE")
    check.set_defaults(verb=_check)
    explain = verbs.add_parser("explain", help="which block sizes would be chosen, and why")
    explain.add_argument(
        "--config", type=Path, metavar="FILE", help="tierd.toml; default: defaults"
    )
    explain.add_argument("--socket", metavar="PATH", help="where a daemon listens, if one runs")
    explain.add_argument("--layout", metavar="JSON", help="of a model, as text or in a file")
    explain.add_argument("--model", metavar="NAME", help="only the attached one of that name")
    explain.add_argument("--json", action="store_true", help="everything, as JSON")
    explain.set_defaults(verb=_explain)


def run(arguments: argparse.Namespace) -> int:
    """Do what the verb says."""
    return int(arguments.verb(arguments))


def _check(arguments: argparse.Namespace) -> int:
    print(describe(Config.load(arguments.file)), end="")
    return 0


def _explain(arguments: argparse.Namespace) -> int:
    from tierd.daemon import explain

    config = Config.load(arguments.config) if arguments.config else Config.default()
    tenants = _tenants(arguments.socket or config.socket, needed=not arguments.layout)
    found = [
        (explain.explain(layout, config, tenant), tenant)
        for tenant in tenants
        for layout in explain.layouts(arguments.layout, arguments.model, tenant)
    ]
    if not found:
        raise ConfigError("no layout to explain: none is attached under that name; see --layout")
    if arguments.json:
        print(json.dumps([explained.to_json() for explained, _ in found], indent=2))
    else:
        parts = ("\n".join(explain.report(e, config, tenant)) for e, tenant in found)
        print("\n\n".join(parts))
    return 0


def _tenants(path: str | Path, needed: bool) -> list[dict[str, Any] | None]:
    """The status of each tenant of the daemon there; of one unknown if none runs."""
    from tierd.client import connect

    try:
        with connect(path) as client:
            return list(client.status()["tenants"])
    except DaemonLost:
        if needed:
            raise
        return [None]
