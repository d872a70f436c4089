"""Updates that are in a store before they are handed in: each is measured while it is read once.

All functions block.
"""

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Protocol

from xain_coordinator.core.vocabulary.errors import InvalidUpdate
from xain_coordinator.core.vocabulary.values import StoredWeights
from xain_coordinator.ports import DirectAccess, KeyNotFound, StoreError, WeightsStore
from xain_coordinator.updates.measured_upload import Announced, MeasuredUpload
from xain_coordinator.updates.measuring import Distance, Inspector, measure


class Bucket(Protocol):
    """A bucket in which participants put updates under names of their own."""

    def reading(
        self, round_: int, name: str
    ) -> AbstractContextManager[tuple[int, Iterator[bytes]]]:
        """Open an update: its size as an .npy file, and the pieces of that file. Raises
        KeyNotFound, InvalidUpdate, TOO_LARGE and StoreUnavailable, also while pieces are read."""


def measure_stored(store: WeightsStore, key: str, distance: Distance | None) -> StoredWeights:
    """Measure an object of the store where it is. Raises InvalidUpdate and the store's errors."""
    measured = measure(store, key, distance)
    # The writer may have died before the object was durable, and it is about to count.
    store.settle(key)
    return measured


def copy_and_measure(
    access: DirectAccess,
    store: WeightsStore,
    source: str,
    key: str,
    announced: Announced,
    distance: Distance | None,
) -> StoredWeights:
    """Copy an object that a participant has put under `source` by a signed URL, and measure the
    copy. The participant may write to `source` until its URL expires.

    Raises InvalidUpdate, and the store's errors; then there is no copy.
    """
    try:
        size = access.copy(source, key, announced.size_bytes)
        if size == announced.size_bytes:
            return measure(store, key, distance, size, announced.digest)
    except KeyNotFound:
        raise
    except BaseException:  # whatever it is, the key of this copy is told to no caller
        with contextlib.suppress(StoreError):
            store.delete(key)
        raise
    # Now: the sender may put the right one there as soon as it hears of this.
    with contextlib.suppress(StoreError):
        store.delete(source)
    raise InvalidUpdate(f"the upload has {size} bytes, {announced.size_bytes} were announced")


def fetch_and_measure(
    bucket: Bucket,
    store: WeightsStore,
    round_: int,
    name: str,
    key: str,
    distance: Distance | None,
) -> StoredWeights:
    """Write an update of the bucket to the store as an .npy file, measured while it is written.
    Raises InvalidUpdate, TOO_LARGE and the stores' errors; then nothing is written."""
    with bucket.reading(round_, name) as (size_bytes, pieces):
        upload = MeasuredUpload(store, key, Announced(round_, size_bytes), Inspector(distance))
        try:
            for piece in pieces:
                upload.write(piece)
            return upload.complete()
        finally:
            upload.abort()
