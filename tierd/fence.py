"""A fence: the point that an engine's GPU stream has been given work up to, seen by the daemon.

    engine   kernels that write K and V | record | frame that commits, releases, ... ->
    daemon                                        -> frame waits until the fence is passed -> served

One interprocess event a connection, recorded before each frame: who sees it recorded again waits
for more, never for less. Where blocks lie in shared memory there is none: an engine's writes are
done when it says so. It knows no frames and no blocks.
"""

from typing import Any, Protocol, Self


class Fence(Protocol):
    """What the daemon sees of it."""

    def passed(self) -> bool:
        """Whether the stream has done all that it had been given when the fence was recorded."""

    def wait(self) -> None:
        """Block until it is passed."""


class CudaFence:
    """A CUDA event that both processes have; made by the engine, opened by the daemon."""

    def __init__(self, event: Any) -> None:
        self._event = event

    @classmethod
    def create(cls, device: int) -> Self:
        """An event of the GPU `device`, as this process counts them."""
        import torch

        with torch.cuda.device(device):
            event = torch.cuda.Event(blocking=True, interprocess=True)  # type: ignore[no-untyped-call]
            event.record()  # before that there is nothing to export
        return cls(event)

    @classmethod
    def attach(cls, handle: bytes, device: int) -> Self:
        """What another process exported. Raises RuntimeError if CUDA cannot open it."""
        import torch

        where = torch.device("cuda", device)
        return cls(torch.cuda.Event.from_ipc_handle(where, handle))  # type: ignore[no-untyped-call]

    def export(self) -> bytes:
        """The handle that `attach` takes."""
        return bytes(self._event.ipc_handle())

    def record(self) -> None:
        """All that the current stream has been given is before the fence."""
        self._event.record()

    def passed(self) -> bool:
        return bool(self._event.query())

    def wait(self) -> None:
        self._event.synchronize()
