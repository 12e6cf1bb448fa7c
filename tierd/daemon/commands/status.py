"""`tierd status`: what a daemon holds, and for whom."""

import argparse
import json
from typing import Any


def add(parser: argparse.ArgumentParser) -> None:
    """What it may be told."""
    parser.add_argument("--socket", metavar="PATH", help="where it listens")
    parser.add_argument("--json", action="store_true", help="everything, as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Ask the daemon and print its answer."""
    from tierd.client import connect

    with connect(arguments.socket) as client:
        status = client.status()
    status["sessions"] = [s for s in status["sessions"] if s["namespace"] or s["quarantined"]]
    print(json.dumps(status, indent=2) if arguments.json else "\n".join(_report(status)))
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
    if trace := status["trace"]:
        state = f"stopped: {trace['stopped']}" if trace["stopped"] else f"to {trace['path']}"
        counts = f"{trace['recorded']} requests, {trace['dropped']} dropped"
        lines.append(f"recording {state}, {counts}")
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
