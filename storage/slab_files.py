"""The slab files of one array: made, found again, read and written, and the disk they occupy.

A slab is *reserved* by bookkeeping alone and *made* at the first write into it, whole, under its
final name, if the file system has room. One that is given back leaves a gap among the numbers, for
the next that is reserved. It counts what is reserved and what is made; it does not know what a slot
holds, nor whether the budget allows another slab.
"""

import errno
import mmap
import os
import shutil
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

import numpy as np

from storage.base import CorruptBlock, Row
from storage.hierarchy import sync_directory
from storage.slab import PAGE, Geometry, Trailer, shard_index

Failures = dict[int, OSError]
Call = Callable[[int, list[memoryview], int], int]  # preadv, pwritev

_CANNOT_CLONE = {errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM, errno.EXDEV}


class Scratch(threading.local):
    """Page-aligned memory, a thread, for a payload and the tails of a run: direct I/O accepts no
    other."""

    def __init__(self, geometry: Geometry, num_tails: int = 1) -> None:
        nbytes = geometry.block_nbytes
        memory = np.frombuffer(mmap.mmap(-1, nbytes + num_tails * PAGE), np.uint8)
        self.row: Row = memory[:nbytes]
        self.tails: list[Row] = list(memory[nbytes:].reshape(num_tails, PAGE))


