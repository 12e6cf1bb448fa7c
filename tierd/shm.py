"""Memory that a daemon makes and engines map: memfd on the host, CUDA allocations on a GPU.

Nothing here has a name in a file system: memory passes as a file descriptor or an IPC handle and
is gone with its last holder (I9). Both halves, making and mapping, stand side by side.
"""

import ctypes
import fcntl
import mmap
import os
import threading
import weakref
from typing import Any, Self

import numpy as np
import numpy.typing as npt

_F_ADD_SEALS, _SEAL, _SHRINK, _GROW = 1033, 0x1, 0x2, 0x4
_PROT_NONE, _PROT_RW = 0, mmap.PROT_READ | mmap.PROT_WRITE
_MAP_FIXED, _MAP_FAILED = 0x10, ctypes.c_void_p(-1).value
_MADV_DONTFORK, _MADV_HUGEPAGE, _MADV_COLLAPSE = 10, 14, 25
_HUGE = 2 << 20
_POPULATE = 32 << 20  # bytes backed at a time
_PUNCH_HOLE, _KEEP_SIZE = 0x2, 0x1  # of fallocate

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class SharedMemory:
    """A mapping of a memfd: `array` is its bytes, uint8, at a multiple of 2 MiB.

    A child made by fork does not inherit the mapping: whoever maps connects himself.
    """

    def __init__(self, fd: int, nbytes: int) -> None:
        """Map `fd`, which this object owns from now on."""
        self.fd, self.nbytes = fd, nbytes
        self._address = _map_aligned(fd, nbytes)
        memory = (ctypes.c_uint8 * nbytes).from_address(self._address)
        # Views keep `memory` alive, and it the mapping; at exit the kernel takes it anyway.
        weakref.finalize(memory, _libc.munmap, self._address, nbytes).atexit = False
        self.array: npt.NDArray[np.uint8] = np.ctypeslib.as_array(memory)

    @classmethod
    def create(cls, name: str, nbytes: int) -> Self:
        """Make `nbytes` of zeros; nobody can change their size any more."""
        fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, nbytes)
        fcntl.fcntl(fd, _F_ADD_SEALS, _SHRINK | _GROW | _SEAL)
        return cls(fd, nbytes)

    def populate(self, stop: threading.Event, first: int = 0, nbytes: int | None = None) -> int:
        """Back the memory, or `nbytes` of it from `first` on, with pages now, huge ones where the
        kernel allows: reading it is then up to 1.4 times as fast (kernels.md 2.1), for every
        process that maps it.

        This takes a second a GiB; `stop` ends it early. Returns the bytes on huge pages. What the
        kernel refuses is left to be backed by the first write, page by page.
        """
        huge, end = 0, self.nbytes if nbytes is None else first + nbytes
        for start in range(first, end, _POPULATE):
            size = min(_POPULATE, end - start)
            if stop.is_set():
                break
            try:
                os.posix_fallocate(self.fd, start, size)
            except OSError:
                break  # memory is short, or the daemon has closed it
            if not _libc.madvise(self._address + start, size, _MADV_COLLAPSE):
                huge += size
        return huge

    def discard(self, start: int, nbytes: int) -> None:
        """Give pages back to the system, for every process that maps them: they read as zeros, and
        are backed again by the first write. Raises OSError."""
        if _libc.fallocate(self.fd, _PUNCH_HOLE | _KEEP_SIZE, start, nbytes):
            raise OSError(ctypes.get_errno(), "cannot give memory back")

    def close(self) -> None:
        """Give the mapping up; whoever still holds a view of it keeps it until they drop it."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
            del self.array


def _map_aligned(fd: int, nbytes: int) -> int:
    """Map `fd` at a multiple of 2 MiB, where its pages can be huge. Returns the address."""
    anonymous = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    reserved = _mmap(0, nbytes + _HUGE, _PROT_NONE, anonymous, -1)
    address = -(-reserved // _HUGE) * _HUGE
    _mmap(address, nbytes, _PROT_RW, mmap.MAP_SHARED | _MAP_FIXED, fd)
    end, pages = reserved + nbytes + _HUGE, -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    for start, stop in ((reserved, address), (address + pages, end)):
        if stop > start:
            _libc.munmap(start, stop - start)
    _libc.madvise(address, nbytes, _MADV_DONTFORK)
    _libc.madvise(address, nbytes, _MADV_HUGEPAGE)
    return address


def _mmap(address: int, nbytes: int, protection: int, flags: int, fd: int) -> int:
    found: int | None = _libc.mmap(address, nbytes, protection, flags, fd, 0)
    if found is None or found == _MAP_FAILED:
        number = ctypes.get_errno()
        raise OSError(number, f"cannot map {nbytes} bytes: {os.strerror(number)}")
    return found


class CudaMemory:
    """A CUDA allocation: `tensor` is its bytes, uint8, on the GPU that `uuid` names.

    Legacy CUDA IPC (`cudaIpcGetMemHandle`), which shares whole allocations: sizes are multiples of
    2 MiB. Unlike a memfd it does not outlive its maker: engines unmap before the daemon frees.
    """

    def __init__(self, pointer: int, nbytes: int, device: int, *, mapped: bool) -> None:
        import torch

        self.nbytes, self.device = nbytes, device
        self.uuid = str(torch.cuda.get_device_properties(device).uuid)
        self._pointer, self._mapped = pointer, mapped
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (pointer, False),
            "version": 3,
        }
        with torch.inference_mode(False):  # else nobody outside of it could write the views
            self.tensor: Any = torch.as_tensor(self, device=f"cuda:{device}")
        assert self.tensor.data_ptr() == pointer, "torch copied the pool instead of viewing it"

    @classmethod
    def create(cls, nbytes: int, device: int = 0) -> Self:
        """Allocate zeros on `device`, past torch's own allocator, whose blocks are not exported."""
        pointer = ctypes.c_void_p()
        with _on(device):
            _check(_cudart().cudaMalloc(ctypes.byref(pointer), ctypes.c_size_t(nbytes)))
            _check(_cudart().cudaMemset(pointer, 0, ctypes.c_size_t(nbytes)))
            _check(_cudart().cudaDeviceSynchronize())  # nobody's stream waits for the memset's
        return cls(pointer.value or 0, nbytes, device, mapped=False)

    def export(self) -> bytes:
        """The 64-byte handle that `attach` of another process on this host takes."""
        handle = (ctypes.c_char * 64)()
        with _on(self.device):
            _check(_cudart().cudaIpcGetMemHandle(handle, ctypes.c_void_p(self._pointer)))
        return bytes(handle)

    @classmethod
    def attach(cls, handle: bytes, nbytes: int, uuid: str) -> Self:
        """Map what another process exported from the GPU `uuid`; once a process and handle.

        Raises OSError if this process does not see that GPU: ordinals differ between processes.
        """
        device, pointer = _ordinal(uuid), ctypes.c_void_p()
        with _on(device):
            raw = _Handle.from_buffer_copy(handle)
            _check(_cudart().cudaIpcOpenMemHandle(ctypes.byref(pointer), raw, 1))
        return cls(pointer.value or 0, nbytes, device, mapped=True)

    def close(self) -> None:
        """Unmap or free, once no kernel runs; no view of `tensor` may be used afterwards."""
        if not self._pointer:
            return
        pointer, self._pointer = ctypes.c_void_p(self._pointer), 0
        del self.tensor
        with _on(self.device):
            _check(_cudart().cudaDeviceSynchronize())
            if self._mapped:
                _check(_cudart().cudaIpcCloseMemHandle(pointer))
            else:
                _check(_cudart().cudaFree(pointer))


