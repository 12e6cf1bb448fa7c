"""The shape of a model's KV-cache: which layers form a group, and what a block of each group is.

A block of group g is one contiguous run of bytes, the tensor
`[layers of g, 2 (K, V), num_kv_heads, block_size, head_dim]` and zero padding up to a whole page:

    | layer a: K: head 0: token 0 .. token bs-1 | head 1 .. | V: .. | layer b: .. | padding |

A layout is a value: two engines share blocks only if theirs are equal, field by field (I10). It
does not know where blocks lie.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from hashlib import blake2b
from math import gcd, lcm, prod
from typing import Any, Self

from tierd.block import HASH_NBYTES, BlockHash

PAGE = 4096
ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}

_TEXTS = ("model", "dtype", "revision", "adapter", "salt")
_LEAST = {
    "num_layers": 1,
    "num_kv_heads": 1,
    "head_dim": 1,
    "num_ranks": 1,
    "rank": 0,
    "granule": 0,
}


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers that share a block size and a window; `block_size` in tokens."""

    layers: tuple[int, ...]
    block_size: int


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Everything that decides what the bytes of a block mean.

    `groups` may be left empty by an engine: the daemon's block-size policy then chooses them.
    `windows` gives each layer's sliding window in tokens, or None for full attention; empty means
    full attention everywhere. `revision` names the weights, `adapter` a LoRA by content, `salt`
    anything else that must not be shared.
    """

    model: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    groups: tuple[LayerGroup, ...] = ()
    windows: tuple[int | None, ...] = ()
    revision: str = ""
    adapter: str = ""
    salt: str = ""
    rank: int = 0
    num_ranks: int = 1
    granule: int = 0  # tokens between two hashes; 0: the gcd of the block sizes

    def __post_init__(self) -> None:
        for name in _TEXTS:
            if not isinstance(value := getattr(self, name), str):
                raise ValueError(f"layout: {name} must be text, not {value!r}")
        for name, least in _LEAST.items():
            _check_integer(name, getattr(self, name), least)
        if self.rank >= self.num_ranks:
            raise ValueError(f"layout: rank {self.rank} is not below num_ranks {self.num_ranks}")
        if self.dtype not in ITEMSIZE:
            raise ValueError(f"layout: dtype {self.dtype!r} is not one of {', '.join(ITEMSIZE)}")
        if self.windows and len(self.windows) != self.num_layers:
            raise ValueError(
                f"layout: {len(self.windows)} windows given for {self.num_layers} layers"
            )
        for window in self.windows:
            if window is not None:
                _check_integer("windows", window, 1)
        if self.groups:
            self._check_groups()

    def _check_groups(self) -> None:
        layers = [layer for group in self.groups for layer in group.layers]
        for layer in layers:
            _check_integer("layers of groups", layer, 0)
        if sorted(layers) != list(range(self.num_layers)):
            raise ValueError(
                f"layout: groups cover layers {sorted(layers)}, not 0 to {self.num_layers - 1}"
            )
        for group in self.groups:
            _check_integer("block_size", group.block_size, 1)
            if len({self._window_of(layer) for layer in group.layers}) != 1:
                raise ValueError(f"layout: layers {group.layers} share a group but not a window")
        sizes = [group.block_size for group in self.groups]
        if self.granule and gcd(*sizes) % self.granule:
            raise ValueError(f"layout: granule {self.granule} does not divide block sizes {sizes}")

    def _window_of(self, layer: int) -> int | None:
        return self.windows[layer] if self.windows else None

    def window(self, group: int) -> int | None:
        """The sliding window of a group in tokens, None for full attention."""
        return self._window_of(self.groups[group].layers[0])

    def group_of(self, layer: int) -> tuple[int, int]:
        """The group a layer is in, and its position among that group's layers."""
        for index, group in enumerate(self.groups):
            if layer in group.layers:
                return index, group.layers.index(layer)
        raise ValueError(f"layout: there is no layer {layer} among {self.num_layers}")

    @property
    def hash_step(self) -> int:
        """Tokens between two hashes of the chain."""
        return self.granule or gcd(*(group.block_size for group in self.groups))

    @property
    def alignment(self) -> int:
        """Tokens after which every group is at the end of a block."""
        return lcm(*(group.block_size for group in self.groups))

    def block_shape(self, group: int) -> tuple[int, int, int, int, int]:
        """Shape of a block: `(layers, 2, num_kv_heads, block_size, head_dim)`."""
        layers, size = self.groups[group].layers, self.groups[group].block_size
        return (len(layers), 2, self.num_kv_heads, size, self.head_dim)

    def payload_nbytes(self, group: int) -> int:
        """Bytes of a block's tensor, without the padding."""
        return prod(self.block_shape(group)) * ITEMSIZE[self.dtype]

    def block_nbytes(self, group: int) -> int:
        """Bytes a block occupies at every tier: whole pages."""
        return -(-self.payload_nbytes(group) // PAGE) * PAGE

    def nbytes_per_token(self) -> int:
        """Bytes of K and V a token has over all layers of one layout."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * ITEMSIZE[self.dtype]

    def with_block_sizes(self, sizes: Sequence[int]) -> Self:
        """The same layout with groups made of layers of equal block size and window."""
        layers: dict[tuple[int, int | None], list[int]] = {}
        for layer, size in enumerate(sizes):
            layers.setdefault((size, self._window_of(layer)), []).append(layer)
        groups = tuple(LayerGroup(tuple(of), size) for (size, _), of in layers.items())
        return replace(self, groups=groups)

    def root(self, tenant: str) -> BlockHash:
        """The root of a tenant's hash chain: its namespace (DESIGN §1)."""
        text = json.dumps(["tierd namespace 1", tenant, asdict(self)], sort_keys=True)
        return BlockHash(blake2b(text.encode(), digest_size=HASH_NBYTES).digest())

    def differences(self, other: Self) -> list[str]:
        """What differs between two layouts, one text a field, ours first."""
        return [
            f"{field.name} {getattr(self, field.name)!r} != {getattr(other, field.name)!r}"
            for field in fields(self)
            if getattr(self, field.name) != getattr(other, field.name)
        ]

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values, the inverse of `from_json`."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Self:
        """Raises ValueError if a field is missing, unknown or of the wrong kind."""
        if not isinstance(values, dict):
            raise ValueError(f"layout: need an object of fields, not {values!r}")
        groups, windows = values.get("groups", ()), values.get("windows", ())
        if not isinstance(windows, (list, tuple)):
            raise ValueError(f"layout: windows must be a list, not {windows!r}")
        try:
            groups = tuple(LayerGroup(**{**g, "layers": tuple(g["layers"])}) for g in groups)
        except (TypeError, KeyError) as error:
            raise ValueError(f"layout: groups are not layers and block_size: {error}") from None
        try:
            return cls(**{**values, "groups": groups, "windows": tuple(windows)})
        except TypeError as error:  # a field is missing or unknown
            raise ValueError(f"layout: {error}") from None


def _check_integer(name: str, value: Any, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"layout: {name} must be an integer of at least {least}, not {value!r}")
