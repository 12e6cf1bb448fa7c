"""What the bytes of a block must be, by its name, so that any process can write and check them.

It looks at the arena's bytes without torch, so that an engine process of a test starts quickly;
`test_route.py` shows that the tensors of `Pool.view` are the same memory.
"""

import random
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from tierd.block import BlockHash
from tierd.daemon.match import first_block
from tierd.daemon.tag import unpack
from tierd.layout import KVLayout
from tierd.lease import Lease
from tierd.pool import Pool
from tierd.shm import SharedMemory

Row = npt.NDArray[np.uint8]

# Blocks of 64 KiB: a device tier of 2 MiB has 32 of them, 512 tokens.
LAYOUT = KVLayout("model", 4, 2, 64, "float32", revision="r1")
BLOCK = 16  # tokens
BLOCK_NBYTES = 64 << 10
BLOCKS = 32


def prompt(seed: int, num_tokens: int) -> list[int]:
    """A prompt that begins like every other of its seed."""
    return random.Random(seed).choices(range(50_000), k=4096)[:num_tokens]


def row(pool: Pool, group: int, block_id: int) -> Row:
    """The bytes of a place of the mapped arena."""
    assert isinstance(pool._memory, SharedMemory)
    nbytes = pool.layout.block_nbytes(group)
    return pool._memory.array[block_id * nbytes : (block_id + 1) * nbytes]


@lru_cache(1024)
def content(key: BlockHash, group: int, nbytes: int) -> bytes:
    return np.random.default_rng([group, *key]).bytes(nbytes)


def names(lease: Lease, group: int) -> Sequence[BlockHash]:
    """The names of the lease's full blocks of a group."""
    ratio = lease._pool.layout.groups[group].block_size // lease._pool.layout.hash_step
    return lease._chain.hashes[ratio - 1 :: ratio]


def key_of(tag: bytes) -> BlockHash:
    """The name of a block that an SSD keeps under a tag."""
    named = unpack(tag)
    assert named is not None, f"{tag!r} names no block"
    return named.key


def check(lease: Lease) -> None:
    """Every byte of the hit is what was committed under its name (I2)."""
    pool = lease._pool
    for group, of in enumerate(pool.layout.groups):
        first = first_block(lease.hit, pool.layout.window(group), of.block_size)
        for index in range(first, lease.hit // of.block_size):
            right = content(names(lease, group)[index], group, pool.layout.block_nbytes(group))
            found = row(pool, group, int(lease.tables[group][index]))
            if found.tobytes() != right:
                differ = np.flatnonzero(found != np.frombuffer(right, np.uint8))
                raise AssertionError(
                    f"block {index} of group {group} is wrong: {len(differ)} bytes of "
                    f"{len(right)}, from {differ[:1]} to {differ[-1:]}; a hit of {lease.hit}"
                )


def write(lease: Lease, start: int, stop: int) -> None:
    """Write the full blocks between two numbers of tokens, as their names say."""
    pool = lease._pool
    for group, of in enumerate(pool.layout.groups):
        for index in range(start // of.block_size, stop // of.block_size):
            right = content(names(lease, group)[index], group, pool.layout.block_nbytes(group))
            place = row(pool, group, int(lease.tables[group][index]))
            place[:] = np.frombuffer(right, np.uint8)


def serve(pool: Pool, tokens: Sequence[int]) -> Lease:
    """What an engine does with a prompt: take the hit, compute the rest, commit it."""
    lease = pool.acquire(tokens)
    lease.wait()
    check(lease)
    write(lease, lease.hit, len(tokens))
    lease.commit(len(tokens))
    return lease


def ask(pool: Pool, tokens: Sequence[int]) -> int:
    """Serve a prompt and give its blocks back; returns the hit."""
    with serve(pool, tokens) as lease:
        return lease.hit
