"""Which policy a pool gets: the last rule of the configuration that fits it, else its tier's own.

A pool is what one tier has of one layer group of one namespace; a rule fits if all its conditions
do. Pure: what the configuration says is decided here, nothing is made but a policy.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from policies.base import EvictionPolicy
from tierd.daemon import plugins
from tierd.daemon.config import Attention, Config, Rule, TierName
from tierd.layout import KVLayout


@dataclass(frozen=True, slots=True)
class Choice:
    """A policy with its options; `why` names the key of the configuration that says so. Two are
    equal if the policies are."""

    policy: str
    options: Mapping[str, object]
    why: str = field(compare=False)

    def make(self, capacity: int = 0) -> EvictionPolicy:
        """One that knows nothing yet."""
        return plugins.policy(self.policy)(capacity, **self.options)


@dataclass(frozen=True, slots=True)
class PoolFacts:
    """What of a pool a rule may go by. `model` is the name that engines attach under."""

    tier: TierName
    tenant: str
    model: str
    attention: Attention
    layers: Sequence[int]


def choices(
    config: Config, tier: str, tenant: str, model: str, layout: KVLayout
) -> Iterator[Choice]:
    """What the pools of a tier get, by layer group."""
    for group, of in enumerate(layout.groups):
        attention = Attention.FULL if layout.window(group) is None else Attention.WINDOW
        yield choose(config, PoolFacts(TierName(tier), tenant, model, attention, of.layers))


def choose(config: Config, pool: PoolFacts) -> Choice:
    """What one pool gets."""
    for at, rule in reversed(list(enumerate(config.rules, 1))):
        if fits(rule, pool):
            return Choice(rule.policy, rule.options, f"rules.{at}")
    own = getattr(config, pool.tier)
    return Choice(own.policy, own.options, f"{pool.tier}.policy")


def fits(rule: Rule, pool: PoolFacts) -> bool:
    """Whether a rule is for a pool."""
    asked = (rule.tier, rule.tenant, rule.model, rule.attention)
    found = (pool.tier, pool.tenant, pool.model, pool.attention)
    if any(a is not None and a != f for a, f in zip(asked, found, strict=True)):
        return False
    if rule.layers is None:
        return True
    first, _, last = rule.layers.partition("-")
    return all(int(first) <= layer <= int(last or first) for layer in pool.layers)
