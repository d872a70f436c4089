"""A session's store together with the small updates that lie in its journal."""

from collections.abc import Iterator, Mapping

from xain_coordinator.core.keys import INCOMING, OPTIMIZER, is_journalled
from xain_coordinator.ports import (
    Journal,
    JournalError,
    KeyNotFound,
    Reader,
    StoreError,
    Unfinished,
    Upload,
    WeightsStore,
)
from xain_coordinator.stores.memory import MemoryReader


class JournalledStore:
    """The objects of `store`, and the small updates of the journal's latest session.

    Nothing is written to the journal here: an update is committed there with its event.
    """

    def __init__(self, store: WeightsStore, journal: Journal) -> None:
        self._store = store
        self._journal = journal
        self.num_parallel = store.num_parallel

    def open(self, key: str, start: int = 0, length: int | None = None) -> Reader:
        """Raises StoreError, not StoreUnavailable, if the journal cannot be read: waiting for it
        would not help."""
        if not is_journalled(key):
            return self._store.open(key, start, length)
        try:
            data = self._journal.read_object(key)
        except JournalError as error:
            raise StoreError(str(error)) from error
        if data is None:
            raise KeyNotFound(key)
        return MemoryReader(data)

    def upload(self, key: str, label: str = "") -> Upload:
        return self._store.upload(key, label)

    def find_unfinished(self, key: str, label: str) -> Unfinished | None:
        return self._store.find_unfinished(key, label)

    def sweep(self) -> None:
        self._store.sweep()

    def put(self, objects: Mapping[str, bytes]) -> None:
        self._store.put(objects)

    def settle(self, key: str) -> None:
        self._store.settle(key)

    def keys(self, prefix: str = "") -> Iterator[str]:
        yield from self._store.keys(prefix)
        if prefix.startswith((INCOMING, OPTIMIZER)):
            return  # updates lie below the number of their round
        try:
            yield from self._journal.object_keys(prefix)
        except JournalError as error:
            raise StoreError(str(error)) from error

    def delete(self, *keys: str) -> None:
        journalled = [key for key in keys if is_journalled(key)]
        if len(journalled) < len(keys):
            self._store.delete(*(key for key in keys if not is_journalled(key)))
        if journalled:
            try:
                self._journal.delete_objects(journalled)
            except JournalError as error:
                raise StoreError(str(error)) from error
