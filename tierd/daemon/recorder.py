"""The recorder: what the daemon was asked goes into a folder, in files that are never changed.

Sessions hand over each lease that is over, which costs the event loop a look or some at what is
known, a tuple, and nothing that waits: a thread makes lines, packs them and writes. What comes
faster than that is dropped, and counted. A file ends, and the next begins, when it has an eighth of
the folder's size, or has named as many granules as are remembered; then the oldest files go. Once a
second all is flushed, so that a daemon that is killed leaves a file which is good up to there. A
medium that refuses a write ends recording, with one line in the log, until the next start.
"""

import logging
import os
import time
import zlib
from collections.abc import Iterable
from contextlib import suppress
from datetime import UTC, datetime
from io import FileIO
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Event, Thread
from typing import Any, Self

from tierd.daemon.config import TraceConfig
from tierd.daemon.json_lines import SUFFIX
from tierd.daemon.lease import Lease
from tierd.daemon.namespace import Namespace
from tierd.daemon.recording import NAME_NBYTES, Encoder, Served, new_salt
from tierd.errors import ConfigError

log = logging.getLogger("tierd.recorder")

_PARTS = 8  # files that a folder's size is divided into
# Granules that are remembered: some 12 MB. A larger table would keep the event loop from the
# interpreter for more than a millisecond when it grows.
_MOST_NAMES = 1 << 16
_MOST_WAITING = 1 << 18  # granules of requests that wait to be written
# A hand-over wakes the thread only if it has slept that long.
_GATHER_S = 0.25
_FLUSH_S = 1.0
_LEVEL = 1  # of zlib: most of a recording are hashes, which nothing makes shorter

_Waiting = tuple[Encoder, Served]


