"""A tiered cache over tiny pools, with a transfer that moves no bytes and settles when told.

A prompt is a string, one letter a granule; a granule's name is the prompt up to its end, so prompts
share blocks exactly as far as they share letters.
"""

from collections.abc import Iterable, Sequence

from policies.base import Access, AdmissionPolicy, PlacementPolicy
from policies.lru import LRU
from tierd.block import Block, BlockHash
from tierd.daemon.cache import TieredCache
from tierd.daemon.copy import Copy, Outcome, Place, Settle
from tierd.daemon.lease import Lease
from tierd.daemon.pool import BlockPool
from tierd.daemon.steps import Step
from tierd.daemon.tier import Tier
from tierd.layout import KVLayout, LayerGroup

DEVICE, HOST, SSD = range(3)
NOW = Access(0.0)
PLAIN = KVLayout("m", 1, 1, 1, "float32", (LayerGroup((0,), 2),))
# Full attention in blocks of 4 tokens, and a window of 4 tokens in blocks of 2.
WINDOWED = KVLayout(
    "m", 2, 1, 1, "float32", (LayerGroup((0,), 4), LayerGroup((1,), 2)), windows=(None, 4)
)


def chain(prompt: str) -> list[BlockHash]:
    return [BlockHash(prompt[: stop + 1].encode()) for stop in range(len(prompt))]


class FakeTransfer:
    """Keeps copies until told how they end, or, `at_once`, ends them in order as they come.

    Copies from a place in `corrupt` are lost.
    """

    def __init__(self, *, at_once: bool) -> None:
        self.copies: list[Copy] = []  # every one ever submitted
        self.pending: dict[Copy, Settle] = {}
        self.begun: set[Copy] = set()
        self.corrupt: set[Place] = set()
        self._at_once, self._running = at_once, False

    def submit(self, copies: Iterable[Copy], settle: Settle) -> None:
        for copy in copies:
            self.copies.append(copy)
            self.pending[copy] = settle
        if self._at_once and not self._running:
            self._running = True
            self.run()
            self._running = False

    def cancel(self, place: Place) -> None:
        for copy in list(self.pending):
            if copy.target == place and copy not in self.begun:
                self.end(copy, Outcome.CANCELLED)

    def end(self, copy: Copy, outcome: Outcome = Outcome.DONE) -> None:
        """End a copy; if it brings no bytes, those that read its target fail."""
        self.pending.pop(copy)(copy, outcome)
        if outcome is not Outcome.DONE:
            for after in [c for c in self.pending if c.source == copy.target]:
                self.end(after, Outcome.FAILED)

    def run(self) -> None:
        """End everything in program order."""
        while self.pending:
            copy = next(iter(self.pending))
            self.end(copy, Outcome.LOST if copy.source in self.corrupt else Outcome.DONE)

    @property
    def routes(self) -> list[tuple[str, int, int]]:
        """`(name, from level, to level)` of every copy ever submitted."""
        return [(copy.key.decode(), copy.src_level, copy.dst_level) for copy in self.copies]


class Rig:
    """The cache, its pools and an engine's shortest way to say things."""

    def __init__(
        self,
        *capacities: Sequence[int] | int,
        layout: KVLayout = PLAIN,
        at_once: bool = False,
        placement: PlacementPolicy | None = None,
        admission: AdmissionPolicy | None = None,
    ) -> None:
        """`admission`: of the coldest tier."""
        self.layout = layout
        self.tiers = []
        for name, capacity in zip(("device", "host", "ssd"), capacities, strict=False):
            sizes = [capacity] if isinstance(capacity, int) else capacity
            pools = [BlockPool(LRU(0)) for _ in sizes]
            for pool, size in zip(pools, sizes, strict=True):
                pool.grow(range(size))
            self.tiers.append(Tier(name, pools, lambda group: None))
        if admission is not None:
            self.tiers[-1].admissions = [admission for _ in layout.groups]
        self.transfer = FakeTransfer(at_once=at_once)
        self.cache = TieredCache(layout, self.tiers, self.transfer, placement)
        self.told: list[Lease] = []

    def pool(self, level: int, group: int = 0) -> BlockPool:
        return self.tiers[level].pools[group]

    def tokens(self, prompt: str) -> int:
        """Every granule of the prompt, and one token more to compute."""
        return len(prompt) * self.layout.hash_step + 1

    def acquire(self, prompt: str, num_tokens: int | None = None, room: int = 0) -> Lease:
        asked = num_tokens or self.tokens(prompt)
        return self.cache.acquire(chain(prompt), asked, max(room, asked), NOW, self.told.append)

    def commit(self, *leases: Lease, room: int = 0) -> None:
        """Freeze every token of the leases whose name is known."""
        step = self.layout.hash_step
        self.cache.advance([Step(e, len(e.hashes) * step, (), room) for e in leases], NOW)

    def write(self, prompt: str) -> None:
        """An engine computes a prompt and goes."""
        lease = self.acquire(prompt)
        self.transfer.run()
        self.commit(lease)
        self.release(lease)

    def release(self, lease: Lease) -> None:
        self.cache.release(lease, NOW)

    def place(self, level: int, prompt: str, group: int = 0, first: int = 0) -> list[Block]:
        """Commit a prompt's blocks from `first` on in a tier, as if they had gone there before."""
        ratio = self.layout.groups[group].block_size // self.layout.hash_step
        hashes, pool = chain(prompt), self.pool(level, group)
        names = hashes[ratio - 1 :: ratio]
        blocks = pool.allocate(len(names) - first)
        for index, block in enumerate(blocks, first):
            inner = hashes[index * ratio : (index + 1) * ratio - 1]
            parent = names[index - 1] if index else None
            assert pool.commit(block, names[index], parent, NOW, inner)
            pool.unpin(block)
        return blocks

    def found(self, level: int, group: int = 0) -> set[str]:
        """Names that are findable in a tier."""
        return {block.key.decode() for block in self.pool(level, group) if block.key}

    def snapshot(self) -> object:
        """Everything of every pool that a failed call may not change."""
        return [
            (
                [(b.block_id, b.state, b.ref_cnt, b.key, b.parent) for b in pool],
                dict(pool.counts),
                pool.num_free,
                [b.block_id for b in pool.evictable()],
            )
            for tier in self.tiers
            for pool in tier.pools
        ]
