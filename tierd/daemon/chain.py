"""The chain of tiers as places: making room on top, and what has to be copied for that.

Victims go down before their places are given away, so a demotion loses nothing while the tier
below has room; what lies there already moves no bytes. Copies are *planned* here, in program order,
and taken by the cache (`take`), which has them carried out. A placement policy says where copies
are kept. It knows pools and levels, no leases.
"""

from collections.abc import Iterator, Sequence
from itertools import islice, zip_longest

from policies.base import Access, PlacementPolicy
from policies.placement import Inclusive
from tierd.block import Block, BlockHash, State
from tierd.daemon.copy import Copy
from tierd.daemon.duplicates import Duplicates
from tierd.daemon.tier import Counts, Tier
from tierd.daemon.victims import Victims
from tierd.errors import OutOfBlocks
from tierd.layout import KVLayout


class TierChain:
    """The tiers of one namespace, hottest first."""

    def __init__(
        self, layout: KVLayout, tiers: Sequence[Tier], placement: PlacementPolicy | None = None
    ) -> None:
        self.layout, self.tiers = layout, list(tiers)
        self.counts = Counts(blocks_hit=[0] * len(tiers))
        self._planned: list[Copy] = []
        self.place_by(placement or Inclusive())

    def place_by(self, placement: PlacementPolicy) -> None:
        """Another placement policy from now on."""
        self.placement = placement
        self._duplicates = Duplicates(self.tiers, placement)
        self.victims = Victims(self.tiers, self._duplicates)

    def take(self) -> list[Copy]:
        """The copies planned since the last call, in program order."""
        planned, self._planned = self._planned, []
        return planned

    def reserve(self, level: int, need: Sequence[int], access: Access) -> list[list[Block]]:
        """Take `need[g]` places of each group at `level`, demoting what is in the way.

        Raises OutOfBlocks, naming the shortest group, before anything has changed.
        """
        for tier in self.tiers[level:]:
            for pool in tier.pools:
                pool.tick(access)
        try:
            for group, n in enumerate(need):
                self._grow(level, group, n)
            victims = [self.victims.choose(level, g, n, access) for g, n in enumerate(need)]
        except OutOfBlocks:
            raise self._shortage(level, need) from None
        for group, chosen in enumerate(victims):
            self.evict(level, group, chosen, access)
        return [self.tiers[level].pools[g].allocate(n) for g, n in enumerate(need)]

    def hit(
        self,
        group: int,
        path: Sequence[BlockHash],
        levels: Sequence[int],
        access: Access,
        home: int = 0,
    ) -> None:
        """A hit of a lease at level `home` is `path`, whose blocks lie at `levels`: a use of it
        where it lies on top, and in those tiers below that the placement names; not at `home`."""
        present, num_levels = set(levels), len(self.tiers)
        touches = {level: {*self.placement.touches(level, num_levels)} for level in present}
        touches.get(0, set()).add(0)
        for at in range(num_levels):
            if at == home:
                continue
            if all(at in touches[level] for level in present):
                used = path
            else:
                used = [k for k, lv in zip(path, levels, strict=True) if at in touches[lv]]
            self.tiers[at].pools[group].touch(used, access)

    def used(self, group: int, path: Sequence[BlockHash], access: Access) -> None:
        """A request that is over used `path`, wherever it lies: for who decides what is worth
        writing."""
        for tier in self.tiers:
            if tier.admissions and path:
                tier.admissions[group].used(path, access)

    def _shortage(self, level: int, need: Sequence[int]) -> OutOfBlocks:
        """What to say of the group that is shortest."""
        pools = self.tiers[level].pools
        spare = [pool.num_free + sum(1 for _ in pool.evictable()) for pool in pools]
        group = max(range(len(need)), key=lambda g: need[g] - spare[g])
        of, pool = self.layout.groups[group], pools[group]
        states = ", ".join(f"{count} {state.word}" for state, count in pool.counts.items())
        return OutOfBlocks(
            f"group {group} (layers {of.layers[0]} to {of.layers[-1]}): need {need[group]} blocks "
            f"of {of.block_size} tokens at tier {self.tiers[level].name!r}, which holds "
            f"{pool.capacity}: {states}; {spare[group]} free or evictable"
        )

    def _grow(self, level: int, group: int, n: int) -> None:
        tier, pool = self.tiers[level], self.tiers[level].pools[group]
        while pool.num_free < n and not tier.paused and (ids := tier.grow(group)) is not None:
            pool.grow(ids)

    def evict(self, level: int, group: int, victims: Sequence[Block], access: Access) -> None:
        """Evict `victims`, first saving to the tier below those that none below has, as far as it
        has room."""
        if not victims:
            return
        self._duplicates.leaving(level, group, victims)
        only = [b for b in victims if not self._duplicates.holds(level, group, b)]
        if level + 1 < len(self.tiers):
            lacking = [b for b in only if b.key and self.victims.below(level, group, b) is None]
            worthy = self.victims.worthy(level + 1, group, lacking, access)
            saved = self.copy_down(level, group, worthy, level + 1, access, pin=False)
            self.counts.refused += len(lacking) - len(worthy)
            self.counts.dropped += len(lacking) - saved
        else:
            self.counts.dropped += len(only)
        if admissions := self.tiers[level].admissions:
            admissions[group].gave_up([block.key for block in only], access)
        for block in victims:
            self.tiers[level].pools[group].evict(block)

    def copy_down(
        self,
        level: int,
        group: int,
        blocks: Sequence[Block],
        to: int,
        access: Access,
        *,
        pin: bool,
    ) -> int:
        """Plan copies of `blocks` into level `to`, the hottest (last) ones if not all fit."""
        pool, below = self.tiers[level].pools[group], self.tiers[to].pools[group]
        if not blocks or self.tiers[to].paused:
            return 0
        self._grow(to, group, len(blocks))
        spare = islice(below.evictable(), max(0, len(blocks) - below.num_free))
        fits = min(len(blocks), below.num_free + sum(1 for _ in spare))
        victims = self.victims.first(to, group, max(0, fits - below.num_free))
        self.evict(to, group, victims, access)
        for block, place in zip(blocks[len(blocks) - fits :], below.allocate(fits), strict=True):
            if pin:
                pool.pin(block)
            self.put(group, level, block, to, place, access, holds=pin)
            below.unpin(place)
        self.counts.demoted += fits
        return fits

    def load(
        self,
        group: int,
        level: int,
        source: Block,
        target: Block,
        landing: Iterator[Block],
        access: Access,
        to: int = 0,
    ) -> None:
        """Plan the pinned, named `source` into `target` at level `to`; on the way to the top tier
        by host memory if it has a place to spare: the bytes then stay there too."""
        if level > to:
            self.counts.promoted += 1
            self._duplicates.add(level, group, source)
        stop = next(landing, None) if to == 0 and level > 1 else None
        if stop is not None:
            self.put(group, level, source, 1, stop, access)
            level, source = 1, stop
            self._duplicates.add(level, group, source)
        self.put(group, level, source, to, target, access)

    def put(
        self,
        group: int,
        level: int,
        source: Block,
        to: int,
        place: Block,
        access: Access,
        *,
        holds: bool = True,
    ) -> None:
        """Plan a copy of the named `source` into a private `place` of another level's pool, which
        is findable under that name from now on."""
        assert source.key is not None, f"block {source.block_id} has no name"
        pool = self.tiers[to].pools[group]
        hints = self.tiers[level].pools[group].said(source)  # they go along
        pool.load(place, source.key, source.parent, Access(access.time, hints), source.inner)
        self._plan(group, level, source, to, place, holds=holds)

    def copy_on_write(self, group: int, level: int, source: Block, to: int, target: Block) -> Copy:
        """Plan the pinned `source`, wherever it lies, into a lease's own `target`, in one copy."""
        self.counts.copied_on_write += 1
        return self._plan(group, level, source, to, target, holds=True, private=True)

    def landing_places(self, group: int, below: Sequence[tuple[int, Block]]) -> Iterator[Block]:
        """Free or clean places of host memory for blocks that come from further below.

        A load never waits for a write, so a block that only host memory has is left alone.
        """
        if not below or len(self.tiers) < 3 or self.tiers[1].paused:
            return iter(())
        pool, colder = self.tiers[1].pools[group], [t.pools[group] for t in self.tiers[2:]]
        self._grow(1, group, len(below))
        wanted = len(below) - pool.num_free
        candidates = islice(pool.evictable(), 2 * len(below)) if wanted > 0 else ()
        clean = [b for b in candidates if b.key and any(p.get(b.key) for p in colder)]
        for block in clean[: max(0, wanted)]:
            pool.evict(block)
        return iter(pool.allocate(min(len(below), pool.num_free)))

    def fetch(self, group: int, below: Sequence[tuple[int, Block]], access: Access) -> None:
        """Plan copies of blocks of lower levels into host memory, as far as it has places."""
        places = self.landing_places(group, below)
        for (level, source), place in zip(below, places, strict=False):
            self.tiers[level].pools[group].pin(source)
            self.put(group, level, source, 1, place, access)
            self.tiers[1].pools[group].unpin(place)
            self.counts.prefetched += 1

    def unsaved(self) -> list[tuple[int, int, Block]]:
        """`(level, group, block)` of what only volatile tiers hold, hottest first, as far as the
        coldest tier has room. For `save`, in pieces."""
        found, coldest = [], self.tiers[-1]
        for group, pool in enumerate(coldest.pools):
            # In the order of its hottest copy; read from its coldest, which is nearest.
            lacking = {
                block.key: (level, group, block)
                for level, tier in enumerate(self.tiers[:-1])
                for block in tier.pools[group].hottest()
                if block.key and pool.get(block.key) is None
            }
            self._grow(len(self.tiers) - 1, group, len(lacking))
            found.append(list(lacking.values())[: pool.capacity])
        return [entry for entries in zip_longest(*found) for entry in entries if entry]

    def save(self, unsaved: Sequence[tuple[int, int, Block]], access: Access) -> None:
        """Copy blocks into the coldest tier, the daemon's way out; they stay where they are too."""
        coldest = len(self.tiers) - 1
        for level, group, block in unsaved:
            known = self.tiers[coldest].pools[group].get
            if block.state is State.COMMITTED and block.key and known(block.key) is None:
                self.copy_down(level, group, [block], coldest, access, pin=True)

    def copy_within(self, group: int, level: int, source: Block, target: Block) -> Copy:
        """Plan the pinned `source` into another, private place of its pool, to move there."""
        self.counts.moved += 1
        return self._plan(group, level, source, level, target, holds=True, private=True)

    def _plan(
        self,
        group: int,
        src_level: int,
        src: Block,
        dst_level: int,
        dst: Block,
        *,
        holds: bool,
        private: bool = False,
    ) -> Copy:
        copy = Copy(
            src.key, src.parent, group, src_level, src, dst_level, dst, holds, private=private
        )
        self._planned.append(copy)
        return copy
