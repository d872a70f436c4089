"""Reading what was uploaded, before it counts.

An upload is measured as it streams by: digest, header, length, and whether every element is finite.
What to make of it is the core's business; here only what cannot be a vector at all is refused.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import xxhash

from xain_coordinator.core.errors import InvalidUpdate
from xain_coordinator.core.values import StoredWeights, WeightsRef
from xain_coordinator.ports import Reader, WeightsStore
from xain_proto.np import NpyHeader, parse_npy_header

CHUNK_BYTES = 1 << 20  # of weights in a message
READ_BYTES = 8 << 20  # of weights in a read: a store far away takes as long for less


class Inspector:
    """Measures one object from its bytes, in order and in pieces of any size."""

    def __init__(self) -> None:
        self._digest = xxhash.xxh3_128()
        self._size = 0
        self._header: NpyHeader | None = None
        self._rest = b""  # bytes that do not make up a whole header or element yet
        self._num_elements = 0
        self._first_bad: int | None = None

    def feed(self, chunk: bytes) -> None:
        """The next bytes. Raises InvalidUpdate as soon as they cannot be an array of floats."""
        self._digest.update(chunk)
        self._size += len(chunk)
        data = self._rest + chunk if self._rest else chunk
        if self._header is None:
            self._header = self._parse(data)
            if self._header is None:
                self._rest = data
                return
            data = data[self._header.data_offset :]
        itemsize = self._header.dtype.itemsize
        whole = len(data) - len(data) % itemsize
        self._scan(np.frombuffer(data, self._header.dtype, whole // itemsize))
        self._rest = data[whole:]

    @staticmethod
    def _parse(data: bytes) -> NpyHeader | None:
        try:
            header = parse_npy_header(data)
        except ValueError as error:
            raise InvalidUpdate(f"the upload cannot be read: it is {error}") from None
        if header is not None and header.dtype.kind != "f":
            raise InvalidUpdate(f"the weights must be floats, they are {header.dtype}")
        # What is accepted is known by the name of its dtype, which says nothing of the order of
        # bytes, so there must be one order. A file's "=" means that of this machine.
        if header is not None and header.dtype != header.dtype.newbyteorder("<"):
            raise InvalidUpdate(
                f"the weights must be little-endian, they are {header.dtype.str!r}; "
                f"save them as {header.dtype.newbyteorder('<').str!r}"
            )
        return header

    def _scan(self, elements: np.ndarray[Any, np.dtype[Any]]) -> None:
        if self._first_bad is None:
            finite = np.isfinite(elements)
            if not finite.all():
                self._first_bad = self._num_elements + int(np.argmin(finite))
        self._num_elements += len(elements)

    @property
    def digest(self) -> str:
        """xxh3-128 of what was fed so far, in hex."""
        return self._digest.hexdigest()

    def result(self, key: str) -> StoredWeights:
        """What the object under this key is. Raises InvalidUpdate if it ends too early or late."""
        header = self._header
        if header is None:
            raise InvalidUpdate(f"the upload of {self._size} bytes is not a whole .npy file")
        if self._size != header.size_bytes:
            raise InvalidUpdate(
                f"the upload has {self._size} bytes, its header promises {header.size_bytes}"
            )
        ref = WeightsRef(key, self._size, self.digest)
        return StoredWeights(ref, header.dtype.name, header.shape, self._first_bad)


def chunks(reader: Reader, offset: int = 0) -> Iterator[bytes]:
    """The object from an offset to its end, in pieces of READ_BYTES."""
    while offset < reader.size:
        chunk = reader.read(offset, READ_BYTES)
        offset += len(chunk)
        yield chunk


def measure(store: WeightsStore, key: str, size_bytes: int | None = None) -> StoredWeights:
    """Read a stored object through an Inspector.

    size_bytes: what it ought to have; nothing is read if it has not.
    Raises InvalidUpdate, and the store's KeyNotFound and StoreUnavailable.
    """
    inspector = Inspector()
    with store.open(key) as reader:
        if size_bytes is not None and reader.size != size_bytes:
            raise InvalidUpdate(f"the upload has {reader.size} bytes, {size_bytes} were announced")
        for chunk in chunks(reader):
            inspector.feed(chunk)
    return inspector.result(key)
