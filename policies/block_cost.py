"""What a block size costs a request: seconds, term by term, for one kind of layers.

Wolman's fixed cell (1965) and Denning's page (1970) for KV: large blocks waste bytes, small ones
cost an entry each, and the best size is near sqrt(2 * length * entry / waste). Bytes become seconds
at one price: a wasted byte displaces a useful one, which must be brought up again. With

    b  tokens a block            n  tokens of a request, by how often they were seen
    c  bytes a token             W  the window, where there is one; live = min(n, W) tokens
    g  tokens a granule          B  bytes of a block: c * b in whole pages
    s, l, t  seconds a byte, a burst and a block, summed over the routes from the coldest tier up
    s1, t1   those of the last route alone

the blocks that a request holds are, where ends and windows may lie anywhere in a block,

    N = max(1, (n + (b - 1) / 2) / b)         of a sequence no longer than the window
    N = (W + b - 1) / b                       of one that has left it

and the terms

    tail      (N * B - live * c) * s          the last block's unfilled part, what the first holds
                                              from before the window, and padding
    shared    (1 - g / b) * (t1 + B * s1 + (b - g) / 2 * c * s)
                                              a hit ends inside a block: that is copied, and its
                                              first tokens lie there twice
    table     N * (ENTRY_S + E * s)           finding and pinning a block, and E, its bytes of index
    transfer  l + N * t + live * c * s        bringing all of it up

Which requests share and which hits are cold is not known here: each is taken to be both. Nor is
what is lost between granules, which no block size changes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd

from policies.base import GRANULE, LayerShape, SizingFacts

# What scripts/bench_granule finds of a block that is hit: seconds more of `acquire` and `release`,
# bytes of the index of its tier, and bytes of each name inside it.
ENTRY_S = 1.2e-6
ENTRY_NBYTES = 225
NAME_NBYTES = 109


@dataclass(frozen=True, slots=True)
class LayerKind:
    """Layers that may share a group: of one window, with their bytes of K and V a token."""

    layers: tuple[int, ...]
    nbytes_per_token: int
    window: int | None


@dataclass(frozen=True, slots=True)
class BlockCost:
    """Seconds a request pays for blocks of `size` tokens, of which it holds `blocks`."""

    size: int
    blocks: float
    tail: float
    shared: float
    table: float
    transfer: float

    @property
    def total(self) -> float:
        return self.tail + self.shared + self.table + self.transfer


def kinds_of(layers: Sequence[LayerShape]) -> list[LayerKind]:
    """The kinds of `layers`, in the order of their first ones."""
    windows = dict.fromkeys(layer.window for layer in layers)
    alike = [[layer for layer in layers if layer.window == window] for window in windows]
    return [
        LayerKind(
            tuple(layer.index for layer in kind),
            sum(layer.nbytes_per_token for layer in kind),
            kind[0].window,
        )
        for kind in alike
    ]


def cost_of(size: int, kind: LayerKind, facts: SizingFacts) -> BlockCost:
    """What blocks of `size` tokens cost the mean request of `facts`; the module has the formula."""
    blocks, live = _mean_use(size, kind.window, facts)
    granule = gcd(size, facts.granule or GRANULE)
    per_token = kind.nbytes_per_token
    nbytes = -(-size * per_token // facts.page_nbytes) * facts.page_nbytes
    per_byte = sum(route.seconds_per_byte for route in facts.routes)
    last = facts.routes[-1]
    copied = last.seconds_per_block + nbytes * last.seconds_per_byte
    twice = (size - granule) / 2 * per_token * per_byte
    entry = ENTRY_NBYTES + NAME_NBYTES * (size // granule - 1)
    burst = sum(route.latency for route in facts.routes)
    each = sum(route.seconds_per_block for route in facts.routes)
    return BlockCost(
        size=size,
        blocks=blocks,
        tail=(blocks * nbytes - live * per_token) * per_byte,
        shared=(1 - granule / size) * (copied + twice),
        table=blocks * (ENTRY_S + entry * per_byte),
        transfer=burst + blocks * each + live * per_token * per_byte,
    )


def _mean_use(size: int, window: int | None, facts: SizingFacts) -> tuple[float, float]:
    """Blocks that the mean request holds, and the tokens in them that it needs."""
    requests = blocks = live = 0.0
    for length, number in facts.lengths.items():
        if window is None or length <= window:
            held = max(1.0, (length + (size - 1) / 2) / size)
        else:
            held = (window + size - 1) / size
        requests += number
        blocks += number * held
        live += number * (length if window is None else min(length, window))
    return blocks / requests, live / requests
