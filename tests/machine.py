"""Random engines on three tiers, against what every token must hold (I1 to I7).

The planner and the transfer are the real ones; the stores end their operations in any order, and
fail some, when hypothesis (or a seeded generator) says so. The granule is one token, and what a
token's K and V are follows from its name, so after every step each token of each committed block,
and each that a sequence has written, can be checked, byte for byte. Places that are free hold
poison: a stale read shows.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from policies.base import NO_HINTS, Access, AdmissionPolicy, Hints, Key
from policies.lru import LRU
from policies.placement import Exclusive, Inclusive, WriteThrough
from tests.stepped import NBYTES, SteppedMemory, SteppedStore, World
from tierd.block import Block, BlockHash, State
from tierd.daemon.arena import Arena
from tierd.daemon.cache import TieredCache
from tierd.daemon.copy import Place
from tierd.daemon.lease import Lease
from tierd.daemon.match import first_block
from tierd.daemon.pool import BlockPool
from tierd.daemon.steps import Step
from tierd.daemon.tier import Tier
from tierd.daemon.transfer import StoreTransfer
from tierd.errors import LeaseError, OutOfBlocks
from tierd.layout import KVLayout, LayerGroup
from tierd.prefix import PrefixChain

SIZES = (4, 2)
WINDOW = 6
LAYOUT = KVLayout(
    "model",
    2,
    1,
    1,
    "float32",
    (LayerGroup((0,), 4), LayerGroup((1,), 2)),
    (None, WINDOW),
    granule=1,
)
EXTENT = 4  # blocks
CAPACITY = (40, 16, 36)  # blocks by level
NUMBERS = st.integers(0, 1023)
TRUNKS = [[0] * 8 + [trunk] * 28 for trunk in range(4)]
MOST_ENGINES = 6
POISON = 0xDD
PLACEMENTS = (Inclusive(), Exclusive(ratio=100), WriteThrough(depth=2))
SAID = (
    *(NO_HINTS, Hints("a"), NO_HINTS, Hints("b"), Hints("a", closed=True), Hints("b", priority=-1)),
    *(Hints("a", priority=2), Hints(dont_need=True), Hints("b", will_need=True)),
)
SPAN = 4  # places of a part


class Ground:
    """The memory of each level, which the pools of one or more models grow out of."""

    def __init__(self, models: int = 1) -> None:
        self.blocks = [np.full((n * models, NBYTES), 0xEE, np.uint8) for n in CAPACITY]
        self.arenas = [Arena(rows.nbytes, EXTENT * NBYTES) for rows in self.blocks]


def content(name: BlockHash, group: int) -> np.ndarray:
    """K and V of the token that `name` ends at."""
    return np.frombuffer(blake2b(name, digest_size=NBYTES // SIZES[group]).digest(), np.uint8)


class Moody(AdmissionPolicy):
    """Of what is to go down it refuses one in `part`, another one each time."""

    def __init__(self, part: int) -> None:
        self._part = part

    def used(self, path: Sequence[Key], access: Access) -> None:
        assert path

    def worth(self, keys: Sequence[Key], access: Access) -> Sequence[bool]:
        return [bool((key[0] + int(access.time)) % self._part) for key in keys]  # type: ignore


@dataclass(eq=False)
class Engine:
    """A sequence an engine works on: its tokens, and how many of them have their K and V."""

    family: int  # who dies together
    lease: Lease
    root: BlockHash
    tokens: list[int]
    written: int = 0
    unanswered: int = 0  # while it has not been told of its places it may not write
    away: bool = False
    hashes: list[BlockHash] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rename()

    def rename(self) -> None:
        chain = PrefixChain(self.root, LAYOUT.hash_step)
        chain.append(self.tokens)
        self.hashes = chain.hashes

    def step(self, committed: int, room: int = 0, *, publish: bool = False) -> Step:
        hashes = self.hashes[len(self.lease.hashes) : committed]
        return Step(self.lease, committed, hashes, room, publish)


class Engines(RuleBasedStateMachine):
    def __init__(self, model: str = "model", beside: "Engines | None" = None) -> None:
        """`beside`: those of another model, on whose loop and ground these are."""
        super().__init__()
        logging.getLogger("tierd").setLevel(logging.CRITICAL)
        self.layout = replace(LAYOUT, model=model)
        self.loop = beside.loop if beside else asyncio.new_event_loop()
        self.world = beside.world if beside else World()
        self.ground = beside.ground if beside else Ground()
        self.owns_loop, self.alone, self.time = beside is None, True, 0.0
        self.engines: list[Engine] = []
        self.quarantined: list[tuple[int, int, Block, bool]] = []  # `(level, group, block, known)`
        self.vacancies: list[tuple[int, int, list[int]]] = []  # `(level, group, ids)`
        self.families = 0
        self.seen: Counter[str] = Counter()

    @initialize(choice=NUMBERS)
    def start(self, choice: int = 0) -> None:
        """`choice`: of a placement, and of an admission policy or none."""
        kinds = (SteppedMemory, SteppedMemory, SteppedStore)
        self.stores = [
            [kind(self.world, level, self.ground.blocks[level]) for _ in SIZES]
            for level, kind in enumerate(kinds)
        ]
        self.tiers = [self.tier(level, name) for level, name in enumerate(("gpu", "cpu", "ssd"))]
        self.transfer = StoreTransfer(self.stores, self.pause)
        if choice // len(PLACEMENTS) % 2:
            self.tiers[2].admissions = [Moody(2 + group) for group in range(len(SIZES))]
        placement = PLACEMENTS[choice % len(PLACEMENTS)]
        self.cache = TieredCache(self.layout, self.tiers, self.transfer, placement)

    def tier(self, level: int, name: str) -> Tier:
        def grow(group: int) -> list[int] | None:
            return self.ground.arenas[level].grow(self.owner(group), NBYTES)

        pools = [BlockPool(LRU(0), SPAN) for _ in SIZES]
        return Tier(name, pools, grow, watermarks=(0.3, 0.6))

    def owner(self, group: int) -> tuple[str, int]:
        return self.layout.model, group

    def pause(self, level: int) -> None:
        self.tiers[level].paused = True

    def now(self) -> Access:
        """Every time something else is said."""
        self.time += 1
        return Access(self.time, SAID[int(self.time) % len(SAID)])

    def settle(self) -> None:
        async def turns() -> None:
            for _ in range(6):
                await asyncio.sleep(0)

        self.loop.run_until_complete(turns())
        self.poison()

    def on_loop(self, work):  # type: ignore[no-untyped-def]
        async def call():  # type: ignore[no-untyped-def]
            return work()

        result = self.loop.run_until_complete(call())
        self.settle()
        return result

    def poison(self) -> None:
        """Free places that nobody reads or fills any more hold nothing of use."""
        for level, tier in enumerate(self.tiers):
            for group, pool in enumerate(tier.pools):
                for block in pool:
                    place = Place(level, group, block.block_id)
                    if block.state is State.FREE and self.transfer.when_idle([place], _nothing):
                        self.stores[level][group].blocks[block.block_id] = POISON

    def token(self, level: int, group: int, block: Block, position: int) -> np.ndarray:
        """Where the K and V of a token lie."""
        nbytes = NBYTES // SIZES[group]
        start = position % SIZES[group] * nbytes
        return self.stores[level][group].blocks[block.block_id][start : start + nbytes]

    def answer(self, engine: Engine) -> None:
        """What the session does: the engine hears only when what it may write is idle."""
        engine.unanswered += 1

        def look() -> None:
            lease = engine.lease
            places = [
                Place(lease.level, group, block.block_id)
                for group, table in enumerate(lease.tables)
                for block in table
                if block is not None and block.key is None and block not in lease.loading[group]
            ]
            if lease.released or self.transfer.when_idle(places, look):
                engine.unanswered -= 1

        look()

    def pick(self, number: int) -> Engine | None:
        return self.engines[number % len(self.engines)] if self.engines else None

    def able(self, number: int) -> Engine | None:
        """One that may do everything; once in a while any."""
        able = [e for e in self.engines if e.lease.ready and not (e.away or e.unanswered)]
        return able[number % len(able)] if able and number % 8 else self.pick(number)

    def notified(self, engine: list[Engine], lease: Lease) -> None:
        if engine and lease.shortened:
            lease.shortened = False
            engine[0].written = min(engine[0].written, lease.hit)
            self.answer(engine[0])

    def unchanged_if_refused(self, call):  # type: ignore[no-untyped-def]
        """What `call` returns, or None if it says OutOfBlocks: then nothing has changed but that
        pools may have grown."""
        pools = [pool for tier in self.tiers for pool in tier.pools]
        before = [(dict(pool.counts), pool.capacity) for pool in pools]
        try:
            return self.on_loop(call)
        except OutOfBlocks:
            self.seen["no room"] += 1
            if not self.alone:
                return None  # another model may have been given some meanwhile
            for pool, (counts, capacity) in zip(pools, before, strict=True):
                counts[State.FREE] += pool.capacity - capacity
                assert pool.counts == counts, "a refused request changed a pool"
            return None

    # -- what engines do: every number is drawn by hypothesis, or by a seeded generator --

    @rule(trunk=NUMBERS, length=NUMBERS, ahead=NUMBERS, level=NUMBERS)
    def acquire(self, trunk: int, length: int, ahead: int, level: int) -> None:
        if len(self.engines) < MOST_ENGINES:
            tokens = TRUNKS[trunk % len(TRUNKS)][: 1 + length % 28]
            self.request(tokens, ahead % 5, _home(level))

    def request(self, tokens: list[int], ahead: int, level: int) -> Engine | None:
        chain = PrefixChain(self.layout.root("tenant"), LAYOUT.hash_step)
        chain.append(tokens)
        engine: list[Engine] = []
        room = len(tokens) + ahead
        lease = self.unchanged_if_refused(
            lambda: self.cache.acquire(
                chain.hashes,
                len(tokens),
                room,
                self.now(),
                lambda lease: self.notified(engine, lease),
                level=level,
            )
        )
        if lease is None:
            return None
        self.seen[f"at level {level}"] += lease.hit > 0
        assert lease.hit < len(tokens), "one token is always computed"
        self.seen["part"] += lease.hit % 4 != 0
        self.families += 1
        engine.append(
            Engine(self.families, lease, self.layout.root("tenant"), list(tokens), lease.hit)
        )
        lease.shortened = False
        self.engines.append(engine[0])
        self.on_loop(lambda: self.answer(engine[0]))
        return engine[0]

    @rule(trunk=NUMBERS, length=NUMBERS, level=NUMBERS)
    def serve_a_whole_request(self, trunk: int, length: int, level: int) -> None:
        engine = self.request(TRUNKS[trunk % len(TRUNKS)][: 1 + length % 28], 0, _home(level))
        if engine is None:
            return
        self.everything_ends()
        self.write_and_commit(self.engines.index(engine), len(engine.tokens), publish=True)
        self.leave(self.engines.index(engine), dies=False)

    @rule(pick=NUMBERS, upto=NUMBERS, publish=st.booleans())
    def write_and_commit(self, pick: int, upto: int, publish: bool) -> None:
        engine = self.pick(pick)
        if engine is None or engine.unanswered or engine.away:
            return
        self.write(engine, min(upto, len(engine.tokens), engine.lease.room))
        upto = min(upto, engine.written)
        step = engine.step(upto, publish=bool(publish))
        if not engine.lease.ready and (upto > engine.lease.committed or step.hashes or publish):
            with pytest.raises(LeaseError):
                self.on_loop(lambda: self.cache.advance([step], self.now()))
            return
        before = engine.lease.room
        if self.fork_tail(engine, upto) and publish:
            with pytest.raises(LeaseError, match="fork"):
                self.on_loop(lambda: self.cache.advance([step], self.now()))
            return
        self.on_loop(lambda: self.cache.advance([step], self.now()))
        engine.written = min(engine.written, engine.lease.room)  # publishing freezes the length
        self.seen["published"] += engine.lease.room < before

    def fork_tail(self, engine: Engine, upto: int) -> bool:
        """Whether a sequence that is published up to there ends in a block that another of its
        family may be writing."""
        lease, length = engine.lease, max(upto, engine.lease.committed)
        for table, size in zip(lease.tables, SIZES, strict=True):
            tail = table[length // size] if length % size else None
            if tail is not None and tail.state is State.PRIVATE and not lease.may_write(tail):
                return True
        return False

    def write(self, engine: Engine, upto: int) -> None:
        """Fill what came without contents; I5: it is this lease's alone to write."""
        lease = engine.lease
        for position in range(engine.written, upto):
            blocks = [t[position // size] for t, size in zip(lease.tables, SIZES, strict=True)]
            if any(block in lease.loading[group] for group, block in enumerate(blocks)):
                return
            for group, block in enumerate(blocks):
                assert block is not None
                assert block.state is State.PRIVATE
                assert lease.may_write(block) or block not in lease.borrowed
                to = self.token(lease.level, group, block, position)
                to[:] = content(engine.hashes[position], group)
            engine.written = position + 1

    @rule(count=NUMBERS, tokens=NUMBERS)
    def decode_a_batch(self, count: int, tokens: int) -> None:
        level = _home(count)
        batch = [e for e in self.engines if not e.away and e.lease.level == level][: 1 + count % 4]
        new = [tokens >> bit & 1 for bit in range(tokens % 4)]
        parked = [Step(e.lease, 0) for e in batch if e.lease.parked]
        if parked:  # whoever asks for more has heard what it lost; a refusal says so, too
            self.on_loop(lambda: self.cache.advance(parked, self.now()))
        steps = [Step(e.lease, 0, room=len(e.tokens) + len(new)) for e in batch]
        added = self.unchanged_if_refused(lambda: self.cache.advance(steps, self.now()))
        if added is None:
            return
        for engine in batch:
            engine.tokens += new
            engine.rename()
            self.on_loop(lambda engine=engine: self.answer(engine))

    def refused_rightly(self, engine: Engine, error: LeaseError) -> None:
        assert engine.away or not engine.lease.ready or "window" in str(error)

    @rule(pick=NUMBERS, upto=NUMBERS)
    def fork(self, pick: int, upto: int) -> None:
        source = self.able(pick)
        if source is None or len(self.engines) >= MOST_ENGINES or source.unanswered:
            return
        upto = source.written - upto % 5 if upto % 3 else source.written
        if upto < 0:
            return
        fork: list[Engine] = []
        try:
            lease = self.on_loop(
                lambda: self.cache.fork(
                    [(source.lease, upto, lambda lease: self.notified(fork, lease))]
                )[0]
            )
        except LeaseError as refused:
            self.refused_rightly(source, refused)
            return
        fork.append(Engine(source.family, lease, source.root, source.tokens[:upto], upto))
        self.engines.append(fork[0])

    @rule(pick=NUMBERS, back=NUMBERS)
    def truncate(self, pick: int, back: int) -> None:
        engine = self.able(pick)
        if engine is None or engine.unanswered:
            return
        upto = max(0, engine.written - back % 7)
        try:
            self.on_loop(lambda: self.cache.truncate([(engine.lease, upto)]))
        except LeaseError as refused:
            self.refused_rightly(engine, refused)
            return
        del engine.tokens[upto:]
        engine.rename()
        engine.written = upto
        engine.tokens.append(4 + back)  # goes on otherwise
        engine.rename()

    @rule(pick=NUMBERS)
    def suspend_or_resume(self, pick: int) -> None:
        engine = self.pick(pick)
        if engine is None or engine.unanswered:
            return
        if engine.away:
            self.resume(engine)
            return
        try:
            done = self.unchanged_if_refused(
                lambda: self.cache.suspend(engine.lease, engine.written, self.now()) or True
            )
        except LeaseError:
            assert not engine.lease.ready
            return
        engine.away = bool(done)
        self.seen["suspended"] += engine.away

    def resume(self, engine: Engine) -> None:
        before = engine.written
        done = self.unchanged_if_refused(
            lambda: self.cache.resume(engine.lease, self.now()) or True
        )
        if not done:
            return
        engine.away = False
        engine.written = engine.lease.hit
        engine.lease.shortened = False
        assert engine.written <= before
        self.seen["resumed whole"] += engine.written == before
        self.seen["resumed shorter"] += engine.written < before
        self.on_loop(lambda: self.answer(engine))

    @rule(pick=NUMBERS, dies=st.booleans())
    def leave(self, pick: int, dies: bool) -> None:
        engine = self.pick(pick)
        if engine is None:
            return
        if not dies:
            self.engines.remove(engine)
            self.on_loop(lambda: self.cache.release(engine.lease, self.now()))
            return
        for dead in [e for e in self.engines if e.family == engine.family]:
            self.engines.remove(dead)
            waits = set().union(*dead.lease.loading)  # it does not write what is not ready
            frozen = self.on_loop(lambda dead=dead: self.cache.abandon(dead.lease, self.now()))
            self.quarantined += [
                (dead.lease.level, group, block, not dead.unanswered and block not in waits)
                for group, block in frozen
            ]

    @rule()
    def processes_are_gone(self) -> None:
        for level, group, block, known in self.quarantined:
            if known:  # it was told of the place, and wrote to the last
                self.stores[level][group].blocks[block.block_id] = 0xCC
            self.cache.thaw(level, group, block)
        self.quarantined.clear()

    # -- what the world does ---------------------------------------------------------------------

    @rule(pick=NUMBERS, fails=NUMBERS)
    def an_operation_ends(self, pick: int, fails: int) -> None:
        if self.world.under_way:
            operation = self.world.under_way[pick % len(self.world.under_way)]
            bad = {i for n, i in enumerate(operation.ids) if fails >> 4 >> n & 1}
            broken = operation.kind == "read" if fails % 2 else fails % 4 == 0
            self.on_loop(lambda: operation.end(bad if broken and operation.level == 2 else None))

    @rule()
    def everything_ends(self) -> None:
        while self.world.under_way:
            for operation in list(self.world.under_way):
                self.on_loop(operation.end)

    @rule()
    def the_medium_recovers(self) -> None:
        for tier in self.tiers:
            tier.paused = False

    @rule(limit=NUMBERS)
    def reclaim(self, limit: int) -> None:
        self.on_loop(lambda: self.cache.reclaim(1 + limit % 4))

    @rule(trunk=NUMBERS, limit=NUMBERS)
    def prefetch(self, trunk: int, limit: int) -> None:
        chain = PrefixChain(self.layout.root("tenant"), LAYOUT.hash_step)
        chain.append(tokens := TRUNKS[trunk % len(TRUNKS)])
        self.on_loop(
            lambda: self.cache.prefetch(chain.hashes, len(tokens), 1 + limit % 4, self.now())
        )

    @rule(trunk=NUMBERS, length=NUMBERS)
    def advise(self, trunk: int, length: int) -> None:
        chain = PrefixChain(self.layout.root("tenant"), LAYOUT.hash_step)
        chain.append(TRUNKS[trunk % len(TRUNKS)][: length % 37])
        self.cache.advise(chain.hashes, self.now())

    @rule(where=NUMBERS, size=NUMBERS)
    def compact(self, where: int, size: int) -> None:
        level, group = where % 3, where // 3 % 2
        pool = self.tiers[level].pools[group]
        ids = sorted(block.block_id for block in pool)
        if not ids or any(v[:2] == (level, group) for v in self.vacancies):
            return
        start = where // 6 % len(ids)
        some = ids[start : start + 1 + size % 4]
        pool.leave(some)
        self.vacancies.append((level, group, list(some)))
        self.vacate(level, group, some, evict=size % 8 < 6)

    def vacate(self, level: int, group: int, some: Sequence[int], *, evict: bool) -> None:
        pool = self.tiers[level].pools[group]
        before = dict(pool.counts)
        left = [block_id for block_id in some if pool.at(block_id)]
        moved = self.on_loop(
            lambda: self.cache.compaction.move(level, group, left, self.now(), evict=evict)
        )
        if not moved:
            self.seen["no room to move"] += 1
            assert pool.counts == before

    @rule()
    def a_vacancy_ends(self) -> None:
        for vacancy in list(self.vacancies):
            level, group, ids = vacancy
            pool = self.tiers[level].pools[group]
            if self.transfer.when_idle([Place(level, group, i) for i in ids], _nothing):
                self.vacancies.remove(vacancy)
                if any(pool.at(block_id) for block_id in ids):
                    self.seen["stayed"] += 1
                    pool.stay(ids)
                    continue
                self.seen["vacated"] += 1
                pool.gone(ids)
                for block_id in ids:  # as if it were another's in between
                    self.stores[level][group].blocks[block_id] = POISON
                pool.grow(ids)

    @rule(pick=NUMBERS)
    def what_stayed_moves_after_all(self, pick: int) -> None:
        if self.vacancies:
            level, group, ids = self.vacancies[pick % len(self.vacancies)]
            self.vacate(level, group, ids, evict=pick % 2 == 0)

    @rule()
    def save(self) -> None:
        unsaved = self.cache.chain.unsaved()
        self.on_loop(lambda: self.cache.save(unsaved))

    # -- what must always hold -------------------------------------------------------------------

    @invariant()
    def committed_blocks_hold_what_their_name_says(self) -> None:  # I1, I2, at every tier
        for level, tier in enumerate(self.tiers):
            for group, pool in enumerate(tier.pools):
                for block in pool:
                    if block.state is State.COMMITTED:
                        names = [*block.inner, block.key]
                        wanted = np.concatenate([content(name, group) for name in names])
                        held = self.stores[level][group].blocks[block.block_id][: len(wanted)]
                        assert (held == wanted).all(), f"wrong bytes in {tier.name}"

    @invariant()
    def states_sum_to_the_capacity(self) -> None:  # I4
        for tier in self.tiers:
            for pool in tier.pools:
                assert sum(pool.counts.values()) == pool.capacity == len(list(pool))
                assert Counter(block.state for block in pool) == +Counter(pool.counts)
                assert pool.num_free == pool.counts[State.FREE]
                used = Counter(b.block_id // SPAN for b in pool if b.state is not State.FREE)
                for part in range(max(CAPACITY) // SPAN + 1):
                    assert pool.live(range(part * SPAN, (part + 1) * SPAN)) == used[part]

    @invariant()
    def a_policy_orders_what_can_be_found(self) -> None:
        for tier in self.tiers:
            for pool in tier.pools:
                ordered = Counter(pool._policy.victims())
                assert ordered == Counter(block.key for block in pool if block.key)

    @invariant()
    def sequences_hold_what_they_have_written(self) -> None:  # I2, I3, I5
        for engine in self.engines:
            if engine.away:
                continue
            lease = engine.lease
            for group, table in enumerate(lease.tables):
                size, window = SIZES[group], LAYOUT.window(group)
                assert all(block is None or block.ref_cnt > 0 for block in table)
                seen = first_block(max(lease.hit, lease.committed), window, size)
                assert None not in table[seen:], "a block the window sees is missing"
                for position in range(seen * size, engine.written):
                    block = table[position // size]
                    if block not in lease.loading[group]:
                        held = self.token(lease.level, group, block, position)
                        assert (held == content(engine.hashes[position], group)).all()

    def check(self) -> None:
        """All of it."""
        self.committed_blocks_hold_what_their_name_says()
        self.states_sum_to_the_capacity()
        self.a_policy_orders_what_can_be_found()
        self.sequences_hold_what_they_have_written()

    def teardown(self) -> None:
        """When all is over nothing is pinned, waited for or lost (I6, I7)."""
        if hasattr(self, "cache"):
            self.everything_ends()
            for engine in self.engines:
                assert engine.away or engine.lease.ready
                assert not engine.unanswered
                self.on_loop(lambda engine=engine: self.cache.release(engine.lease, self.now()))
            self.processes_are_gone()
            self.everything_ends()
            self.a_vacancy_ends()
            assert not self.transfer.busy
            assert self.cache.loads.idle
            for tier in self.tiers:
                for pool in tier.pools:
                    for block in pool:
                        assert block.ref_cnt == 0
                        assert block.state in (State.FREE, State.COMMITTED)
            self.vacancies.clear()
        if self.owns_loop:
            self.loop.close()
            logging.getLogger("tierd").setLevel(logging.NOTSET)


def _home(number: int) -> int:
    """The level of an engine: one in four only offloads."""
    return int(number % 4 == 3)


def _nothing() -> None:
    pass
