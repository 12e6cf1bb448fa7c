"""An SSD volume whose medium fails while it runs, as a file beside it tells: for `ssd.store`.

The daemon finds it by `ssd.store = "tests.failing:FailingVolume"`; the errors are raised where the
system call would raise them, so all that handles them is the real thing.
"""

import errno
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import tierd.daemon.namespace
from storage.base import Row
from storage.slab import Geometry
from storage.slab_files import Failures, SlabFiles
from storage.ssd import SsdVolume

STORE = 'ssd.store = "tests.failing:FailingVolume"\n'
PAUSE_S = 0.5  # of the daemon that has such a volume, so that a test need not wait for 10 s

tierd.daemon.namespace._PAUSE_S = PAUSE_S


class FailingFiles(SlabFiles):
    """`read` and `write` fail with the error told for them; `slow` and `slow_read`
    are the seconds that writing and reading a block take more."""

    def read(self, run: Sequence[int], rows: Sequence[Row], tails: Sequence[Row]) -> Failures:
        time.sleep(len(run) * float(told(self._root).get("slow_read", "0")))
        return self._met("read", run) or super().read(run, rows, tails)

    def write(self, run: Sequence[int], rows: Sequence[Row], tails: Sequence[Row]) -> Failures:
        time.sleep(len(run) * float(told(self._root).get("slow", "0")))
        return self._met("write", run) or super().write(run, rows, tails)

    def _met(self, verb: str, run: Sequence[int]) -> Failures:
        if name := told(self._root).get(verb):
            number = getattr(errno, name)
            path = str(self.path(self.geometry.locate(run[0])[0]))
            return {slot: OSError(number, os.strerror(number), path) for slot in run}
        return {}


class FailingVolume(SsdVolume):
    def _slab_files(self, name: str, geometry: Geometry) -> FailingFiles:
        root = self._hierarchy.root / name
        return FailingFiles(root, geometry, self._flags, self._min_free_nbytes)


def told(root: Path) -> Mapping[str, str]:
    """What the medium is told, for the array at `root`: FOLDER/ssd/TENANT/store.zarr/NAME."""
    try:
        words = (root.parents[3] / "medium").read_text().split()
    except FileNotFoundError:
        return {}
    return dict(word.split("=") for word in words)


@contextmanager
def medium(folder: Path, **fails: object) -> Iterator[None]:
    """From here on `read="EIO"`, `write="ENOSPC"` or `slow=0.1`; afterwards it is sound again."""
    draft = folder / "medium.draft"
    draft.write_text(" ".join(f"{verb}={how}" for verb, how in fails.items()))
    draft.rename(folder / "medium")
    try:
        yield
    finally:
        (folder / "medium").unlink()