class Recorder:
    """Owns the thread and the open file, from `open` to `close`."""

    def __init__(self, config: TraceConfig, offset: float) -> None:
        self._folder, self._part = config.path, config.size // _PARTS
        self._offset, self._salt = offset, new_salt()
        self._queue: SimpleQueue[_Waiting | None] = SimpleQueue()
        self._handed = self._taken = 0  # granules; each is counted by one thread only
        # So much can come between two files, and neither is to be much larger than its part.
        self._most = min(_MOST_WAITING, self._part // NAME_NBYTES // 2)
        self._hurry = Event()
        self._encoder = self._new_encoder()
        self._unflushed = 0  # requests
        self._recorded = self._dropped = 0
        self._stopped = ""  # why, if it was
        self._thread = Thread(target=self._run, name="tierd-trace", daemon=True)

    @classmethod
    def open(cls, config: TraceConfig, offset: float) -> Self:
        """Begin a file in the configured folder; Unix time is `offset` ahead of the clock that
        requests are timed by. This blocks. Raises ConfigError if there can be no file."""
        recorder = cls(config, offset)
        try:
            config.path.mkdir(0o700, parents=True, exist_ok=True)
            recorder._begin(recorder._encoder)
        except OSError as error:
            raise ConfigError(
                f'trace.path = "{config.path}": cannot be recorded to: {error.strerror}'
            ) from error
        recorder._thread.start()
        return recorder

    def record(self, tenant: str, namespace: Namespace, lease: Lease, now: float) -> None:
        """Take a lease that is over.

        Only what is new of its hashes is kept: to hold thousands that would be freed at once costs
        more than all the rest, for others then find no memory that is in the processor's cache.
        """
        encoder, access = self._encoder, lease.access
        after, new = encoder.split(lease.hashes)
        handed = self._handed + len(new) + 1
        if handed - self._taken > self._most or self._stopped:
            self._dropped += 1
            return
        self._handed = handed
        began, hints = now if access is None else access.time, lease.hints
        served = Served(
            tenant, namespace, began, now, lease.asked, lease.hit, lease.committed, hints,
            access is None, after, new,
        )  # fmt: skip
        self._queue.put((encoder, served))
        if handed - self._taken > self._most // 2:
            self._hurry.set()

    def close(self) -> None:
        """Write what waits, and end the file; one without a request is not kept. This blocks."""
        self._queue.put(None)
        self._hurry.set()
        self._thread.join()

    def status(self) -> dict[str, Any]:
        """Facts for `tierd status`, as JSON."""
        return {
            "path": str(self._folder),
            "recorded": self._recorded,
            "waiting": self._handed - self._taken,
            "dropped": self._dropped,
            "stopped": self._stopped,
        }

    # -- the thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._write_all()
            self._end(self._encoder)
        except OSError as error:
            self._stopped = error.strerror or str(error)
            log.warning("%s: recording stops: %s", self._path, self._stopped)
            self._dropped += self._unflushed + self._queue.qsize()
            self._file.close()

    def _write_all(self) -> None:
        """Write until told to end."""
        flushed, ending = time.monotonic(), False
        while not ending:
            patience = flushed + _FLUSH_S - time.monotonic() if self._unflushed else None
            ending = self._write(patience)
            if time.monotonic() - flushed > _FLUSH_S:
                self._flush()
                flushed = time.monotonic()
            if self._nbytes >= self._part or self._encoder.num_names >= _MOST_NAMES:
                ending |= self._change()

    def _write(self, patience: float | None) -> bool:
        """Write what was handed over; whether that is all there will be."""
        waiting = list[_Waiting | None]()
        with suppress(Empty):
            waiting.append(self._queue.get(timeout=None if patience is None else max(0, patience)))
            self._hurry.wait(_GATHER_S)
            self._hurry.clear()
            room = self._most // 4
            while (last := waiting[-1]) is not None and room > 0:
                room -= len(last[1].new)
                waiting.append(self._queue.get_nowait())
        self._pack(filter(None, waiting), self._encoder)
        return None in waiting

    def _pack(self, waiting: Iterable[_Waiting], encoder: Encoder) -> None:
        """Add requests to the file, but for those that go on from what is in none any more."""
        waiting = list(waiting)
        batch = [served for of, served in waiting if of is encoder or served.after is None]
        self._taken += sum(len(served.new) + 1 for _, served in waiting)
        self._dropped += len(waiting) - len(batch)
        self._unflushed += len(batch)
        self._append(self._zip.compress(encoder.encode(batch)))

    def _change(self) -> bool:
        """Go on in another file; whether that was the end."""
        old, self._encoder = self._encoder, self._new_encoder()
        waiting = list[_Waiting | None]()
        with suppress(Empty):  # what goes on from something in the old file
            while True:
                waiting.append(self._queue.get_nowait())
        self._pack(filter(None, waiting), old)
        self._end(old)
        self._begin(self._encoder)
        return None in waiting

    def _new_encoder(self) -> Encoder:
        return Encoder(time.time(), self._offset, self._salt)

    def _flush(self) -> None:
        self._append(self._zip.flush(zlib.Z_SYNC_FLUSH))
        self._recorded += self._unflushed
        self._unflushed = 0

    def _append(self, data: bytes) -> None:
        left = memoryview(data)
        while left:
            left = left[self._file.write(left) or 0 :]
        self._nbytes += len(data)

    def _begin(self, encoder: Encoder) -> None:
        """Open the next file, and make room for it."""
        self._zip = zlib.compressobj(_LEVEL, wbits=31)
        self._nbytes = 0
        _trim(self._folder, (_PARTS - 2) * self._part)
        name = f"{datetime.fromtimestamp(encoder.time, UTC):%Y%m%dT%H%M%S.%f}{SUFFIX}"
        self._path = self._folder / name
        self._file = FileIO(self._path, "xb")
        self._append(self._zip.compress(encoder.head()))

    def _end(self, encoder: Encoder) -> None:
        """Close the file; remove it if it says nothing."""
        self._append(self._zip.flush())
        self._recorded += self._unflushed
        self._unflushed = 0
        self._file.close()
        if not encoder.num_requests:
            os.unlink(self._path)


def _trim(folder: Path, nbytes: int) -> None:
    """Remove the oldest recordings of a folder until at most so many bytes are left."""
    for path in sorted(folder.glob(f"*{SUFFIX}"), reverse=True):
        nbytes -= path.stat().st_size
        if nbytes < 0:
            path.unlink()
