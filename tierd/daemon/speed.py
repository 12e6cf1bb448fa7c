"""How fast each route between two tiers is, and which hit is the fastest for that.

A route is measured by bursts, from when it begins to work until it is idle again, as

    seconds = latency + bytes / bandwidth

for batches overlap, and what one of them took alone says little. A burst that does not end is
measured in pieces, of which only the first has the latency. It moves nothing and decides for
nobody; the clock is given.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Route = tuple[int, int]  # from level, to level

_MEMORY = 1 / 32  # the weight of a new burst: what is older than some 32 of them hardly counts
_TRUSTED = 8  # bursts after which one that took far too long is an accident
_ACCIDENT = 4.0  # times the expected seconds; beyond it counts as this
_MOST_LATENCY = 0.9  # of what bursts took: bandwidth is finite
_PIECE = 32  # batches of a burst that does not end


@dataclass(slots=True)
class RouteSpeed:
    """A line through what bursts took, the latest counting most.

    It is fitted to seconds a byte over bursts a byte, so that a burst of one block counts as much
    as one of many: noise grows with size.
    """

    bursts: int = 0
    nbytes: int = 0  # under way
    _rate: float = 0.0  # means: seconds a byte; 1 a byte (0 in later pieces); and their products
    _per_byte: float = 0.0
    _per_byte_squared: float = 0.0
    _product: float = 0.0

    def took(self, nbytes: int, seconds: float, *, first: bool = True) -> None:
        """A burst, or the `first` or a later piece of one, took so long for so many bytes."""
        if self.bursts >= _TRUSTED:
            expected = self.latency * first + nbytes * self.seconds_per_byte
            seconds = min(seconds, _ACCIDENT * expected)
        rate, per_byte = max(seconds, 1e-9) / nbytes, first / nbytes
        self.bursts += 1
        weight = max(_MEMORY, 1 / self.bursts)
        self._rate += weight * (rate - self._rate)
        self._per_byte += weight * (per_byte - self._per_byte)
        self._per_byte_squared += weight * (per_byte**2 - self._per_byte_squared)
        self._product += weight * (per_byte * rate - self._product)

    @property
    def latency(self) -> float:
        """Seconds until the first byte of a burst is there."""
        spread = self._per_byte_squared - self._per_byte**2
        if spread <= 1e-6 * self._per_byte_squared:  # all of one size: nothing tells them apart
            return 0.0
        slope = (self._product - self._per_byte * self._rate) / spread
        return min(max(slope, 0.0), _MOST_LATENCY * self._rate / self._per_byte)

    @property
    def seconds_per_byte(self) -> float:
        return self._rate - self.latency * self._per_byte

    def seconds(self, nbytes: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """How long each of some loads would take, behind what is under way; none takes none."""
        if not self.bursts:
            return np.zeros(len(nbytes))
        behind = nbytes + self.nbytes
        return np.where(nbytes > 0, self.latency + behind * self.seconds_per_byte, 0.0)


@dataclass(slots=True)
class _Burst:
    """What a route is doing since it was idle, or since the last piece of that."""

    began: float
    first: bool
    batches: int = 0
    nbytes: int = 0
    whole: bool = True  # every batch moved its bytes


class Speeds:
    """The speeds of one namespace's routes."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock`: seconds, from any origin, never backwards."""
        self.routes: dict[Route, RouteSpeed] = {}
        self._clock = clock
        self._bursts: dict[Route, _Burst] = {}

    def begin(self, route: Route, nbytes: int) -> None:
        """A batch of `nbytes`, above 0, sets out; `end` must follow."""
        speed = self.routes.setdefault(route, RouteSpeed())
        if not speed.nbytes:
            self._bursts[route] = _Burst(self._clock(), first=True)
        speed.nbytes += nbytes

    def end(self, route: Route, nbytes: int, *, moved: bool) -> None:
        """It has ended; a burst in which something was not `moved` says nothing of the speed."""
        speed, burst, now = self.routes[route], self._bursts[route], self._clock()
        speed.nbytes -= nbytes
        burst.batches += 1
        burst.nbytes += nbytes
        burst.whole &= moved
        if speed.nbytes and burst.batches < _PIECE:
            return
        if burst.whole:
            speed.took(burst.nbytes, now - burst.began, first=burst.first)
        self._bursts[route] = _Burst(now, first=False)


def fastest_hit(
    hits: Sequence[int],
    elsewhere: npt.NDArray[np.int64],
    num_tokens: int,
    prefill: float,
    routes: Mapping[Route, RouteSpeed],
    to: int = 0,
) -> int:
    """Which of `hits`, usable ones in tokens, lets a prompt of `num_tokens` be ready first.

    It is the L with the least

        load(L) + (num_tokens - L) / prefill,        load(L) = sum of seconds_r(bytes_r(L)) over r

    the longest of equal ones. `prefill` is in tokens a second, above 0. `elsewhere[l, i]`: the
    bytes of `hits[i]` that lie at level l, not at `to`. They take the route (l, to), but from below
    host memory to the top (l, 1) and (1, 0); a route that was never measured takes no time.
    """
    lengths = np.asarray(hits)
    seconds = (num_tokens - lengths) / prefill
    by_host = to == 0
    loads = {
        (level, 1 if by_host and level > 1 else to): nbytes
        for level, nbytes in enumerate(elsewhere)
        if level != to
    }
    if by_host and len(elsewhere) > 1:
        loads[1, 0] = elsewhere[1:].sum(axis=0)
    for route, nbytes in loads.items():
        if route in routes:
            seconds = seconds + routes[route].seconds(nbytes)
    return int(lengths[seconds == seconds.min()].max())
