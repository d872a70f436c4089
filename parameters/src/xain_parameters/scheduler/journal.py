"""The scheduler's events in an SQLite file.

locking_mode=EXCLUSIVE holds SQLite's lock on the file for the life of the process, so two
schedulers never both decide: what one cannot write down it does not tell anybody either.

Events are on the disk when append() returns, but for ticks, which are many: they are in the file,
which a killed process does not take along, and on the disk with the next other event. A power cut
may take the last of them; workers bring them again.

Instead of old events the file has the state that they lead to.

Each record has a checksum, because SQLite keeps none in the database file. An error names a record
that is damaged or missing. SQLite itself drops the end of its write-ahead log that a power cut has
torn.
"""

import sqlite3
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import xxhash

from xain_foundation.durable import make_directory
from xain_parameters.scheduler.state import AnyEvent, State, Ticked, fold
from xain_parameters.specs import encoded

APPLICATION_ID = 0x58414950  # "XAIP"
FORMAT = 3
MAX_EVENTS = 5_000

_decode_state = msgspec.msgpack.Decoder(State).decode
_decode_event = msgspec.msgpack.Decoder(AnyEvent).decode


_SUM_BYTES = 8


def _with_checksum(body: bytes) -> bytes:
    return xxhash.xxh3_64_digest(body) + body


class Journal:
    """The journal at `path`, made with its folder if it is missing. Not for several threads.

    state: what the events lead to; of a new journal a new group, with a generation above
        those of groups before it.
    is_new: it was made now.
    Raises OSError if another process has it open, or it cannot be read or written.
    """

    def __init__(self, path: Path) -> None:
        self._path = path.absolute()
        try:
            make_directory(self._path.parent)
            self._db = sqlite3.connect(
                self._path, timeout=0, isolation_level=None, check_same_thread=False
            )
        except (OSError, sqlite3.Error) as error:
            raise self._error(error) from error
        try:
            self._open()
        except (sqlite3.Error, msgspec.MsgspecError) as error:
            self._db.close()
            raise self._error(error) from error
        except BaseException:  # on Ctrl-C, too: no other code closes it
            self._db.close()
            raise

    def _open(self) -> None:
        """Read the state from the file, or begin a new one. Raises OSError for a file that is
        damaged, of another program, or of another format."""
        db = self._db
        db.execute("PRAGMA locking_mode=EXCLUSIVE")
        db.execute("PRAGMA journal_mode=WAL")
        db.execute("BEGIN EXCLUSIVE")
        application = db.execute("PRAGMA application_id").fetchone()[0]
        self.is_new = not db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
        if self.is_new:
            db.execute(f"PRAGMA application_id={APPLICATION_ID}")
            db.execute(f"PRAGMA user_version={FORMAT}")
            db.execute("CREATE TABLE snapshot (body BLOB NOT NULL)")
            db.execute("CREATE TABLE event (seq INTEGER PRIMARY KEY, body BLOB NOT NULL)")
            first = State.first(int(time.time()))
            db.execute("INSERT INTO snapshot VALUES (?)", (_with_checksum(encoded(first)),))
        elif application != APPLICATION_ID:
            raise OSError(f"{self._path} is no journal of a scheduler")
        format_ = db.execute("PRAGMA user_version").fetchone()[0]
        if format_ != FORMAT:
            text = f"{self._path} has format {format_}; this program reads {FORMAT}"
            raise OSError(text)
        (snapshot,) = db.execute("SELECT body FROM snapshot").fetchone()
        rows = db.execute("SELECT seq, body FROM event ORDER BY seq").fetchall()
        first = _decode_state(self._checked(snapshot, "the snapshot"))
        events = []
        for expected, (seq, record) in enumerate(rows, 1):
            if seq != expected:
                raise self._damaged(f"event {expected} is missing")
            events.append(_decode_event(self._checked(record, f"event {seq}")))
        self.state = fold(first, events)
        self._num_events = len(rows)
        db.execute("COMMIT")

    def append(self, events: Sequence[AnyEvent], state: State) -> None:
        """Write events down. state: what they lead to. Raises OSError; then nothing is
        written."""
        if not events:
            return
        is_tick = all(isinstance(event, Ticked) for event in events)
        self._num_events += len(events)
        try:
            self._db.execute(f"PRAGMA synchronous={'NORMAL' if is_tick else 'FULL'}")
            with self._db:
                self._db.execute("BEGIN")
                rows = ((_with_checksum(encoded(event)),) for event in events)
                self._db.executemany("INSERT INTO event (body) VALUES (?)", rows)
                if self._num_events > MAX_EVENTS:
                    self._replace_events(state)
        except sqlite3.Error as error:
            raise self._error(error) from error
        self.state = state

    def close(self) -> None:
        self._db.close()

    def _replace_events(self, state: State) -> None:
        """Keep the state that the events lead to instead of them."""
        self._db.execute("UPDATE snapshot SET body = ?", (_with_checksum(encoded(state)),))
        self._db.execute("DELETE FROM event")  # the next event has the number 1 again
        self._num_events = 0

    def _checked(self, record: bytes, what: str) -> bytes:
        """Return the body of a record. Raises OSError if its checksum is wrong."""
        body = record[_SUM_BYTES:]
        if record[:_SUM_BYTES] != xxhash.xxh3_64_digest(body):
            raise self._damaged(f"{what} is damaged")
        return body

    def _damaged(self, what: str) -> OSError:
        return OSError(f"the journal {self._path}: {what}; restore it from a backup")

    def _error(self, error: Exception) -> OSError:
        if "locked" in str(error):
            return OSError(f"another scheduler has {self._path} open")
        return OSError(f"the journal {self._path} cannot be used: {error}")
