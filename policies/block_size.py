"""How many tokens a block has: the same for every layer, or by ranges of layers.

A size is an integer from 1 to 4096 tokens. These policies do not know what a block costs, and they
never change a size: a namespace asks once.
"""

import re
from collections.abc import Mapping, Sequence

from policies.base import BlockSizePolicy, LayerShape

MAX_SIZE = 4096


class Uniform(BlockSizePolicy):
    """One size for all layers."""

    def __init__(self, size: int = 16) -> None:
        self.size = _checked(size, "size")

    def sizes(self, layers: Sequence[LayerShape]) -> list[int]:
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

    def sizes(self, layers: Sequence[LayerShape]) -> list[int]:
        """Raises `ValueError` naming a range that has none of `layers`."""
        for span, name in self._names.items():
            if not any(layer.index in span for layer in layers):
                raise ValueError(f"layer range {name!r} matches none of the {len(layers)} layers")
        return [self._size(layer.index) for layer in layers]

    def _size(self, index: int) -> int:
        return next((s for span, s in self._sizes.items() if index in span), self.default)


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
