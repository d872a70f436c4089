"""The journal as an SQLite file.

Durable: WAL with synchronous=FULL, so that a committed transaction is on the disk before append
returns. One transaction per append, so that its records are there together or not at all.

Exclusive: locking_mode=EXCLUSIVE makes SQLite hold its lock on the file from the opening to the end
of the process, however it ends. A lock file beside it would be a second truth, which tools that
know nothing of it (the sqlite3 shell, a backup) would not respect. It also lets WAL work without
shared memory, which network file systems do not have. Nothing else in this process may open the
file: on POSIX, closing any descriptor of a file gives up the process's locks on it.

Checked: every record has a checksum, because SQLite keeps none in the database file. The write-
ahead log has SQLite's own checksums (see wal.py), and a snapshot that of its compression.
"""

import contextlib
import sqlite3
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from pathlib import Path

from xain_coordinator.core.vocabulary.events import SessionOpened
from xain_coordinator.journal.codec import FORMAT, Row, decode_record, digest_of, encode_record
from xain_coordinator.journal.snapshots import encode_snapshot, require_covered, usable_snapshot
from xain_coordinator.journal.wal import require_sound_log
from xain_coordinator.ports import JournalError, Record, Snapshot
from xain_foundation.durable import make_directory
from xain_foundation.settings.hints import hint

APPLICATION_ID = 0x5841494E  # "XAIN"

# Records, and bytes of them and their objects, that are written in the thread of the caller of
# `prepare`: in memory, in less than a millisecond.
MAX_PREPARED = 32
MAX_PREPARED_BYTES = 256 << 10

# Read at a time, so that memory does not grow with the journal. A record may have 512 KiB.
PAGE_RECORDS = 100

# digest: see codec.digest_of.
_TABLES = (
    """
    CREATE TABLE record (
        session INTEGER NOT NULL,  -- 1, 2, ...: in order of opening
        seq     INTEGER NOT NULL,  -- 0, 1, ... within the session, without gaps
        at      REAL    NOT NULL,  -- session time in seconds
        type    TEXT    NOT NULL,  -- class of the event
        body    TEXT    NOT NULL,  -- its fields as JSON
        digest  BLOB    NOT NULL,
        PRIMARY KEY (session, seq)
    ) WITHOUT ROWID
    """,
    """
    CREATE TABLE snapshot (
        session INTEGER PRIMARY KEY,
        version TEXT NOT NULL,  -- of the program that wrote it
        body    BLOB NOT NULL
    )
    """,
    """
    CREATE TABLE owner (
        session_id TEXT NOT NULL,
        name       TEXT NOT NULL,  -- see upkeep/fence.py
        digest     BLOB NOT NULL,
        PRIMARY KEY (session_id, name)
    ) WITHOUT ROWID
    """,
    """
    CREATE TABLE object (
        session INTEGER NOT NULL,
        key     TEXT    NOT NULL,  -- see core/vocabulary/keys.py; its record has its digest
        data    BLOB    NOT NULL,
        PRIMARY KEY (session, key)
    )
    """,
)


