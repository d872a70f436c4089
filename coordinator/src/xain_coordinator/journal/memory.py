"""A journal in memory, for tests and for sessions that nobody wants to keep."""

import threading
from collections.abc import Sequence

from xain_coordinator.core.events import SessionOpened
from xain_coordinator.journal.codec import Row, decode_record, encode_record
from xain_coordinator.ports import JournalError, Record


class MemoryJournal:
    """Keeps what every Journal promises, durability aside. Records go through the codec, so that
    what passes here passes on disk too."""

    def __init__(self) -> None:
        self._sessions: list[list[Row]] = []
        self._lock = threading.Lock()
        self._closed = False

    def load(self) -> Sequence[Record]:
        with self._lock:
            self._require_open()
            rows = list(self._sessions[-1]) if self._sessions else []
        return [decode_record(row) for row in rows]

    def append(self, records: Sequence[Record]) -> None:
        rows = [encode_record(record) for record in records]
        with self._lock:
            self._require_open()
            sessions = [list(session) for session in self._sessions[-1:]]
            for row in rows:
                if row[1] == SessionOpened.__name__:
                    sessions.append([])
                if not sessions:
                    raise JournalError(f"the journal begins with a SessionOpened, not a {row[1]}")
                sessions[-1].append(row)
            self._sessions[-1:] = sessions

    def close(self) -> None:
        self._closed = True

    def _require_open(self) -> None:
        if self._closed:
            raise JournalError("the journal is closed")
