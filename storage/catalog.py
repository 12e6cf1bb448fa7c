"""The catalog: which slots hold blocks, under which tag, in one SQLite file.

It guides and never proves: a row counts only if the slot's own trailer and bytes agree with it, so
losing rows, or the whole file, loses nothing but time. It does not know slabs or files. A catalog
is *sealed* once it names every block there is; one that is not, or is damaged, is thrown away.
"""

import errno
import os
import sqlite3
import threading
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Self

from storage.slab import Trailer

SEAL = 2  # the version of the table below, kept in PRAGMA user_version
# Strict and not null, so that the check at open finds a value that damage made another type.
_TABLE = """CREATE TABLE block (
    array TEXT NOT NULL, slot INTEGER NOT NULL, seq INTEGER NOT NULL, crc INTEGER NOT NULL,
    tag BLOB NOT NULL, PRIMARY KEY (array, slot)
) WITHOUT ROWID, STRICT"""


class Catalog:
    """Rows of trailers by array and slot; every method may block, and is safe in any thread."""

    def __init__(self, path: Path, db: sqlite3.Connection) -> None:
        self._path = path
        self._db = db
        self._lock = threading.Lock()

    @classmethod
    def open(cls, path: Path) -> Self | None:
        """The sealed catalog at `path`, or None if there is none that is sound."""
        if not path.exists():
            return None
        with suppress(sqlite3.DatabaseError), ExitStack() as undo:
            db = _connect(path)
            undo.callback(db.close)
            sealed = db.execute("PRAGMA user_version").fetchone()[0] == SEAL
            if sealed and db.execute("PRAGMA quick_check(1)").fetchone()[0] == "ok":
                undo.pop_all()
                return cls(path, db)
        return None

    @classmethod
    def create(cls, path: Path) -> Self:
        """An empty catalog in the place of whatever is at `path`, to be filled and sealed."""
        for suffix in ("", "-wal", "-shm"):
            path.with_name(path.name + suffix).unlink(missing_ok=True)
        with _as_oserror(path):
            db = _connect(path)
            db.execute(_TABLE)
        return cls(path, db)

    def seal(self) -> None:
        with self._transaction() as db:
            db.execute(f"PRAGMA user_version = {SEAL}")

    def put(self, array: str, rows: Iterable[Trailer]) -> None:
        """Record blocks, all or none, in place of what their slots held."""
        with self._transaction() as db:
            values = ((array, *row) for row in rows)
            db.executemany("INSERT OR REPLACE INTO block VALUES (?, ?, ?, ?, ?)", values)

    def proofs(self, array: str) -> list[tuple[int, int, int]]:
        """Slot, seq and crc of every block: plain tuples, of which there may be millions."""
        with self._transaction() as db:
            query = "SELECT slot, seq, crc FROM block WHERE array = ?"
            return db.execute(query, (array,)).fetchall()

    def tags(self, array: str) -> list[tuple[int, int, bytes]]:
        """Slot, seq and tag of every block."""
        with self._transaction() as db:
            query = "SELECT slot, seq, tag FROM block WHERE array = ?"
            return db.execute(query, (array,)).fetchall()

    def rows(self, array: str) -> list[Trailer]:
        """Every block, in the order of the slots."""
        with self._transaction() as db:
            query = "SELECT slot, seq, crc, tag FROM block WHERE array = ? ORDER BY slot"
            return [Trailer(*row) for row in db.execute(query, (array,))]

    def tag(self, array: str, slot: int, seq: int) -> bytes | None:
        """The tag of one block, or None if it is not known."""
        with self._transaction() as db:
            query = "SELECT tag FROM block WHERE array = ? AND slot = ? AND seq = ?"
            row = db.execute(query, (array, slot, seq)).fetchone()
            return None if row is None else row[0]

    def sync(self) -> None:
        """Make what was recorded durable: it is in the log, or was synced when it left it."""
        try:
            fd = os.open(self._path.with_name(self._path.name + "-wal"), os.O_RDWR)
        except FileNotFoundError:
            return
        try:
            os.fdatasync(fd)
        finally:
            os.close(fd)

    def forget(self, array: str, slot: int, seq: int) -> None:
        """Drop one row, unless its slot has been written again."""
        with self._transaction() as db:
            where = "array = ? AND slot = ? AND seq = ?"
            db.execute(f"DELETE FROM block WHERE {where}", (array, slot, seq))

    def drop(self, array: str) -> None:
        with self._transaction() as db:
            db.execute("DELETE FROM block WHERE array = ?", (array,))

    def last_seq(self) -> int:
        with self._transaction() as db:
            return int(db.execute("SELECT coalesce(max(seq), 0) FROM block").fetchone()[0])

    def close(self) -> None:
        with self._lock:
            self._db.close()

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._lock, _as_oserror(self._path), self._db:
            yield self._db


def _connect(path: Path) -> sqlite3.Connection:
    db = sqlite3.connect(path, check_same_thread=False)
    with ExitStack() as undo:
        undo.callback(db.close)
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = NORMAL")
        undo.pop_all()
    return db


@contextmanager
def _as_oserror(path: Path) -> Iterator[None]:
    """A catalog that cannot be used is one more failure of the medium."""
    try:
        yield
    except sqlite3.Error as error:
        raise OSError(errno.EIO, str(error), str(path)) from error
