"""Device memory: the GPU's own, or, on a host without one, shared memory that stands in for it.

A store copies; it does not know when an engine's kernels are done with a block. Whoever calls
`read` or `write` has waited for them before, and finds the bytes in place when the call returns.
"""

from collections.abc import Sequence
from concurrent.futures import Executor
from typing import TYPE_CHECKING

from storage.arena import ArenaStore
from storage.base import BlockStore, Row
from storage.batch import check_batch, hop

if TYPE_CHECKING:
    import torch  # at run time only where there is a GPU: it takes seconds to import


class CpuDeviceStore(ArenaStore):
    """The device of a host without a GPU: engines compute on these blocks in place."""


class CudaDeviceStore(BlockStore):
    """Blocks in the memory of one GPU; each direction has a stream, so loads pass stores."""

    def __init__(self, memory: "torch.Tensor", block_nbytes: int, executor: Executor) -> None:
        import torch

        self.block_nbytes = block_nbytes
        self._executor = executor
        num_blocks = memory.numel() // block_nbytes
        self._blocks = memory[: num_blocks * block_nbytes].view(num_blocks, block_nbytes)
        self._in = torch.cuda.Stream(memory.device)  # type: ignore[no-untyped-call]
        self._out = torch.cuda.Stream(memory.device)  # type: ignore[no-untyped-call]

    async def read(self, ids: Sequence[int], out: Sequence[Row]) -> None:
        check_batch(self.block_nbytes, ids, out)
        await hop(self._executor, self._read, ids, out)

    async def write(self, ids: Sequence[int], data: Sequence[Row], tags: Sequence[bytes]) -> None:
        check_batch(self.block_nbytes, ids, data, tags)
        await hop(self._executor, self._write, ids, data)

    async def copy(self, src: int, dst: int) -> None:
        await hop(self._executor, _copy, self._in, [self._blocks[dst]], [self._blocks[src]])

    def _read(self, ids: Sequence[int], out: Sequence[Row]) -> None:
        _copy(self._out, _tensors(out), [self._blocks[block_id] for block_id in ids])

    def _write(self, ids: Sequence[int], data: Sequence[Row]) -> None:
        _copy(self._in, [self._blocks[block_id] for block_id in ids], _tensors(data))


def _tensors(rows: Sequence[Row]) -> "list[torch.Tensor]":
    import torch

    return [torch.from_numpy(row) for row in rows]


def _copy(
    stream: "torch.cuda.Stream",
    targets: "Sequence[torch.Tensor]",
    sources: "Sequence[torch.Tensor]",
) -> None:
    """Queue every copy on `stream` and wait, in this thread, for the last of them."""
    import torch

    # A blocking event sleeps instead of spinning on a core that an engine could use.
    done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    try:
        with torch.cuda.stream(stream):
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source, non_blocking=True)
    finally:  # what was queued before an error still writes the caller's rows
        done.record(stream)
        done.synchronize()
