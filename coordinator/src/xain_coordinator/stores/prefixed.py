"""A part of another store, such as one session's."""

from collections.abc import Iterator, Mapping

from xain_coordinator.core.keys import check_key
from xain_coordinator.ports import (
    DirectAccess,
    KeyClaimed,
    KeyExists,
    KeyNotFound,
    ObjectChanged,
    Reader,
    Unfinished,
    Upload,
    WeightsStore,
    WrongSize,
)
from xain_coordinator.stores.closing import ClosedAtEnd


class PrefixedStore:
    """The objects of `store` under "prefix/". Keys, in errors too, are relative to it.

    Raises ValueError if the prefix cannot be part of a key.
    """

    def __init__(self, store: WeightsStore, prefix: str) -> None:
        check_key(prefix)
        self._store = store
        self._prefix = f"{prefix}/"
        self.num_parallel = store.num_parallel

    def open(self, key: str, start: int = 0, length: int | None = None) -> Reader:
        try:
            return PrefixedReader(self._store.open(self._whole(key), start, length), key)
        except KeyNotFound as error:
            raise KeyNotFound(key) from error

    def upload(self, key: str, label: str = "", size_bytes: int = 0) -> Upload:
        return PrefixedUpload(self._store.upload(self._whole(key), label, size_bytes), key)

    def find_unfinished(self, key: str, label: str) -> Unfinished | None:
        found = self._store.find_unfinished(self._whole(key), label)
        return None if found is None else PrefixedUnfinished(found, key)

    def sweep(self) -> None:
        self._store.sweep()

    def put(self, objects: Mapping[str, bytes]) -> None:
        self._store.put({self._whole(key): data for key, data in objects.items()})

    def settle(self, key: str) -> None:
        try:
            self._store.settle(self._whole(key))
        except KeyNotFound as error:
            raise KeyNotFound(key) from error

    def keys(self, prefix: str = "") -> Iterator[str]:
        start = len(self._prefix)
        return (key[start:] for key in self._store.keys(self._prefix + prefix))

    def delete(self, *keys: str) -> None:
        self._store.delete(*map(self._whole, keys))

    def _whole(self, key: str) -> str:
        check_key(key)
        return self._prefix + key


class PrefixedAccess:
    """Direct access to the objects of `access` under "prefix/"."""

    def __init__(self, access: DirectAccess, prefix: str) -> None:
        check_key(prefix)
        self._access = access
        self._prefix = f"{prefix}/"

    def download_url(self, key: str) -> str:
        return self._access.download_url(self._whole(key))

    def upload_url(self, key: str) -> str:
        return self._access.upload_url(self._whole(key))

    def copy(self, source: str, target: str, size_bytes: int) -> None:
        try:
            self._access.copy(self._whole(source), self._whole(target), size_bytes)
        except KeyNotFound as error:
            raise KeyNotFound(source) from error
        except ObjectChanged as error:
            raise ObjectChanged(source) from error
        except WrongSize as error:
            raise WrongSize(source, error.size, error.expected) from error

    def _whole(self, key: str) -> str:
        check_key(key)
        return self._prefix + key


class PrefixedReader(ClosedAtEnd):
    """Reader whose key, in errors too, is relative to the prefix."""

    def __init__(self, reader: Reader, key: str) -> None:
        self._reader = reader
        self._key = key
        self.size = reader.size

    def read(self, offset: int, length: int) -> bytes:
        try:
            return self._reader.read(offset, length)
        except ObjectChanged as error:
            raise ObjectChanged(self._key) from error

    def read_into(self, offset: int, buffer: memoryview) -> int:
        try:
            return self._reader.read_into(offset, buffer)
        except ObjectChanged as error:
            raise ObjectChanged(self._key) from error

    def close(self) -> None:
        self._reader.close()


class PrefixedUpload:
    """Upload whose key, in errors too, is relative to the prefix."""

    def __init__(self, upload: Upload, key: str) -> None:
        self._upload = upload
        self._key = key

    def write(self, chunk: bytes | memoryview) -> None:
        self._upload.write(chunk)

    def commit(self, *, overwrite: bool) -> None:
        try:
            self._upload.commit(overwrite=overwrite)
        except KeyExists as error:
            raise KeyExists(self._key) from error
        except KeyClaimed as error:
            raise KeyClaimed(self._key, error.claim) from error

    def abort(self) -> None:
        self._upload.abort()

    def suspend(self) -> None:
        self._upload.suspend()


class PrefixedUnfinished:
    """Unfinished upload whose key, in errors too, is relative to the prefix."""

    def __init__(self, unfinished: Unfinished, key: str) -> None:
        self._unfinished = unfinished
        self._key = key
        self.size = unfinished.size

    def read(self, offset: int, length: int) -> bytes:
        return self._unfinished.read(offset, length)

    def resume(self, size: int) -> Upload:
        return PrefixedUpload(self._unfinished.resume(size), self._key)

    def abort(self) -> None:
        self._unfinished.abort()
