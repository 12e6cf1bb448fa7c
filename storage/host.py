"""Pinned host memory: an arena that a GPU can copy from and to at full speed.

Pinning registers memory with this process's CUDA driver. It belongs to the memory, not to blocks:
whoever made the memory pins it once, however many stores lie over it.
"""

from contextlib import ExitStack

from storage.arena import ArenaStore
from storage.base import Row

# One registration of a whole large arena is known to fail where several succeed.
PIN_CHUNK_NBYTES = 64 << 30
CUDA_HOST_REGISTER_PORTABLE = 1


class HostStore(ArenaStore):
    """Blocks in host memory."""


def pin(memory: Row) -> ExitStack:
    """Register all of `memory`, or none of it; closing the result gives it back.

    This takes seconds for a large arena. Raises RuntimeError if the driver refuses.
    """
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
