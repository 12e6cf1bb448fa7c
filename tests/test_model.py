"""Random engines on three tiers, against what every block must hold (I1 to I7).

The planner and the transfer are the real ones; the stores end their operations in any order, and
fail some, when hypothesis says so. Content follows from a block's name, so after every step each
committed block of every tier can be checked, byte for byte.
"""

import asyncio
import inspect
import logging
import random
from collections import Counter
from dataclasses import asdict, dataclass, field

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from policies.base import Access
from policies.lru import LRU
from tests.stepped import SteppedMemory, SteppedStore, World, content
from tierd.block import Block, BlockHash, State
from tierd.daemon.cache import TieredCache
from tierd.daemon.copy import Place
from tierd.daemon.lease import Lease
from tierd.daemon.match import first_block
from tierd.daemon.pool import BlockPool
from tierd.daemon.tier import Tier
from tierd.daemon.transfer import StoreTransfer
from tierd.errors import LeaseError, OutOfBlocks
from tierd.layout import KVLayout, LayerGroup
from tierd.prefix import PrefixChain

SIZES = (4, 2)
WINDOW = 6
LAYOUT = KVLayout(
    "model", 2, 1, 1, "float32", (LayerGroup((0,), 4), LayerGroup((1,), 2)), (None, WINDOW)
)
CAPACITY = ((12, 20), (6, 10), (14, 22))  # by level and group
NUMBERS = st.integers(0, 1023)
TRUNKS = [[0] * 8 + [trunk] * 28 for trunk in range(4)]


@dataclass(eq=False)
class Engine:
    """A sequence an engine works on: what it may do next, and what it has written."""

    lease: Lease
    chain: PrefixChain
    num_tokens: int
    unanswered: int = 0  # while it has not been told of its places it may not write
    written: dict[tuple[int, int], Block] = field(default_factory=dict)  # (group, index)


