"""A part of another store, such as one session's."""

from collections.abc import Iterator, Mapping

from xain_coordinator.ports import KeyExists, KeyNotFound, Reader, Upload, WeightsStore
from xain_coordinator.stores.paths import check_key


class PrefixedStore:
    """The objects of `store` under "prefix/". Keys, in errors too, are relative to it.

    Raises ValueError if the prefix cannot be part of a key.
    """

    def __init__(self, store: WeightsStore, prefix: str) -> None:
        check_key(prefix)
        self._store = store
        self._prefix = f"{prefix}/"

    def open(self, key: str) -> Reader:
        try:
            return self._store.open(self._whole(key))
        except KeyNotFound as error:
            raise KeyNotFound(key) from error

    def upload(self, key: str) -> Upload:
        return PrefixedUpload(self._store.upload(self._whole(key)), key)

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

    def delete(self, key: str) -> None:
        self._store.delete(self._whole(key))

    def _whole(self, key: str) -> str:
        check_key(key)
        return self._prefix + key


class PrefixedUpload:
    """An upload that calls its key what the caller called it."""

    def __init__(self, upload: Upload, key: str) -> None:
        self._upload = upload
        self._key = key

    def write(self, chunk: bytes) -> None:
        self._upload.write(chunk)

    def commit(self, *, overwrite: bool) -> None:
        try:
            self._upload.commit(overwrite=overwrite)
        except KeyExists as error:
            raise KeyExists(self._key) from error

    def abort(self) -> None:
        self._upload.abort()
