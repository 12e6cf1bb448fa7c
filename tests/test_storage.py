"""Every store passes the conformance suites, and what only memory stores do."""

import asyncio
import mmap
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import storage.host
import storage.ssd
from storage.arena import ArenaStore
from storage.base import BlockStore, Row
from storage.batch import check_batch, hop
from storage.device import CpuDeviceStore, CudaDeviceStore
from storage.host import HostStore
from storage.ssd import SsdVolume
from storage.testing import BlockStoreTests, assert_equal, make_rows, random_rows
from storage.volume_testing import VolumeTests


def make_arena(nbytes: int) -> Row:
    return np.frombuffer(mmap.mmap(-1, nbytes), np.uint8)


@pytest.fixture
def executor() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as executor:
        yield executor


class ArenaStoreTests(BlockStoreTests):
    store_cls: type[ArenaStore]

    @asynccontextmanager
    async def open_store(self, path: Path) -> AsyncIterator[BlockStore]:
        # The arena's end holds no whole block, as where another group's blocks begin.
        arena = make_arena((len(self.ids) * self.block_nbytes) + 4096)
        with ThreadPoolExecutor(2) as executor:
            store = self.store_cls(arena, self.block_nbytes, executor)
            yield store
            await store.close()


class TestHostStore(ArenaStoreTests):
    store_cls = HostStore


class TestCpuDeviceStore(ArenaStoreTests):
    store_cls = CpuDeviceStore


@pytest.mark.gpu
class TestCudaDeviceStore(BlockStoreTests):
    @asynccontextmanager
    async def open_store(self, path: Path) -> AsyncIterator[BlockStore]:
        import torch

        memory = torch.zeros(len(self.ids) * self.block_nbytes, dtype=torch.uint8, device="cuda")
        torch.cuda.synchronize()
        with ThreadPoolExecutor(2) as executor:
            store = CudaDeviceStore(memory, self.block_nbytes, executor)
            yield store
            await store.close()


class TestSsdStore(BlockStoreTests):
    persistent = True

    @asynccontextmanager
    async def open_store(self, path: Path) -> AsyncIterator[BlockStore]:
        volume = SsdVolume.open(path, nbytes=8 << 20, min_free_nbytes=0, slab_nbytes=1 << 18)
        with closing(volume):
            store = volume.array("blocks", self.block_nbytes, {})
            while sum(map(len, volume.slabs("blocks"))) < len(self.ids):
                assert volume.grow("blocks")
            yield store
            await store.close()

    def damage(self, store: BlockStore, path: Path, block_id: int) -> None:
        for slab in (path / "store.zarr" / "blocks" / "c").glob("*/0"):
            data = slab.read_bytes()
            at = data.find(random_rows([block_id], self.block_nbytes)[0].tobytes())
            if at >= 0:
                with slab.open("r+b") as file:
                    file.seek(at + 100)
                    file.write(bytes([data[at + 100] ^ 1]))


class TestSsdStoreWithoutDirectIO(TestSsdStore):
    @pytest.fixture(autouse=True)
    def buffered(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(storage.ssd, "_takes_direct", lambda path: False)


class TestSsdStoreOfLargerBlocks(TestSsdStore):
    block_nbytes = 3 * 4096
    ids = range(90)


class TestSsdVolume(VolumeTests):
    volume_cls = SsdVolume


async def test_blocks_of_two_sizes_lie_in_one_arena_by_offset(executor: ThreadPoolExecutor) -> None:
    arena = make_arena(1 << 20)
    small, large = HostStore(arena, 4096, executor), HostStore(arena, 12288, executor)
    [row] = random_rows([1], 12288)
    await large.write([5], [row], [b""])
    assert_equal(small.rows([15, 16, 17]), list(row.reshape(3, 4096)))
    assert_equal([arena[5 * 12288 : 6 * 12288]], [row])


class FakeCudart:
    """Counts registrations; the one of index `fails_at` is refused."""

    def __init__(self, fails_at: int) -> None:
        self.fails_at = fails_at
        self.pinned: dict[int, int] = {}

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        if len(self.pinned) == self.fails_at:
            return 2
        self.pinned[address] = nbytes
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        del self.pinned[address]
        return 0


@pytest.fixture
def fake_cuda(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], FakeCudart]:
    import torch

    def check_error(error: int) -> None:
        if error:
            raise RuntimeError(f"CUDA error {error}")

    def install(fails_at: int) -> FakeCudart:
        cudart = FakeCudart(fails_at)
        monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
        monkeypatch.setattr(torch.cuda, "check_error", check_error)
        monkeypatch.setattr(storage.host, "PIN_CHUNK_NBYTES", 1 << 16)
        return cudart

    return install


