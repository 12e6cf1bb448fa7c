"""The command line: `tierd serve`, `status`, `config`, `inspect`, `verify`, `replay`.

It parses words and prints; what it prints comes from the daemon or the configuration. Errors of
the user's are one line and exit status 2, a daemon that is not there is 1.
"""

import argparse
import json
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tierd.daemon.config import Config, describe
from tierd.daemon.values import Size
from tierd.errors import ConfigError, DaemonLost, TierdError


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit status."""
    arguments = _parser().parse_args(argv)
    try:
        return int(arguments.run(arguments))
    except DaemonLost as error:
        print(f"tierd: {error}", file=sys.stderr)
        return 1
    except (TierdError, OSError) as error:
        print(f"tierd: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="tierd", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    serve = commands.add_parser("serve", help="run the daemon until SIGTERM")
    serve.add_argument("--config", type=Path, metavar="FILE", help="tierd.toml; default: defaults")
    serve.add_argument("--verbose", action="store_true", help="log more")
    serve.set_defaults(run=_serve)
    status = commands.add_parser("status", help="what the daemon holds, and for whom")
    status.add_argument("--socket", metavar="PATH", help="where it listens")
    status.add_argument("--json", action="store_true", help="everything, as JSON")
    status.set_defaults(run=_status)
    reload = commands.add_parser("reload", help="have the daemon read its configuration again")
    reload.add_argument("--socket", metavar="PATH", help="where it listens")
    reload.set_defaults(run=_reload)
    config = commands.add_parser("config", help="look at a configuration file")
    verbs = config.add_subparsers(required=True, metavar="VERB")
    check = verbs.add_parser("check", help="check FILE and print what it says in full")
    check.add_argument("file", type=Path, metavar="FILE")
    check.set_defaults(run=_check)
    explain = verbs.add_parser("explain", help="which block sizes would be chosen, and why")
    explain.add_argument(
        "--config", type=Path, metavar="FILE", help="tierd.toml; default: defaults"
    )
    explain.add_argument("--socket", metavar="PATH", help="where a daemon listens, if one runs")
    explain.add_argument("--layout", metavar="JSON", help="of a model, as text or in a file")
    explain.add_argument("--model", metavar="NAME", help="only the attached one of that name")
    explain.add_argument("--json", action="store_true", help="everything, as JSON")
    explain.set_defaults(run=_explain)
    inspect = commands.add_parser("inspect", help="what a folder of the SSD tier holds")
    inspect.add_argument("--blocks", action="store_true", help="every block, too")
    inspect.set_defaults(run=_inspect)
    verify = commands.add_parser("verify", help="read and check every block of such a folder")
    verify.set_defaults(run=_verify)
    for offline in (inspect, verify):
        offline.add_argument("path", type=Path, metavar="PATH", help="ssd.path, or a tenant's part")
        offline.add_argument("--json", action="store_true", help="as JSON")
    _add_replay(commands.add_parser("replay", help="what a cache would have made of a trace"))
    return parser


def _add_replay(replay: argparse.ArgumentParser) -> None:
    add = replay.add_argument
    add("traces", type=Path, nargs="+", metavar="TRACE", help="lines of JSON, maybe gzip'ed")
    add("--config", type=Path, metavar="FILE", help="tierd.toml; default: defaults")
    add("--policy", type=_names, default=[], metavar="P,..", help="instead of the tiers' own")
    add("--sizes", type=_names, default=[], metavar="S,..", help="as 9139 (blocks), 40GiB/1TiB")
    add("--token-bytes", type=Size(1), default=None, metavar="N", help="of K and V; 128KiB")
    add("--coarse", type=int, default=1, metavar="M", help="M blocks as one")
    add("--closing", action="store_true", help="the last request of a session says that it is")
    add("--csv", type=Path, metavar="FILE", help="write one line a replay")
    add("--plot", type=Path, metavar="FILE", help="draw miss-ratio curves; needs matplotlib")
    replay.set_defaults(run=_replay)


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _config(path: Path | None) -> Config:
    return Config.load(path) if path else Config.default()


def _serve(arguments: argparse.Namespace) -> int:
    from tierd.daemon.server import run

    level = logging.DEBUG if arguments.verbose else logging.INFO
    logging.basicConfig(
        level=level, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr
    )
    logging.getLogger("asyncio").setLevel(logging.WARNING)
    run(_config(arguments.config), arguments.config)
    return 0


def _check(arguments: argparse.Namespace) -> int:
    print(describe(_config(arguments.file)), end="")
    return 0


def _explain(arguments: argparse.Namespace) -> int:
    from tierd.daemon import explain

    config = _config(arguments.config)
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


def _inspect(arguments: argparse.Namespace) -> int:
    from tierd.daemon import inspect

    with inspect.surveys(arguments.path) as found:
        volumes = [inspect.facts(survey, blocks=arguments.blocks) for survey in found]
    lines = [line for volume in volumes for line in inspect.report(volume)]
    print(json.dumps(volumes, indent=2) if arguments.json else "\n".join(lines))
    return 0


def _verify(arguments: argparse.Namespace) -> int:
    from tierd.daemon import inspect

    with inspect.surveys(arguments.path) as found:
        result = inspect.verify(found, sys.stderr)
    if arguments.json:
        print(json.dumps(result, indent=2))
    else:
        for damage in result["damaged"]:
            print(inspect.describe(damage))
    return 1 if result["damaged"] else 0


def _replay(arguments: argparse.Namespace) -> int:
    from tierd.daemon import lab, lab_report
    from tierd.daemon.trace import Trace

    closing, coarse = arguments.closing, arguments.coarse
    traces = [Trace.read(path, coarse=coarse, closing=closing) for path in arguments.traces]
    progress = sys.stderr if sys.stderr.isatty() else None
    nbytes = arguments.token_bytes or lab.TOKEN_NBYTES
    replays = lab.Lab(
        _config(arguments.config), arguments.policy, arguments.sizes, nbytes, progress
    )
    rows = list(replays.run(traces))
    print("\n".join(lab_report.table(rows)))
    if arguments.csv:
        lab_report.write_csv(rows, arguments.csv)
    if arguments.plot:
        lab_report.draw(rows, arguments.plot)
    return 0


def _status(arguments: argparse.Namespace) -> int:
    from tierd.client import connect

    with connect(arguments.socket) as client:
        status = client.status()
    status["sessions"] = [s for s in status["sessions"] if s["namespace"] or s["quarantined"]]
    print(json.dumps(status, indent=2) if arguments.json else "\n".join(_report(status)))
    return 0


def _reload(arguments: argparse.Namespace) -> int:
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


def _report(status: dict[str, Any]) -> list[str]:
    """The status for a person."""
    process, loop = status["process"], status["process"]["loop"]
    memlock = process["memlock_limit_nbytes"]
    lines = [
        f"tierd {status['pid']} on {status['socket']}, up {status['uptime']:.0f} s, boot "
        f"{status['boot'][:8]}, {_size(process['rss_nbytes'])} resident",
        f"event loop: {loop['turns']} turns, {loop['long']} over 1 ms, longest "
        f"{loop['max_cpu_ms']:.1f} ms of CPU",
        f"memory: {_size(process['memory_limit_nbytes'])} allowed, {_most(memlock)} may be locked",
    ]
    for tenant in status["tenants"]:
        lines += ["", f"tenant {tenant['name']}"]
        for name, facts in tenant["memory"].items():
            free = _size(facts["nbytes_free"])
            huge = facts.get("nbytes_huge")
            pages = "" if huge is None else f", {_size(huge)} on huge pages"
            over = facts["nbytes_over"]
            shrinks = f", {_size(over)} still to be given up" if over else ""
            lines.append(
                f"  {name}: {_size(facts['nbytes'])}, {free} in no pool yet{pages}{shrinks}"
            )
        if ssd := tenant["ssd"]:
            lines.append(
                f"  ssd: {_size(ssd['nbytes'])}, {_size(ssd['nbytes_used'])} on disk, "
                f"{ssd['slabs_swept']} sparse slabs given back"
            )
        for namespace in tenant["namespaces"]:
            lines += _namespace(namespace)
    lines += ["", f"{len(status['sessions'])} engines attached"]
    for session in status["sessions"]:
        lines.append(
            f"  pid {session['pid']} uid {session['uid']}: {session['namespace'] or 'gone'}, "
            f"{session['leases']} leases, {session['blocks']} blocks"
            + (f", {session['quarantined']} quarantined" if session["quarantined"] else "")
        )
    return lines


def _namespace(namespace: dict[str, Any]) -> list[str]:
    asked, hit = namespace["tokens_asked"], namespace["tokens_hit"]
    rate = f"{hit / asked:.1%}" if asked else "-"
    lines = [
        f"  {namespace['name']}: {namespace['requests']} requests, {asked} tokens, hit {rate}; "
        f"blocks {namespace['promoted']} promoted, {namespace['demoted']} demoted, "
        f"{namespace['prefetched']} prefetched, {namespace['dropped']} dropped, "
        f"{namespace['lost']} lost",
        "    tier      group  blocks    free committed   private   loading quarantined      bytes",
    ]
    for tier in namespace["tiers"]:
        for number, group in enumerate(tier["groups"]):
            used = (group["capacity"] - group["free"]) * group["block_nbytes"]
            lines.append(
                f"    {tier['name']:<9} {number:>5} {group['capacity']:>7} {group['free']:>7} "
                f"{group['committed']:>9} {group['private']:>9} {group['loading']:>9} "
                f"{group['quarantined']:>11} {_size(used):>10}"
                + ("  paused" if tier["paused"] else "")
            )
    lines += _fragmentation(namespace)
    lines += _hints(namespace["hints"])
    names = [tier["name"] for tier in namespace["tiers"]]
    for route, speed in sorted(namespace["speeds"].items()):
        start, stop = (names[int(level)] for level in route.split(">"))
        lines.append(
            f"    {start} to {stop}: {speed['latency_s'] * 1e3:.2f} ms, then "
            f"{1 / speed['seconds_per_gib']:.2f} GiB/s, over {speed['bursts']} bursts"
        )
    return lines


def _hints(heard: dict[str, int]) -> list[str]:
    """How often each hint came, of those that did."""
    counts = dict(heard)
    known, expected = counts.pop("sessions"), counts.pop("expected")
    if not any(counts.values()):
        return []
    said = ", ".join(f"{count} {kind}" for kind, count in counts.items() if count)
    return [f"    hints: {said}; {known} sessions known, {expected} expected back"]


def _fragmentation(namespace: dict[str, Any]) -> list[str]:
    faults = namespace["faults"]
    lines = [
        f"    faults: {faults['minor']} blocks from memory (minor), "
        f"{faults['major']} from SSD (major)"
    ]
    for number, leased in enumerate(namespace["leased"]):
        share = leased["slots_unused"] / leased["slots"] if leased["slots"] else 0.0
        lines.append(
            f"    leases, group {number}: {leased['slots_unused']} of {leased['slots']} slots "
            f"past their tokens ({share:.1%}), {_size(leased['nbytes_unused'])}"
        )
    for tier in namespace["tiers"]:
        for number, group in enumerate(tier["groups"]):
            facts = group["fragmentation"]
            lines.append(f"    {tier['name']}, group {number}: {_held(facts)}")
    return lines


def _held(facts: dict[str, Any]) -> str:
    """What a pool has of a medium, and how much of that is of no use to it."""
    held = _size(facts["nbytes_held"])
    if "slabs" not in facts:
        free, edges = _size(facts["nbytes_free"]), _size(facts["nbytes_edges"])
        return f"{held} in extents, {free} of them free, {edges} at their edges"
    fills = facts["slabs_by_fill"]
    steps = ", ".join(f"{n} to {at / len(fills):.0%}" for at, n in enumerate(fills, 1))
    return f"{held} in {facts['slabs']} slabs, {_size(facts['nbytes_live'])} live; full {steps}"


def _most(nbytes: int | None) -> str:
    return "any amount" if nbytes is None else _size(nbytes)


def _size(nbytes: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} TiB"
