"""A replay: a trace goes through the production cache, in its own time, without a byte.

Pools, chain, cache and policies are those that serve engines; only the transfer moves nothing, and
one request is over before the next begins. A block of the trace is one token here, whose bytes are
counted and not held. A request longer than the top tier keeps its beginning.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from policies.base import Access, AdmissionPolicy, EvictionPolicy, Key, PlacementPolicy
from policies.belady import Belady
from tierd.daemon.cache import TieredCache
from tierd.daemon.copy import Copy, Outcome, Place, Settle
from tierd.daemon.pool import BlockPool
from tierd.daemon.steps import Step
from tierd.daemon.tier import Tier
from tierd.daemon.trace import Trace, TraceRequest
from tierd.errors import TierdError
from tierd.layout import KVLayout, LayerGroup

_BATCH = 64  # blocks that are made clean ahead after a request, at most
_TICK = 1e-6  # seconds between two requests of one time


class NullTransfer:
    """A transfer that moves nothing: every copy is done as soon as it is asked for."""

    def __init__(self) -> None:
        self.moved: Counter[tuple[int, int]] = Counter()  # blocks, by from and to which level
        self._waiting: list[tuple[Copy, Settle]] = []
        self._running = False

    def submit(self, copies: Iterable[Copy], settle: Settle) -> None:
        self._waiting += [(copy, settle) for copy in copies]
        if self._running:  # a settled copy led to this one: it comes after those before it
            return
        self._running = True
        for copy, told in self._waiting:
            self.moved[copy.src_level, copy.dst_level] += 1
            told(copy, Outcome.DONE)
        self._waiting.clear()
        self._running = False

    def cancel(self, place: Place) -> None:
        pass


@dataclass(frozen=True, slots=True)
class TierPlan:
    """One tier of a replay: places, the policy that orders them, and what makes the policy that
    says what is worth writing there; without one all is."""

    name: str
    capacity: int
    policy: type[EvictionPolicy]
    options: Mapping[str, object]
    watermarks: tuple[float, float] = (0.0, 0.0)
    admission: Callable[[], AdmissionPolicy] | None = None


@dataclass(frozen=True, slots=True)
class Result:
    """What came of it, in blocks; `hits` by level, `moved` by from and to which level."""

    num_requests: int
    num_accesses: int
    hits: Sequence[int]
    moved: Mapping[tuple[int, int], int]
    seconds: float

    @property
    def hit_rate(self) -> float:
        return sum(self.hits) / self.num_accesses

    @property
    def speed(self) -> float:
        """Blocks asked for, a second."""
        return self.num_accesses / self.seconds


class Replay:
    """One trace, one chain of tiers. `run` yields how many requests are over."""

    def __init__(
        self,
        trace: Trace,
        tiers: Sequence[TierPlan],
        placement: PlacementPolicy | None = None,
        granules: int = 1,
    ) -> None:
        """So many `granules`, blocks of the trace, make a block of the cache, which is hit in parts
        too; what is counted is still blocks of the cache. Raises TierdError if a tier has no
        place."""
        for tier in tiers:
            if tier.capacity < 1:
                raise TierdError(f"tier {tier.name!r} does not hold one block")
        self._trace, self._top = trace, tiers[0].capacity * granules
        self._transfer = NullTransfer()
        self._future: dict[Key, list[float]] = {}
        self._times = _rising(request.time for request in trace.requests)
        if any(issubclass(tier.policy, Belady) for tier in tiers):
            for time, request in zip(self._times, trace.requests, strict=True):
                for name in trace.path(request)[: request.num_asked]:
                    self._future.setdefault(name, []).append(time)
        chain = [self._tier(tier) for tier in tiers]
        self.cache = TieredCache(_layout(granules), chain, self._transfer, placement)
        self._seconds = 0.0

    def _tier(self, plan: TierPlan) -> Tier:
        options: dict[str, Any] = dict(plan.options)
        if issubclass(plan.policy, Belady):
            options["future"] = self._future
        pool = BlockPool(plan.policy(plan.capacity, **options))
        pool.grow(range(plan.capacity))
        admissions = [plan.admission()] if plan.admission else []
        return Tier(plan.name, [pool], lambda group: None, False, plan.watermarks, admissions)

    def run(self) -> Iterator[int]:
        """Replay it; yields after every request. To be called once."""
        begin = perf_counter()
        for at, (time, request) in enumerate(zip(self._times, self._trace.requests, strict=True)):
            path = self._trace.path(request)[: self._top]
            self._serve(path, request, Access(time, request.hints))
            self._seconds += perf_counter() - begin
            yield at + 1
            begin = perf_counter()

    def _serve(self, path: list[Any], request: TraceRequest, access: Access) -> None:
        """One request: it finds its hit, computes the rest, and is over."""
        cache, length = self.cache, len(path)
        lease = cache.acquire(path, min(request.num_asked, length) + 1, length, access)
        if lease.hit < (kept := min(request.num_kept, length)):
            cache.advance([Step(lease, kept)], access)
        cache.release(lease, access)
        while cache.ahead.lags() and cache.reclaim(_BATCH):
            pass

    @property
    def result(self) -> Result:
        """So far."""
        return Result(
            len(self._trace.requests),
            self._trace.num_accesses,
            list(self.cache.chain.counts.blocks_hit),
            dict(self._transfer.moved),
            self._seconds,
        )


def _layout(granules: int) -> KVLayout:
    group = LayerGroup((0,), granules)
    return KVLayout("replay", 1, 1, 1, "float32", (group,), granule=1)


def _rising(times: Iterable[float]) -> list[float]:
    """The same times, those that are equal a tick apart: a policy knows requests by them."""
    rising: list[float] = []
    for time in times:
        rising.append(max(time, rising[-1] + _TICK) if rising else time)
    return rising