class SqliteJournal:
    """The journal at `path`, which is created, with its folder, if it is missing.

    May be used from any thread. Raises JournalError if another process has the journal open, if it
    is of another format, or if it cannot be read or written; nothing in the file is changed then.

    make_room: frees space on a full disk, and tells whether there was any; an append is then tried
    again.
    """

    # Bytes of small updates and models that stay in memory for their aggregation; older ones are
    # read from the file.
    max_recent_bytes = 8 << 20
    copied_pages = 256  # of 4 KiB, which copy_to() copies while appends wait

    def __init__(self, path: Path) -> None:
        """Open the journal's file, or make it with its folder, and lock it. Raises JournalError."""
        self._path = path.absolute()
        self._lock = threading.Lock()
        self._copying = threading.Lock()  # taken before the other one
        self._is_closing = False
        self._db: sqlite3.Connection | None = None
        self._recent: dict[str, bytes] = {}  # the latest objects of the latest session
        self._recent_bytes = 0
        self._numbers: dict[str, int] | None = None  # of sessions by id; None until asked for
        self.make_room: Callable[[], bool] = lambda: False
        try:
            make_directory(self._path.parent)
        except OSError as error:
            raise JournalError(
                f"the journal's folder {self._path.parent} cannot be created: {error.strerror}; "
                "choose another [journal] path"
            ) from error
        with contextlib.suppress(OSError):  # SQLite says it better
            require_sound_log(self._path)
        with self._explained():
            # Our own lock stands in for the check of threads. timeout: a process that holds the
            # journal holds it for life, so there is nothing to wait for.
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

    def load(self, after: int = 0) -> Iterator[Record]:
        with self._lock:
            self._open_db()
            return self._read(self._session, after, self._seq)

    def has_session(self) -> bool:
        return self._session > 0

    def session_ids(self) -> list[str]:
        with self._lock, self._explained():
            return list(self._known_sessions())

    def records_of(self, session_id: str, after: int = 0) -> Iterator[Record] | None:
        """Records of a session from number `after` on; None if the journal lacks the session."""
        with self._lock, self._explained():
            session = self._known_sessions().get(session_id)
            if session is None:
                return None
            query = "SELECT max(seq) + 1 FROM record WHERE session = ?"
            (end,) = self._open_db().execute(query, (session,)).fetchone()
        return self._read(session, after, end)

    def _known_sessions(self) -> Mapping[str, int]:
        """Number of each session by its id, in order of opening. All records are searched for them
        once: readers of events ask several times a second."""
        db = self._open_db()
        if self._numbers is None:
            query = (
                "SELECT json_extract(body, '$.session_id'), session FROM record WHERE seq = 0 "
                "ORDER BY session"
            )
            self._numbers = {str(name): number for name, number in db.execute(query)}
        return self._numbers

    def _read(self, session: int, begin: int, end: int) -> Iterator[Record]:
        """Yield records of a session from `begin` to before `end`, a page at a time. Raises
        JournalError, also if one is missing or has another checksum."""
        for start in range(begin, end, PAGE_RECORDS):
            numbers = range(start, min(start + PAGE_RECORDS, end))
            with self._lock, self._explained():
                query = (
                    "SELECT seq, at, type, body, digest FROM record "
                    "WHERE session = ? AND seq BETWEEN ? AND ? ORDER BY seq"
                )
                limits = (session, numbers[0], numbers[-1])
                rows = self._open_db().execute(query, limits).fetchall()
            for seq, row in zip_longest(numbers, rows):
                match row:
                    case (int(found), float(at), str(name), str(body), digest) if found == seq:
                        if digest != digest_of(session, seq, at, name, body):
                            raise self._damaged(
                                f"record {seq} of session {session}, a {name}, has another "
                                "checksum than it was written with"
                            )
                        yield self._decode(session, seq, (at, name, body))
                    case _:
                        raise self._damaged(f"record {seq} of session {session} is missing")

    def _decode(self, session: int, seq: int, row: Row) -> Record:
        """Decode a row. Raises JournalError that names the record."""
        try:
            return decode_record(row)
        except JournalError as error:
            raise JournalError(
                f"record {seq} of session {session} in {self._path}: {error}; use the version of "
                "the program that wrote it, or restore the file from a backup"
            ) from error

    def append(self, records: Sequence[Record], objects: Mapping[str, bytes] | None = None) -> None:
        """Write and commit records and objects in one transaction. Raises JournalError."""
        if not records:
            return
        rows = [encode_record(record) for record in records]
        with self._lock:
            self._append(records, rows, objects or {})

    def _append(
        self, records: Sequence[Record], rows: Sequence[Row], objects: Mapping[str, bytes]
    ) -> None:
        """Write and commit records; once more if the disk is full and make_room has freed space.
        The caller holds the lock."""
        try:
            self._commit(self._write(records, rows, objects))
        except JournalError as error:
            if error.why != "full" or not self.make_room():
                raise
            self._commit(self._write(records, rows, objects))

    def prepare(
        self, records: Sequence[Record], objects: Mapping[str, bytes] | None = None
    ) -> Callable[[], None]:
        """Write small groups of records at once, and return the function that commits them; the
        lock is held until then. For large ones, while another thread has the lock, and on a full
        disk, nothing is written yet, and the function appends. Raises JournalError."""
        objects = objects or {}
        rows = _small_rows(records, objects)
        # The lock is not free while another thread deletes objects or saves a snapshot.
        if not rows or not self._lock.acquire(blocking=False):
            return partial(self.append, records, objects)
        try:
            written = self._write(records, rows, objects)
        except BaseException as error:  # whatever it is, the lock must be free again
            self._lock.release()
            if isinstance(error, JournalError) and error.why == "full":
                return partial(self.append, records, objects)
            raise
        return partial(
            self._commit_prepared, written, partial(self._append, records, rows, objects)
        )

    def _commit_prepared(self, written: "_Written", again: Callable[[], None]) -> None:
        """Commit a prepared transaction, and release the lock that prepare() took. again: writes it
        anew if the disk is full."""
        try:
            self._commit(written)
        except JournalError as error:
            if error.why != "full":
                raise
            again()
        finally:
            self._lock.release()

    def _write(
        self, records: Sequence[Record], encoded: Sequence[Row], objects: Mapping[str, bytes]
    ) -> "_Written":
        """Begin a transaction and write to it. The caller holds the lock until it is committed."""
        with self._explained():
            db = self._open_db()
            session, seq = self._session, self._seq
            rows = []
            opened: dict[str, int] = {}
            for record, (at, name, body) in zip(records, encoded, strict=True):
                if isinstance(record.event, SessionOpened):
                    session, seq = session + 1, 0
                    opened[record.event.session_id] = session
                if session == 0:
                    raise JournalError(f"the journal begins with a SessionOpened, not a {name}")
                digest = digest_of(session, seq, at, name, body)
                rows.append((session, seq, at, name, body, digest))
                seq += 1
            db.execute("BEGIN IMMEDIATE")
            with _undone_after_error(db):
                db.executemany("INSERT INTO record VALUES (?, ?, ?, ?, ?, ?)", rows)
                if objects:
                    added = [(session, key, data) for key, data in objects.items()]
                    db.executemany("INSERT OR REPLACE INTO object VALUES (?, ?, ?)", added)
        return _Written(session, seq, opened, objects)

    def _commit(self, written: "_Written") -> None:
        """Commit the transaction and make it durable; the journal's end moves to behind it."""
        with self._explained():
            db = self._open_db()
            with _undone_after_error(db):
                db.execute("COMMIT")
        if written.session != self._session:
            self._forget_recent(list(self._recent))
        # Only now: after a failure the next append goes on where the last one ended.
        self._session, self._seq = written.session, written.seq
        if self._numbers is not None:
            self._numbers.update(written.opened)
        self._keep_recent(written.objects)

    def read_object(self, key: str) -> bytes | None:
        """An object of the latest session, from memory or the file; None without one."""
        if (data := self.recent_object(key)) is not None:
            return data  # without the lock, which an append holds until the disk has it
        with self._lock, self._explained():
            query = "SELECT data FROM object WHERE session = ? AND key = ?"
            row = self._open_db().execute(query, (self._session, key)).fetchone()
        return None if row is None else bytes(row[0])

    def recent_object(self, key: str) -> bytes | None:
        return self._recent.get(key)

    def object_keys(self, prefix: str = "") -> Sequence[str]:
        """Keys of the latest session's objects that begin with a prefix."""
        with self._lock, self._explained():
            query = "SELECT key FROM object WHERE session = ? AND key >= ? AND key < ?"
            # No character of a key comes after the last one of Unicode.
            limits = (self._session, prefix, f"{prefix}\U0010ffff")
            return [key for (key,) in self._open_db().execute(query, limits)]

    def delete_objects(self, keys: Sequence[str]) -> None:
        """Delete objects of the latest session, from the file and from memory."""
        with self._lock, self._explained():
            db = self._open_db()
            with _transaction(db):
                rows = [(self._session, key) for key in keys]
                db.executemany("DELETE FROM object WHERE session = ? AND key = ?", rows)
            self._forget_recent(keys)

    def _keep_recent(self, objects: Mapping[str, bytes]) -> None:
        """Keep objects in memory, and drop the oldest that are too much together."""
        for key, data in objects.items():
            self._forget_recent([key])
            self._recent[key] = data
            self._recent_bytes += len(data)
        while self._recent_bytes > self.max_recent_bytes:
            self._forget_recent([next(iter(self._recent))])

    def _forget_recent(self, keys: Sequence[str]) -> None:
        """Drop these objects from memory."""
        for key in keys:
            self._recent_bytes -= len(self._recent.pop(key, b""))

    def snapshot(self) -> Snapshot | None:
        """The snapshot of the latest session, if this version of the program can use it. Raises
        JournalError."""
        with self._lock, self._explained():
            row = (
                self._open_db()
                .execute("SELECT version, body FROM snapshot WHERE session = ?", (self._session,))
                .fetchone()
            )
        if row is None:
            return None
        version, body = row
        return usable_snapshot(version, body, self._seq)

    def save(self, snapshot: Snapshot) -> None:
        """Replace the snapshot; it is encoded before the lock is taken. Raises JournalError."""
        version, body = encode_snapshot(snapshot)  # before the lock: an append need not wait for it
        with self._lock, self._explained():
            db = self._open_db()
            require_covered(snapshot, self._seq)
            with _transaction(db):
                db.execute("DELETE FROM snapshot")
                db.execute("INSERT INTO snapshot VALUES (?, ?, ?)", (self._session, version, body))

    def owners(self, session_id: str) -> frozenset[str]:
        """The owners of a session that were noted last."""
        with self._lock, self._explained():
            query = "SELECT name, digest FROM owner WHERE session_id = ?"
            rows = self._open_db().execute(query, (session_id,)).fetchall()
        if any(digest != digest_of(session_id, name) for name, digest in rows):
            raise self._damaged(f"a name in its table owner, of session {session_id}, has changed")
        return frozenset(name for name, _ in rows)

    def note_owners(self, session_id: str, names: Collection[str]) -> None:
        """Replace the noted owners of a session, which need not be in the journal yet."""
        with self._lock, self._explained():
            db = self._open_db()
            with _transaction(db):
                db.execute("DELETE FROM owner WHERE session_id = ?", (session_id,))
                rows = [(session_id, name, digest_of(session_id, name)) for name in names]
                db.executemany("INSERT INTO owner VALUES (?, ?, ?)", rows)

    def check(self) -> tuple[int, int]:
        """Read the whole journal: SQLite's own structure, and the records of every session. Returns
        (number of sessions, number of records). Raises JournalError."""
        with self._lock, self._explained():
            db = self._open_db()
            (result,) = db.execute("PRAGMA integrity_check(1)").fetchone()
            if result != "ok":
                raise self._damaged(" ".join(str(result).split()))
            counts = db.execute("SELECT session, max(seq) + 1 FROM record GROUP BY session")
            sessions = counts.fetchall()
        num_records = sum(1 for s, end in sessions for _ in self._read(s, 0, end))
        return len(sessions), num_records

    def copy_to(self, path: Path) -> None:
        """Write a copy of the journal, as it is when this returns, to a new file; blocks.

        SQLite's backup copies a few pages at a time and takes in what is appended meanwhile, so
        that appends wait for a few pages at most. Raises JournalError, also when the journal is
        closed meanwhile; no file stays then.
        """

        def let_appends_in(*_: object) -> None:
            """Release the lock for a moment. Raises JournalError once the journal is being
            closed."""
            self._lock.release()
            time.sleep(0.001)  # else this thread takes the lock again before the others wake
            self._lock.acquire()
            if self._is_closing:
                raise self._closed()

        with contextlib.ExitStack() as after_error, self._explained():
            after_error.callback(path.unlink, missing_ok=True)
            with (
                self._copying,
                contextlib.closing(sqlite3.connect(path, isolation_level=None)) as copy,
                self._lock,
            ):
                self._open_db().backup(copy, pages=self.copied_pages, progress=let_appends_in)
            after_error.pop_all()

    def close(self) -> None:
        """Close the file once a copy that is under way has ended, which ends at once."""
        self._is_closing = True
        # SQLite keeps the file, and its lock, until a copy under way has ended.
        with self._copying, self._lock:
            db, self._db = self._db, None
            if db is not None:
                with self._explained():
                    db.close()

    def _take(self, db: sqlite3.Connection) -> tuple[int, int]:
        """Lock the file, check that it is ours, make the tables of a new one, and find its end:
        (session, next seq)."""
        db.execute("PRAGMA locking_mode=EXCLUSIVE")
        # Before anything is written: what is not ours must stay as it is.
        db.execute("BEGIN EXCLUSIVE")
        is_new = self._is_new(db)
        db.execute("ROLLBACK")  # in this locking mode the lock stays
        (mode,) = db.execute("PRAGMA journal_mode=WAL").fetchone()
        if mode != "wal":
            raise JournalError(f"{self._path} lies where SQLite cannot keep a write-ahead log")
        db.execute("PRAGMA synchronous=FULL")
        # macOS: its plain fsync leaves the data in the drive's cache. No effect elsewhere.
        db.execute("PRAGMA fullfsync=ON")
        if is_new:
            with _transaction(db):
                for statement in _TABLES:
                    db.execute(statement)
                db.execute(f"PRAGMA application_id={APPLICATION_ID}")
                db.execute(f"PRAGMA user_version={FORMAT}")
        row = db.execute(
            "SELECT session, seq FROM record ORDER BY session DESC, seq DESC LIMIT 1"
        ).fetchone()
        match row:
            case None:
                return 0, 0
            case (int(session), int(seq)):
                return session, seq + 1
            case _:  # never written by this code
                raise self._damaged("its last record has no number")

    def _is_new(self, db: sqlite3.Connection) -> bool:
        """Whether the file is empty. Raises JournalError if its content is no journal of this
        format."""
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
                f"{self._path} has format {version}, this version of the program reads "
                f"{FORMAT}; use the version that wrote it, or choose another [journal] path"
            )
        return False

    def _damaged(self, how: str) -> JournalError:
        """The error of a damaged journal. how: what is wrong."""
        text = f"the journal {self._path} is damaged: {how}; {_DAMAGED_HINT}"
        return JournalError(text, "damaged")

    def _open_db(self) -> sqlite3.Connection:
        """The connection. Raises JournalError if the journal is closed."""
        if self._db is None:
            raise self._closed()
        return self._db

    def _closed(self) -> JournalError:
        """The error of a journal that is closed."""
        return JournalError(f"the journal {self._path} is closed")

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Turn SQLite's errors into JournalErrors that say what to do."""
        try:
            yield
        except sqlite3.Error as error:
            code = getattr(error, "sqlite_errorcode", None)
            if code is None and isinstance(error, sqlite3.OperationalError):
                raise self._damaged("it has text that is not UTF-8") from error
            code = code or 0
            # Extended codes carry the primary one in their lowest byte.
            reason = _REASONS.get(code) or _REASONS.get(code & 0xFF)
            if reason is None:
                reason = f"cannot be used: {' '.join(str(error).split())}; {_DAMAGED_HINT}"
            why = _WHY.get(code & 0xFF, "")
            raise JournalError(f"the journal {self._path} {reason}", why) from error
        except UnicodeDecodeError as error:  # SQLite quotes what is there in its message
            raise self._damaged("it has text that is not UTF-8") from error


