"""The vectors that an aggregation reads: piece by piece into given memory, with their digests."""

import threading
from typing import Any, Self

import numpy as np
import xxhash
from numpy.typing import NDArray

from xain_coordinator.core.vocabulary.values import WeightsRef
from xain_coordinator.ports import Reader, StoreError, WeightsStore


class UpdateChanged(StoreError):
    """An accepted update, or a model or state that was published, is no longer what it was."""


class Source:
    """A stored vector, read piece by piece and compared with its digest.

    Threads may read several pieces at the same time. add_to_digest takes the pieces in their order.

    kind: what it is, for messages. keep_open: one reader serves all reads; otherwise each read
    opens the object anew. The digest covers all that is read, whichever reader it came from.
    """

    def __init__(
        self,
        store: WeightsStore,
        ref: WeightsRef,
        kind: str,
        dtype: np.dtype[Any],
        length: int,
        *,
        keep_open: bool = True,
    ) -> None:
        self._store = store
        self._ref = ref
        self._name = f"the {kind} {ref.key!r}"
        self._itemsize = dtype.itemsize
        self._keep_open = keep_open
        self._reader: Reader | None = None
        self._opening = threading.Lock()
        self._digest = xxhash.xxh3_128()
        self._header_bytes = ref.size_bytes - length * dtype.itemsize
        self._header = bytearray(self._header_bytes)

    def read_into(self, start: int, row: NDArray[Any]) -> None:
        """Read len(row) elements from the one with the index `start`, with the first of them the
        header. Raises UpdateChanged and the store's errors."""
        first = self._header_bytes + start * self._itemsize if start else 0
        length = row.nbytes if start else self._header_bytes + row.nbytes
        if not self._keep_open:
            with self._open(first, length) as reader:
                self._read(reader, start, row)
            return
        with self._opening:
            if self._reader is None:
                self._reader = self._open(first, length)
        self._read(self._reader, start, row)

    def add_to_digest(self, row: NDArray[Any]) -> None:
        """Add the next piece to the digest, the first after the header."""
        if self._header:
            self._digest.update(self._header)
            self._header.clear()
        self._digest.update(row.view(np.uint8).data)

    def check(self) -> None:
        """Compare, after the last piece. Raises UpdateChanged."""
        if self._digest.hexdigest() != self._ref.digest:
            raise UpdateChanged(f"{self._name} has changed in the store")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    def _open(self, start: int, length: int) -> Reader:
        """Open the stored vector and check its size. start, length: the bytes that will be read
        first. Raises UpdateChanged and the store's errors."""
        reader = self._store.open(self._ref.key, start, length)
        if reader.size != self._ref.size_bytes:
            reader.close()
            raise UpdateChanged(
                f"{self._name} has {reader.size} bytes in the store, it had {self._ref.size_bytes}"
            )
        return reader

    def _read(self, reader: Reader, start: int, row: NDArray[Any]) -> None:
        """Read elements, and with the first of them the header. Raises UpdateChanged and the
        store's errors."""
        if start == 0:
            self._fill(reader, 0, memoryview(self._header))
        offset = self._header_bytes + start * self._itemsize
        self._fill(reader, offset, row.view(np.uint8).data)

    def _fill(self, reader: Reader, offset: int, buffer: memoryview) -> None:
        """Fill a buffer from an offset. Raises UpdateChanged if the object ends before."""
        if reader.read_into(offset, buffer) != len(buffer):
            raise UpdateChanged(f"{self._name} has become shorter")