def test_a_pinned_arena_is_registered_in_chunks_until_it_is_closed(
    fake_cuda: Callable[[int], FakeCudart],
) -> None:
    cudart, arena = fake_cuda(99), make_arena((1 << 17) + 4096)
    pins = storage.host.pin(arena)
    start = arena.ctypes.data
    assert cudart.pinned == {start: 1 << 16, start + (1 << 16): 1 << 16, start + (1 << 17): 4096}
    pins.close()
    pins.close()
    assert not cudart.pinned


def test_an_arena_is_pinned_whole_or_not_at_all(
    fake_cuda: Callable[[int], FakeCudart],
) -> None:
    cudart = fake_cuda(1)
    with pytest.raises(RuntimeError, match="CUDA error 2"):
        storage.host.pin(make_arena(1 << 18))
    assert not cudart.pinned


def test_an_arena_is_a_row_of_bytes(executor: ThreadPoolExecutor) -> None:
    for arena in (np.zeros((2, 4096), np.uint8), np.zeros(4096, np.int8)):
        with pytest.raises(ValueError, match="arena"):
            CpuDeviceStore(arena, 4096, executor)


def test_random_rows_are_the_same_for_the_same_seed() -> None:
    assert_equal(random_rows([3], 4096, misaligned=9), random_rows([3], 4096))
    with pytest.raises(AssertionError):
        assert_equal(make_rows(1, 4096), random_rows([3], 4096))


async def test_a_cancelled_hop_is_waited_for_even_before_its_thread_begins_it() -> None:
    begin = threading.Event()
    done: list[int] = []
    with ThreadPoolExecutor(1) as executor:
        executor.submit(begin.wait)
        hopping = asyncio.create_task(hop(executor, done.append, 1))
        for _ in range(3):
            await asyncio.sleep(0)
            hopping.cancel()
        assert not hopping.done()
        begin.set()
        with pytest.raises(asyncio.CancelledError):
            await hopping
        assert done == [1]


async def test_a_hop_gives_what_its_function_returns_or_raises() -> None:
    with ThreadPoolExecutor(1) as executor:
        assert await hop(executor, int, "12") == 12
        with pytest.raises(ValueError, match="invalid literal"):
            await hop(executor, int, "twelve")


@pytest.mark.parametrize(
    ("ids", "rows", "tags", "words"),
    [
        ([1, 2], [(4096, np.uint8)], None, "2 ids with 1 rows"),
        ([1], [(4096, np.uint8)], [b"", b""], "1 ids with 1 rows and 2 tags"),
        ([3, -2], [(4096, np.uint8)] * 2, None, "-2 is no block id"),
        ([3, 2], [(4096, np.uint8), (4097, np.uint8)], None, r"uint8\(4097,\), not of 4096"),
        ([3], [((1, 4096), np.uint8)], None, r"uint8\(1, 4096\), not of 4096"),
        ([3], [(4096, np.int8)], None, r"int8\(4096,\), not of 4096"),
        ([3], [(4096, np.uint8)], [bytes(2049)], "a tag of 2049 bytes"),
    ],
)
def test_what_no_store_can_carry_is_named(
    ids: list[int], rows: list[Any], tags: list[bytes] | None, words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        check_batch(4096, ids, [np.zeros(shape, kind) for shape, kind in rows], tags)


def test_a_batch_of_nothing_can_be_carried() -> None:
    check_batch(4096, [], [], [])