class Engines(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        logging.getLogger("tierd").setLevel(logging.CRITICAL)
        self.loop = asyncio.new_event_loop()
        self.world, self.time = World(), 0.0
        self.engines: list[Engine] = []
        self.quarantined: list[tuple[int, Block, bool]] = []

    @initialize()
    def start(self) -> None:
        kinds = (SteppedMemory, SteppedMemory, SteppedStore)
        self.stores = [
            [kind(self.world, level, n) for n in CAPACITY[level]]
            for level, kind in enumerate(kinds)
        ]
        self.tiers = [self.tier(level, name) for level, name in enumerate(("gpu", "cpu", "ssd"))]
        self.transfer = StoreTransfer(self.stores, self.pause)
        self.cache = TieredCache(LAYOUT, self.tiers, self.transfer)

    def tier(self, level: int, name: str) -> Tier:
        left = [list(range(n)) for n in CAPACITY[level]]

        def grow(group: int) -> list[int] | None:
            taken, left[group] = left[group][:5], left[group][5:]
            return taken or None

        return Tier(name, [BlockPool(LRU(0)) for _ in SIZES], grow, watermarks=(0.3, 0.6))

    def pause(self, level: int) -> None:
        self.tiers[level].paused = True

    def now(self) -> Access:
        self.time += 1
        return Access(self.time)

    def settle(self) -> None:
        async def turns() -> None:
            for _ in range(6):
                await asyncio.sleep(0)

        self.loop.run_until_complete(turns())

    def on_loop(self, work):  # type: ignore[no-untyped-def]
        async def call():  # type: ignore[no-untyped-def]
            return work()

        result = self.loop.run_until_complete(call())
        self.settle()
        return result

    def row(self, group: int, block: Block) -> np.ndarray:
        return self.stores[0][group].blocks[block.block_id]

    def name(self, engine: Engine, group: int, index: int) -> BlockHash:
        return engine.chain.hashes[(index + 1) * SIZES[group] // LAYOUT.hash_step - 1]

    def answer(self, engine: Engine) -> None:
        """What the session does: the engine hears only when its places are idle."""
        engine.unanswered += 1
        places = [
            Place(0, group, block.block_id)
            for group, table in enumerate(engine.lease.tables)
            for block in table
            if block is not None and block.key is None
        ]

        def told() -> None:
            engine.unanswered -= 1

        if self.transfer.when_idle(places, told):
            told()

    # -- what engines do: every number is drawn by hypothesis, or by a seeded generator --

    @rule(trunk=NUMBERS, length=NUMBERS, ahead=NUMBERS)
    def acquire(self, trunk: int, length: int, ahead: int) -> None:
        if len(self.engines) < 4:
            self.request(TRUNKS[trunk % len(TRUNKS)][: 1 + length % 28], ahead % 5)

    def request(self, tokens: list[int], ahead: int) -> Engine | None:
        chain = PrefixChain(LAYOUT.root("tenant"), LAYOUT.hash_step)
        chain.append(tokens)
        engine: list[Engine] = []

        def notify(lease: Lease) -> None:
            if engine and lease.shortened:
                lease.shortened = False
                engine[0].written.clear()
                self.answer(engine[0])

        pools = [pool for tier in self.tiers for pool in tier.pools]
        before = [(dict(pool.counts), pool.capacity) for pool in pools]
        room = len(tokens) + ahead
        try:
            lease = self.on_loop(
                lambda: self.cache.acquire(chain.hashes, len(tokens), room, self.now(), notify)
            )
        except OutOfBlocks:  # nothing has changed but that pools may have grown
            for pool, (counts, capacity) in zip(pools, before, strict=True):
                counts[State.FREE] += pool.capacity - capacity
                assert pool.counts == counts, "a refused request changed a pool"
            return None
        assert lease.hit < len(tokens), "one token is always computed"
        engine.append(Engine(lease, chain, len(tokens)))
        lease.shortened = False
        self.engines.append(engine[0])
        self.on_loop(lambda: self.answer(engine[0]))
        return engine[0]

    @rule(trunk=NUMBERS, length=NUMBERS)
    def serve_a_whole_request(self, trunk: int, length: int) -> None:
        engine = self.request(TRUNKS[trunk % len(TRUNKS)][: 1 + length % 28], 0)
        if engine is None:
            return
        self.everything_ends()
        self.write_and_commit(self.engines.index(engine), engine.num_tokens)
        self.leave(self.engines.index(engine), dies=False)

    @rule(pick=NUMBERS, upto=NUMBERS)
    def write_and_commit(self, pick: int, upto: int) -> None:
        if not self.engines:
            return
        engine = self.engines[pick % len(self.engines)]
        lease, upto = engine.lease, min(upto, engine.num_tokens, engine.lease.room)
        if engine.unanswered:
            return
        self.write(engine, upto)
        step = (lease, upto, (), 0)
        if not lease.ready and upto > lease.committed:
            with pytest.raises(LeaseError):
                self.on_loop(lambda: self.cache.advance([step], self.now()))
        else:
            self.on_loop(lambda: self.cache.advance([step], self.now()))

    def write(self, engine: Engine, upto: int) -> None:
        """Fill the blocks up to `upto` that came without contents; I5: they are ours alone."""
        for group, size in enumerate(SIZES):
            for index in range(engine.lease.committed // size, upto // size):
                block = engine.lease.tables[group][index]
                assert block is not None
                if block.key is None and (group, index) not in engine.written:
                    self.row(group, block)[:] = content(self.name(engine, group, index))
                    engine.written[group, index] = block

    @rule(count=NUMBERS, tokens=NUMBERS)
    def decode_a_batch(self, count: int, tokens: int) -> None:
        batch = self.engines[: 1 + count % 4]
        new = [tokens >> bit & 1 for bit in range(tokens % 4)]
        steps = [(e.lease, e.lease.committed, (), e.num_tokens + len(new)) for e in batch]
        try:
            self.on_loop(lambda: self.cache.advance(steps, self.now()))
        except OutOfBlocks:
            return
        for engine in batch:
            engine.chain.append(new)
            engine.num_tokens += len(new)
            engine.lease.hashes.extend(engine.chain.hashes[len(engine.lease.hashes) :])
            self.on_loop(lambda engine=engine: self.answer(engine))

    @rule(pick=NUMBERS, dies=st.booleans())
    def leave(self, pick: int, dies: bool) -> None:
        if not self.engines:
            return
        engine = self.engines.pop(pick % len(self.engines))
        for (group, _), block in engine.written.items():
            if block.key is None:
                self.row(group, block)[:] = 0xDD  # a stale read shows
        if dies:
            frozen = self.on_loop(lambda: self.cache.abandon(engine.lease, self.now()))
            self.quarantined += [(group, block, not engine.unanswered) for group, block in frozen]
        else:
            self.on_loop(lambda: self.cache.release(engine.lease, self.now()))

    @rule()
    def processes_are_gone(self) -> None:
        for group, block, known in self.quarantined:
            if known:  # it was told of the place, and wrote to the last
                self.row(group, block)[:] = 0xCC
            self.cache.thaw(group, block)
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
        chain = PrefixChain(LAYOUT.root("tenant"), LAYOUT.hash_step)
        chain.append(tokens := TRUNKS[trunk % len(TRUNKS)])
        self.on_loop(
            lambda: self.cache.prefetch(chain.hashes, len(tokens), 1 + limit % 4, self.now())
        )

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
                        held = self.stores[level][group].blocks[block.block_id]
                        assert (held == content(block.key)).all(), f"wrong bytes in {tier.name}"

    @invariant()
    def states_sum_to_the_capacity(self) -> None:  # I4
        for tier in self.tiers:
            for pool in tier.pools:
                assert sum(pool.counts.values()) == pool.capacity == len(list(pool))
                assert Counter(block.state for block in pool) == +Counter(pool.counts)
                assert pool.num_free == pool.counts[State.FREE]

    @invariant()
    def leases_hold_what_they_were_given(self) -> None:  # I2, I3, I5
        for engine in self.engines:
            for group, table in enumerate(engine.lease.tables):
                hit = engine.lease.hit
                first = first_block(hit, LAYOUT.window(group), SIZES[group])
                for index, block in enumerate(table):
                    if block is None:
                        assert index < first, "a block the window sees is missing"
                        continue
                    assert block.ref_cnt > 0
                    if first <= index < hit // SIZES[group]:
                        assert block.key == self.name(engine, group, index)
                        if not engine.lease.loading[group]:
                            assert block.state is State.COMMITTED
            for (group, index), block in engine.written.items():
                assert (self.row(group, block) == content(self.name(engine, group, index))).all()

    def teardown(self) -> None:
        """When all is over nothing is pinned, waited for or lost (I6, I7)."""
        if hasattr(self, "cache"):
            self.everything_ends()
            for engine in self.engines:
                assert engine.lease.ready
                assert not engine.unanswered
                self.on_loop(lambda engine=engine: self.cache.release(engine.lease, self.now()))
            self.processes_are_gone()
            self.everything_ends()
            assert not self.transfer.busy
            for tier in self.tiers:
                for pool in tier.pools:
                    for block in pool:
                        assert block.ref_cnt == 0
                        assert block.state in (State.FREE, State.COMMITTED)
        self.loop.close()


CHECKS = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]
MIX = {  # how often a seeded run does what
    Engines.acquire: 6,
    Engines.serve_a_whole_request: 3,
    Engines.write_and_commit: 8,
    Engines.decode_a_batch: 4,
    Engines.leave: 6,
    Engines.processes_are_gone: 1,
    Engines.an_operation_ends: 16,
    Engines.everything_ends: 1,
    Engines.the_medium_recovers: 2,
    Engines.reclaim: 2,
    Engines.prefetch: 2,
    Engines.save: 1,
}


def run_seeded(seed: int, steps: int) -> TieredCache:
    """The same machine, driven by a generator: long and dense runs, where hypothesis shrinks."""
    rng = random.Random(seed)
    engines = Engines()
    engines.start()
    arguments = {do: inspect.signature(do).parameters.keys() - {"self"} for do in MIX}
    for _ in range(steps):
        (do,) = rng.choices(list(MIX), list(MIX.values()))
        do(engines, **{name: rng.randrange(1024) for name in sorted(arguments[do])})
        engines.committed_blocks_hold_what_their_name_says()
        engines.states_sum_to_the_capacity()
        engines.leases_hold_what_they_were_given()
    engines.teardown()
    return engines.cache


def test_hypothesis_finds_no_interleaving_that_breaks_an_invariant() -> None:
    run_state_machine_as_test(
        Engines,
        settings=settings(
            max_examples=60, stateful_step_count=50, deadline=None, suppress_health_check=CHECKS
        ),
    )


def test_thousands_of_random_steps_see_only_the_bytes_committed_under_a_name() -> None:
    counts: Counter[str] = Counter()
    for seed in range(60):
        counts += Counter(
            {
                k: v
                for k, v in asdict(run_seeded(seed, 400).chain.counts).items()
                if k != "blocks_hit"
            }
        )
    for what in ("promoted", "demoted", "dropped", "failed", "lost", "out_of_blocks"):
        assert counts[what] > 20, f"the runs hardly saw a block {what}: {counts}"


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_million_random_steps() -> None:
    for seed in range(1000, 2000):
        run_seeded(seed, 1000)
