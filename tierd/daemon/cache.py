"""The tiered cache of one namespace: which blocks a prompt already has, and getting them on top.

Every method is a synchronous plan over all layer groups and tiers, all or nothing: it finds what
it needs without changing anything, then changes every pool at once, then emits copies. There is no
lock: what is not there yet is *loading*, and others may wait for the same load. The bytes are moved
by the `Transfer` it was given; with one that moves none this class is the simulator.

It knows no socket, no file, no clock and no byte.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice, zip_longest

from policies.base import Access
from tierd.block import Block, BlockHash, State
from tierd.daemon.copy import Copy, Outcome, Place, Transfer
from tierd.daemon.lease import Lease
from tierd.daemon.pool import BlockPool
from tierd.errors import LeaseError, OutOfBlocks
from tierd.layout import KVLayout

Notify = Callable[[Lease], None]


@dataclass(slots=True)
class Tier:
    """One rung of the chain: a pool for each layer group.

    `grow(group)` gives more places for a group's pool, or None if the tier has no more to give.
    A paused tier takes nothing new (its medium is full or failing) but still serves.
    """

    name: str
    pools: Sequence[BlockPool]
    grow: Callable[[int], Iterable[int] | None]
    paused: bool = False


@dataclass(slots=True)
class Counts:
    """What the cache has done since it was made, in blocks unless it says tokens."""

    requests: int = 0
    tokens_asked: int = 0
    tokens_hit: int = 0
    blocks_hit: list[int] = field(default_factory=list)  # by level
    promoted: int = 0
    demoted: int = 0
    dropped: int = 0  # evicted with no copy left below
    failed: int = 0
    lost: int = 0  # unreadable or corrupt in a lower tier
    out_of_blocks: int = 0


class TieredCache:
    """A chain of tiers, hottest first. Only this class decides what moves along it."""

    def __init__(self, layout: KVLayout, tiers: Sequence[Tier], transfer: Transfer) -> None:
        self.layout = layout
        self.tiers = list(tiers)
        self.counts = Counts(blocks_hit=[0] * len(tiers))
        self._transfer = transfer
        self._sizes = [group.block_size for group in layout.groups]
        self._waiters: dict[Block, list[tuple[Lease, int]]] = {}
        self._pending: list[Copy] = []
        self._access = Access(0.0)  # the latest

    # -- requests ------------------------------------------------------------------------------

    def match_prefix(self, hashes: Sequence[BlockHash], num_tokens: int) -> int:
        """Tokens of the longest usable hit of a prompt of `num_tokens`. Changes nothing.

        It ends where every group ends a block, leaves one token to compute, and needs all blocks
        of full-attention groups but only the window's of sliding-window groups.
        """
        step = self.layout.alignment
        hit = (num_tokens - 1) // step * step
        windows = []
        for group, size in enumerate(self._sizes):
            window = self.layout.window(group)
            if window is None:
                hit = min(hit, self._reach(group, hashes, hit) * size)
            else:
                windows.append((group, size, window))
        hit = hit // step * step
        runs = [(size, window, self._runs(g, hashes, hit)) for g, size, window in windows]
        while hit and not all(
            run[hit // size - 1] >= hit // size - _first_block(hit, window, size)
            for size, window, run in runs
        ):
            hit -= step
        return hit

    def acquire(
        self,
        hashes: Sequence[BlockHash],
        num_tokens: int,
        room: int,
        access: Access,
        notify: Notify | None = None,
    ) -> Lease:
        """Lease places for `room` tokens, the longest hit of a prompt of `num_tokens` in place or
        on its way.

        Raises OutOfBlocks, nothing changed, if the top tier cannot hold it.
        """
        self._access = access
        hit = self.match_prefix(hashes, num_tokens)
        found = [self._find(group, hashes, hit) for group in range(len(self._sizes))]
        for group, blocks in enumerate(found):
            for _, level, block in blocks:
                self.tiers[level].pools[group].pin(block)
        need = [
            sum(level > 0 for _, level, _ in blocks) + _blocks(room, size) - hit // size
            for blocks, size in zip(found, self._sizes, strict=True)
        ]
        try:
            rooms = self._reserve(0, need, access)
        except OutOfBlocks:
            for group, blocks in enumerate(found):
                for _, level, block in blocks:
                    self.tiers[level].pools[group].unpin(block)
            self.counts.out_of_blocks += 1
            raise
        lease = Lease(list(hashes), [], [], hit, committed=hit, room=room, notify=notify)
        for group, (blocks, places) in enumerate(zip(found, rooms, strict=True)):
            self._fill(lease, group, blocks, places, access)
        self._touch_below(lease, access)
        self.counts.requests += 1
        self.counts.tokens_asked += num_tokens
        self.counts.tokens_hit += hit
        for _, level, _ in chain.from_iterable(found):
            self.counts.blocks_hit[level] += 1
        self._emit()
        return lease

    def advance(
        self, steps: Sequence[tuple[Lease, int, Sequence[BlockHash], int]], access: Access
    ) -> list[list[list[Block]]]:
        """For each `(lease, committed, hashes, room)`: freeze tokens up to `committed`, then make
        room up to `room` tokens. `hashes` are those of the granules after the ones known.

        Returns the blocks added, by step and group. All or nothing: raises LeaseError or
        OutOfBlocks and nothing has changed.
        """
        self._access = access
        for lease, committed, hashes, _ in steps:
            self._check_commit(lease, committed, hashes)
        if len({id(lease) for lease, *_ in steps}) != len(steps):
            raise LeaseError("a lease is named twice in one message")
        need = [
            sum(max(0, _blocks(room, size) - len(lease.tables[g])) for lease, _, _, room in steps)
            for g, size in enumerate(self._sizes)
        ]
        try:
            rooms = self._reserve(0, need, access)
        except OutOfBlocks:
            self.counts.out_of_blocks += 1
            raise
        added = []
        for lease, committed, hashes, room in steps:
            new = []
            for g, size in enumerate(self._sizes):
                count = max(0, _blocks(room, size) - len(lease.tables[g]))
                new.append([rooms[g].pop() for _ in range(count)])
                lease.tables[g].extend(new[g])
            lease.room = max(lease.room, room)
            self._commit(lease, committed, hashes, access)
            added.append(new)
        self._emit()
        return added

    def release(self, lease: Lease, access: Access) -> None:
        """Give everything back. Committed blocks stay, as the request's path, tail first."""
        self._let_go(lease, access, quarantine=False)

    def abandon(self, lease: Lease, access: Access) -> list[tuple[int, Block]]:
        """As `release`, but what the engine could write is quarantined: `(group, block)` each."""
        return self._let_go(lease, access, quarantine=True)

    def thaw(self, group: int, block: Block) -> None:
        """The engine that could write a quarantined block is really gone."""
        self.tiers[0].pools[group].thaw(block)

    def unsaved(self) -> list[tuple[int, int, Block]]:
        """`(level, group, block)` of what only volatile tiers hold, hottest first, as far as the
        coldest tier has room. For `save`, in pieces."""
        found, coldest = [], self.tiers[-1]
        for group, pool in enumerate(coldest.pools):
            lacking = {
                block.key: (level, group, block)
                for level, tier in reversed(list(enumerate(self.tiers[:-1])))
                for block in tier.pools[group].hottest()
                if block.key and pool.get(block.key) is None
            }
            self._grow(len(self.tiers) - 1, group, len(lacking))
            found.append(list(lacking.values())[: pool.capacity])
        return [entry for entries in zip_longest(*found) for entry in entries if entry]

    def save(self, unsaved: Sequence[tuple[int, int, Block]]) -> None:
        """Copy blocks into the coldest tier, the daemon's way out; they stay where they are too."""
        coldest = len(self.tiers) - 1
        for level, group, block in unsaved:
            known = self.tiers[coldest].pools[group].get
            if block.state is State.COMMITTED and block.key and known(block.key) is None:
                self._copy_down(level, group, [block], coldest, self._access, pin=True)
        self._emit()

    # -- finding -------------------------------------------------------------------------------

    def _reach(self, group: int, hashes: Sequence[BlockHash], hit: int) -> int:
        """Leading blocks of the group, up to `hit` tokens, that some tier holds."""
        pools = [tier.pools[group] for tier in self.tiers]
        names = self._names(group, hashes, 0, hit // self._sizes[group])
        for index, key in enumerate(names):
            if not any(pool.get(key) for pool in pools):
                return index
        return len(names)

    def _runs(self, group: int, hashes: Sequence[BlockHash], hit: int) -> list[int]:
        """For each block up to `hit` tokens: the length of the run of known blocks that it ends."""
        pools = [tier.pools[group] for tier in self.tiers]
        run, runs = 0, []
        for key in self._names(group, hashes, 0, hit // self._sizes[group]):
            run = run + 1 if any(pool.get(key) for pool in pools) else 0
            runs.append(run)
        return runs

    def _names(
        self, group: int, hashes: Sequence[BlockHash], start: int, stop: int
    ) -> Sequence[BlockHash]:
        """The names of blocks `start` to `stop` of a group: the hashes at their ends."""
        ratio = self._sizes[group] // self.layout.hash_step
        return hashes[(start + 1) * ratio - 1 : stop * ratio : ratio]

    def _find(
        self, group: int, hashes: Sequence[BlockHash], hit: int
    ) -> list[tuple[int, int, Block]]:
        """`(index, level, block)`, hottest copy, of every block of a group that `hit` needs."""
        size = self._sizes[group]
        first, found = _first_block(hit, self.layout.window(group), size), []
        for index, key in enumerate(self._names(group, hashes, first, hit // size), first):
            for level, tier in enumerate(self.tiers):
                if block := tier.pools[group].get(key):
                    found.append((index, level, block))
                    break
        assert len(found) == hit // size - first, "a matched block is gone"
        return found

    # -- room ----------------------------------------------------------------------------------

    def _reserve(self, level: int, need: Sequence[int], access: Access) -> list[list[Block]]:
        """Take `need[g]` places of each group at `level`, demoting what is in the way.

        Raises OutOfBlocks, naming the shortest group, before anything has changed.
        """
        victims = [self._choose(level, group, n) for group, n in enumerate(need)]
        for group, chosen in enumerate(victims):
            self._evict(level, group, chosen, access)
        return [self.tiers[level].pools[g].allocate(n) for g, n in enumerate(need)]

    def _choose(self, level: int, group: int, n: int) -> list[Block]:
        """The blocks to evict so that `n` places are free. Changes nothing but the capacity."""
        tier, pool = self.tiers[level], self.tiers[level].pools[group]
        self._grow(level, group, n)
        try:
            return pool.victims(max(0, n - pool.num_free))
        except OutOfBlocks:
            layers = self.layout.groups[group].layers
            raise OutOfBlocks(
                f"group {group} (layers {layers[0]} to {layers[-1]}): need {n} blocks of "
                f"{self._sizes[group]} tokens at tier {tier.name!r}, which holds {pool.capacity}: "
                + ", ".join(f"{count} {state.value}" for state, count in pool.counts.items())
                + f", {sum(1 for _ in pool.evictable())} evictable"
            ) from None

    def _grow(self, level: int, group: int, n: int) -> None:
        tier, pool = self.tiers[level], self.tiers[level].pools[group]
        while pool.num_free < n and not tier.paused and (ids := tier.grow(group)) is not None:
            pool.grow(ids)

    def _evict(self, level: int, group: int, victims: Sequence[Block], access: Access) -> None:
        """Evict `victims`, first saving to the tier below those it lacks and has room for."""
        if not victims:
            return
        if level + 1 < len(self.tiers):
            below = self.tiers[level + 1].pools[group]
            lacking = [block for block in victims if block.key and below.get(block.key) is None]
            saved = self._copy_down(level, group, lacking, level + 1, access, pin=False)
            self.counts.dropped += len(lacking) - saved
        else:
            self.counts.dropped += len(victims)
        for block in victims:
            self.tiers[level].pools[group].evict(block)

    def _copy_down(
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
        victims = below.victims(max(0, fits - below.num_free))
        self._evict(to, group, victims, access)
        for block, place in zip(blocks[len(blocks) - fits :], below.allocate(fits), strict=True):
            assert block.key is not None, f"block {block.block_id} has no name"
            below.load(place, block.key, block.parent, access)
            below.unpin(place)
            if pin:
                pool.pin(block)
            self._plan(group, level, block, to, place, block.key, block.parent, holds=pin)
        self.counts.demoted += fits
        return fits

    # -- filling -------------------------------------------------------------------------------

    def _fill(
        self,
        lease: Lease,
        group: int,
        found: Sequence[tuple[int, int, Block]],
        room: list[Block],
        access: Access,
    ) -> None:
        """Build the lease's table of a group from pinned `found` blocks and reserved `room`."""
        table: list[Block | None] = [None] * (lease.hit // self._sizes[group])
        loading: set[Block] = set()
        landing = self._landing_places(group, [(lv, b) for _, lv, b in found if lv > 1])
        names = self._names(group, lease.hashes, 0, len(table))
        for index, level, source in found:
            block = source
            if level > 0:
                block = room.pop()
                parent = names[index - 1] if index else None
                self._load(group, level, source, block, names[index], parent, landing, access)
            if block.state is State.LOADING:
                loading.add(block)
                self._waiters.setdefault(block, []).append((lease, group))
            table[index] = block
        lease.tables.append([*table, *room])
        lease.loading.append(loading)

    def _load(
        self,
        group: int,
        level: int,
        source: Block,
        target: Block,
        key: BlockHash,
        parent: BlockHash | None,
        landing: Iterator[Block],
        access: Access,
    ) -> None:
        """Plan the pinned `source` into `target` of the top tier, by way of host memory if it has
        a place to spare: the bytes then stay there too."""
        self.tiers[0].pools[group].load(target, key, parent, access)
        self.counts.promoted += 1
        stop = next(landing, None) if level > 1 else None
        if stop is not None:
            self.tiers[1].pools[group].load(stop, key, parent, access)
            self._plan(group, level, source, 1, stop, key, parent, holds=True)
            level, source = 1, stop
        self._plan(group, level, source, 0, target, key, parent, holds=True)

    def _landing_places(self, group: int, below: Sequence[tuple[int, Block]]) -> Iterator[Block]:
        """Free or clean places of host memory for blocks that come from further below.

        A load never waits for a write, so a block that only host memory has is left alone.
        """
        if not below or len(self.tiers) < 3:
            return iter(())
        pool, colder = self.tiers[1].pools[group], [t.pools[group] for t in self.tiers[2:]]
        self._grow(1, group, len(below))
        wanted = len(below) - pool.num_free
        candidates = islice(pool.evictable(), 2 * len(below)) if wanted > 0 else ()
        clean = [b for b in candidates if b.key and any(p.get(b.key) for p in colder)]
        for block in clean[: max(0, wanted)]:
            pool.evict(block)
        return iter(pool.allocate(min(len(below), pool.num_free)))

    def _touch_below(self, lease: Lease, access: Access) -> None:
        """A request uses its hit in every tier that holds it; the top one is touched at release."""
        for group, size in enumerate(self._sizes):
            first = _first_block(lease.hit, self.layout.window(group), size)
            path = self._names(group, lease.hashes, first, lease.hit // size)
            for tier in self.tiers[1:]:
                tier.pools[group].touch(path, access)

    def _plan(
        self,
        group: int,
        src_level: int,
        src: Block,
        dst_level: int,
        dst: Block,
        key: BlockHash,
        parent: BlockHash | None,
        *,
        holds: bool,
    ) -> None:
        self._pending.append(Copy(key, parent, group, src_level, src, dst_level, dst, holds))

    def _emit(self) -> None:
        """Hand the planned copies over, in program order."""
        copies, self._pending = self._pending, []
        if copies:
            self._transfer.submit(copies, self.settle)

    # -- committing and releasing --------------------------------------------------------------

    def _check_commit(self, lease: Lease, committed: int, hashes: Sequence[BlockHash]) -> None:
        if lease.released:
            raise LeaseError("the lease is released")
        if committed <= lease.committed and not hashes:
            return
        if not lease.ready:
            raise LeaseError("the lease may not commit before all its groups are ready")
        if committed > lease.room:
            raise LeaseError(
                f"cannot commit {committed} tokens, the lease has room for {lease.room}"
            )
        if (len(lease.hashes) + len(hashes)) * self.layout.hash_step < (
            committed // self.layout.hash_step * self.layout.hash_step
        ):
            raise LeaseError(f"hashes are missing to commit {committed} tokens")

    def _commit(
        self, lease: Lease, committed: int, hashes: Sequence[BlockHash], access: Access
    ) -> None:
        lease.hashes.extend(hashes)
        for group, size in enumerate(self._sizes):
            pool, table = self.tiers[0].pools[group], lease.tables[group]
            start, stop = lease.committed // size, committed // size
            parent = self._names(group, lease.hashes, start - 1, start)[0] if start else None
            for index, key in enumerate(self._names(group, lease.hashes, start, stop), start):
                block = table[index]
                assert block is not None, f"block {index} of group {group} is out of the window"
                pool.commit(block, key, parent, access)
                parent = key
        lease.committed = max(lease.committed, committed)

    def _let_go(self, lease: Lease, access: Access, *, quarantine: bool) -> list[tuple[int, Block]]:
        if lease.released:
            raise LeaseError("the lease is released already")
        lease.released, frozen = True, []
        for group, size in enumerate(self._sizes):
            pool = self.tiers[0].pools[group]
            pool.touch(self._names(group, lease.hashes, 0, lease.committed // size), access)
            for block in lease.tables[group]:
                if block is None:
                    continue
                if quarantine and block.state is State.PRIVATE:
                    pool.quarantine(block)
                    frozen.append((group, block))
                else:
                    self._drop(lease, group, block)
        return frozen

    def _drop(self, lease: Lease, group: int, block: Block) -> None:
        """A lease lets go of a block; the last to wait for a load cancels it."""
        if block in lease.loading[group]:
            lease.loading[group].discard(block)
            waiters = self._waiters[block]
            waiters.remove((lease, group))
            if not waiters:
                del self._waiters[block]
        self.tiers[0].pools[group].unpin(block)
        if block.state is State.LOADING and block.ref_cnt == 0:
            self._transfer.cancel(Place(0, group, block.block_id))

    # -- completions ---------------------------------------------------------------------------

    def settle(self, copy: Copy, outcome: Outcome) -> None:
        """A copy has ended: its target is readable, or its waiters get a shorter hit (I6)."""
        source, target = self.tiers[copy.src_level].pools, self.tiers[copy.dst_level].pools
        src_pool, dst_pool = source[copy.group], target[copy.group]
        if outcome is Outcome.LOST and copy.src.key == copy.key:
            self.counts.lost += 1
            src_pool.forget(copy.src)
        if copy.holds_src:
            src_pool.unpin(copy.src)
        waiters = self._waiters.pop(copy.dst, [])
        if outcome is Outcome.DONE:
            dst_pool.landed(copy.dst)
            for lease, group in waiters:
                lease.loading[group].discard(copy.dst)
                if not lease.loading[group]:
                    _tell(lease)
        else:
            self.counts.failed += outcome is not Outcome.CANCELLED
            dst_pool.failed(copy.dst)
            self._shorten(waiters, copy.dst)

    def _shorten(self, waiters: Sequence[tuple[Lease, int]], failed: Block) -> None:
        """Cut the hits of all who waited for `failed`, then give each private places instead."""
        cut = []
        for lease, group in waiters:
            lease.loading[group].discard(failed)
            start = lease.tables[group].index(failed) * self._sizes[group]
            cut.append((lease, self._roll_back(lease, start)))
        for lease, missing in cut:
            self._refill(lease, missing)
            lease.shortened = True
            _tell(lease)

    def _roll_back(self, lease: Lease, limit: int) -> list[list[int]]:
        """Let go of what the lease did not write past its new hit, at most `limit` tokens.

        Returns the table positions left empty, by group.
        """
        step = self.layout.alignment
        hit = limit // step * step
        while hit and not self._covers(lease, hit):
            hit -= step
        old, lease.hit, lease.committed = lease.hit, hit, hit
        missing: list[list[int]] = []
        for group, size in enumerate(self._sizes):
            table = lease.tables[group]
            missing.append(list(range(hit // size, old // size)))
            for index in missing[group]:
                block, table[index] = table[index], None
                if block is not None:
                    self._drop(lease, group, block)
        return missing

    def _covers(self, lease: Lease, hit: int) -> bool:
        """Whether the lease holds what a hit of `hit` tokens needs of its window groups."""
        return all(
            None
            not in lease.tables[g][_first_block(hit, self.layout.window(g), size) : hit // size]
            for g, size in enumerate(self._sizes)
        )

    def _refill(self, lease: Lease, missing: Sequence[Sequence[int]]) -> None:
        """Put private places where the hit was; where too few are left, the room ends there."""
        try:
            rooms = self._reserve(0, [len(gaps) for gaps in missing], self._access)
        except OutOfBlocks:
            self.counts.out_of_blocks += 1
            lease.room = lease.hit
            for group, size in enumerate(self._sizes):
                table = lease.tables[group]
                for block in table[lease.hit // size :]:
                    if block is not None:
                        self._drop(lease, group, block)
                del table[lease.hit // size :]
            return
        for group, gaps in enumerate(missing):
            for index in gaps:
                lease.tables[group][index] = rooms[group].pop()
        self._emit()


def _tell(lease: Lease) -> None:
    if lease.notify is not None:
        lease.notify(lease)


def _blocks(num_tokens: int, size: int) -> int:
    """Blocks that hold `num_tokens`."""
    return -(-num_tokens // size)


def _first_block(hit: int, window: int | None, size: int) -> int:
    """The first block that a hit of `hit` tokens needs: all, or those the window still sees."""
    return 0 if window is None else max(0, hit - window) // size
