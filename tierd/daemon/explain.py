"""What block-size policies choose for a layout, and why: every size's cost, term by term; and which
policy each of its pools gets, by which key of the configuration.

It reads what a configuration and, where a daemon runs, a tenant's status say, and changes nothing.
The terms are `policies.block_cost`'s; nothing here knows the formula.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from policies.base import BlockSizePolicy, SizingFacts
from policies.block_cost import BlockCost, LayerKind, cost_of, kinds_of
from policies.block_size import Auto, Uniform
from tierd.daemon import rules, sizing
from tierd.daemon.config import Config
from tierd.daemon.values import form
from tierd.errors import ConfigError
from tierd.layout import KVLayout

Tenant = Mapping[str, Any]  # its status

_HEAD = "size  blocks    tail  shared   table  transfer     sum  over best"


@dataclass(frozen=True, slots=True)
class SizeChoice:
    """The cost of one size, and who chooses it."""

    cost: BlockCost
    chosen_by: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Explanation:
    """For each kind of a layout's layers, the sizes that are candidates or chosen, ascending."""

    layout: KVLayout
    facts: SizingFacts
    kinds: Sequence[tuple[LayerKind, Sequence[SizeChoice]]]
    refused: Mapping[str, str]  # why a policy cannot serve the layout, by its name

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values; costs in seconds a request."""
        return {
            "layout": self.layout.to_json(),
            "facts": asdict(self.facts) | {"lengths": dict(self.facts.lengths)},
            "kinds": [
                {
                    **asdict(kind),
                    "sizes": [
                        {**asdict(c.cost), "total": c.cost.total, "chosen_by": c.chosen_by}
                        for c in choices
                    ],
                }
                for kind, choices in self.kinds
            ],
            "refused": dict(self.refused),
        }


def layouts(given: str | None, name: str | None, tenant: Tenant | None) -> list[KVLayout]:
    """The layout that was given (JSON, or a file of it), else those that `tenant` has under `name`,
    or all. Raises ConfigError if what was given is no layout, OSError if it cannot be read."""
    if given is None:
        attached = tenant["namespaces"] if tenant else []
        return [KVLayout.from_json(n["layout"]) for n in attached if name in (None, n["name"])]
    text = given if given.lstrip().startswith("{") else Path(given).read_text(encoding="utf-8")
    try:
        return [KVLayout.from_json(json.loads(text))]
    except ValueError as error:
        raise ConfigError(f"--layout: {error}") from error


def explain(layout: KVLayout, config: Config, tenant: Tenant | None = None) -> Explanation:
    """What the configured policy, ours, and the layout itself, if it has groups, choose."""
    facts = sizing.facts_of(config, tenant)
    shapes, refused, chosen = sizing.shapes_of(layout), dict[str, str](), dict[str, list[int]]()
    policies = _policies(config)
    for name, policy in policies.items():
        try:
            chosen[name] = policy.sizes(shapes, facts)
        except ValueError as error:
            refused[name] = str(error)
    if layout.groups:
        sizes = {layer: group.block_size for group in layout.groups for layer in group.layers}
        chosen["the layout"] = [sizes[layer] for layer in range(layout.num_layers)]
    auto = policies["auto"]
    assert isinstance(auto, Auto), "the name is ours"
    kinds = []
    for kind in kinds_of(shapes):
        by = {name: {sizes[layer] for layer in kind.layers} for name, sizes in chosen.items()}
        candidates = set() if "auto" in refused else set(auto.candidates(kind, facts))
        found = [
            SizeChoice(cost_of(size, kind, facts), tuple(n for n in by if size in by[n]))
            for size in sorted(candidates.union(*by.values()))
        ]
        kinds.append((kind, found))
    return Explanation(layout, facts, kinds, refused)


def _policies(config: Config) -> dict[str, BlockSizePolicy]:
    policy = sizing.policy_of(config.blocks)
    ours: dict[str, BlockSizePolicy] = {"auto": Auto(), "uniform": Uniform()}
    name = {Auto: "auto", Uniform: "uniform"}.get(type(policy), config.blocks.policy)
    return ours | {name: policy}


def report(explained: Explanation, config: Config, tenant: Tenant | None = None) -> list[str]:
    """The explanation for a person."""
    layout = explained.layout
    return [
        f"{layout.model}: {layout.num_layers} layers, {layout.num_kv_heads} KV heads of "
        f"{layout.head_dim}, {layout.dtype}; blocks.policy is {config.blocks.policy!r}",
        *_facts(explained.facts, config, tenant),
        *(f"  {name} cannot serve it: {why}" for name, why in explained.refused.items()),
        *(line for kind, choices in explained.kinds for line in _kind(kind, choices)),
        *_pools(explained, config, tenant),
    ]


def _pools(explained: Explanation, config: Config, tenant: Tenant | None) -> Iterator[str]:
    """Which policy each pool gets; of a layout without groups, of those that would be chosen."""
    layout, name = explained.layout, next(iter(config.tenants))
    model = layout.model
    if tenant:
        named = {KVLayout.from_json(n["layout"]): n["name"] for n in tenant["namespaces"]}
        name, model = tenant["name"], named.get(layout, model)
    if config.blocks.policy in explained.refused and not layout.groups:
        return
    if not layout.groups:
        layout = sizing.choose(layout, sizing.policy_of(config.blocks), explained.facts)
    yield f"  policies, for tenant {name!r} and model {model!r}:"
    for tier in reversed([*sizing.tiers_below(config, tenant), "device"]):
        for group, choice in enumerate(rules.choices(config, tier, name, model, layout)):
            layers = layout.groups[group].layers
            options = f" {form(choice.options)}" if choice.options else ""
            yield (
                f"    {tier}, group {group} (layers {layers[0]} to {layers[-1]}): "
                f"{choice.policy}{options}, by {choice.why}"
            )


def _facts(facts: SizingFacts, config: Config, tenant: Tenant | None) -> Iterator[str]:
    seen = sizing.lengths_of(tenant) if tenant else {}
    mean = sum(length * n for length, n in facts.lengths.items()) / sum(facts.lengths.values())
    who = f"{sum(seen.values()):,.0f} requests" if seen else "assumed, too few requests yet"
    yield f"  requests: {mean:,.0f} tokens on average ({who})"
    tiers = sizing.tiers_below(config, tenant)
    speeds = sizing.speeds_of(tenant) if tenant else {}
    for level, name, route in zip(range(len(tiers), 0, -1), tiers, facts.routes, strict=False):
        speed = speeds.get((level, min(level - 1, 1)))
        yield (
            f"  from {name}: {route.latency * 1e6:.0f} µs a burst, "
            f"{route.seconds_per_block * 1e6:.0f} µs a block, "
            f"{1 / route.seconds_per_byte / 2**30:.2f} GiB/s "
            + (f"(measured, {speed.bursts} bursts)" if speed else "(assumed)")
        )
    if not tiers:
        yield "  no tier below: what is evicted is taken to cost what reading it from an SSD would"


def _kind(kind: LayerKind, choices: Sequence[SizeChoice]) -> Iterator[str]:
    what = "full attention" if kind.window is None else f"a window of {kind.window} tokens"
    yield (
        f"  {len(kind.layers)} layers with {what}, {kind.nbytes_per_token / 1024:.1f} KiB a token; "
        "in ms a request:"
    )
    yield f"    {_HEAD}"
    best = min(choice.cost.total for choice in choices)
    for choice in choices:
        cost = choice.cost
        terms = (cost.tail, cost.shared, cost.table, cost.transfer, cost.total, cost.total - best)
        tail, shared, table, transfer, total, over = (term * 1e3 for term in terms)
        line = (
            f"    {cost.size:>4} {cost.blocks:>7.1f} {tail:>7.2f} {shared:>7.2f} {table:>7.2f} "
            f"{transfer:>9.2f} {total:>7.2f} {over:>10.2f}  {', '.join(choice.chosen_by)}"
        )
        yield line.rstrip()
