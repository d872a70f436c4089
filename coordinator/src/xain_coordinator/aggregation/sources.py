"""The vectors an aggregation reads: slice after slice into given memory, and checked on the way."""

from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from xain_coordinator.bundles import open_weights
from xain_coordinator.core.values import WeightsRef
from xain_coordinator.ports import Reader, StoreError, WeightsStore


class UpdateChanged(StoreError):
    """An accepted update, or a model or state that was published, is no longer what it was."""


class Source:
    """A stored vector, read front to back and held against its digest.

    kind: what it is, for messages. keep_open: one reader serves for all; otherwise each read opens
    the object anew. The digest goes on over all that is read, whichever reader it came from.
    """

    def __init__(
        self,
        store: WeightsStore,
        ref: WeightsRef,
        kind: str,
        dtype: np.dtype[Any],
        length: int,
        *,
        keep_open: bool,
    ) -> None:
        self.dtype = dtype
        self._store = store
        self._ref = ref
        self._name = f"the {kind} {ref.key!r}"
        self._keep_open = keep_open
        self._reader: Reader | None = None
        self._digest = xxhash.xxh3_128()
        self._header_bytes = ref.size_bytes - length * dtype.itemsize
        self._offset = 0

    def read_into(self, row: NDArray[Any]) -> None:
        """The next len(row) elements. Raises UpdateChanged and the store's errors."""
        header_bytes = self._header_bytes if self._offset == 0 else 0
        if self._reader is None:
            self._reader = self._open(header_bytes + row.nbytes)
        if header_bytes:
            self._next(self._reader, memoryview(bytearray(header_bytes)))
        self._next(self._reader, row.view(np.uint8).data)
        if not self._keep_open:
            self.close()

    def _open(self, length: int) -> Reader:
        """length: of what will be read next."""
        reader = open_weights(self._store, self._ref.key, self._offset, length)
        if reader.size != self._ref.size_bytes:
            reader.close()
            raise UpdateChanged(
                f"{self._name} has {reader.size} bytes in the store, it had {self._ref.size_bytes}"
            )
        return reader

    def _next(self, reader: Reader, buffer: memoryview) -> None:
        if reader.read_into(self._offset, buffer) != len(buffer):
            raise UpdateChanged(f"{self._name} has become shorter")
        self._offset += len(buffer)
        self._digest.update(buffer)

    def check(self) -> None:
        """After the last element. Raises UpdateChanged."""
        if self._digest.hexdigest() != self._ref.digest:
            raise UpdateChanged(f"{self._name} has changed in the store")

    def close(self) -> None:
        if self._reader is not None:
            self._reader.close()
            self._reader = None
