"""How many tokens a block has: the same for every layer, by ranges of layers, or what costs least.

A size is an integer from 1 to 4096 tokens. No policy ever changes a size: a namespace asks once.
What a block costs is `block_cost`'s to say.
"""

import re
from collections.abc import Mapping, Sequence

from policies.base import GRANULE, BlockSizePolicy, LayerShape, SizingFacts
from policies.block_cost import LayerKind, cost_of, kinds_of

MAX_SIZE = 4096
_FEW = 64  # blocks, that a tier should hold more than


class Uniform(BlockSizePolicy):
    """One size for all layers."""

    def __init__(self, size: int = 16) -> None:
        self.size = _checked(size, "size")

    def sizes(self, layers: Sequence[LayerShape], facts: SizingFacts) -> list[int]:
        return [self.size] * len(layers)


class Hierarchical(BlockSizePolicy):
    """A size for each range of layers: "0-9" (both ends included) or "12", else `default`."""

    def __init__(self, sizes: Mapping[str, int], default: int = 16) -> None:
        self.default = _checked(default, "default")
        self._names: dict[range, str] = {}
        self._sizes: dict[range, int] = {}
        for name, size in _table(sizes).items():
            layers = _layers(name)
            for other, taken in self._names.items():
                if layers.start < other.stop and other.start < layers.stop:
                    raise ValueError(f"layer ranges {taken!r} and {name!r} overlap")
            self._names[layers] = name
            self._sizes[layers] = _checked(size, f"sizes[{name!r}]")

    def sizes(self, layers: Sequence[LayerShape], facts: SizingFacts) -> list[int]:
        """Raises `ValueError` naming a range that has none of `layers`."""
        for span, name in self._names.items():
            if not any(layer.index in span for layer in layers):
                raise ValueError(f"layer range {name!r} matches none of the {len(layers)} layers")
        return [self._size(layer.index) for layer in layers]

    def _size(self, index: int) -> int:
        return next((s for span, s in self._sizes.items() if index in span), self.default)


class Auto(BlockSizePolicy):
    """For each kind of layers, equal in window, the size that `block_cost` finds cheapest: of
    doublings from `smallest` to `largest`, the smallest of equally cheap ones, and none but
    `smallest` of which the hottest tier would hold few."""

    by_facts = True

    def __init__(self, smallest: int = GRANULE, largest: int = 512) -> None:
        self.smallest = _checked(smallest, "smallest")
        self.largest = _checked(largest, "largest")
        if smallest > largest:
            raise ValueError(f"smallest = {smallest} is above largest = {largest}")

    def sizes(self, layers: Sequence[LayerShape], facts: SizingFacts) -> list[int]:
        """Raises `ValueError` if no multiple of the granule is from `smallest` to `largest`."""
        sizes = dict[int, int]()
        for kind in kinds_of(layers):
            costs = [cost_of(size, kind, facts) for size in self.candidates(kind, facts)]
            best = min(costs, key=lambda cost: (cost.total, cost.size))
            sizes |= dict.fromkeys(kind.layers, best.size)
        return [sizes[layer.index] for layer in layers]

    def candidates(self, kind: LayerKind, facts: SizingFacts) -> list[int]:
        """The sizes it chooses from: `smallest`, rounded up to whole granules, and doublings."""
        step = facts.granule or 1
        found = [-(-self.smallest // step) * step]
        if found[0] > self.largest:
            raise ValueError(
                f"no multiple of the granule, {step}, is from {self.smallest} to {self.largest}"
            )
        most = min(self.largest, facts.memory_nbytes / (_FEW * kind.nbytes_per_token))
        while found[-1] * 2 <= most:
            found.append(found[-1] * 2)
        return found


def _table(sizes: object) -> Mapping[str, object]:
    if not isinstance(sizes, Mapping):
        raise ValueError(f"sizes = {sizes!r} is not a table of layer ranges")
    return sizes


def _layers(name: str) -> range:
    match = re.fullmatch(r"([0-9]+)(?:-([0-9]+))?", name)
    if match is None:
        raise ValueError(f"layer range {name!r} is neither like '0-9' nor like '12'")
    first = int(match[1])
    last = first if match[2] is None else int(match[2])
    if last < first:
        raise ValueError(f"layer range {name!r} ends before it begins")
    return range(first, last + 1)


def _checked(size: object, what: str) -> int:
    if type(size) is not int or not 1 <= size <= MAX_SIZE:
        raise ValueError(f"{what} = {size!r} is not an integer from 1 to {MAX_SIZE}")
    return size
