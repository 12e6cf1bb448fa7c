"""The bookkeeping of one tier's blocks of one layer group: ONE class for every tier.

Each place is in exactly one of five states, and the states sum to the capacity (I4):

    FREE -allocate-> PRIVATE -commit-> COMMITTED -evict-> FREE
                     PRIVATE -load-> LOADING -landed-> COMMITTED
                                     LOADING -failed-> PRIVATE -unpin-> FREE
                     PRIVATE -quarantine-> QUARANTINED -thaw-> FREE

A findable block has a key, the name of all tokens up to its end, and is found by the names of the
granules inside it too. The policy orders every findable (loading or committed) block; which of them
may go is decided here: committed ones that nobody holds. The pool knows no bytes, no media and no
other pool.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice

from policies.base import Access, EvictionPolicy
from tierd.block import Block, BlockHash, BlockId, State
from tierd.errors import OutOfBlocks

Adopted = tuple[BlockId, BlockHash, BlockHash | None, Sequence[BlockHash]]  # place, and its names


class BlockPool:
    """Places that hold blocks. `grow` gives it its first ones."""

    def __init__(self, policy: EvictionPolicy) -> None:
        self._policy = policy
        self._blocks: dict[BlockId, Block] = {}
        # Every free block, the next to be taken last; and some that were given back since.
        self._free: list[Block] = []
        self._findable: dict[BlockHash, Block] = {}
        self._inner: dict[BlockHash, Block] = {}  # by the names of granules inside a block
        self._counts = [0] * len(State)
        self.num_taken = 0  # places that were ever taken from the free or the evictable ones

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
        while len(taken) < n:
            block = self._free.pop()
            if self._blocks.get(block.block_id) is block:
                block.ref_cnt = 1
                self._move(block, State.PRIVATE)
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
        """Take up blocks that a former life left in free places, as the newest: place and names of
        each. Returns how many; those in no such place, or whose name is known, are not taken. There
        may be millions: where that is too long, let nobody else have the pool yet.
        """
        blocks, findable, insert = self._blocks, self._findable, self._policy.insert
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
            insert(key, parent, access)
            num_adopted += 1
        self._counts[free] -= num_adopted
        self._counts[committed] += num_adopted
        self._free = [block for block in self._free if block.state is free]
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

    def touch(self, path: Sequence[BlockHash], access: Access) -> None:
        """One request used those blocks of `path` (names in token order) that are findable."""
        known = self._findable
        present = [key for key in path if key in known]
        if present:
            self._policy.touch(present, access)

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
        """Every block that may go, the first to give up first. Valid until the pool changes."""
        blocks = (self._findable[BlockHash(key)] for key in self._policy.victims())  # type: ignore[arg-type]
        return (b for b in blocks if b.ref_cnt == 0 and b.state is State.COMMITTED)

    def hottest(self) -> list[Block]:
        """Every committed block, held or not, the last to give up first."""
        blocks = [self._findable[BlockHash(key)] for key in self._policy.victims()]  # type: ignore[arg-type]
        return [block for block in reversed(blocks) if block.state is State.COMMITTED]

    def evict(self, block: Block) -> None:
        """Give up one of `victims()`."""
        assert block.state is State.COMMITTED, f"block {block.block_id} is {block.state}"
        assert block.ref_cnt == 0, f"block {block.block_id} is held {block.ref_cnt} times"
        assert block.key is not None, f"block {block.block_id} has no name"
        self._policy.evict(block.key)
        self._unpublish(block)
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
        caller's; the old place leaves the pool. Whoever looks for it finds one or the other."""
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
        self._move(src, State.FREE)
        self.shrink([src.block_id])

    def at(self, block_id: int) -> Block | None:
        """The block in that place, if it is one of the pool's."""
        return self._blocks.get(BlockId(block_id))

    def grow(self, ids: Iterable[int]) -> None:
        """Take new places, free."""
        # Not `BlockId(number)`: there may be millions, and the call takes as long again.
        new: dict[BlockId, Block] = {number: Block(number) for number in ids}  # type: ignore
        assert self._blocks.keys().isdisjoint(new), "some of these blocks are in the pool already"
        self._blocks |= new
        self._free += reversed(new.values())  # neighbours go out together, the first one first
        self._counts[State.FREE] += len(new)
        self._policy.resize(self.capacity)

    def shrink(self, ids: Iterable[int]) -> None:
        """Give free places back."""
        for block_id in map(BlockId, ids):
            assert self._blocks[block_id].state is State.FREE, f"block {block_id} is not free"
            del self._blocks[block_id]
            self._counts[State.FREE] -= 1
            self.num_taken += 1
        self._policy.resize(self.capacity)

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
        self._free.append(block)

    def _move(self, block: Block, state: State) -> None:
        self._counts[block.state] -= 1
        self._counts[state] += 1
        block.state = state