_WHY = {
    sqlite3.SQLITE_BUSY: "in use",
    sqlite3.SQLITE_CORRUPT: "damaged",
    sqlite3.SQLITE_NOTADB: "damaged",
    sqlite3.SQLITE_FULL: "full",
}

_DAMAGED_HINT = (
    "restore it from a backup, or, to begin anew, "
    + hint("xain-coordinator", "--new-session")
    + " or "
    + hint("xain-coordinator", 'journal.path = "FILE"')
)

_REASONS = {
    sqlite3.SQLITE_BUSY: (
        "is in use by another process; stop that one, or "
        + hint("xain-coordinator", 'journal.path = "FILE"')
    ),
    sqlite3.SQLITE_NOTADB: "is not a journal; " + hint("xain-coordinator", 'journal.path = "FILE"'),
    sqlite3.SQLITE_CORRUPT: f"is damaged; {_DAMAGED_HINT}",
    sqlite3.SQLITE_FULL: "has no room left on its disk; free some space and start again",
    sqlite3.SQLITE_READONLY: "cannot be written; check the permissions of the file and its folder",
    # SQLite takes a file that it may not write as one to be read, which cannot be locked like this.
    sqlite3.SQLITE_IOERR_LOCK: (
        "cannot be locked; check the permissions of the file and its folder, and that its file "
        "system knows locks"
    ),
    sqlite3.SQLITE_CANTOPEN: "cannot be opened; check the permissions of the file and its folder",
    sqlite3.SQLITE_IOERR: "cannot be read or written: the disk reports an error; check it",
}


