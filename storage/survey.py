"""A survey: a volume looked at by somebody who changes nothing of it, not even what is broken.

It needs the volume not to be open elsewhere, and keeps it so. Blocks are those the catalog names
(read from a copy, for SQLite writes to what it opens), or, where it is lost, those whose slots say
so of themselves; whether a block is whole is known only by reading it. It does not know what tags
and attributes mean.
"""

import errno
import fcntl
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from types import TracebackType
from typing import Self

from storage.base import CorruptBlock
from storage.catalog import Catalog
from storage.hierarchy import ArrayDocument, array_names, read_group
from storage.slab import PAGE, Geometry, Trailer, prove, seed_of
from storage.slab_files import Scratch

_NUM_READERS = 4
_BATCH = 64  # blocks between two words of progress


class InUse(BlockingIOError):
    """Another process has the volume open; `pid` is 0 if it does not say which."""

    def __init__(self, path: Path, pid: int) -> None:
        super().__init__(errno.EWOULDBLOCK, "is open in another process", str(path))
        self.pid = pid


@dataclass(frozen=True, slots=True)
class Slab:
    """A slab file, whole or not."""

    path: Path
    nbytes: int  # on disk
    is_whole: bool
    written_at: float


class Survey:
    """Made for the volume at `path`; a context manager, which holds the lock.

    Raises `FileNotFoundError` if there is none, `InUse`, other `OSError`s, and `ValueError` for a
    volume of another version. `arrays` are those whose documents can be read, `unreadable` says
    what is wrong with the others.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        root = path / "store.zarr"
        with ExitStack() as opened:
            opened.callback(os.close, _lock(path))
            uuid = read_group(root)
            folder = opened.enter_context(tempfile.TemporaryDirectory(prefix="tierd-survey-"))
            catalog = _catalog(path, Path(folder))
            if catalog is not None:
                opened.enter_context(closing(catalog))
            self.has_catalog = catalog is not None
            self.arrays: list[SurveyedArray] = []
            self.unreadable: dict[str, str] = {}
            for name in array_names(root):
                try:
                    document = ArrayDocument.read(root / name / "zarr.json")
                except ValueError as error:
                    self.unreadable[name] = str(error)
                else:
                    seed = seed_of(uuid, name)
                    self.arrays.append(SurveyedArray(root / name, document, seed, catalog))
            self._opened = opened.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._opened.close()


class SurveyedArray:
    """One array: its slabs, and its blocks in the order of their slots."""

    def __init__(
        self, root: Path, document: ArrayDocument, seed: int, catalog: Catalog | None
    ) -> None:
        self.name = root.name
        self.geometry: Geometry = document.geometry
        self.attributes: Mapping[str, object] = document.attributes
        self._seed = seed
        self.slabs = {
            int(path.parent.name): _slab(path, document.geometry)
            for path in root.glob("c/*/0")
            if path.parent.name.isdecimal()
        }
        self.num_slots = len(self.slabs) * self.geometry.num_slots
        self.blocks: list[Trailer] = (
            [Trailer(*row) for some in catalog.rows(self.name) for row in some]
            if catalog is not None
            else list(self._trailers())
        )

    @property
    def nbytes(self) -> int:
        return sum(slab.nbytes for slab in self.slabs.values())

    @property
    def written_at(self) -> float:
        """In seconds since 1970; 0 without slabs."""
        return max((slab.written_at for slab in self.slabs.values()), default=0.0)

    def slabs_by_fill(self, classes: int) -> list[int]:
        """How many slabs are full up to one part in `classes`, up to two, and so on."""
        used = Counter(self.geometry.locate(block.slot)[0] for block in self.blocks)
        found = [0] * classes
        for slab in self.slabs:
            found[max(0, -(-used[slab] * classes // self.geometry.num_slots) - 1)] += 1
        return found

    def check(self) -> Iterator[tuple[int, dict[int, str]]]:
        """Read every block: a count and what is wrong, by slot, a few blocks at a time."""
        scratch = Scratch(self.geometry)
        with ThreadPoolExecutor(_NUM_READERS, "tierd-survey") as threads:
            for slab, rows in groupby(self.blocks, lambda row: self.geometry.locate(row.slot)[0]):
                batch = list(rows)
                for start in range(0, len(batch), _BATCH * _NUM_READERS):
                    some = batch[start : start + _BATCH * _NUM_READERS]
                    cuts = [some[at::_NUM_READERS] for at in range(_NUM_READERS)]
                    found = threads.map(partial(self._check, slab, scratch), cuts)
                    yield len(some), {slot: what for part in found for slot, what in part.items()}

    def read(self, block: Trailer) -> bytes:
        """The bytes of a block. Raises `CorruptBlock`, other `OSError`s of the medium."""
        scratch = Scratch(self.geometry)
        slab, _ = self.geometry.locate(block.slot)
        with closing(_Reader(self._file(slab))) as reader:
            self._prove(reader, block, scratch)
        return scratch.row.tobytes()

    def _check(self, slab: int, scratch: Scratch, blocks: Sequence[Trailer]) -> dict[int, str]:
        wrong: dict[int, str] = {}
        try:
            with closing(_Reader(self._file(slab))) as reader:
                for block in blocks:
                    try:
                        self._prove(reader, block, scratch)
                    except OSError as error:
                        wrong[block.slot] = error.strerror or str(error)
        except OSError as error:
            return {block.slot: error.strerror or str(error) for block in blocks}
        return wrong

    def _prove(self, reader: "_Reader", block: Trailer, scratch: Scratch) -> None:
        offset = self.geometry.locate(block.slot)[1]
        got = os.preadv(reader.fd, [scratch.row.data, scratch.tails[0].data], offset)
        if got < self.geometry.stride:
            raise CorruptBlock(errno.EIO, f"only {got} bytes are left of it")
        tail = scratch.tails[0].tobytes()
        prove(tail, scratch.row, block, self._seed)

    def _trailers(self) -> Iterator[Trailer]:
        scratch = Scratch(self.geometry)
        for slab in sorted(self.slabs):
            with closing(_Reader(self._file(slab))) as reader:
                for slot in self.geometry.slots(slab):
                    offset = self.geometry.locate(slot)[1] + self.geometry.block_nbytes
                    got = os.preadv(reader.fd, [scratch.tails[0].data], offset)
                    page = scratch.tails[0].tobytes()
                    trailer = Trailer.parse(page, self.geometry.block_nbytes, self._seed)
                    if got == PAGE and trailer is not None and trailer.slot == slot:
                        yield trailer

    def _file(self, slab: int) -> Path:
        if slab not in self.slabs:
            raise CorruptBlock(errno.EIO, "its slab is missing")
        return self.slabs[slab].path


class _Reader:
    """A slab opened to be read, from the medium itself where the file system allows it."""

    def __init__(self, path: Path) -> None:
        try:
            self.fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self.fd = os.open(path, os.O_RDONLY)

    def close(self) -> None:
        os.close(self.fd)


def _slab(path: Path, geometry: Geometry) -> Slab:
    stat = path.stat()
    return Slab(path, stat.st_blocks * 512, stat.st_size == geometry.file_nbytes, stat.st_mtime)


def _lock(path: Path) -> int:
    """The volume's lock, shared with other surveys and nobody else."""
    fd = os.open(path / "LOCK", os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        pid = os.pread(fd, 32, 0).strip()
        os.close(fd)
        raise InUse(path, int(pid) if pid.isdigit() else 0) from None
    return fd


def _catalog(path: Path, folder: Path) -> Catalog | None:
    """A copy of the volume's catalog, if that is sound."""
    for file in path.glob("catalog.sqlite*"):
        if not file.name.endswith("-shm"):
            shutil.copy(file, folder)
    return Catalog.open(folder / "catalog.sqlite")
