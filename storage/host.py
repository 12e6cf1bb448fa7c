"""Pinned host memory: an arena that a GPU can copy from and to at full speed.

Pinning registers the memory with this process's CUDA driver, until `close`. It belongs to the
memory, not to the blocks: of several stores over one arena, one is told `pin=True`.
"""

from concurrent.futures import Executor
from contextlib import ExitStack

from storage.arena import ArenaStore
from storage.base import Row

# One registration of a whole large arena is known to fail where several succeed.
PIN_CHUNK_NBYTES = 64 << 30
CUDA_HOST_REGISTER_PORTABLE = 1


class HostStore(ArenaStore):
    """Blocks in host memory. With `pin=True`, making one takes seconds for a large arena."""

    def __init__(
        self, memory: Row, block_nbytes: int, executor: Executor, *, pin: bool = False
    ) -> None:
        super().__init__(memory, block_nbytes, executor)
        self._pins = _pin(memory) if pin else ExitStack()

    async def close(self) -> None:
        self._pins.close()


def _pin(memory: Row) -> ExitStack:
    """Register all of `memory`, or none of it; closing the result gives it back."""
    import torch

    cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    start, end = memory.ctypes.data, memory.ctypes.data + memory.nbytes
    with ExitStack() as pins:
        for chunk in range(start, end, PIN_CHUNK_NBYTES):
            nbytes = min(PIN_CHUNK_NBYTES, end - chunk)
            error = cudart.cudaHostRegister(chunk, nbytes, CUDA_HOST_REGISTER_PORTABLE)
            torch.cuda.check_error(int(error))
            pins.callback(cudart.cudaHostUnregister, chunk)
        return pins.pop_all()
