"""The bookkeeping of one tier's blocks of one layer group: ONE class for every tier.

Each place is in exactly one of five states, and the states sum to the capacity (I4):

    FREE -allocate-> PRIVATE -commit-> COMMITTED -evict-> FREE
                     PRIVATE -load-> LOADING -landed-> COMMITTED
                                     LOADING -failed-> PRIVATE -unpin-> FREE
                     PRIVATE -quarantine-> QUARANTINED -thaw-> FREE

The policy orders every findable (loading or committed) block; which of them may go is decided here:
committed ones that nobody holds. The pool knows no bytes, no media and no other pool.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice

from policies.base import Access, EvictionPolicy
from tierd.block import Block, BlockHash, BlockId, State
from tierd.errors import OutOfBlocks


class BlockPool:
    """Places that hold blocks. `grow` gives it its first ones."""

    def __init__(self, policy: EvictionPolicy) -> None:
        self._policy = policy
        self._blocks: dict[BlockId, Block] = {}
        self._free: list[Block] = []  # every free block, the next to be taken last
        self._findable: dict[BlockHash, Block] = {}
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

    def allocate(self, n: int) -> list[Block]:
        """Take `n` free places, private, with one reference each.

        Evicting first is the caller's choice. Raises OutOfBlocks and changes nothing if too few.
        """
        if n > self.num_free:
            raise OutOfBlocks(f"need {n} blocks, {self.num_free} are free")
        self.num_taken += n
        taken = [self._free.pop() for _ in range(n)]
        for block in taken:
            block.ref_cnt = 1
            self._move(block, State.PRIVATE)
        return taken

    def load(self, block: Block, key: BlockHash, parent: BlockHash | None, access: Access) -> None:
        """Make a private block findable as `key` before its bytes are there."""
        assert key not in self._findable, f"{key.hex()} is findable already"
        self._publish(block, key, parent, access, State.LOADING)

    def landed(self, block: Block) -> None:
        """The bytes of a loading block are there."""
        assert block.state is State.LOADING, f"block {block.block_id} is {block.state}"
        self._move(block, State.COMMITTED)

    def failed(self, block: Block) -> None:
        """The bytes of a loading block will not come: it is unfindable, its holders let go."""
        assert block.state is State.LOADING, f"block {block.block_id} is {block.state}"
        self.forget(block)

    def commit(
        self, block: Block, key: BlockHash, parent: BlockHash | None, access: Access
    ) -> bool:
        """Freeze a private block as `key`.

        False, and nothing changes, if the name is findable already: the index knows one block of
        a name, the other stays its lease's own.
        """
        if key in self._findable:
            return False
        self._publish(block, key, parent, access, State.COMMITTED)
        return True

    def adopt(self, found: Iterable[tuple[BlockId, BlockHash, BlockHash | None]]) -> int:
        """Take up blocks that a former life left in free places, as the newest: place, name and
        parent of each. Returns how many; those in no such place, or whose name is known, are not
        taken. There may be millions: where that is too long, let nobody else have the pool yet.
        """
        blocks, findable, insert = self._blocks, self._findable, self._policy.insert
        free, committed, access = State.FREE, State.COMMITTED, Access(0.0)
        num_adopted = 0
        for block_id, key, parent in found:
            block = blocks.get(block_id)
            if block is None or block.state is not free or key in findable:
                continue
            block.state, block.key, block.parent = committed, key, parent
            findable[key] = block
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
        """Keep a private block, whoever held it, from use until `thaw`."""
        assert block.state is State.PRIVATE, f"block {block.block_id} is {block.state}"
        block.ref_cnt = 0
        self._move(block, State.QUARANTINED)

    def thaw(self, block: Block) -> None:
        """Nobody can write the quarantined block any more: it is free."""
        assert block.state is State.QUARANTINED, f"block {block.block_id} is {block.state}"
        self._release(block)

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
        gone = {BlockId(number) for number in ids}
        for block_id in gone:
            assert self._blocks[block_id].state is State.FREE, f"block {block_id} is not free"
            del self._blocks[block_id]
            self._counts[State.FREE] -= 1
        self.num_taken += len(gone)
        self._free = [block for block in self._free if block.block_id not in gone]
        self._policy.resize(self.capacity)

    def __iter__(self) -> Iterator[Block]:
        return iter(self._blocks.values())

    def _publish(
        self, block: Block, key: BlockHash, parent: BlockHash | None, access: Access, state: State
    ) -> None:
        block.key, block.parent = key, parent
        self._findable[key] = block
        self._policy.insert(key, parent, access)
        self._move(block, state)

    def _unpublish(self, block: Block) -> None:
        assert block.key is not None, f"block {block.block_id} has no name"
        del self._findable[block.key]
        block.key = block.parent = None

    def _release(self, block: Block) -> None:
        self._move(block, State.FREE)
        self._free.append(block)

    def _move(self, block: Block, state: State) -> None:
        self._counts[block.state] -= 1
        self._counts[state] += 1
        block.state = state
