"""The bookkeeping of one tier's blocks of one layer group: ONE class for every tier.

Each place is in exactly one of five states, and the states sum to the capacity (I4):

    FREE -allocate-> PRIVATE -commit-> COMMITTED -evict-> FREE
                     PRIVATE -load-> LOADING -landed-> COMMITTED
                                     LOADING -failed-> PRIVATE -unpin-> FREE
                     PRIVATE -quarantine-> QUARANTINED -thaw-> FREE

A findable block has a key, the name of all tokens up to its end, and is found by the names of the
granules inside it too. The policy orders every findable (loading or committed) block; which of them
may go is decided here: committed ones that nobody holds. A place that is *leaving* leaves the pool
when it is free. The pool knows no bytes, no media and no other pool.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice

from policies.base import Access, EvictionPolicy, Hints, Key
from policies.hinted import Hinted
from tierd.block import Block, BlockHash, BlockId, State
from tierd.daemon.handover import Handover
from tierd.daemon.held import Held
from tierd.errors import OutOfBlocks

Adopted = tuple[BlockId, BlockHash, BlockHash | None, Sequence[BlockHash]]  # place, and its names


class BlockPool:
    """Places that hold blocks. `grow` gives it its first ones.

    `span`: its ids come in parts of so many, and it counts what each holds; 0 if they do not.
    """

    def __init__(self, policy: EvictionPolicy, span: int = 0) -> None:
        self.span = span
        self._policy = Hinted(policy)
        self._handover: Handover | None = None  # then it is the policy inside
        self._blocks: dict[BlockId, Block] = {}
        self._free: dict[BlockId, Block] = {}  # the next to be taken last
        self._findable: dict[BlockHash, Block] = {}
        self._inner: dict[BlockHash, Block] = {}  # by the names of granules inside a block
        self._counts = [0] * len(State)
        self.num_taken = 0  # places that were ever taken from the free or the evictable ones
        self._live: Counter[int] = Counter()  # by part: places that are not free
        self._leaving: set[BlockId] = set()
        self._until_freed = 0  # places that become free before `_when_freed` is called, if above 0
        self._when_freed: Callable[[], None] | None = None

    @property
    def capacity(self) -> int:
        return len(self._blocks)

    @property
    def num_free(self) -> int:
        return self._counts[State.FREE]

    @property
    def counts(self) -> Mapping[State, int]:
        """How many places are in each state."""
        return {state: self._counts[state] for state in State}

    @property
    def policy(self) -> EvictionPolicy:
        """What orders the findable blocks, but for hints; to be read."""
        return self._policy.policy

    def exchange(self, policy: EvictionPolicy) -> None:
        """Begin to exchange the policy for one that knows nothing yet; `hand_over` then, until it
        says that nothing is left. Meanwhile the pool may be used as ever."""
        self._handover = Handover(self._policy.policy, policy, self._parent_of)
        self._policy.policy = self._handover

    def hand_over(self, n: int, access: Access) -> bool:
        """Hand `n` of the keys to the new policy; whether any is left. If none is, that decides
        alone from now on."""
        assert self._handover is not None, "no exchange has begun"
        more = self._handover.hand(n, access)
        if not more:
            self._policy.policy, self._handover = self._handover.new, None
        return more

    def hold(self) -> EvictionPolicy:
        """The policy, to be read elsewhere: it does not change until `tell`. Meanwhile the pool may
        be used as ever."""
        held = self._policy.policy
        self._policy.policy = Held(held)
        return held

    def tell(self, n: int) -> int:
        """Tell the held policy of `n` things that happened meanwhile; returns how many are left. If
        none is, it is held no longer."""
        held = self._policy.policy
        assert isinstance(held, Held), "nobody holds the policy"
        left = held.tell(n)
        if not left:
            self._policy.policy = held.policy
        return left

    def get(self, key: BlockHash) -> Block | None:
        """The loading or committed block of that name."""
        return self._findable.get(key)

    def covering(self, name: BlockHash) -> Block | None:
        """A loading or committed block that holds all up to the granule `name`, and maybe more.

        Of several, the one published last: when that is gone, the others have only their keys.
        """
        return self._findable.get(name) or self._inner.get(name)

    def allocate(self, n: int) -> list[Block]:
        """Take `n` free places, private, with one reference each.

        Evicting first is the caller's choice. Raises OutOfBlocks and changes nothing if too few.
        """
        if n > self.num_free:
            raise OutOfBlocks(f"need {n} blocks, {self.num_free} are free")
        self.num_taken += n
        taken: list[Block] = []
        for _ in range(n):
            block_id, block = self._free.popitem()
            block.ref_cnt = 1
            self._move(block, State.PRIVATE)
            if self.span:
                self._live[block_id // self.span] += 1
            taken.append(block)
        return taken

    def load(
        self,
        block: Block,
        key: BlockHash,
        parent: BlockHash | None,
        access: Access,
        inner: Sequence[BlockHash] = (),
    ) -> None:
        """Make a private block findable as `key` before its bytes are there."""
        assert key not in self._findable, f"{key.hex()} is findable already"
        self._publish(block, key, parent, inner, access, State.LOADING)

    def landed(self, block: Block) -> None:
        """The bytes of a loading block are there."""
        assert block.state is State.LOADING, f"block {block.block_id} is {block.state}"
        self._move(block, State.COMMITTED)

    def failed(self, block: Block) -> None:
        """The bytes of a loading block will not come: it is unfindable, its holders let go."""
        assert block.state is State.LOADING, f"block {block.block_id} is {block.state}"
        self.forget(block)

    def commit(
        self,
        block: Block,
        key: BlockHash,
        parent: BlockHash | None,
        access: Access,
        inner: Sequence[BlockHash] = (),
    ) -> bool:
        """Freeze a private block as `key`.

        False, and nothing changes, if the name is findable already: the index knows one block of
        a name, the other stays its lease's own.
        """
        if key in self._findable:
            return False
        assert block.state is State.PRIVATE, f"block {block.block_id} is {block.state}"
        self._publish(block, key, parent, inner, access, State.COMMITTED)
        return True

    def adopt(self, found: Iterable[Adopted]) -> int:
        """Take up blocks that a former life left in free places: place and names of each. Returns
        how many; those in no such place, or whose name is known, are not taken. What the policy
        remembers of that life is where it was in its order, the rest the newest; what it remembers
        and is not found is gone. There may be millions: where that is too long, let nobody else
        have the pool yet.
        """
        blocks, findable, insert = self._blocks, self._findable, self._policy.insert
        remembered = set(self._policy.victims()).difference(findable)
        span, live = self.span, self._live
        free, committed, access = State.FREE, State.COMMITTED, Access(0.0)
        num_adopted = 0
        for block_id, key, parent, inner in found:
            block = blocks.get(block_id)
            if block is None or block.state is not free or key in findable:
                continue
            block.state, block.key, block.parent, block.inner = committed, key, parent, inner
            findable[key] = block
            for name in inner:
                self._inner[name] = block
            if key in remembered:
                remembered.remove(key)
            else:
                insert(key, parent, access)
            if span:
                live[block_id // span] += 1
            num_adopted += 1
        for lost in remembered:
            self._policy.remove(lost)
        self._counts[free] -= num_adopted
        self._counts[committed] += num_adopted
        self._free = {i: block for i, block in self._free.items() if block.state is free}
        return num_adopted

    def forget(self, block: Block) -> None:
        """Make a findable block unfindable at once; its place is free when its holders are gone."""
        assert block.key is not None, f"block {block.block_id} has no name"
        self._policy.remove(block.key)
        self._unpublish(block)
        self._move(block, State.PRIVATE)
        if block.ref_cnt == 0:
            self._release(block)

    def pin(self, block: Block) -> None:
        """Keep a block from eviction. Protection is not use: a transfer pins and does not touch."""
        self.num_taken += not block.ref_cnt
        block.ref_cnt += 1

    def unpin(self, block: Block) -> None:
        """Let go of a block; a private one that nobody holds any more is free."""
        assert block.ref_cnt > 0, f"block {block.block_id} is not pinned"
        block.ref_cnt -= 1
        if block.ref_cnt == 0 and block.state is State.PRIVATE:
            self._release(block)

    def pin_all(self, blocks: Iterable[Block | None], times: int) -> None:
        """`pin` blocks that somebody holds already, so many times each."""
        for block in blocks:
            if block is not None:
                block.ref_cnt += times

    def unpin_all(self, blocks: Iterable[Block | None]) -> None:
        """`unpin` each of them."""
        private = State.PRIVATE
        for block in blocks:
            if block is not None:
                assert block.ref_cnt > 0, f"block {block.block_id} is not pinned"
                block.ref_cnt -= 1
                if not block.ref_cnt and block.state is private:
                    self._release(block)

    def touch(self, path: Sequence[BlockHash], access: Access) -> None:
        """One request used those blocks of `path` (names in token order) that are findable."""
        known = self._findable
        present = [key for key in path if key in known]
        if present:
            self._policy.touch(present, access)

    def advise(self, path: Sequence[BlockHash], access: Access) -> None:
        """Something was said of those blocks of `path` that are findable, without a use."""
        present = [key for key in path if key in self._findable]
        if present:
            self._policy.advise(present, access)

    def said(self, block: Block) -> Hints:
        """What was said of a findable block and still holds."""
        assert block.key is not None, f"block {block.block_id} has no name"
        return self._policy.said(block.key)

    def tick(self, access: Access) -> None:
        """So late it is: places are about to be asked for."""
        self._policy.tick(access.time)

    def victims(self, n: int) -> list[Block]:
        """The `n` blocks to give up first. Raises OutOfBlocks if too few; changes nothing."""
        chosen = list(islice(self.evictable(), n))
        if len(chosen) < n:
            raise OutOfBlocks(f"need {n} blocks to evict, {len(chosen)} are not in use")
        return chosen

    def evictable(self) -> Iterator[Block]:
        """Every block that may go, the first to give up first, and those in leaving places last.
        Valid until the pool changes."""
        leaving = self._leaving
        if not leaving:
            return self.idle()
        stay = (block for block in self.idle() if block.block_id not in leaving)
        return chain(stay, (block for block in self.idle() if block.block_id in leaving))

    def idle(self) -> Iterator[Block]:
        """As `evictable`, wherever they are."""
        blocks = (self._findable[BlockHash(key)] for key in self._policy.victims())  # type: ignore[arg-type]
        return (b for b in blocks if b.ref_cnt == 0 and b.state is State.COMMITTED)

    def hottest(self) -> list[Block]:
        """Every committed block, held or not, the last to give up first."""
        blocks = [self._findable[BlockHash(key)] for key in self._policy.victims()]  # type: ignore[arg-type]
        return [block for block in reversed(blocks) if block.state is State.COMMITTED]

    def evict(self, block: Block) -> None:
        """Give up one of `victims()`. Its place is free in the pool, whether it was leaving or not:
        somebody needs it."""
        assert block.state is State.COMMITTED, f"block {block.block_id} is {block.state}"
        assert block.ref_cnt == 0, f"block {block.block_id} is held {block.ref_cnt} times"
        assert block.key is not None, f"block {block.block_id} has no name"
        self._policy.evict(block.key)
        self._unpublish(block)
        self._leaving.discard(block.block_id)
        self._release(block)

    def quarantine(self, block: Block) -> None:
        """Let go of a private block, which is not used again before `thaw`."""
        assert block.state is State.PRIVATE, f"block {block.block_id} is {block.state}"
        self._move(block, State.QUARANTINED)
        self.unpin(block)

    def thaw(self, block: Block) -> None:
        """Nobody can write the quarantined block any more: it is free once nobody reads it."""
        assert block.state is State.QUARANTINED, f"block {block.block_id} is {block.state}"
        if block.ref_cnt:
            self._move(block, State.PRIVATE)
        else:
            self._release(block)

    def relocate(self, src: Block, dst: Block) -> None:
        """The committed block `src`, which nobody holds, lies in `dst` now, a private place of the
        caller's; the old place is free. Whoever looks for it finds one or the other."""
        assert src.state is State.COMMITTED, f"block {src.block_id} is {src.state}"
        assert src.ref_cnt == 0, f"block {src.block_id} is held {src.ref_cnt} times"
        assert dst.state is State.PRIVATE, f"block {dst.block_id} is {dst.state}"
        assert src.key is not None, f"block {src.block_id} has no name"
        dst.key, dst.parent, dst.inner, dst.ref_cnt = src.key, src.parent, src.inner, 0
        self._findable[src.key] = dst
        for name in src.inner:
            if self._inner.get(name) is src:
                self._inner[name] = dst
        src.key, src.parent, src.inner = None, None, ()
        self._move(dst, State.COMMITTED)
        self._release(src)

    def at(self, block_id: int) -> Block | None:
        """The block in that place, if it is one of the pool's."""
        return self._blocks.get(BlockId(block_id))

    def grow(self, ids: Iterable[int]) -> None:
        """Take new places, free."""
        # Not `BlockId(number)`: there may be millions, and the call takes as long again.
        new: dict[BlockId, Block] = {number: Block(number) for number in ids}  # type: ignore
        assert self._blocks.keys().isdisjoint(new), "some of these blocks are in the pool already"
        self._blocks |= new
        self._free.update(reversed(new.items()))  # neighbours go out together, the first first
        self._counts[State.FREE] += len(new)
        self._policy.resize(self.capacity)

    def shrink(self, ids: Iterable[int]) -> None:
        """Give free places back."""
        for block_id in map(BlockId, ids):
            assert self._blocks[block_id].state is State.FREE, f"block {block_id} is not free"
            del self._blocks[block_id], self._free[block_id]
            self._counts[State.FREE] -= 1
            self.num_taken += 1
        self._policy.resize(self.capacity)

    def leave(self, ids: Iterable[int]) -> None:
        """Those of the places `ids` that are the pool's are leaving it, until `gone` or `stay`."""
        leaving = [block_id for block_id in map(BlockId, ids) if block_id in self._blocks]
        self._leaving.update(leaving)
        self.shrink(i for i in leaving if self._blocks[i].state is State.FREE)

    def is_leaving(self, block: Block) -> bool:
        return block.block_id in self._leaving

    def gone(self, ids: Iterable[int]) -> None:
        """The places `ids` have all left the pool; they may come again by `grow`."""
        self._leaving.difference_update(map(BlockId, ids))

    def stay(self, ids: Iterable[int]) -> None:
        """The places `ids` are not leaving any more; those that had left are free in the pool."""
        back = [block_id for block_id in map(BlockId, ids) if block_id in self._leaving]
        self._leaving.difference_update(back)
        self.grow(block_id for block_id in back if block_id not in self._blocks)

    def live(self, ids: range) -> int:
        """How many places of a part are not free; `ids` are those of one part."""
        return self._live[ids.start // self.span]

    def when_freed(self, n: int, call: Callable[[], None]) -> None:
        """Call once, when `n` more places have become free."""
        self._until_freed, self._when_freed = n, call

    def _parent_of(self, key: Key) -> Key | None:
        return self._findable[key].parent  # type: ignore[index]

    def __iter__(self) -> Iterator[Block]:
        return iter(self._blocks.values())

    def _publish(
        self,
        block: Block,
        key: BlockHash,
        parent: BlockHash | None,
        inner: Sequence[BlockHash],
        access: Access,
        state: State,
    ) -> None:
        block.key, block.parent, block.inner = key, parent, inner
        self._findable[key] = block
        for name in inner:
            self._inner[name] = block
        self._policy.insert(key, parent, access)
        self._move(block, state)

    def _unpublish(self, block: Block) -> None:
        assert block.key is not None, f"block {block.block_id} has no name"
        del self._findable[block.key]
        for name in block.inner:
            if self._inner.get(name) is block:
                del self._inner[name]
        block.key, block.parent, block.inner = None, None, ()

    def _release(self, block: Block) -> None:
        self._move(block, State.FREE)
        if self.span:
            self._live[block.block_id // self.span] -= 1
        self._free[block.block_id] = block
        if self._leaving and block.block_id in self._leaving:
            self.shrink([block.block_id])
        self._until_freed -= 1
        if not self._until_freed and self._when_freed is not None:
            self._when_freed()

    def _move(self, block: Block, state: State) -> None:
        self._counts[block.state] -= 1
        self._counts[state] += 1
        block.state = state
