"""The catalog: which slots hold blocks, under which tag, in one SQLite file.

It guides and never proves: a row counts only if the slot's own trailer and bytes agree with it, so
losing rows, or the whole file, loses nothing but time. It does not know slabs or files. A catalog
is *sealed* once it names every block there is; one that is not, or whose rows cannot all be read,
is thrown away. Damage that can be read is left to the slots to tell.
"""

import errno
import os
import sqlite3
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Self

from storage.slab import Proof, Trailer

_ROWS = 1000  # a statement; SQLite takes 32,766 values
_SOME = 10_000  # rows read at a time: a few ms in which nobody else runs
_SEQ_END = 1 << 62  # of nanoseconds since 1970: no clock is there yet, and SQLite counts that far
SEAL = 2  # the version of the table below, kept in PRAGMA user_version
_TABLE = """CREATE TABLE block (
    array TEXT NOT NULL, slot INTEGER NOT NULL, seq INTEGER NOT NULL, crc INTEGER NOT NULL,
    tag BLOB NOT NULL, PRIMARY KEY (array, slot)
) WITHOUT ROWID, STRICT"""


# What SQLite raises of a damaged file; the second, where its message quotes what is no text.
_DAMAGE = (sqlite3.DatabaseError, UnicodeDecodeError)


class Catalog:
    """Rows of trailers by array and slot; every method may block, and is safe in any thread."""

    def __init__(self, path: Path, db: sqlite3.Connection, last_seq: int = 0) -> None:
        self.last_seq = last_seq  # no row has a later one
        self._path = path
        self._db = db
        self._lock = threading.Lock()

    @classmethod
    def open(cls, path: Path) -> Self | None:
        """The sealed catalog at `path`, or None if there is none that is sound."""
        if not path.exists():
            return None
        with suppress(*_DAMAGE), ExitStack() as undo:
            db = _connect(path)
            undo.callback(db.close)
            sealed = db.execute("PRAGMA user_version").fetchone()[0] == SEAL
            if sealed:
                last_seq = _read_through(db)
                undo.pop_all()
                return cls(path, db, last_seq)
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

    def put(self, array: str, rows: Sequence[Trailer]) -> None:
        """Record blocks, all or none, in place of what their slots held."""
        with self._transaction() as db:
            for start in range(0, len(rows), _ROWS):
                # In one statement, because that is what costs, not its rows.
                some = rows[start : start + _ROWS]
                places = ", ".join(["(?1, ?, ?, ?, ?)"] * len(some))
                values = (value for row in some for value in row)
                db.execute(f"INSERT OR REPLACE INTO block VALUES {places}", (array, *values))
                self.last_seq = max(self.last_seq, *(row.seq for row in some))

    def rows(self, array: str) -> Iterator[list[Proof]]:
        """Every block that was recorded before, in the order of the slots, some at a time."""
        with _as_oserror(self._path), closing(_connect(self._path)) as db:
            query = "SELECT slot, seq, crc, tag FROM block WHERE array = ? ORDER BY slot"
            cursor = db.execute(query, (array,))
            while some := cursor.fetchmany(_SOME):
                # Damage may have made a value another type, whatever the table says.
                yield [
                    row
                    for row in some
                    if type(row[0]) is type(row[1]) is type(row[2]) is int and type(row[3]) is bytes
                ]

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

    def vacate(self, array: str, slots: range) -> None:
        """Drop the rows of a slab, durably: none may outlive its file."""
        with self._transaction() as db:
            where = "array = ? AND slot >= ? AND slot < ?"
            db.execute(f"DELETE FROM block WHERE {where}", (array, slots.start, slots.stop))
        self.sync()

    def drop(self, array: str) -> None:
        with self._transaction() as db:
            db.execute("DELETE FROM block WHERE array = ?", (array,))

    def close(self) -> None:
        with self._lock:
            self._db.close()

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._lock, _as_oserror(self._path), self._db:
            yield self._db


def _read_through(db: sqlite3.Connection) -> int:
    """The last seq, found by reading all there is of every row: each array is looked for, as `rows`
    does it, because a walk from row to row passes over damage that stops who looks."""
    after, last_seq = "", 0
    next_array = "SELECT min(array) FROM block WHERE array > ?"
    all_of_it = "SELECT max(seq), max(slot), max(crc), max(tag) FROM block WHERE array = ?"
    while (array := db.execute(next_array, (after,)).fetchone()[0]) is not None:
        if not isinstance(array, str) or array <= after:
            raise sqlite3.DatabaseError(f"{array!r} comes after {after!r}")
        seq = db.execute(all_of_it, (array,)).fetchone()[0]
        if not isinstance(seq, int) or not 0 <= seq < _SEQ_END:
            raise sqlite3.DatabaseError(f"{seq!r} is no seq")
        after, last_seq = array, max(last_seq, seq)
    return last_seq


def _connect(path: Path) -> sqlite3.Connection:
    db = sqlite3.connect(path, check_same_thread=False)
    with ExitStack() as undo:
        undo.callback(db.close)
        # For a new one. Scattered rows are a page each in the log: half the usual is half the cost.
        db.execute("PRAGMA page_size = 2048")
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = NORMAL")
        undo.pop_all()
    return db


@contextmanager
def _as_oserror(path: Path) -> Iterator[None]:
    """A catalog that cannot be used is one more failure of the medium."""
    try:
        yield
    except (sqlite3.Error, *_DAMAGE) as error:
        raise OSError(errno.EIO, str(error), str(path)) from error
