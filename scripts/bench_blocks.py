"""Blocks to measure with: page-aligned rows of random bytes, and copies of them to carry."""

import asyncio
import mmap
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from storage.base import Row
from storage.ssd import SsdVolume
from storage.ssd_store import SsdStore
from tierd.block import Block, BlockHash, BlockId
from tierd.daemon.copy import Copy, Outcome
from tierd.daemon.transfer import StoreTransfer

KIB, MIB = 1 << 10, 1 << 20
TAG = bytes(32)


def memory(nbytes: int, seed: int = 1) -> Row:
    """Random bytes on pages of their own, all touched."""
    array = np.frombuffer(mmap.mmap(-1, nbytes), np.uint8)
    array[:] = np.frombuffer(np.random.default_rng(seed).bytes(nbytes), np.uint8)
    return array


def rows(number: int, nbytes: int) -> list[Row]:
    array = memory(number * nbytes)
    return [array[at : at + nbytes] for at in range(0, len(array), nbytes)]


def shuffled(number: int) -> list[int]:
    return [int(i) for i in np.random.default_rng(number).permutation(number)]


def open_volume(path: Path, **options: object) -> SsdVolume:
    """A volume without limits to speak of."""
    given = {"nbytes": 1 << 40, "min_free_nbytes": 0, "slab_nbytes": 64 * MIB, **options}
    return SsdVolume.open(path, **given)  # type: ignore[arg-type]


def open_store(volume: SsdVolume, name: str, block_nbytes: int, number: int) -> SsdStore:
    """A store with room for `number` blocks."""
    store = volume.array(name, block_nbytes, {})
    while sum(map(len, volume.slabs(name))) < number:
        assert volume.grow(name), "the volume has no limit to speak of"
    return store


def copies(ids: Sequence[int], src_level: int, dst_level: int) -> list[Copy]:
    """Copies between places of the same number of two levels."""
    places = [(Block(BlockId(i)), Block(BlockId(i))) for i in ids]
    key = BlockHash(TAG[:16])
    return [Copy(key, key, 0, src_level, a, dst_level, b, False) for a, b in places]


async def carry(transfer: StoreTransfer, work: Sequence[Copy]) -> None:
    """Have copies carried out, all of them, and well."""
    over, left = asyncio.get_running_loop().create_future(), len(work)

    def settle(copy: Copy, outcome: Outcome) -> None:
        nonlocal left
        assert outcome is Outcome.DONE, f"{copy} ended as {outcome}"
        left -= 1
        if not left:
            over.set_result(None)

    transfer.submit(work, settle)
    await over
