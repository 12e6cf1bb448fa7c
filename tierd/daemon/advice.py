"""Advice: which policy, block size and split of memory would have served a trace best.

    policies  ->  block sizes of the best two  ->  splits of the best  ->  all policies again

A choice is judged by the seconds that a thousand tokens of prompts would have taken: those that
missed are computed at a speed that is given, those hit below the top are read as fast as the priors
of `sizing` say. Each step keeps what was best before, so that it takes tens of replays, not
hundreds; a long trace is looked at in coarser blocks.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from time import monotonic
from typing import TextIO

from policies.base import RouteFacts
from tierd.daemon import plugins, sizing
from tierd.daemon.config import EXTENT
from tierd.daemon.lab import TIERS
from tierd.daemon.progress import shown
from tierd.daemon.replay import Replay, TierPlan
from tierd.daemon.trace import Trace
from tierd.errors import ConfigError

PARTS = 10  # of a trace, for how far they differ
_MOST = 1_000_000  # blocks that a replay asks for, of a trace that may be coarsened
_START = 64  # tokens of a block, for the first comparison
_LARGEST = 512
_SHARES = (0.125, 0.25, 0.5, 0.75)  # of memory that the device tier may get
_PAGE = 4096
_KEPT = 2  # choices of a step that the next begins from
_WATERMARKS = (0.05, 0.1)


@dataclass(frozen=True, slots=True)
class Choice:
    """What a configuration says: one policy for all tiers, tokens of a block, bytes of each tier
    from the hottest on, 0 for one that there is not."""

    policy: str
    block_size: int
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class Outcome:
    """What a choice came to: tokens asked for, and hit by tier, in each part of the trace."""

    choice: Choice
    asked: Sequence[int]
    hits: Sequence[Sequence[float]]
    prefill: float
    token_nbytes: int

    @cached_property
    def rates(self) -> list[float]:
        """Tokens hit in each tier, of those asked for."""
        return [sum(of) / sum(self.asked) for of in zip(*self.hits, strict=True)]

    @property
    def hit_rate(self) -> float:
        return sum(self.rates)

    @property
    def warm(self) -> float:
        """The hit rate in the second half."""
        half = len(self.asked) // 2
        return sum(map(sum, self.hits[half:])) / max(1, sum(self.asked[half:]))

    def costs(self) -> list[float]:
        """Seconds a thousand tokens, by part."""
        pairs = zip(self.asked, self.hits, strict=True)
        return [1000 * self._cost(asked, hits) / max(1, asked) for asked, hits in pairs]

    @property
    def cost(self) -> float:
        """Seconds a thousand tokens, over all."""
        hits = [sum(of) for of in zip(*self.hits, strict=True)]
        return 1000 * self._cost(sum(self.asked), hits) / sum(self.asked)

    def _cost(self, asked: int, hits: Sequence[float]) -> float:
        named = [name for name, size in zip(TIERS, self.choice.sizes, strict=True) if size]
        seconds = (asked - sum(hits)) / self.prefill
        for name, hit in zip(named, hits, strict=True):
            routes = {"device": [], "host": [sizing.MEMORY], "ssd": [sizing.SSD, sizing.MEMORY]}
            seconds += sum(self._read(route, hit) for route in routes[name])
        return seconds

    def _read(self, route: RouteFacts, tokens: float) -> float:
        blocks = tokens / self.choice.block_size
        nbytes = tokens * self.token_nbytes
        return blocks * route.seconds_per_block + nbytes * route.seconds_per_byte


class Advisor:
    """Replays a trace for choices; nothing twice."""

    def __init__(
        self, trace: Trace, token_nbytes: int, prefill: float, progress: TextIO | None
    ) -> None:
        self.trace = _within(trace, _MOST)
        self._token_nbytes, self._prefill = token_nbytes, prefill
        self._progress = progress
        self._known: dict[Choice, Outcome] = {}
        self._planned = 0  # replays, all together
        self._begun = monotonic()

    def best(
        self, policies: Sequence[str], block_sizes: Sequence[int], splits: Sequence[tuple[int, ...]]
    ) -> list[Outcome]:
        """Every choice that was tried, the best first. Without block sizes all that are worth it.
        Raises ConfigError for one that is no multiple of the trace's."""
        sizes = self._sizes(block_sizes)
        self._planned = 2 * len(policies) + _KEPT * len(sizes) + len(splits) - 3
        start = min(sizes, key=lambda size: abs(size - _START))
        found = self._try(Choice(p, start, splits[len(splits) // 2]) for p in policies)
        found = self._try(replace(one, block_size=size) for one in found for size in sizes)
        found = self._try(replace(found[0], sizes=split) for split in splits)
        self._try(replace(found[0], policy=policy) for policy in policies)
        return sorted(self._known.values(), key=lambda outcome: outcome.cost)

    def _sizes(self, given: Sequence[int]) -> list[int]:
        granule = self.trace.block_size
        if wrong := [size for size in given if size % granule]:
            raise ConfigError(f"a block of {wrong[0]} tokens is no multiple of {granule}")
        times = [1 << power for power in range(10)]
        return list(given) or [granule * n for n in times if n == 1 or granule * n <= _LARGEST]

    def _try(self, choices: Iterator[Choice]) -> list[Choice]:
        """Replay them; the best few of them."""
        wanted = dict.fromkeys(choices)
        for choice in wanted:
            if choice not in self._known:
                self._known[choice] = self._replay(choice)
        best = sorted(wanted, key=lambda choice: self._known[choice].cost)
        return best[:_KEPT]

    def _replay(self, choice: Choice) -> Outcome:
        granules = choice.block_size // self.trace.block_size
        nbytes = -(-choice.block_size * self._token_nbytes // _PAGE) * _PAGE
        plans = [
            TierPlan(name, size // nbytes, plugins.policy(choice.policy), {}, _WATERMARKS)
            for name, size in zip(TIERS, choice.sizes, strict=True)
            if size
        ]
        replay = Replay(self.trace, plans, granules=granules)
        title = f"{self._standing()}: {choice.policy}, blocks of {choice.block_size}"
        asked, hits = _parts(replay, self.trace, title, self._progress)
        return Outcome(choice, asked, hits, self._prefill, self._token_nbytes)

    def _standing(self) -> str:
        """How far it is, and how long the rest will take."""
        done = len(self._known)
        standing = f"{done + 1} of {max(done + 1, self._planned)}"
        if not done:
            return standing
        left = (monotonic() - self._begun) / done * max(1, self._planned - done)
        return f"{standing}, {left:.0f} s left"


def _parts(
    replay: Replay, trace: Trace, title: str, out: TextIO | None
) -> tuple[list[int], list[list[float]]]:
    """Run a replay: tokens asked for and hit, by part and, the hits, by level."""
    requests, counts = trace.requests, replay.cache.chain.counts
    ends = [len(requests) * part // PARTS for part in range(1, PARTS + 1)]
    asked = [
        sum(request.num_tokens for request in requests[start:stop])
        for start, stop in zip([0, *ends], ends, strict=False)
    ]
    totals = [[0.0] * len(counts.blocks_hit)]
    for done in shown(replay.run(), len(requests), title, out):
        while len(totals) <= PARTS and done >= ends[len(totals) - 1]:
            blocks = sum(counts.blocks_hit) or 1  # a part of one counts as one
            tokens = counts.tokens_hit * trace.block_size
            totals.append([tokens * of / blocks for of in counts.blocks_hit])
    pairs = pairwise(totals)
    return asked, [[b - a for a, b in zip(*pair, strict=True)] for pair in pairs]


def splits(memory: int, ssd: int) -> list[tuple[int, ...]]:
    """Ways to share memory out to the device and the host tier."""
    device = [int(memory * share) // EXTENT * EXTENT for share in _SHARES]
    parts = [(size, (memory - size) // EXTENT * EXTENT) for size in (*device, memory)]
    return [(*part, ssd) for part in dict.fromkeys(parts) if part[0]]


def _within(trace: Trace, most: int) -> Trace:
    """The trace, in so coarse blocks that it asks for no more than `most`."""
    times = 1
    while trace.num_accesses > most * times and trace.block_size * times < _LARGEST:
        times *= 2
    return trace if times == 1 else trace.coarser(times)
