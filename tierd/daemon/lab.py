"""A lab: which replays `tierd replay` runs, and what came of each.

A *size* is the tiers of one replay, the hottest first: `9139` (blocks), `40GiB`, or several with a
slash between, `40GiB/200GiB/1TiB`. Bytes become blocks by how many a token has. It prints nothing
but its progress, where it is told to.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TextIO

from policies.base import AdmissionPolicy, PlacementPolicy
from policies.belady import Belady
from tierd.daemon import plugins
from tierd.daemon.config import ADMISSION, Config
from tierd.daemon.optimum import Optimum
from tierd.daemon.progress import shown
from tierd.daemon.replay import Replay, Result, TierPlan
from tierd.daemon.trace import Trace
from tierd.daemon.values import Size
from tierd.errors import ConfigError

TIERS = ("device", "host", "ssd")
TOKEN_NBYTES = 128 * 1024  # of Llama 3 8B in 16 bits
_GIB = 2**30


@dataclass(frozen=True, slots=True)
class Row:
    """One replay: what was run, what came of it, and the most that was to be had."""

    trace: str
    policy: str
    capacities: Sequence[int]
    result: Result
    optimum: float
    block_nbytes: int

    @property
    def regret(self) -> float:
        """How far the hit rate is below what as many places could have had, 0 to 1."""
        return self.optimum - self.result.hit_rate

    @property
    def gib_moved(self) -> Mapping[str, float]:
        """GiB between tiers, by `from>to`."""
        return {
            f"{TIERS[src]}>{TIERS[dst]}": count * self.block_nbytes / _GIB
            for (src, dst), count in sorted(self.result.moved.items())
        }

    def facts(self) -> dict[str, object]:
        """All of it, flat, for CSV and JSON."""
        levels = [count / self.result.num_accesses for count in self.result.hits]
        levels += [0.0] * (len(TIERS) - len(levels))
        return {
            "trace": self.trace,
            "policy": self.policy,
            "blocks": "/".join(map(str, self.capacities)),
            "hit_rate": round(self.result.hit_rate, 6),
            **{f"hit_{name}": round(rate, 6) for name, rate in zip(TIERS, levels, strict=True)},
            "optimum": round(self.optimum, 6),
            "regret": round(self.regret, 6),
            "gib_down_to_host": round(self._gib_to(1, down=True), 1),
            "gib_down_to_ssd": round(self._gib_to(2, down=True), 1),
            "gib_up_to_host": round(self._gib_to(1, down=False), 1),
            "gib_up_to_device": round(self._gib_to(0, down=False), 1),
            "blocks_per_second": round(self.result.speed),
        }

    def _gib_to(self, level: int, *, down: bool) -> float:
        moved = self.result.moved.items()
        blocks = sum(n for (src, dst), n in moved if dst == level and (src < dst) is down)
        return blocks * self.block_nbytes / _GIB


@dataclass(frozen=True, slots=True)
class Lab:
    """What to replay: every policy at every size; without sizes the configuration's own tiers, and
    without policies each tier's own. `admission` and `placement` name others than it has."""

    config: Config
    policies: Sequence[str] = ()
    sizes: Sequence[str] = ()
    token_nbytes: int | None = None  # instead of the trace's own
    progress: TextIO | None = field(default=None, compare=False)
    admission: str = ""
    placement: str = ""

    def run(self, traces: Sequence[Trace]) -> Iterator[Row]:
        """Yield a row for every replay as it ends. Raises ConfigError."""
        for trace in traces:
            optimum = Optimum(trace)
            for size in self.sizes or [""]:
                for policy in self.policies or [""]:
                    plans = self._plans(trace, size, policy)
                    capacities = [plan.capacity for plan in plans]
                    named = policy or "/".join(plan.policy.__name__.lower() for plan in plans)
                    replay = Replay(trace, plans, self._placement())
                    result = self._replay(replay, f"{trace.name} {named} {size}")
                    best = optimum.hit_rate(sum(capacities))
                    nbytes = trace.block_size * self.token_nbytes_of(trace)
                    yield Row(trace.name, named, capacities, result, best, nbytes)

    def token_nbytes_of(self, trace: Trace) -> int:
        """Bytes of K and V a token."""
        return self.token_nbytes or trace.token_nbytes or TOKEN_NBYTES

    def _plans(self, trace: Trace, size: str, policy: str) -> list[TierPlan]:
        """The tiers of one replay."""
        tiers = [self.config.device, self.config.host, self.config.ssd]
        block = trace.block_size * self.token_nbytes_of(trace)
        if size:
            texts = size.split("/")
            if len(texts) > len(TIERS):
                raise ConfigError(f"size {size!r} has more than {len(TIERS)} tiers")
            capacities: Sequence[int | None] = [_capacity(text, block) for text in texts]
        else:
            capacities = [tier.size // block if tier else None for tier in tiers]
        plans = []
        for name, tier, capacity in zip(TIERS, tiers, capacities, strict=False):
            if capacity is None:
                continue
            own = tier or self.config.device
            found = plugins.policy(policy or own.policy)
            if issubclass(found, Belady) and not policy:
                raise ConfigError("belady is for --policy: no daemon knows the future")
            marks = getattr(own, "watermarks", (0.0, 0.0))
            admission = self._admission() if name == "ssd" else None
            options = {} if policy else own.options
            plans.append(TierPlan(name, capacity, found, options, marks, admission))
        return plans

    def _admission(self) -> Callable[[], AdmissionPolicy]:
        """What makes the policy that says what is worth writing to the SSD."""
        if self.admission:
            return plugins.admission(self.admission)
        ssd = self.config.ssd
        if ssd is None:  # it has no such tier, but a size has
            return plugins.admission(ADMISSION)
        return partial(plugins.admission(ssd.admission), **ssd.admission_options)

    def _placement(self) -> PlacementPolicy:
        own = self.config.placement
        name, options = (self.placement, {}) if self.placement else (own.policy, own.options)
        return plugins.placement(name)(**options)

    def _replay(self, replay: Replay, title: str) -> Result:
        for _ in shown(replay.run(), replay.result.num_requests, title, self.progress):
            pass
        return replay.result


def _capacity(text: str, block_nbytes: int) -> int:
    """Blocks, of a number of them or of a size in bytes."""
    if text.isdecimal():
        return int(text)
    try:
        return Size(1)(text) // block_nbytes
    except ValueError as error:
        raise ConfigError(f"size {text!r} {error}, or a number of blocks") from error
