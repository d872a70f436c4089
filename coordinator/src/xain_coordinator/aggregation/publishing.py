"""Publication of objects that never change, repeatable after a crash."""

from collections.abc import Iterable
from typing import Self

import xxhash

from xain_coordinator.core.vocabulary.values import WeightsRef
from xain_coordinator.ports import (
    Fenced,
    KeyClaimed,
    KeyExists,
    KeyNotFound,
    StoreError,
    WeightsStore,
)
from xain_coordinator.stores.integrity import why_damaged
from xain_coordinator.stores.reading import chunks


class AnotherModel(Fenced):
    """Another object lies under the key, so that somebody else works on the session."""


class Publication:
    """An object that is being written. No reader sees it before commit, and nothing stays of one
    that is not committed. Raises the store's errors.

    size_bytes: about what the object will have; 0 if that is not known.
    """

    def __init__(self, store: WeightsStore, key: str, size_bytes: int = 0) -> None:
        self._store = store
        self._key = key
        self._digest = xxhash.xxh3_128()
        self._size = 0
        self._upload = store.upload(key, size_bytes=size_bytes)

    @property
    def digest(self) -> str:
        """Digest of what was written."""
        return self._digest.hexdigest()

    def write(self, piece: bytes | memoryview) -> None:
        """Append bytes to the object. Raises the store's errors."""
        self._digest.update(piece)
        self._size += len(piece)
        self._upload.write(piece)

    def commit(self) -> WeightsRef:
        """Publish the object. An equal object under the key counts as published: its writer died
        before it could say so. Raises AnotherModel if it is another one or claimed, and the
        store's errors."""
        ref = WeightsRef(self._key, self._size, self.digest)
        try:
            self._upload.commit(overwrite=False)
        except KeyClaimed as error:
            raise AnotherModel(str(error)) from None
        except KeyExists:
            if why_damaged(self._store, ref):
                raise AnotherModel(
                    f"another model lies under {self._key!r} than this coordinator would publish: "
                    "a second coordinator works on the same store, an old session's files are in "
                    "it, or it was damaged right after this coordinator was killed; in the last "
                    "two cases, delete it and start again"
                ) from None
        return ref

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._upload.abort()  # unless it was committed


def publish(store: WeightsStore, key: str, pieces: Iterable[bytes]) -> WeightsRef:
    """Write an object that never changes, and return its reference; an equal object that is there
    counts as written. After an error nothing was written."""
    with Publication(store, key) as begun:
        for piece in pieces:
            begun.write(piece)
        return begun.commit()


def copy_object(
    source: WeightsStore, ref: WeightsRef, target: WeightsStore, key: str
) -> WeightsRef:
    """Copy an object that never changes to another store. Raises StoreError if it is missing or
    damaged; no copy stays then."""
    try:
        with source.open(ref.key) as reader, Publication(target, key, ref.size_bytes) as begun:
            for chunk in chunks(reader):
                begun.write(chunk)
            if begun.digest != ref.digest:
                raise StoreError(
                    f"the weights under {ref.key!r} are damaged: they have another digest"
                )
            return begun.commit()
    except KeyNotFound as error:
        raise StoreError(f"{error}; the journal has it, the weights store does not") from error
