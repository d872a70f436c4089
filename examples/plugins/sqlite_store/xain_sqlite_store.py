"""A store of weights in one SQLite file, chosen by `storage.kind = "sqlite"`."""

import sqlite3
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from uuid import uuid4

from xain_coordinator.core.vocabulary.keys import check_key
from xain_coordinator.ports import KeyExists, KeyNotFound, Reader, StoreUnavailable, object_changed

OBJECTS = "CREATE TABLE IF NOT EXISTS objects (key TEXT PRIMARY KEY, id TEXT, size INTEGER)"
PIECES = "CREATE TABLE IF NOT EXISTS pieces (id TEXT, start INTEGER, data BLOB, UNIQUE (id, start))"
NAME = [f"INSERT OR {n} INTO objects VALUES (?, ?, ?) RETURNING 1" for n in ("IGNORE", "REPLACE")]
EMPTY = "DELETE FROM pieces WHERE id = (SELECT id FROM objects WHERE key = ?)"


class SqliteStore:
    """WeightsStore in the file `path`: rows of objects, and of the pieces that commits name."""

    num_parallel = 1

    def __init__(self, path: str) -> None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        self._lock = threading.Lock()
        self._file = sqlite3.connect(path, 60.0, isolation_level=None, check_same_thread=False)
        self._file.execute("PRAGMA synchronous = FULL")
        self.run((OBJECTS,), (PIECES,))

    def run(self, *statements: tuple[Any, ...]) -> list[Any]:
        """Run statements, each with its values, in one transaction. Returns the last one's rows."""
        try:
            with self._lock, self._file as file:  # commits, or rolls back
                file.execute("BEGIN IMMEDIATE")
                return [file.execute(sql, values).fetchall() for sql, *values in statements][-1]
        except sqlite3.Error as error:
            raise StoreUnavailable(f"the SQLite store: {error}") from error

    def open(self, key: str, start: int = 0, length: int | None = None) -> "SqliteReader":
        check_key(key)
        if rows := self.run(("SELECT id, size FROM objects WHERE key = ?", key)):
            return SqliteReader(self, key, *rows[0])
        raise KeyNotFound(key)

    def upload(self, key: str, label: str = "", size_bytes: int = 0) -> "SqliteUpload":
        check_key(key)
        return SqliteUpload(self, key)

    def find_unfinished(self, key: str, label: str) -> None: ...  # an upload begins anew

    def sweep(self) -> None: ...

    def put(self, objects: Mapping[str, bytes]) -> None:
        for key, data in objects.items():
            upload = self.upload(key)
            upload.write(data)
            upload.commit(overwrite=True)

    def settle(self, key: str) -> None:
        self.open(key)  # what is visible is durable

    def keys(self, prefix: str = "") -> Iterator[str]:
        return (key for (key,) in self.run(("SELECT key FROM objects",)) if key.startswith(prefix))

    def delete(self, *keys: str) -> None:
        for key in keys:
            check_key(key)
            self.run((EMPTY, key), ("DELETE FROM objects WHERE key = ?", key))

    def close(self) -> None:
        self._file.close()


class SqliteUpload:
    def __init__(self, store: SqliteStore, key: str) -> None:
        self.store, self.key, self.id, self.size, self.is_over = store, key, uuid4().hex, 0, False

    def write(self, chunk: bytes | memoryview) -> None:
        if self.is_over:
            raise ValueError(f"the upload of {self.key!r} is over")
        if data := bytes(chunk):
            self.store.run(("INSERT INTO pieces VALUES (?, ?, ?)", self.id, self.size, data))
            self.size += len(data)

    def commit(self, *, overwrite: bool) -> None:
        self.write(b"")  # raises ValueError
        before = [(EMPTY, self.key)] if overwrite else []
        named = (NAME[overwrite], self.key, self.id, self.size)
        if not self.store.run(*before, named):
            self.abort()
            raise KeyExists(self.key)
        self.is_over = True

    def abort(self) -> None:
        if not self.is_over:
            self.store.run(("DELETE FROM pieces WHERE id = ?", self.id))
            self.is_over = True

    suspend = abort


class SqliteReader(Reader):
    def __init__(self, store: SqliteStore, key: str, id_: str, size: int) -> None:
        self.store, self.key, self.id, self.size, self.is_closed = store, key, id_, size, False

    def read(self, offset: int, length: int) -> bytes:
        if self.is_closed:
            raise ValueError("the reader is closed")
        end = min(offset + length, self.size)
        where = "id = ? AND start < ? AND start + length(data) > ? ORDER BY start"
        rows = self.store.run((f"SELECT * FROM pieces WHERE {where}", self.id, end, offset))
        found = b"".join(data for *_, data in rows)[offset - rows[0][1] :] if rows else b""
        if len(found) < end - offset:
            raise object_changed(self.key)
        return found[: max(end - offset, 0)]

    def close(self) -> None:
        self.is_closed = True
