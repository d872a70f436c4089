"""A store in memory, for tests and for sessions that need not outlive the process."""

import threading
from collections.abc import Iterator, Mapping

from xain_coordinator.core.vocabulary.keys import check_key
from xain_coordinator.ports import KeyExists, KeyNotFound, Reader


class MemoryStore:
    """WeightsStore in memory, without durability."""

    num_parallel = 1

    def __init__(self, objects: Mapping[str, bytes] | None = None) -> None:
        self._objects = dict(objects or {})
        self._lock = threading.Lock()

    def open(self, key: str, start: int = 0, length: int | None = None) -> "MemoryReader":
        with self._lock:
            data = self._objects.get(key)
        if data is None:
            check_key(key)
            raise KeyNotFound(key)
        return MemoryReader(data)

    def upload(self, key: str, label: str = "", size_bytes: int = 0) -> "MemoryUpload":
        check_key(key)
        return MemoryUpload(self, key)

    def find_unfinished(self, key: str, label: str) -> None:
        """Find nothing: no upload in memory outlives its process."""

    def sweep(self) -> None: ...

    def close(self) -> None: ...

    def put(self, objects: Mapping[str, bytes]) -> None:
        for key, data in objects.items():
            check_key(key)
            self.store_object(key, data, overwrite=True)

    def settle(self, key: str) -> None:
        """Check that the object is there; nothing is durable. Raises KeyNotFound."""
        check_key(key)
        with self._lock:
            if key not in self._objects:
                raise KeyNotFound(key)

    def keys(self, prefix: str = "") -> Iterator[str]:
        with self._lock:
            keys = list(self._objects)
        return (key for key in keys if key.startswith(prefix))

    def delete(self, *keys: str) -> None:
        for key in keys:
            check_key(key)
            with self._lock:
                self._objects.pop(key, None)

    def store_object(self, key: str, data: bytes, *, overwrite: bool) -> None:
        """Store an object. Raises KeyExists."""
        with self._lock:
            if not overwrite and key in self._objects:
                raise KeyExists(key)
            self._objects[key] = data


class MemoryReader(Reader):
    """An object as it was when it was opened."""

    def __init__(self, data: bytes) -> None:
        self._data: bytes | None = data
        self.size = len(data)

    def read(self, offset: int, length: int) -> bytes:
        if self._data is None:
            raise ValueError("the reader is closed")
        return self._data[offset : offset + length]

    def read_into(self, offset: int, buffer: memoryview) -> int:
        if self._data is None:
            raise ValueError("the reader is closed")
        piece = memoryview(self._data)[offset : offset + len(buffer)]
        buffer[: len(piece)] = piece
        return len(piece)

    def close(self) -> None:
        self._data = None


class MemoryUpload:
    """Collects chunks until commit or abort, of which there is one."""

    def __init__(self, store: MemoryStore, key: str) -> None:
        self._store = store
        self._key = key
        self._data: bytearray | None = bytearray()

    def write(self, chunk: bytes | memoryview) -> None:
        if self._data is None:
            raise ValueError(f"the upload of {self._key!r} is over")
        self._data += chunk

    def commit(self, *, overwrite: bool) -> None:
        if self._data is None:
            raise ValueError(f"the upload of {self._key!r} is over")
        data, self._data = bytes(self._data), None
        self._store.store_object(self._key, data, overwrite=overwrite)

    def abort(self) -> None:
        self._data = None

    def suspend(self) -> None:
        self.abort()
