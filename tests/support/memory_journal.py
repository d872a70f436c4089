"""A journal in memory, for tests and for sessions that need not outlive the process."""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

from xain_coordinator.core.vocabulary.events import SessionOpened
from xain_coordinator.journal.codec import Row, decode_record, encode_record
from xain_coordinator.journal.snapshots import encode_snapshot, require_covered, usable_snapshot
from xain_coordinator.ports import JournalError, Record, Snapshot


class MemoryJournal:
    """Journal without durability. Records pass the codec, so that a record that works here works on
    disk too."""

    def __init__(self) -> None:
        # Records of the latest session; earlier ones are not asked for.
        self._rows: list[Row] = []
        self._objects: dict[str, bytes] = {}
        self._snapshot: tuple[str, bytes] | None = None
        self._lock = threading.Lock()
        self._closed = False

    def load(self, after: int = 0) -> Sequence[Record]:
        with self._lock:
            self._require_open()
            return [decode_record(row) for row in self._rows[after:]]

    def session_ids(self) -> list[str]:
        return [self._session_id()] if self._rows else []

    def records_of(self, session_id: str, after: int = 0) -> Iterator[Record] | None:
        if not self._rows or session_id != self._session_id():
            return None
        return iter(self.load(after))

    def _session_id(self) -> str:
        opened = decode_record(self._rows[0]).event
        assert isinstance(opened, SessionOpened), "a session begins with it"
        return opened.session_id

    def has_session(self) -> bool:
        return bool(self._rows)

    def append(self, records: Sequence[Record], objects: Mapping[str, bytes] | None = None) -> None:
        rows = [encode_record(record) for record in records]
        with self._lock:
            self._require_open()
            for row in rows:
                _, name, _ = row
                if name == SessionOpened.__name__:
                    self._rows, self._objects, self._snapshot = [], {}, None
                elif not self._rows:
                    raise JournalError(f"the journal begins with a SessionOpened, not a {name}")
                self._rows.append(row)
            self._objects.update(objects or {})

    def prepare(
        self, records: Sequence[Record], objects: Mapping[str, bytes] | None = None
    ) -> Callable[[], None]:
        return partial(self.append, records, objects)

    def read_object(self, key: str) -> bytes | None:
        with self._lock:
            self._require_open()
            return self._objects.get(key)

    def recent_object(self, key: str) -> bytes | None:
        return self.read_object(key)

    def object_keys(self, prefix: str = "") -> Sequence[str]:
        with self._lock:
            self._require_open()
            return [key for key in self._objects if key.startswith(prefix)]

    def delete_objects(self, keys: Sequence[str]) -> None:
        with self._lock:
            self._require_open()
            for key in keys:
                self._objects.pop(key, None)

    def snapshot(self) -> Snapshot | None:
        with self._lock:
            self._require_open()
            if self._snapshot is None:
                return None
            return usable_snapshot(*self._snapshot, len(self._rows))

    def save(self, snapshot: Snapshot) -> None:
        encoded = encode_snapshot(snapshot)
        with self._lock:
            self._require_open()
            require_covered(snapshot, len(self._rows))
            self._snapshot = encoded

    def close(self) -> None:
        self._closed = True

    def _require_open(self) -> None:
        if self._closed:
            raise JournalError("the journal is closed")
