"""Who shares a medium: its space, the parts that space is given out in, and the pools that hold it.

    medium    memory: an arena          SSD: a volume
    part      a run of extents          a slab of an array

A part is given back whole, so it is emptied first. What is given out where is the space's own
business; who deserves how much is decided elsewhere.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Protocol

from tierd.block import BlockHash
from tierd.daemon.cache import TieredCache
from tierd.daemon.config import ModelConfig
from tierd.daemon.fair import Claim
from tierd.daemon.pool import BlockPool
from tierd.daemon.transfer import StoreTransfer

if TYPE_CHECKING:
    from tierd.daemon.namespace import Namespace

Owner = tuple[BlockHash, int]  # a namespace's root, and a layer group of it


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of a medium: `nbytes` of it, and the places that lie in it, if only partly. `start`
    and `stop` are where it lies, in the space's own measure."""

    start: int
    stop: int
    ids: range
    nbytes: int


@dataclass(frozen=True, slots=True, eq=False)
class Holder:
    """One pool that holds parts: a group of a namespace, at one level of its chain."""

    owner: Owner
    level: int
    block_nbytes: int
    cache: TieredCache
    transfer: StoreTransfer
    claim: Callable[[int], Claim]  # of the bytes it holds

    @property
    def group(self) -> int:
        return self.owner[1]

    @property
    def pool(self) -> BlockPool:
        return self.cache.chain.tiers[self.level].pools[self.group]


class Space(Protocol):
    """What pools share. Nothing here waits but `give_back`."""

    @property
    def nbytes(self) -> int:
        """All there is to share."""

    def held(self, holder: Holder) -> int:
        """The bytes that a pool holds."""

    def parts(self, holder: Holder, needy: Holder) -> list[Part]:
        """What a pool holds, in parts of which one, if possible, is enough for `needy` to grow."""

    def grow(self, holder: Holder) -> Iterable[int] | None:
        """Give a pool another part: the ids it gained, or None if nothing is free."""

    async def give_back(self, holder: Holder, part: Part) -> None:
        """Take an emptied part back. Raises `OSError`, and it is the pool's still."""


def holders(
    namespace: "Namespace", level: int, owner: BlockHash, model: ModelConfig
) -> list[Holder]:
    """The pools of a namespace at one level; `owner` is its root."""
    layout = namespace.layout
    sizes = [layout.block_nbytes(group) for group in range(len(layout.groups))]
    pairs = zip(sizes, layout.groups, strict=True)
    per_token = [nbytes / group.block_size for nbytes, group in pairs]
    return [
        Holder(
            (owner, group),
            level,
            sizes[group],
            namespace.cache,
            namespace.transfer,
            partial(_claim, namespace, (owner, group), model, part / sum(per_token)),
        )
        for group, part in enumerate(per_token)
    ]


def _claim(
    namespace: "Namespace", owner: Owner, model: ModelConfig, part: float, held: int
) -> Claim:
    """What a group may claim: its model's weight and floor by the bytes that it has of a token."""
    active = namespace.num_sessions > 0
    return Claim(owner, held, model.weight * part, int(model.floor * part), active)
