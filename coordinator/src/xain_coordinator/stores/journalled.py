"""A session's store together with the small updates and models that lie in its journal."""

import threading
from collections.abc import Iterator, Mapping

from xain_coordinator.core.vocabulary.keys import (
    INCOMING,
    OPTIMIZER,
    is_journalled,
    is_model,
    round_of,
)
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
from xain_coordinator.stores.prefixed import PrefixedStore


class JournalledStore:
    """The objects of `store`, and the small updates and models of the journal's latest session.

    An update or a model is committed to the journal with its event, not here. Updates stay there;
    a model lies there until model_copies.py has copied it to `store`.

    is_new: the session is not in the journal yet.
    """

    def __init__(self, store: WeightsStore, journal: Journal, *, is_new: bool = False) -> None:
        self.store = store
        self.journal = journal
        self.num_parallel = store.num_parallel
        self._lock = threading.Lock()
        self.copying = threading.Lock()  # held while models are copied from the journal
        keys = [] if is_new else journal.object_keys()
        self._models = {key for key in keys if is_model(key)}

    @property
    def models(self) -> list[str]:
        """Keys of the models in the journal, the oldest first."""
        with self._lock:
            return sorted(self._models, key=round_of)

    def has_model(self, key: str) -> bool:
        """Whether a model is in the journal."""
        return key in self._models

    @property
    def num_models(self) -> int:
        """Number of models in the journal."""
        return len(self._models)

    def add_model(self, key: str) -> None:
        """Note that a model is about to be committed to the journal."""
        with self._lock:
            self._models.add(key)

    def forget_models(self, keys: list[str]) -> None:
        """Remove models from the journal. Raises JournalError."""
        with self._lock:
            self._models.difference_update(keys)
        self.journal.delete_objects(keys)

    def open(self, key: str, start: int = 0, length: int | None = None) -> Reader:
        """Open an object that lies in the journal or in the store. Raises KeyNotFound and the
        store's errors; StoreError, not StoreUnavailable, if the journal cannot be read: waiting for
        it would not help."""
        if not is_journalled(key) and key not in self._models:
            return self.store.open(key, start, length)
        try:
            data = self.journal.read_object(key)
        except JournalError as error:
            raise StoreError(str(error)) from error
        if data is not None:
            return MemoryReader(data)
        if is_journalled(key):
            raise KeyNotFound(key)
        return self.store.open(key, start, length)

    def upload(self, key: str, label: str = "", size_bytes: int = 0) -> Upload:
        """Begin to write an object to the store. A model of this key in the journal is removed
        there first: it is damaged, and is being rebuilt."""
        if key in self._models:  # it is damaged, and is being rebuilt
            self.forget_models([key])
        return self.store.upload(key, label, size_bytes)

    def find_unfinished(self, key: str, label: str) -> Unfinished | None:
        return self.store.find_unfinished(key, label)

    def sweep(self) -> None:
        self.store.sweep()

    def put(self, objects: Mapping[str, bytes]) -> None:
        self.store.put(objects)

    def settle(self, key: str) -> None:
        self.store.settle(key)

    def keys(self, prefix: str = "") -> Iterator[str]:
        """Yield the keys of the store, and then those of the journal that may begin with the
        prefix. Raises StoreError."""
        yield from self.store.keys(prefix)
        if prefix.startswith((INCOMING, OPTIMIZER)):
            return  # updates lie below the number of their round
        try:
            yield from self.journal.object_keys(prefix)
        except JournalError as error:
            raise StoreError(str(error)) from error

    def delete(self, *keys: str) -> None:
        """Remove each object from the journal or the store, wherever it may be. Raises StoreError,
        also for errors of the journal."""
        if models := [key for key in keys if key in self._models]:
            try:
                with self.copying:  # else a copy could be written after the deletion
                    self.forget_models(models)
            except JournalError as error:
                raise StoreError(str(error)) from error
        journalled = [key for key in keys if is_journalled(key)]
        if len(journalled) < len(keys):
            self.store.delete(*(key for key in keys if not is_journalled(key)))
        if journalled:
            try:
                self.journal.delete_objects(journalled)
            except JournalError as error:
                raise StoreError(str(error)) from error


def store_of_session(store: WeightsStore, journal: Journal, session_id: str) -> WeightsStore:
    """The store of a session, with what the journal holds of the latest one. store: of all
    sessions. Raises JournalError."""
    part = PrefixedStore(store, session_id)
    is_latest = journal.session_ids()[-1:] == [session_id]
    return JournalledStore(part, journal) if is_latest else part