class SlabFiles:
    """The numbered slabs of one array. Reading never waits for a slab that is being made."""

    def __init__(self, root: Path, geometry: Geometry, flags: int, min_free_nbytes: int) -> None:
        self.geometry = geometry
        self._root = root
        self._flags = flags
        self.min_free_nbytes = min_free_nbytes
        self._making = threading.Lock()
        self._fds: dict[int, int] = {}
        self._made: dict[int, int] = {}  # slab -> bytes, by what the file system says
        self._adopt()
        self._slabs = set(self._made)  # and those that are reserved

    @property
    def nbytes(self) -> int:
        return self._total(list(self._made.values()))

    @property
    def ceiling(self) -> int:
        """What `nbytes` can come to by writing into the slabs there are."""
        footprint = self.geometry.footprint
        return self._total([max(nbytes, footprint) for nbytes in list(self._made.values())])

    def _total(self, made: list[int]) -> int:
        return sum(made) + (len(self._slabs) - len(made)) * self.geometry.footprint

    def written_at(self) -> float:
        """When a slab was last written, in seconds since 1970; 0 without slabs."""
        times = []
        for slab in self.made():
            with suppress(FileNotFoundError):  # it may be given back at this moment
                times.append(self.path(slab).stat().st_mtime)
        return max(times, default=0.0)

    def made(self) -> list[int]:
        return sorted(self._made)

    def slabs(self) -> list[int]:
        """Those made and those reserved."""
        return sorted(self._slabs)

    def reserve(self) -> range:
        """The slots of one slab more, of the lowest number that is free."""
        slabs = self.slabs()
        slab = next((at for at, slab in enumerate(slabs) if at != slab), len(slabs))
        self._slabs.add(slab)
        return self.geometry.slots(slab)

    def drop(self, slab: int) -> None:
        """Remove a slab that nobody uses; its number is free only after its file is gone. One that
        a power cut brings back is as good as reserved."""
        with self._making:
            if slab in self._made:
                path = self.path(slab)
                path.unlink()
                with suppress(OSError):  # as a killed life may leave it: `_adopt` removes it
                    path.parent.rmdir()
                os.close(self._fds.pop(slab))
                del self._made[slab]
            self._slabs.discard(slab)

    def path(self, slab: int) -> Path:
        return self._root / "c" / str(slab) / "0"

    def open(self) -> None:
        """Open every slab there is; one file descriptor each, until `close`."""
        with ExitStack() as undo:
            undo.callback(self.close)
            for slab in self._made:
                self._fds[slab] = os.open(self.path(slab), os.O_RDWR | self._flags)
            undo.pop_all()

    def close(self) -> None:
        while self._fds:
            os.close(self._fds.popitem()[1])

    def read(self, run: Sequence[int], rows: Sequence[Row], tails: Sequence[Row]) -> Failures:
        """Fill `rows` and `tails`, all page-aligned, with a run of slots of a slab that is made.

        Returns what went wrong, by slot.
        """
        return self._carry(os.preadv, CorruptBlock, run, rows, tails)

    def write(self, run: Sequence[int], rows: Sequence[Row], tails: Sequence[Row]) -> Failures:
        """Write a run of slots, and make its slab first if there is none yet; see `read`."""
        slab, _ = self.geometry.locate(run[0])
        if slab not in self._fds:
            try:
                self._make(slab)
            except OSError as error:
                return dict.fromkeys(run, error)
        return self._carry(os.pwritev, OSError, run, rows, tails)

    def _carry(
        self,
        call: Call,
        short: type[OSError],
        run: Sequence[int],
        rows: Sequence[Row],
        tails: Sequence[Row],
    ) -> Failures:
        slab, offset = self.geometry.locate(run[0])
        pages = [page.data for pair in zip(rows, tails, strict=True) for page in pair]
        try:
            moved, error = call(self._fds[slab], pages, offset), None
        except OSError as caught:
            moved, error = 0, caught
        whole = moved // self.geometry.stride
        if whole == len(run):
            return {}
        if len(run) == 1:
            error = error or short(errno.EIO, f"only {moved} bytes of it are there")
            error.filename = str(self.path(slab))
            return {run[0]: error}
        # One by one, so that each of those that were not reached fails, or not, for itself.
        failed: Failures = {}
        for at in range(whole, len(run)):
            one = slice(at, at + 1)
            failed |= self._carry(call, short, run[one], rows[one], tails[one])
        return failed

    def clone(self, src: int, dst: int, tail: Row) -> bool:
        """Let the file system copy a slot's payload to another slot, and write that one's `tail`.

        False, and nothing worth reading in `dst`, where it refuses.
        """
        (src_slab, src_at), (dst_slab, dst_at) = map(self.geometry.locate, (src, dst))
        if dst_slab not in self._fds:
            self._make(dst_slab)
        src_fd, dst_fd, done = self._fds[src_slab], self._fds[dst_slab], 0
        with _Naming(self, dst_slab):
            while (left := self.geometry.block_nbytes - done) > 0:
                try:
                    put = os.copy_file_range(src_fd, dst_fd, left, src_at + done, dst_at + done)
                except OSError as error:
                    if error.errno in _CANNOT_CLONE:
                        return False
                    raise
                if not put:
                    return False
                done += put
            return os.pwritev(dst_fd, [tail.data], dst_at + done) == tail.nbytes

    def sync(self, slab: int) -> None:
        """Make what was written into a slab durable."""
        with _Naming(self, slab):
            os.fdatasync(self._fds[slab])

    def checkpoint(self, slab: int, slots: Sequence[int]) -> None:
        """Let foreign readers find `slots` in a slab, and make the slab durable."""
        fd = self._fds[slab]
        index = _aligned(shard_index(self.geometry, slots))
        with _Naming(self, slab):
            os.pwritev(fd, [index], 0)
            os.fdatasync(fd)
        self._made[slab] = _occupied(os.fstat(fd))

    def trailers(self, slab: int, seed: int) -> list[Trailer]:
        """What the slots of a slab say of themselves; reads a page a slot."""
        found = []
        page = mmap.mmap(-1, PAGE)
        block_nbytes = self.geometry.block_nbytes
        fd = os.open(self.path(slab), os.O_RDONLY | self._flags)
        try:
            for slot in self.geometry.slots(slab):
                got = os.preadv(fd, [page], self.geometry.locate(slot)[1] + block_nbytes)
                trailer = Trailer.parse(page[:], block_nbytes, seed) if got == PAGE else None
                if trailer is not None and trailer.slot == slot:
                    found.append(trailer)
        finally:
            os.close(fd)
        return found

    def _adopt(self) -> None:
        """Count the slabs an earlier life left, and remove what is not a whole slab."""
        for directory in self._root.glob("c/*"):
            if not directory.name.isdecimal():
                continue
            slab = int(directory.name)
            path = self.path(slab)
            if path.exists() and path.stat().st_size == self.geometry.file_nbytes:
                path.with_name("0.partial").unlink(missing_ok=True)
                self._made[slab] = _occupied(path.stat())
            else:
                shutil.rmtree(directory)

    def _make(self, slab: int) -> None:
        with self._making:
            if slab in self._fds:
                return
            path = self.path(slab)
            self._check_room(slab)
            path.parent.mkdir(parents=True, exist_ok=True)
            draft = path.with_name("0.partial")
            fd = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_TRUNC | self._flags, 0o600)
            try:
                os.posix_fallocate(fd, 0, self.geometry.file_nbytes)
                os.pwritev(fd, [_aligned(shard_index(self.geometry, ()))], 0)
                os.fsync(fd)
                os.rename(draft, path)
                for parent in (path.parent, path.parent.parent, self._root):
                    sync_directory(parent)
            except OSError:
                os.close(fd)
                shutil.rmtree(path.parent)
                raise
            self._made[slab] = _occupied(os.fstat(fd))
            self._fds[slab] = fd

    def _check_room(self, slab: int) -> None:
        if slab not in self._slabs:
            raise OSError(errno.ENOSPC, "no slab is reserved here", str(self.path(slab)))
        disk = os.statvfs(self._root)
        if disk.f_bavail * disk.f_frsize < self.min_free_nbytes + self.geometry.footprint:
            message = f"a slab would leave less than {self.min_free_nbytes} bytes free"
            raise OSError(errno.ENOSPC, message, str(self.path(slab)))


class _Naming:
    """Give an error of a file descriptor the name of its file."""

    def __init__(self, files: SlabFiles, slab: int) -> None:
        self._files = files
        self._slab = slab

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, OSError):
            error.filename = str(self._files.path(self._slab))


def _occupied(stat: os.stat_result) -> int:
    return stat.st_blocks * 512


def _aligned(data: bytes) -> mmap.mmap:
    memory = mmap.mmap(-1, len(data))
    memory[:] = data
    return memory