class _Handle(ctypes.Structure):
    """cudaIpcMemHandle_t, which CUDA passes by value."""

    _fields_ = [("reserved", ctypes.c_char * 64)]


def _ordinal(uuid: str) -> int:
    """Which of the GPUs this process sees is the one of that UUID."""
    import torch

    seen = [str(torch.cuda.get_device_properties(i).uuid) for i in range(torch.cuda.device_count())]
    if uuid not in seen:
        raise OSError(f"the pool lies on GPU {uuid}; this process sees {', '.join(seen) or 'none'}")
    return seen.index(uuid)


def _cudart() -> ctypes.CDLL:
    """The CUDA runtime that torch has loaded into this process."""
    import torch

    torch.cuda.init()  # type: ignore[no-untyped-call]
    with open("/proc/self/maps") as maps:
        paths = {line.split()[-1] for line in maps if "libcudart" in line}
    if not paths:
        raise OSError("torch has loaded no CUDA runtime (libcudart) into this process")
    runtime = ctypes.CDLL(min(paths))
    runtime.cudaGetErrorString.restype = ctypes.c_char_p
    return runtime


def _on(device: int) -> Any:
    import torch

    return torch.cuda.device(device)


def _check(code: int) -> None:
    if code:
        raise OSError(f"CUDA error {code}: {_cudart().cudaGetErrorString(code).decode()}")
