"""One rung of the chain: a pool for each layer group, and what the cache has done with them.

Plain state that the planner changes; levels are positions in a list, so a tier does not know its
own.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from typing import Self

from policies.base import AdmissionPolicy, EvictionPolicy
from tierd.daemon.pool import BlockPool


@dataclass(slots=True)
class Tier:
    """One rung of the chain: a pool for each layer group.

    `grow(group)` gives more places for a group's pool, or None if the tier has no more to give.
    Between its `watermarks` a tier keeps places free, or evictable without a copy. A paused tier
    takes nothing new (its medium is full or failing) but still serves. `admissions` say, by group,
    what of that which would come down to it is worth writing; without any, all is.
    """

    name: str
    pools: Sequence[BlockPool]
    grow: Callable[[int], Iterable[int] | None]
    paused: bool = False
    watermarks: tuple[float, float] = (0.0, 0.0)  # of places free or clean, as parts of a pool
    admissions: Sequence[AdmissionPolicy] = ()

    @classmethod
    def of(
        cls,
        name: str,
        policy: type[EvictionPolicy],
        options: Mapping[str, object],
        groups: Sized,
        grow: Callable[[int], Iterable[int] | None],
    ) -> Self:
        """A tier of empty pools, one for each of `groups`, each with a policy of its own."""
        return cls(name, [BlockPool(policy(0, **options)) for _ in range(len(groups))], grow)


@dataclass(slots=True)
class Counts:
    """What the cache has done since it was made, in blocks unless it says tokens."""

    requests: int = 0
    tokens_asked: int = 0
    tokens_hit: int = 0
    blocks_hit: list[int] = field(default_factory=list)  # by level
    promoted: int = 0
    copied_on_write: int = 0
    moved: int = 0  # within a pool
    forks: int = 0
    suspended: int = 0
    prefetched: int = 0
    demoted: int = 0
    dropped: int = 0  # evicted with no copy left below
    refused: int = 0  # of those, what was not worth writing
    failed: int = 0
    lost: int = 0  # unreadable or corrupt in a lower tier
    out_of_blocks: int = 0

    def asked(self, num_tokens: int, hit: int, levels: Iterable[int]) -> None:
        """A prompt was leased; `levels` are those of the blocks of its hit."""
        self.requests += 1
        self.tokens_asked += num_tokens
        self.tokens_hit += hit
        for level in levels:
            self.blocks_hit[level] += 1
