"""`tierd advise`: what would have served a recording best within a given memory."""

import argparse
import sys
from pathlib import Path

from policies.belady import Belady
from tierd.daemon.commands.replay import add_trace, names, read
from tierd.daemon.config import EXTENT, TierConfig
from tierd.daemon.values import MIB, Size
from tierd.errors import ConfigError

_PREFILL = 10_000.0  # tokens a second


def add(parser: argparse.ArgumentParser) -> None:
    """What it may be told."""
    add = parser.add_argument
    tier, ssd = Size(EXTENT, multiple=EXTENT), Size(1 * MIB)
    add_trace(parser, "trace")
    memory = parser.add_mutually_exclusive_group(required=True)
    memory.add_argument("--memory", type=tier, metavar="SIZE", help="for device and host together")
    memory.add_argument("--device", type=tier, metavar="SIZE", help="the hottest tier's")
    add("--host", type=tier, default=0, metavar="SIZE", help="beside --device")
    add("--ssd", type=ssd, default=0, metavar="SIZE", help="of the SSD")
    add("--policy", type=names, default=[], metavar="P,..", help="those to try; all installed")
    add("--block-sizes", type=names, default=[], metavar="N,..", help="tokens; all worth trying")
    add(
        "--prefill", type=float, default=_PREFILL, metavar="N", help="tokens an engine computes a s"
    )
    add("--toml", type=Path, metavar="FILE", help="write the configuration there, too")


def run(arguments: argparse.Namespace) -> int:
    """Replay a few dozen choices, and print the best."""
    from tierd.daemon import advice, advice_report, lab, plugins

    if arguments.memory and arguments.host:
        raise ConfigError("--memory is for device and host together; --host is beside --device")
    if not arguments.prefill > 0:
        raise ConfigError(f"--prefill {arguments.prefill:g} is not above 0")
    trace = read(arguments.trace, arguments)
    policies = arguments.policy or [
        name
        for name in plugins.installed(plugins.POLICIES)
        if not issubclass(plugins.policy(name), Belady)
    ]
    for policy in policies:
        TierConfig(policy=policy)  # it says what is wrong with it
    splits = (
        advice.splits(arguments.memory, arguments.ssd)
        if arguments.memory
        else [(arguments.device, arguments.host, arguments.ssd)]
    )
    nbytes = arguments.token_bytes or trace.token_nbytes or lab.TOKEN_NBYTES
    progress = sys.stderr if sys.stderr.isatty() else None
    advisor = advice.Advisor(trace, nbytes, arguments.prefill, progress)
    found = advisor.best(policies, _integers(arguments.block_sizes), splits)
    granule = trace.block_size if trace.token_nbytes else None  # other traces have no granules
    config = "\n".join(advice_report.toml(found[0], granule))
    print("\n".join(advice_report.table(found)), end="\n\n")
    print("\n".join(advice_report.certainty(found, advisor.trace, trace.block_size)), end="\n\n")
    print(config)
    if arguments.toml:
        arguments.toml.write_text(config + "\n")
    return 0


def _integers(texts: list[str]) -> list[int]:
    try:
        sizes = [int(text) for text in texts]
    except ValueError as error:
        raise ConfigError(f"--block-sizes: {error}") from error
    if any(size < 1 for size in sizes):
        raise ConfigError("--block-sizes: each must be 1 or more")
    return sizes