def _small_rows(records: Sequence[Record], objects: Mapping[str, bytes]) -> list[Row]:
    """Encode records; empty if they and their objects are too many for the caller's thread. A
    record may have 512 KiB, so the first that is too many ends the encoding. Raises
    JournalError."""
    num_bytes = sum(map(len, objects.values()))
    rows: list[Row] = []
    if len(records) > MAX_PREPARED:
        return rows
    for record in records:
        if num_bytes > MAX_PREPARED_BYTES:
            return []
        rows.append(encode_record(record))
        num_bytes += len(rows[-1][-1])
    return rows if num_bytes <= MAX_PREPARED_BYTES else []


@dataclass(frozen=True, slots=True)
class _Written:
    """State of the journal after a transaction: session, next seq, new sessions and objects."""

    session: int
    seq: int
    opened: Mapping[str, int]
    objects: Mapping[str, bytes]


@contextlib.contextmanager
def _transaction(db: sqlite3.Connection) -> Iterator[None]:
    """Commit what the block writes as one transaction; an error undoes it."""
    db.execute("BEGIN IMMEDIATE")
    with _undone_after_error(db):
        yield
        db.execute("COMMIT")


@contextlib.contextmanager
def _undone_after_error(db: sqlite3.Connection) -> Iterator[None]:
    """Roll an open transaction back if the block raises; the error is raised again."""
    try:
        yield
    except BaseException:  # raised again
        # An open transaction would swallow the next append. SQLite has undone some failures
        # itself.
        if db.in_transaction:
            db.execute("ROLLBACK")
        raise
