"""An SSD volume: a Zarr v3 hierarchy of slabs, with a catalog beside it, on a file system.

    LOCK              held (flock) by the one process that has the volume open; its pid is inside
    catalog.sqlite    which slots hold blocks; a guide, made anew from the slots when it is lost
    store.zarr/NAME/  an array [slots, block_nbytes] of uint8, its shards being the slabs c/K/0

The volume gives out slabs under one budget and owns the threads; it does not touch blocks.
"""

import errno
import fcntl
import itertools
import mmap
import os
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Self

from storage.base import ArrayFacts, Durability, Slab, Volume
from storage.catalog import Catalog
from storage.group_commit import GroupCommit
from storage.hierarchy import ArrayDocument, Hierarchy
from storage.slab import PAGE, Geometry, seed_of
from storage.slab_files import SlabFiles
from storage.ssd_store import Shared, SsdStore

__all__ = ["SsdStore", "SsdVolume"]

_FICLONE = 0x40049409  # of linux/fs.h
# Two fill the disk with runs of neighbours; it takes all of them where small blocks are scattered.
NUM_READERS = 6
NUM_WRITERS = 4


class SsdVolume(Volume):
    """Arrays of slabs on one file system.

    What never waits may be called while one thread is in any other method, and so may `give_back`.
    """

    def __init__(
        self,
        path: Path,
        nbytes: int,
        min_free_nbytes: int,
        slab_nbytes: int,
        durability: Durability,
    ) -> None:
        self._budget = nbytes
        self._min_free_nbytes = min_free_nbytes
        self._slab_nbytes = slab_nbytes
        self._stores: dict[str, SsdStore] = {}
        self._files: dict[str, SlabFiles] = {}
        with ExitStack() as opened:
            opened.callback(os.close, _lock(path))
            self._hierarchy = Hierarchy(path)
            self._flags = os.O_DIRECT if _takes_direct(path) else 0
            self._documents = {name: self._hierarchy.read(name) for name in self._hierarchy.names()}
            for name, document in self._documents.items():
                self._files[name] = self._slab_files(name, document.geometry)
            self._catalog = self._open_catalog(path / "catalog.sqlite")
            opened.callback(self._catalog.close)
            commits = GroupCommit(durability, self._catalog)
            opened.callback(commits.close)
            # Later than any seq of an earlier life, even of one whose catalog is lost.
            seqs = itertools.count(max(time.time_ns(), self._catalog.last_seq + 1))
            opened.callback(self._shut)
            self._shared = Shared(
                self._catalog,
                commits,
                seqs,
                opened.enter_context(ThreadPoolExecutor(NUM_READERS, "tierd-ssd-read")),
                NUM_READERS,
                opened.enter_context(ThreadPoolExecutor(NUM_WRITERS, "tierd-ssd-write")),
                NUM_WRITERS,
                _clones(path),
            )
            self._opened = opened.pop_all()

    @classmethod
    def open(
        cls,
        path: Path,
        *,
        nbytes: int,
        min_free_nbytes: int,
        slab_nbytes: int,
        durability: Durability = Durability.BATCH,
    ) -> Self:
        return cls(path, nbytes, min_free_nbytes, slab_nbytes, durability)

    def arrays(self) -> Mapping[str, ArrayFacts]:
        return {
            name: ArrayFacts(
                document.attributes,
                document.geometry.block_nbytes,
                self._files[name].nbytes,
                self._files[name].written_at(),
            )
            for name, document in self._documents.items()
        }

    def array(self, name: str, block_nbytes: int, attributes: Mapping[str, object]) -> SsdStore:
        if self._is_open(name):
            raise ValueError(f"array {name} is open already")
        self._declare(name, block_nbytes, attributes)
        seed = seed_of(self._hierarchy.uuid, name)
        store = SsdStore(name, seed, self._files[name], self._shared)
        self._stores[name] = store
        return store

    def slab(self, name: str) -> Slab:
        geometry = self._files[name].geometry
        return Slab(geometry.num_slots, geometry.footprint)

    def slabs(self, name: str) -> list[range]:
        files = self._files[name]
        return [files.geometry.slots(slab) for slab in files.slabs()]

    def grow(self, name: str) -> range | None:
        if not self._is_open(name):
            raise ValueError(f"array {name} is not open")
        files = self._files[name]
        ceiling = sum(other.ceiling for other in list(self._files.values()))
        if ceiling + files.geometry.footprint > self._budget:
            return None
        return files.reserve()

    def limit(self, nbytes: int, min_free_nbytes: int) -> None:
        self._budget, self._min_free_nbytes = nbytes, min_free_nbytes
        for files in self._files.values():
            files.min_free_nbytes = min_free_nbytes
        for name, document in list(self._documents.items()):
            self._cover(name, document)

    def give_back(self, name: str, ids: range) -> None:
        if not self._is_open(name):
            raise ValueError(f"array {name} is not open")
        if ids not in self.slabs(name):
            raise ValueError(f"array {name} has no slab of {ids}")
        self._stores[name].vacate(self._files[name].geometry.locate(ids.start)[0])

    @property
    def nbytes(self) -> int:
        return sum(files.nbytes for files in list(self._files.values()))

    def drop(self, name: str) -> None:
        if self._is_open(name):
            raise ValueError(f"array {name} is open")
        if name not in self._files:
            raise KeyError(name)
        self._catalog.drop(name)
        self._hierarchy.drop(name)
        del self._files[name], self._documents[name]

    def close(self) -> None:
        self._opened.close()

    def _is_open(self, name: str) -> bool:
        return name in self._stores and not self._stores[name].closed

    def _declare(self, name: str, block_nbytes: int, attributes: Mapping[str, object]) -> None:
        """See that array `name` exists, with a shape that covers all the budget has room for."""
        document = self._documents.get(name)
        geometry = (
            document.geometry if document else Geometry.fitting(block_nbytes, self._slab_nbytes)
        )
        if geometry.block_nbytes != block_nbytes:
            held = geometry.block_nbytes
            raise ValueError(f"array {name} has blocks of {held} bytes, not of {block_nbytes}")
        if document is not None:
            self._cover(name, document)
            return
        document = ArrayDocument(geometry, self._most_slots(geometry), attributes)
        self._catalog.drop(name)  # of an array that somebody else deleted
        self._hierarchy.create(name, document)
        self._files[name] = self._slab_files(name, geometry)
        self._documents[name] = document

    def _cover(self, name: str, document: ArrayDocument) -> None:
        """See that an array's document has a shape that covers all the budget has room for."""
        most = self._most_slots(document.geometry)
        if document.shape_slots < most:
            document = ArrayDocument(document.geometry, most, document.attributes)
            self._hierarchy.replace(name, document)
            self._documents[name] = document

    def _most_slots(self, geometry: Geometry) -> int:
        return max(1, self._budget // geometry.footprint) * geometry.num_slots

    def _slab_files(self, name: str, geometry: Geometry) -> SlabFiles:
        return SlabFiles(self._hierarchy.root / name, geometry, self._flags, self._min_free_nbytes)

    def _open_catalog(self, path: Path) -> Catalog:
        """The catalog, or a new one of what the slots say of themselves."""
        catalog = Catalog.open(path)
        if catalog is not None:
            return catalog
        catalog = Catalog.create(path)
        with ExitStack() as undo, ThreadPoolExecutor(NUM_READERS, "tierd-ssd-scan") as threads:
            undo.callback(catalog.close)
            for name, files in self._files.items():
                seed = seed_of(self._hierarchy.uuid, name)
                for rows in threads.map(partial(files.trailers, seed=seed), files.made()):
                    catalog.put(name, rows)
            catalog.seal()
            undo.pop_all()
        return catalog

    def _shut(self) -> None:
        with ExitStack() as stores:
            for store in self._stores.values():
                stores.callback(store.shut)


def _lock(path: Path) -> int:
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    fd = os.open(path / "LOCK", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.truncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    except OSError:
        os.close(fd)
        raise
    return fd


def _clones(path: Path) -> bool:
    """Whether the file system copies by sharing (a reflink); one that does not is slower at it
    than we are, who have the bytes in memory already: half as fast on ext4."""
    probes = [path / "tmp" / name for name in ("probe", "clone")]
    try:
        with probes[0].open("wb") as source, probes[1].open("wb") as target:
            source.write(bytes(PAGE))
            source.flush()
            fcntl.ioctl(target, _FICLONE, source.fileno())
            return True
    except OSError:
        return False
    finally:
        for probe in probes:
            probe.unlink(missing_ok=True)


def _takes_direct(path: Path) -> bool:
    """Whether the file system does direct I/O by whole pages; some refuse it at open."""
    probe = path / "tmp" / "probe"
    try:
        fd = os.open(probe, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
        try:
            return os.pwrite(fd, mmap.mmap(-1, PAGE), 0) == PAGE
        finally:
            os.close(fd)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return False
    finally:
        probe.unlink(missing_ok=True)
