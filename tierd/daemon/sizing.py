"""Sizing: the layer groups and the granule of a layout whose engine leaves them to the daemon.

The configured policy chooses by facts: what was measured where it was, else the priors named here.
A choice by facts is made once: what a namespace in use, or an array on the SSD, has of the same
model by the same configuration, that is kept, for other sizes would be another namespace, and its
blocks lost to it. Nothing here measures, or reads a disk.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import gcd
from typing import Any

from policies.base import GRANULE, BlockSizePolicy, LayerShape, RouteFacts, SizingFacts
from tierd.daemon import plugins
from tierd.daemon.config import BlocksConfig, Config
from tierd.daemon.speed import Route
from tierd.layout import ITEMSIZE, PAGE, KVLayout

# Until something is measured. What a block costs beside its bytes no burst of equal blocks tells:
# that is what scripts/bench_tiers found between blocks of 64 and of 720 KiB, and stays.
SSD = RouteFacts(latency=100e-6, seconds_per_block=37e-6, seconds_per_byte=1 / 1.8e9)
MEMORY = RouteFacts(latency=10e-6, seconds_per_block=5e-6, seconds_per_byte=1 / 20e9)
_PRIORS = {"ssd": SSD, "host": MEMORY}
LENGTHS: Mapping[int, float] = {512: 1, 2048: 1, 8192: 1}  # tokens of a request

ENOUGH_BURSTS = 8  # for a route's speed to count
ENOUGH_REQUESTS = 64  # for their lengths to


@dataclass(frozen=True, slots=True)
class Measured:
    """A route's line through its bursts (see `speed`), of blocks of `block_nbytes` on average."""

    latency: float
    seconds_per_byte: float
    block_nbytes: float
    bursts: int


def facts_of(config: Config, tenant: Mapping[str, Any] | None = None) -> SizingFacts:
    """What a policy is told: of what a tenant's status says what is enough, else the priors."""
    lengths, speeds = (lengths_of(tenant), speeds_of(tenant)) if tenant else ({}, {})
    below = tiers_below(config, tenant)
    routes = [
        _route(_PRIORS[name], speeds.get((level, min(level - 1, 1))))
        for level, name in zip(range(len(below), 0, -1), below, strict=True)
    ]
    return SizingFacts(
        lengths=lengths or LENGTHS,
        # What is nowhere else is computed again, which takes no less than reading it would.
        routes=routes or [SSD],
        granule=config.blocks.granule,
        memory_nbytes=tenant["memory"]["device"]["nbytes"] if tenant else config.device.size,
        page_nbytes=PAGE,
    )


def tiers_below(config: Config, tenant: Mapping[str, Any] | None = None) -> list[str]:
    """The tiers below the hottest, the coldest first: a tenant's, or those there would be."""
    ssd = tenant["ssd"] if tenant else config.ssd
    host = "host" in tenant["memory"] if tenant else config.host
    return ["ssd"] * bool(ssd) + ["host"] * bool(host)


def lengths_of(tenant: Mapping[str, Any]) -> dict[int, float]:
    """The lengths that a tenant's status tells; none before there are enough."""
    lengths = {int(length): float(count) for length, count in tenant["lengths"].items()}
    return lengths if sum(lengths.values()) >= ENOUGH_REQUESTS else {}


def speeds_of(tenant: Mapping[str, Any]) -> dict[Route, Measured]:
    """The speeds that a tenant's status tells often enough; of several namespaces', the one that
    was measured most."""
    found = dict[Route, Measured]()
    for namespace in tenant["namespaces"]:
        layout = KVLayout.from_json(namespace["layout"])
        groups = range(len(layout.groups))
        nbytes = sum(layout.block_nbytes(group) for group in groups) / len(groups)
        for name, speed in namespace["speeds"].items():
            start, _, stop = name.partition(">")
            route, bursts = (int(start), int(stop)), int(speed["bursts"])
            most = found[route].bursts if route in found else ENOUGH_BURSTS - 1
            if bursts > most:
                per_byte = speed["seconds_per_gib"] / 2**30
                found[route] = Measured(speed["latency_s"], per_byte, nbytes, bursts)
    return found


def _route(prior: RouteFacts, measured: Measured | None) -> RouteFacts:
    if measured is None:
        return prior
    per_byte = measured.seconds_per_byte
    # Its bursts' blocks cost something beside their bytes, and bytes are not free.
    bare = max(per_byte - prior.seconds_per_block / measured.block_nbytes, per_byte / 4)
    per_block = min(prior.seconds_per_block, (per_byte - bare) * measured.block_nbytes)
    return RouteFacts(measured.latency, per_block, bare)


def shapes_of(layout: KVLayout) -> list[LayerShape]:
    """A layout's layers as a policy sees them."""
    nbytes = 2 * layout.num_kv_heads * layout.head_dim * ITEMSIZE[layout.dtype]
    windows = layout.windows or (None,) * layout.num_layers
    return [LayerShape(index, nbytes, window) for index, window in enumerate(windows)]


def policy_of(blocks: BlocksConfig) -> BlockSizePolicy:
    """The configured policy."""
    return plugins.block_sizes(blocks.policy)(**blocks.options)


def choose(wanted: KVLayout, policy: BlockSizePolicy, facts: SizingFacts) -> KVLayout:
    """The layout with the groups that `policy` chooses, and a granule if it has none."""
    if wanted.granule:
        facts = replace(facts, granule=wanted.granule)
    layout = wanted.with_block_sizes(policy.sizes(shapes_of(wanted), facts))
    if layout.granule:
        return layout
    return replace(layout, granule=facts.granule or _granule(layout))


def keep(wanted: KVLayout, granule: int | None, known: Iterable[KVLayout]) -> KVLayout | None:
    """The first of `known` that is `wanted` with groups; None if none is."""
    asked = wanted.granule or granule
    for layout in known:
        same = replace(layout, groups=(), granule=wanted.granule) == wanted
        if same and layout.groups and asked in (None, layout.granule):
            return layout
    return None


def _granule(layout: KVLayout) -> int:
    """0, the gcd of the block sizes, unless that is large: then a divisor near `GRANULE`.

    For what a finer one saves and costs scripts/bench_granule has the figures.
    """
    whole = gcd(*(group.block_size for group in layout.groups))
    near = range(GRANULE // 2, min(GRANULE, whole - 1) + 1)
    return max((step for step in near if whole % step == 0), default=0) if whole > GRANULE else 0
