"""Arrays as .npy bytes: whole ones as NDArray messages, and the header alone for streams.

Nothing here reads or writes a pickle.
"""

import io
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod
from typing import Any

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray as Array

from xain_wire.np.ndarray_pb2 import NDArray

# Version 1.0 of the format pads its header to a multiple of 64 bytes; a plain vector needs 128.
MAX_HEADER_BYTES = 4096
MAX_DIMENSIONS = 32  # numpy 1 has no more
MAX_ELEMENTS = 2**63 - 1  # of one dimension
MAX_ATTEMPTS = 10


def ndarray_to_proto(array: Array[Any]) -> NDArray:
    """Encode an array of any shape. Raises ValueError for object arrays: they need pickle."""
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=False)
    return NDArray(ndarray=buffer.getvalue())


def proto_to_ndarray(message: NDArray) -> Array[Any]:
    """Decode the array of a message; an unset field is the empty vector, shape (0,). Raises
    ValueError for anything but a plain .npy file."""
    if not message.ndarray:
        return np.empty((0,))
    # Not np.load: that opens zip archives too, and gives something that is no array.
    try:
        array: Array[Any] = npy.read_array(io.BytesIO(message.ndarray), allow_pickle=False)
    except Exception as error:  # numpy raises whatever the literal in a header leads to
        raise ValueError(f"not a plain .npy file: {error}") from error
    return array


@dataclass(frozen=True)  # without slots: a cached property needs a __dict__
class NpyHeader:
    """Header of an .npy file. Its data begin at `data_offset`, in C order."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    data_offset: int

    @cached_property
    def size_bytes(self) -> int:
        """Size of the whole file."""
        return self.data_offset + self.dtype.itemsize * prod(self.shape)


@lru_cache(maxsize=64)
def npy_header(dtype: np.dtype[Any], shape: tuple[int, ...]) -> bytes:
    """Return the .npy header that comes before the data of a C-ordered array."""
    buffer = io.BytesIO()
    npy.write_array_header_1_0(
        buffer,
        {"descr": npy.dtype_to_descr(dtype), "fortran_order": False, "shape": shape},
    )
    return buffer.getvalue()


def parse_npy_header(start: bytes) -> NpyHeader | None:
    """Read the header from the first bytes of a file; None if they do not reach far enough.

    Raises ValueError if they do not begin an .npy file of version 1.0 in C order, or if its dtype
    is not a plain number.
    """
    if not npy.MAGIC_PREFIX.startswith(start[:6]) and not start.startswith(npy.MAGIC_PREFIX):
        raise ValueError("not an .npy file")
    if len(start) < 10:
        return None
    if start[6:8] != b"\x01\x00":
        raise ValueError(f"version {start[6]}.{start[7]} of the .npy format, only 1.0 is read")
    data_offset = 10 + int.from_bytes(start[8:10], "little")
    if data_offset > MAX_HEADER_BYTES:
        raise ValueError(f"an .npy header of {data_offset} bytes, at most {MAX_HEADER_BYTES}")
    if len(start) < data_offset:
        return None
    return _parse_whole(bytes(start[:data_offset]))


def _read_header(header: bytes) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    return npy.read_array_header_1_0(io.BytesIO(header[8:]), max_header_size=MAX_HEADER_BYTES)


def _read_header_safely(header: bytes) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Read shape, order and dtype from an .npy header, again after a SystemError: Python up to 3.12
    may raise it when two threads parse source (python/cpython#106905)."""
    for _ in range(MAX_ATTEMPTS - 1):
        with suppress(SystemError):
            return _read_header(header)
    return _read_header(header)


# All updates of a session have the same header.
@lru_cache(maxsize=64)
def _parse_whole(header: bytes) -> NpyHeader:
    """Parse a whole .npy header. Raises ValueError if it is broken, too large or not of numbers."""
    try:
        shape, fortran_order, dtype = _read_header_safely(header)
    except Exception as error:  # numpy raises whatever the literal it parses leads to
        raise ValueError(f"a broken .npy header: {error}") from None
    # Python writes no number of more than 4,300 digits, and a header can have one in hexadecimal.
    if len(shape) > MAX_DIMENSIONS or any(abs(extent) > MAX_ELEMENTS for extent in shape):
        raise ValueError(
            f"an .npy file of more than {MAX_DIMENSIONS} dimensions or {MAX_ELEMENTS} elements"
        )
    if fortran_order and len(shape) > 1:
        raise ValueError("an .npy file in Fortran order")
    if dtype.hasobject or dtype.kind not in "biufc" or any(extent < 0 for extent in shape):
        raise ValueError(f"an .npy file of {dtype} with shape {shape}")
    return NpyHeader(dtype, shape, len(header))
