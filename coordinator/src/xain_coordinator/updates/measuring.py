"""The measuring pass: every update is measured once, while it is written or read.

An Inspector takes the bytes in order: digest, header, length, whether every element is finite, and
how far the update is from the model that it was trained from. The core decides about the result; an
Inspector refuses only bytes that are no vector at all, or too far away.
"""

import math
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from xain_coordinator.core.vocabulary.errors import InvalidUpdate
from xain_coordinator.core.vocabulary.values import GlobalModel, StoredWeights, WeightsRef
from xain_coordinator.ports import Reader, StoreUnavailable, WeightsStore
from xain_coordinator.stores.reading import CHUNK_BYTES, READ_BYTES
from xain_wire.np import NpyHeader, parse_npy_header
from xain_wire.np.codec import MAX_HEADER_BYTES
from xain_workloads.model import control_size

_BASE_READ_BYTES = 1 << 20
_BLOCK_ELEMENTS = 65_536  # 512 KiB in float64: they stay in a processor's own memory


class BaseModel:
    """The model that an update was trained from, read by ranges in step with the update.

    One thread at a time. It holds an open object from the first use on, until close(), and one
    buffer of _BASE_READ_BYTES, until release_buffer() or close(); and again from the next use on.
    """

    def __init__(self, store: WeightsStore, model: GlobalModel) -> None:
        self.model = model
        self.dtype = np.dtype(model.dtype).newbyteorder("<")
        self.size = math.prod(model.shape)
        self._store = store
        self._reader: Reader | None = None
        self._data_offset = 0
        self._buffer = np.empty(0, dtype=self.dtype)
        self._first = 0  # which elements the buffer holds
        self._count = 0

    def fits(self, header: NpyHeader) -> bool:
        """Whether an array with this header is an update of this model."""
        return header.dtype == self.dtype and header.shape == self.model.shape

    def elements(self, first: int, count: int) -> NDArray[Any]:
        """`count` elements from `first`, at most _BLOCK_ELEMENTS; good until the next call. Raises
        the store's errors."""
        if not self._first <= first <= first + count <= self._first + self._count:
            self._read(first)
        at = first - self._first
        return self._buffer[at : at + count]

    def _read(self, first: int) -> None:
        """Fill the buffer with elements from `first` on. Raises the store's errors."""
        reader = self._open()
        if not len(self._buffer):
            num_elements = max(_BASE_READ_BYTES // self.dtype.itemsize, _BLOCK_ELEMENTS)
            self._buffer = np.empty(min(num_elements, self.size), dtype=self.dtype)
        count = min(len(self._buffer), self.size - first)
        itemsize = self.dtype.itemsize
        view = self._buffer[:count].view(np.uint8).data
        if reader.read_into(self._data_offset + first * itemsize, view) < len(view):
            raise StoreUnavailable(f"{self.model.ref.key!r} is shorter in the store than it was")
        self._first, self._count = first, count

    def _open(self) -> Reader:
        """The open object of the model. Raises the store's errors."""
        if self._reader is None:
            reader = self._reader = self._store.open(self.model.ref.key)
            header = parse_npy_header(reader.read(0, MAX_HEADER_BYTES))
            assert header is not None, "what we have published has a header"
            self._data_offset = header.data_offset
        return self._reader

    def release_buffer(self) -> None:
        """Release the buffer until the next use."""
        self._buffer = np.empty(0, dtype=self.dtype)
        self._first = self._count = 0

    def close(self) -> None:
        """Release the buffer, and close the object."""
        self.release_buffer()
        reader, self._reader = self._reader, None
        if reader is not None:
            reader.close()


class Distance:
    """The L2 norm of what an update changes, in float64, without a control variate.

    max_norm: what is allowed.
    """

    def __init__(self, base: BaseModel, max_norm: float) -> None:
        self._base = base
        self._max_norm = max_norm
        self._size = base.size - control_size(base.model.layout)
        self._squared = 0.0
        self._work = np.empty(0, dtype=np.float64)

    def fits(self, header: NpyHeader) -> bool:
        """Whether an array with this header is an update of the model."""
        return self._base.fits(header)

    def add(self, first: int, elements: NDArray[Any]) -> None:
        """Add the update's elements from index `first` on. Elements beyond the model's are
        ignored."""
        if not len(self._work):
            self._work = np.empty(min(_BLOCK_ELEMENTS, self._size), dtype=np.float64)
        end = min(first + len(elements), self._size)
        for at in range(first, end, _BLOCK_ELEMENTS):
            count = min(_BLOCK_ELEMENTS, end - at)
            work = self._work[:count]
            # Elements that are not finite are found by another check, and have no distance.
            with np.errstate(over="ignore", invalid="ignore"):
                mine = elements[at - first : at - first + count]
                np.subtract(mine, self._base.elements(at, count), out=work, dtype=np.float64)
                np.square(work, out=work)
                # Not a dot product: BLAS would spread it over threads that others need.
                self._squared += float(np.add.reduce(work))

    def check(self) -> None:
        """Check that the distance is within the limit. Raises InvalidUpdate."""
        norm = math.sqrt(self._squared)
        if norm > self._max_norm:
            raise InvalidUpdate(
                f"the update is {norm:.6g} away from the model it was trained from (L2 norm), and "
                f"at most {self._max_norm:g} is taken; train with a smaller learning rate"
            )

    def release_buffer(self) -> None:
        """Release the buffers; the next add() allocates them again."""
        self._work = np.empty(0, dtype=np.float64)
        self._base.release_buffer()

    def close(self) -> None:
        """Release the buffers and close the model."""
        self.release_buffer()
        self._base.close()


class Inspector:
    """Measures one object from its bytes, in order and in pieces of any size.

    distance: of which model and how far it may be; None: anywhere. It is closed by close().
    """

    def __init__(self, distance: Distance | None = None) -> None:
        self._distance = distance
        self._digest = xxhash.xxh3_128()
        self.size = 0  # bytes so far
        self.header: NpyHeader | None = None  # once it is there
        self._rest = b""  # bytes that do not make up a whole header or element yet
        self._num_elements = 0
        self._first_bad: int | None = None

    def feed(self, chunk: bytes | memoryview) -> None:
        """Measure the next bytes. Raises InvalidUpdate as soon as they cannot be an array of
        floats, and the store's errors if there is a distance to measure."""
        self._digest.update(chunk)
        self.size += len(chunk)
        if self.header is None:
            start = self._rest + chunk[: MAX_HEADER_BYTES - len(self._rest)]
            self.header = self._parse(start)
            if self.header is None:
                self._rest = start  # all there was: no header is longer
                return
            chunk = memoryview(chunk)[self.header.data_offset - len(self._rest) :]
            self._rest = b""
            if self._distance is not None and not self._distance.fits(self.header):
                self._distance.close()
                self._distance = None  # the core refuses it for what it is
        itemsize = self.header.dtype.itemsize
        if self._rest:
            # The element that the pieces have cut in two; the others are not copied.
            missing = itemsize - len(self._rest)
            self._rest += chunk[:missing]
            chunk = chunk[missing:]
            if len(self._rest) < itemsize:
                return
            self._scan(np.frombuffer(self._rest, self.header.dtype))
        whole = len(chunk) - len(chunk) % itemsize
        self._scan(np.frombuffer(chunk, self.header.dtype, whole // itemsize))
        self._rest = bytes(chunk[whole:])

    @staticmethod
    def _parse(data: bytes) -> NpyHeader | None:
        """The header at the beginning of an object; None if more bytes are needed. Raises
        InvalidUpdate if it is no array of little-endian floats or of bytes."""
        try:
            header = parse_npy_header(data)
        except ValueError as error:
            raise InvalidUpdate(f"the upload cannot be read: it is {error}") from None
        if header is not None and header.dtype.kind != "f" and header.dtype != np.uint8:
            raise InvalidUpdate(f"the weights must be floats, they are {header.dtype}")
        # An accepted update is known by the name of its dtype, which does not tell the order of
        # bytes, so there must be one order. A file's "=" means that of this machine.
        if header is not None and header.dtype != header.dtype.newbyteorder("<"):
            raise InvalidUpdate(
                f"the weights must be little-endian, they are {header.dtype.str!r}; "
                f"save them as {header.dtype.newbyteorder('<').str!r}"
            )
        return header

    def _scan(self, elements: NDArray[Any]) -> None:
        """Count elements, find the first that is not finite, and add them to the distance until
        then."""
        if self._first_bad is None and elements.dtype.kind == "f":
            finite = np.isfinite(elements)
            if not finite.all():
                self._first_bad = self._num_elements + int(np.argmin(finite))
            elif self._distance is not None:
                self._distance.add(self._num_elements, elements)
        self._num_elements += len(elements)

    @property
    def digest(self) -> str:
        """xxh3-128 of what was fed so far, in hex."""
        return self._digest.hexdigest()

    def result(self, key: str) -> StoredWeights:
        """The object under this key as it was measured. Raises InvalidUpdate if its length is wrong
        or its distance to the model too large."""
        header = self.header
        if header is None:
            raise InvalidUpdate(f"the upload of {self.size} bytes is not a whole .npy file")
        if (promised := header.size_bytes) != self.size:
            raise InvalidUpdate(f"the upload has {self.size} bytes, its header promises {promised}")
        # The core says which element is not finite.
        if self._distance is not None and self._first_bad is None:
            self._distance.check()
        ref = WeightsRef(key, self.size, self._digest.hexdigest())
        return StoredWeights(ref, header.dtype.name, header.shape, self._first_bad)

    def release_buffer(self) -> None:
        """Release the buffers until more is fed."""
        if self._distance is not None:
            self._distance.release_buffer()

    def close(self) -> None:
        """Release buffers and close the model, until more is fed. May be called again."""
        if self._distance is not None:
            self._distance.close()


def measure(
    store: WeightsStore,
    key: str,
    distance: Distance | None = None,
    size_bytes: int | None = None,
    digest: str | None = None,
) -> StoredWeights:
    """Measure a stored object, read once through an Inspector.

    distance: as an Inspector's, closed on return. size_bytes, digest: what it ought to have;
    nothing is read of an object of another size.
    Raises InvalidUpdate, and the store's KeyNotFound and StoreUnavailable.
    """
    # A disk of this machine brings little as fast as much.
    read_bytes = READ_BYTES if store.num_parallel > 1 else CHUNK_BYTES
    inspector = Inspector(distance)
    try:
        with store.open(key) as reader:
            if size_bytes is not None and reader.size != size_bytes:
                raise InvalidUpdate(
                    f"the upload has {reader.size} bytes, {size_bytes} were announced"
                )
            # One buffer for all of it.
            buffer = memoryview(bytearray(min(read_bytes, max(reader.size, 1))))
            offset = 0
            while offset < reader.size and (count := reader.read_into(offset, buffer)):
                inspector.feed(buffer[:count])
                offset += count
        return _result(inspector, key, digest)
    finally:
        inspector.close()


def measure_bytes(
    data: bytes, key: str, distance: Distance | None = None, digest: str | None = None
) -> StoredWeights:
    """Measure an object that is in memory. key: under which it will be stored. distance, digest: as
    of measure(). Raises InvalidUpdate, and the store's errors if there is a distance."""
    inspector = Inspector(distance)
    try:
        inspector.feed(data)
        return _result(inspector, key, digest)
    finally:
        inspector.close()


def _result(inspector: Inspector, key: str, digest: str | None) -> StoredWeights:
    """The measurements of an Inspector that has all bytes. digest: that they must have; None: any.
    Raises InvalidUpdate."""
    # First, because what is wrong with other bytes than the sender's own says nothing of them.
    if digest is not None and inspector.digest != digest:
        raise InvalidUpdate("the upload's digest is not the one announced; send it again")
    return inspector.result(key)
