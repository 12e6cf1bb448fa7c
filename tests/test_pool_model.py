"""A pool agrees with a dict of plain facts, whatever is done to it (I4).

Its policy may be held, or give way to another one of the same kind, at any moment, in pieces, and
no key is lost; once it has given way the order is the policy's word.
"""

from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from policies.base import EvictionPolicy
from policies.lru import LRU
from tests.test_pool import NOW, make_pool, name, states
from tierd.block import Block, BlockHash, State
from tierd.errors import OutOfBlocks


@dataclass
class Fact:
    """What the model knows of a place."""

    state: State = State.FREE
    refs: int = 0
    key: BlockHash | None = None


class PoolMachine(RuleBasedStateMachine):
    """Random calls on a pool and on a dict of plain facts."""

    @initialize(capacity=st.integers(0, 6))
    def begin(self, capacity: int) -> None:
        self.pool = make_pool(capacity)
        self.model = {block: Fact() for block in self.pool}
        self.order: list[BlockHash] = []  # of findable names, the first to go first
        self.successor: LRU | None = None  # of the policy
        self.in_order = True
        self.held: EvictionPolicy | None = None
        self.told = False  # of some of what happened

    def some(self, *wanted: State) -> list[Block]:
        return [block for block, fact in self.model.items() if fact.state in wanted]

    def follow(self) -> None:
        """Take the policy's order, which must be of the same keys."""
        if not self.in_order:
            order = [BlockHash(key) for key in self.pool.policy.victims()]  # type: ignore[arg-type]
            assert sorted(order) == sorted(self.order)
            self.order = order

    def idle(self) -> list[BlockHash]:
        ready = {f.key for f in self.model.values() if f.state is State.COMMITTED and not f.refs}
        return [key for key in self.order if key in ready]

    def unname(self, block: Block) -> None:
        fact = self.model[block]
        assert fact.key is not None
        self.order.remove(fact.key)
        fact.key, fact.state = None, State.PRIVATE if fact.refs else State.FREE

    @precondition(lambda self: self.successor is None and not self.held)
    @rule()
    def hold_policy(self) -> None:
        self.held = self.pool.hold()
        self.state = self.held.state()

    @precondition(lambda self: self.held)
    @rule(n=st.integers(1, 6))
    def tell_policy(self, n: int) -> None:
        assert self.told or self.held.state() == self.state
        self.told = True
        if not self.pool.tell(n):
            assert self.pool.policy is self.held
            self.held, self.told = None, False

    @precondition(lambda self: self.successor is None and not self.held)
    @rule()
    def exchange(self) -> None:
        self.successor, self.in_order = LRU(0), False
        self.pool.exchange(self.successor)

    @precondition(lambda self: self.successor is not None)
    @rule(n=st.integers(1, 4))
    def hand_over(self, n: int) -> None:
        if not self.pool.hand_over(n, NOW):
            assert self.pool.policy is self.successor
            assert self.successor.capacity == self.pool.capacity
            self.successor = None

    @rule(n=st.integers(0, 4))
    def allocate(self, n: int) -> None:
        if n > len(self.some(State.FREE)):
            with pytest.raises(OutOfBlocks):
                self.pool.allocate(n)
            return
        for block in self.pool.allocate(n):
            assert self.model[block] == Fact()
            self.model[block] = Fact(State.PRIVATE, 1)

    @precondition(lambda self: self.some(State.PRIVATE))
    @rule(data=st.data(), number=st.integers(0, 8), load=st.booleans())
    def publish(self, data: st.DataObject, number: int, load: bool) -> None:
        block, key = data.draw(st.sampled_from(self.some(State.PRIVATE))), name(number)
        if key in self.order:
            assert not self.pool.commit(block, key, None, NOW)
            return
        if load:
            self.pool.load(block, key, None, NOW)
        else:
            assert self.pool.commit(block, key, None, NOW)
        state = State.LOADING if load else State.COMMITTED
        self.model[block] = Fact(state, self.model[block].refs, key)
        self.order.append(key)

    @precondition(lambda self: self.some(State.LOADING))
    @rule(data=st.data(), arrives=st.booleans())
    def settle(self, data: st.DataObject, arrives: bool) -> None:
        block = data.draw(st.sampled_from(self.some(State.LOADING)))
        if arrives:
            self.pool.landed(block)
            self.model[block].state = State.COMMITTED
        else:
            self.pool.failed(block)
            self.unname(block)

    @precondition(lambda self: self.some(State.LOADING, State.COMMITTED))
    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(self.some(State.LOADING, State.COMMITTED)))
        self.pool.forget(block)
        self.unname(block)

    @precondition(lambda self: self.some(State.PRIVATE, State.LOADING, State.COMMITTED))
    @rule(data=st.data(), pin=st.booleans())
    def hold(self, data: st.DataObject, pin: bool) -> None:
        known = self.some(State.PRIVATE, State.LOADING, State.COMMITTED)
        block = data.draw(st.sampled_from(known))
        fact = self.model[block]
        if pin:
            self.pool.pin(block)
            fact.refs += 1
        elif fact.refs:
            self.pool.unpin(block)
            fact.refs -= 1
            if not fact.refs and fact.state is State.PRIVATE:
                fact.state = State.FREE

    @rule(path=st.lists(st.integers(0, 8), unique=True, max_size=4))
    def touch(self, path: list[int]) -> None:
        self.pool.touch([name(number) for number in path], NOW)
        for key in reversed([name(number) for number in path]):
            if key in self.order:
                self.order.remove(key)
                self.order.append(key)

    @rule(n=st.integers(0, 3))
    def evict(self, n: int) -> None:
        if n > len(self.idle()):
            with pytest.raises(OutOfBlocks):
                self.pool.victims(n)
            return
        self.follow()
        victims = self.pool.victims(n)
        assert [block.key for block in victims] == self.idle()[:n]
        for block in victims:
            self.pool.evict(block)
            self.unname(block)

    @precondition(lambda self: self.some(State.PRIVATE, State.QUARANTINED))
    @rule(data=st.data())
    def freeze_or_thaw(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(self.some(State.PRIVATE, State.QUARANTINED)))
        if self.model[block].state is State.PRIVATE:
            self.pool.quarantine(block)
            self.model[block].state = State.QUARANTINED
            self.model[block].refs -= 1
        else:
            self.pool.thaw(block)
            self.model[block].state = State.PRIVATE if self.model[block].refs else State.FREE

    @rule(more=st.booleans(), adopted=st.integers(0, 8))
    def resize(self, more: bool, adopted: int) -> None:
        if not more:
            free = self.some(State.FREE)[:2]
            self.pool.shrink(block.block_id for block in free)
            for block in free:
                del self.model[block]
            return
        new = max((block.block_id for block in self.model), default=-1) + 1
        self.pool.grow([new])
        block = list(self.pool)[-1]
        self.model[block] = Fact()
        assert self.pool.adopt([(block.block_id, name(adopted), None, ())]) == (
            name(adopted) not in self.order
        )
        if block.key is not None:
            self.model[block] = Fact(State.COMMITTED, 0, name(adopted))
            self.order.append(name(adopted))

    @invariant()
    def agree(self) -> None:
        self.follow()
        facts = self.model.values()
        assert states(self.pool) == Counter(fact.state for fact in facts)
        assert sum(self.pool.counts.values()) == self.pool.capacity == len(self.model)
        assert self.pool.num_free == len(self.some(State.FREE))
        for block, fact in self.model.items():
            assert (block.state, block.ref_cnt, block.key) == (fact.state, fact.refs, fact.key)
            assert fact.key is None or self.pool.get(fact.key) is block
        assert [block.key for block in self.pool.evictable()] == self.idle()


PoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestPoolAgreesWithItsModel = PoolMachine.TestCase
