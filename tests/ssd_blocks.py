"""Blocks for the tests of the SSD volume: a block's tag is the seed of its bytes."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, closing
from pathlib import Path

from storage.base import BlockFault, BlockStore
from storage.slab import Geometry
from storage.ssd import SsdVolume
from storage.testing import assert_equal, make_rows, random_rows

NBYTES = 8192
GEOMETRY = Geometry.fitting(NBYTES, 1 << 17)
SLOTS = GEOMETRY.num_slots


def open_volume(path: Path, *, nbytes: int = 1 << 20, min_free_nbytes: int = 0) -> SsdVolume:
    return SsdVolume.open(path, nbytes=nbytes, min_free_nbytes=min_free_nbytes, slab_nbytes=1 << 17)


@asynccontextmanager
async def open_store(path: Path, num_slabs: int = 3) -> AsyncIterator[BlockStore]:
    with closing(open_volume(path)) as volume:
        store = volume.array("a", NBYTES, {"group": 0})
        while len(volume.slabs("a")) < num_slabs:
            assert volume.grow("a")
        yield store


async def put(store: BlockStore, ids: Sequence[int], generation: int = 0) -> None:
    seeds = [1000 * generation + block_id for block_id in ids]
    tags = [str(seed).encode() for seed in seeds]
    await store.write(ids, random_rows(seeds, NBYTES), tags)


async def faults(store: BlockStore, tags: dict[int, bytes]) -> dict[int, OSError]:
    """Read blocks whose tags name their seeds; those that do not fail must be right."""
    out = make_rows(len(tags), NBYTES)
    failed: dict[int, OSError] = {}
    try:
        await store.read(list(tags), out)
    except BlockFault as fault:
        failed = fault.failed
    for (block_id, tag), row in zip(tags.items(), out, strict=True):
        if block_id not in failed:
            assert_equal([row], random_rows([int(tag)], NBYTES))
    return failed


def slab(path: Path, k: int) -> Path:
    return path / "store.zarr" / "a" / "c" / str(k) / "0"


def names(path: Path, pattern: str) -> list[str]:
    return sorted(str(file.relative_to(path)) for file in path.glob(pattern))


def flip(path: Path, block_id: int, offset: int) -> None:
    """Flip one bit of a slot, `offset` bytes after its start."""
    k, start = GEOMETRY.locate(block_id)
    with slab(path, k).open("r+b") as file:
        file.seek(start + offset)
        [byte] = file.read(1)
        file.seek(start + offset)
        file.write(bytes([byte ^ 4]))


def lose_catalog(path: Path) -> None:
    for file in path.glob("catalog.sqlite*"):
        file.unlink()
