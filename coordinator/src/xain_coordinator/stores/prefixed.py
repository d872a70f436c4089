"""A part of another store, such as one session's."""

from collections.abc import Iterator, Mapping

from xain_coordinator.core.vocabulary.keys import check_key
from xain_coordinator.ports import DirectAccess, Reader, Unfinished, Upload, WeightsStore


class _Prefix:
    """Raises ValueError if the prefix cannot be part of a key."""

    def __init__(self, prefix: str) -> None:
        check_key(prefix)
        self._prefix = f"{prefix}/"

    def _whole(self, key: str) -> str:
        """A key with the prefix. Raises ValueError, as check_key does."""
        check_key(key)
        return self._prefix + key


class PrefixedStore(_Prefix):
    """The objects of `store` under "prefix/". Errors name keys with the prefix."""

    def __init__(self, store: WeightsStore, prefix: str) -> None:
        super().__init__(prefix)
        self._store = store
        self.num_parallel = store.num_parallel

    def open(self, key: str, start: int = 0, length: int | None = None) -> Reader:
        return self._store.open(self._whole(key), start, length)

    def upload(self, key: str, label: str = "", size_bytes: int = 0) -> Upload:
        return self._store.upload(self._whole(key), label, size_bytes)

    def find_unfinished(self, key: str, label: str) -> Unfinished | None:
        return self._store.find_unfinished(self._whole(key), label)

    def sweep(self) -> None:
        self._store.sweep()

    def put(self, objects: Mapping[str, bytes]) -> None:
        self._store.put({self._whole(key): data for key, data in objects.items()})

    def settle(self, key: str) -> None:
        self._store.settle(self._whole(key))

    def keys(self, prefix: str = "") -> Iterator[str]:
        start = len(self._prefix)
        return (key[start:] for key in self._store.keys(self._prefix + prefix))

    def delete(self, *keys: str) -> None:
        self._store.delete(*map(self._whole, keys))


class PrefixedAccess(_Prefix):
    """Direct access to the objects of `access` under "prefix/"."""

    def __init__(self, access: DirectAccess, prefix: str) -> None:
        super().__init__(prefix)
        self._access = access

    def download_url(self, key: str) -> str:
        return self._access.download_url(self._whole(key))

    def upload_url(self, key: str) -> str:
        return self._access.upload_url(self._whole(key))

    def copy(self, source: str, target: str, size_bytes: int) -> int:
        return self._access.copy(self._whole(source), self._whole(target), size_bytes)
