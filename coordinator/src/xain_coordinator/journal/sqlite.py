"""The journal as an SQLite file.

Durable: WAL with synchronous=FULL, so that a committed transaction is on the disk before append
returns. One transaction per append, so that its records are there together or not at all.

Exclusive: locking_mode=EXCLUSIVE makes SQLite hold its lock on the file from the opening to the end
of the process, however it ends. A lock file beside it would be a second truth, which tools that
know nothing of it (the sqlite3 shell, a backup) would not respect. It also lets WAL work without
shared memory, which network file systems do not have. Nothing else in this process may open the
file: on POSIX, closing any descriptor of a file gives up the process's locks on it.
"""

import contextlib
import sqlite3
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

from xain_coordinator.core.events import SessionOpened
from xain_coordinator.journal.codec import FORMAT, decode_record, encode_record
from xain_coordinator.ports import JournalError, Record
from xain_coordinator.stores.durable import make_directory

APPLICATION_ID = 0x5841494E  # "XAIN"

_SCHEMA = """
CREATE TABLE record (
    session INTEGER NOT NULL,  -- 1, 2, ...: in order of opening
    seq     INTEGER NOT NULL,  -- 0, 1, ... within the session, without gaps
    at      REAL    NOT NULL,  -- session time in seconds
    type    TEXT    NOT NULL,  -- class of the event
    body    TEXT    NOT NULL,  -- its fields as JSON
    PRIMARY KEY (session, seq)
) WITHOUT ROWID
"""


class SqliteJournal:
    """The journal at `path`, which is created, with its folder, if it is missing.

    May be used from any thread. Raises JournalError if another process has the journal open, if it
    is of another format, or if it cannot be read or written; nothing in the file is changed then.
    """

    def __init__(self, path: Path) -> None:
        self._path = path.absolute()
        self._lock = threading.Lock()
        self._db: sqlite3.Connection | None = None
        try:
            make_directory(self._path.parent)
        except OSError as error:
            raise JournalError(
                f"the journal's folder {self._path.parent} cannot be created: {error.strerror}; "
                "choose another [journal] path"
            ) from error
        with self._explained():
            # Our own lock stands in for the check of threads. timeout: whoever holds the journal
            # holds it for life, so there is nothing to wait for.
            db = sqlite3.connect(
                self._path, timeout=0, isolation_level=None, check_same_thread=False
            )
        try:
            with self._explained():
                self._session, self._seq = self._take(db)
        except BaseException:  # on Ctrl-C too: the file is locked for as long as it is open
            db.close()
            raise
        self._db = db

    def load(self) -> Sequence[Record]:
        with self._lock, self._explained():
            rows = self._open_db().execute(
                "SELECT seq, at, type, body FROM record WHERE session = ? ORDER BY seq",
                (self._session,),
            )
            records: list[Record] = []
            for seq, at, name, body in rows:
                if seq != len(records):
                    raise JournalError(
                        f"{self._path} is damaged: record {len(records)} of session "
                        f"{self._session} is missing; restore the file from a backup"
                    )
                records.append(decode_record((at, name, body)))
        return records

    def append(self, records: Sequence[Record]) -> None:
        if not records:
            return
        encoded = [encode_record(record) for record in records]
        with self._lock, self._explained():
            db = self._open_db()
            session, seq = self._session, self._seq
            rows = []
            for at, name, body in encoded:
                if name == SessionOpened.__name__:
                    session, seq = session + 1, 0
                if session == 0:
                    raise JournalError(f"the journal begins with a SessionOpened, not a {name}")
                rows.append((session, seq, at, name, body))
                seq += 1
            with _transaction(db):
                db.executemany("INSERT INTO record VALUES (?, ?, ?, ?, ?)", rows)
            # Only now: after a failure the next append goes on where the last one ended.
            self._session, self._seq = session, seq

    def close(self) -> None:
        with self._lock:
            db, self._db = self._db, None
            if db is not None:
                with self._explained():
                    db.close()

    def _take(self, db: sqlite3.Connection) -> tuple[int, int]:
        """Lock the file, make sure that it is ours, and find its end: (session, next seq)."""
        db.execute("PRAGMA locking_mode=EXCLUSIVE")
        # Before anything is written: what is not ours must stay as it is.
        db.execute("BEGIN EXCLUSIVE")
        fresh = self._is_fresh(db)
        db.execute("ROLLBACK")  # in this locking mode the lock stays
        (mode,) = db.execute("PRAGMA journal_mode=WAL").fetchone()
        if mode != "wal":
            raise JournalError(f"{self._path} lies where SQLite cannot keep a write-ahead log")
        db.execute("PRAGMA synchronous=FULL")
        # macOS: its plain fsync leaves the data in the drive's cache. No effect elsewhere.
        db.execute("PRAGMA fullfsync=ON")
        if fresh:
            with _transaction(db):
                db.execute(_SCHEMA)
                db.execute(f"PRAGMA application_id={APPLICATION_ID}")
                db.execute(f"PRAGMA user_version={FORMAT}")
        row = db.execute(
            "SELECT session, seq FROM record ORDER BY session DESC, seq DESC LIMIT 1"
        ).fetchone()
        return (0, 0) if row is None else (row[0], row[1] + 1)

    def _is_fresh(self, db: sqlite3.Connection) -> bool:
        """True if the file is empty, False if it is a journal that we can read."""
        (application_id,) = db.execute("PRAGMA application_id").fetchone()
        (version,) = db.execute("PRAGMA user_version").fetchone()
        (num_tables,) = db.execute("SELECT count(*) FROM sqlite_master").fetchone()
        if (application_id, version, num_tables) == (0, 0, 0):
            return True
        if application_id != APPLICATION_ID:
            raise JournalError(
                f"{self._path} is a database of another program; choose another [journal] path"
            )
        if version != FORMAT:
            raise JournalError(
                f"{self._path} has format {version}, this version of the program reads {FORMAT}; "
                "use the version that wrote it, or choose another [journal] path"
            )
        return False

    def _open_db(self) -> sqlite3.Connection:
        if self._db is None:
            raise JournalError(f"the journal {self._path} is closed")
        return self._db

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Turn SQLite's errors into ones that say what to do."""
        try:
            yield
        except sqlite3.Error as error:
            # Extended codes carry the primary one in their lowest byte.
            code = getattr(error, "sqlite_errorcode", 0) & 0xFF
            reason = _REASONS.get(code, f"cannot be used: {error}")
            raise JournalError(f"the journal {self._path} {reason}") from error


_REASONS = {
    sqlite3.SQLITE_BUSY: (
        "is in use by another process; stop that one, or choose another [journal] path"
    ),
    sqlite3.SQLITE_NOTADB: "is not a journal; choose another [journal] path",
    sqlite3.SQLITE_CORRUPT: (
        "is damaged; restore it from a backup, or choose another [journal] path"
    ),
    sqlite3.SQLITE_FULL: "has no room left on its disk; free some space and start again",
    sqlite3.SQLITE_READONLY: "cannot be written; check the permissions of the file and its folder",
    sqlite3.SQLITE_CANTOPEN: "cannot be opened; check the permissions of the file and its folder",
    sqlite3.SQLITE_IOERR: "cannot be read or written: the disk reports an error; check it",
}


@contextlib.contextmanager
def _transaction(db: sqlite3.Connection) -> Iterator[None]:
    db.execute("BEGIN IMMEDIATE")
    try:
        yield
        db.execute("COMMIT")
    except BaseException:
        # Whatever it was, an open transaction would swallow the next append. SQLite has undone
        # some failures itself.
        if db.in_transaction:
            db.execute("ROLLBACK")
        raise
