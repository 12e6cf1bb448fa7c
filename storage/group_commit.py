"""Group commit: what many writes have written becomes durable by one sync of the medium.

A write is durable once the slabs it touched and the catalog's log are synced. Under `sync` it waits
for that, with all who wait at the same time; under `batch` a thread does it `WINDOW_S` after the
first write that is not durable, or as soon as `GROUP` blocks are not. It proves nothing about a
block, so the order of the syncs does not matter, and one that fails loses warmth, not truth.
"""

import threading
from collections.abc import Iterable

from storage.base import Durability
from storage.catalog import Catalog
from storage.slab_files import SlabFiles

WINDOW_S = 0.05
GROUP = 16  # blocks


class GroupCommit:
    """The syncs of one volume; every method is safe in any thread, and may block."""

    def __init__(self, durability: Durability, catalog: Catalog) -> None:
        self._durability = durability
        self._catalog = catalog
        self._changed = threading.Condition()  # guards all below but the syncs themselves
        self._touched: set[tuple[SlabFiles, int]] = set()
        self._num_blocks = 0  # noted and in no sync yet
        self._noted = self._synced = self._failed = 0  # numbers of writes
        self._error: OSError | None = None  # of the write numbered `_failed` and those before
        self._untold = False  # no write has raised it yet
        self._closed = False
        self._syncing = threading.Lock()
        self._thread: threading.Thread | None = None
        if durability is Durability.BATCH:
            self._thread = threading.Thread(target=self._run, name="tierd-ssd-sync", daemon=True)
            self._thread.start()

    def wrote(self, files: SlabFiles, slabs: Iterable[int], num_blocks: int) -> None:
        """Note a write that is in its slabs and in the catalog; under `sync`, make it durable.

        Raises the `OSError` of its sync, or, under `batch`, that of an earlier one.
        """
        if self._durability is Durability.NONE:
            return
        with self._changed:
            self._touched.update((files, slab) for slab in slabs)
            self._num_blocks += num_blocks
            self._noted += 1
            self._changed.notify()
            if self._untold and self._error:
                self._untold = False
                raise self._error
        if self._durability is Durability.SYNC:
            self.commit()

    def commit(self) -> None:
        """Make everything noted so far durable; whoever asks meanwhile shares the next sync."""
        with self._changed:
            mine = self._noted
        with self._syncing:
            if self._synced < mine:
                self._sync()
            if mine <= self._failed and self._error:
                raise self._error

    def close(self) -> None:
        """Sync what is left and end the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()

    def _sync(self) -> None:
        with self._changed:
            touched, self._touched, self._num_blocks = self._touched, set(), 0
            upto, error = self._noted, None
        try:
            for files, slab in touched:
                files.sync(slab)
            if touched:
                self._catalog.sync()
        except OSError as failure:  # never again: a second sync would say that all is well
            error = failure
        with self._changed:
            self._synced = upto
            if error is not None:
                self._failed, self._error = upto, error
                self._untold = self._durability is Durability.BATCH

    def _is_due(self) -> bool:
        return self._num_blocks >= GROUP or self._closed

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._num_blocks or self._closed)
                if not self._num_blocks:
                    return
                self._changed.wait_for(self._is_due, WINDOW_S)
            with self._syncing:
                self._sync()
