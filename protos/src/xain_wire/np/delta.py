"""Updates in fewer bytes: the difference to the model that they were trained from, tile by tile.

Both sides compute the same decoded elements, to the bit: single-precision products and sums of one
element each, which IEEE 754 defines. So a sender knows the digest of what its receiver will have.

An encoded tile of n elements is

    scale      float32, little-endian, not negative
    steps      n int8 or n float16, little-endian

and stands for model + scale * steps, each operation rounded to float32. All tiles but the last have
tile_elements of DeltaCodec. With d the difference and D the largest magnitude of it in a tile:

- INT8: scale = D / 127, and what is decoded is off by at most D / 254.
- FLOAT16: scale is a power of two that brings D between 0.5 and 1, so no difference overflows, and
  what is decoded is off by at most |d| / 2048, or D / 2**24 where that is more.

To both comes what float32 itself rounds: 2**-22 of the larger of |model| and |update|.

Of float32 only. A float64 model does not get smaller without losing what it was chosen for.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray as Array

from xain_wire.fl.coordinator_pb2 import Encoding

ENCODING_BITS = {Encoding.INT8: 8, Encoding.FLOAT16: 16}  # of an element

_SCALE_BYTES = 4
# Below it 1 / scale would overflow; such differences are zero for every purpose.
_SMALLEST = np.float32(2.0**-120)
# Above it what is decoded might overflow though the update does not.
_LARGEST = np.float32(2.0**100)

Float32s = Array[np.float32]


class NotEncodable(ValueError):
    """The update must travel as it is: a difference is no number, infinite, or nearly so."""


class DeltaCodec:
    """Encodes and decodes tiles. It owns the buffers for one tile, so one thread uses it at a time,
    and what it returns is good until the next call.

    bits: 8 or 16, as in ENCODING_BITS.
    """

    tile_elements = 65_536

    def __init__(self, bits: int) -> None:
        self._dtype: np.dtype[Any] = np.dtype({8: "i1", 16: "<f2"}[bits])
        self._work = np.empty(self.tile_elements, dtype=np.float32)
        self._decoded = np.empty(self.tile_elements, dtype="<f4")
        self._encoded = np.empty(self.encoded_bytes(self.tile_elements), dtype=np.uint8)

    def encoded_bytes(self, num_elements: int) -> int:
        """Bytes of an encoded tile with this number of elements."""
        return _SCALE_BYTES + num_elements * self._dtype.itemsize

    def encode(self, tile: Float32s, model: Float32s) -> memoryview:
        """tile, model: (n,) float32, n at most tile_elements.

        Raises NotEncodable.
        """
        count = len(tile)
        work = self._work[:count]
        with np.errstate(over="ignore", invalid="ignore"):
            np.subtract(tile, model, out=work)
            largest = max(np.float32(work.max()), np.float32(-work.min()))  # NaN stays NaN
        if not largest <= _LARGEST:
            raise NotEncodable(f"the largest difference to the model is {largest}")
        scale = self._scale(largest)
        encoded = self._encoded[: self.encoded_bytes(count)]
        encoded[:_SCALE_BYTES].view("<f4")[0] = scale
        steps = encoded[_SCALE_BYTES:].view(self._dtype)
        if scale == 0:
            steps[:] = 0
        else:
            np.divide(work, scale, out=work)
            if self._dtype.itemsize == 1:
                np.rint(work, out=work)
                np.clip(work, -127, 127, out=work)
            steps[:] = work
        return encoded.data

    def _scale(self, largest: np.float32) -> np.float32:
        if largest < _SMALLEST:
            return np.float32(0)
        if self._dtype.itemsize == 1:
            return np.float32(largest / np.float32(127))
        # largest = mantissa * 2**exponent with a mantissa from 0.5 to 1.
        return np.float32(np.ldexp(np.float32(1), int(np.frexp(largest)[1])))

    def decode(self, encoded: bytes | memoryview, model: Float32s) -> Float32s:
        """The elements that a tile stands for, (n,) float32.

        encoded: encoded_bytes(n) bytes. Raises ValueError if they are not, or if the scale is not
        what encode() writes.
        """
        count = len(model)
        if len(encoded) != self.encoded_bytes(count):
            raise ValueError(f"{len(encoded)} bytes for a tile of {count} elements")
        scale = np.frombuffer(encoded, "<f4", 1)[0]
        if not (np.isfinite(scale) and scale >= 0):
            raise ValueError(f"a tile with scale {scale}")
        steps = np.frombuffer(encoded, self._dtype, count, _SCALE_BYTES)
        work, decoded = self._work[:count], self._decoded[:count]
        # Values that a hostile sender makes overflow are found where all updates are checked.
        with np.errstate(over="ignore", invalid="ignore"):
            work[:] = steps
            np.multiply(work, scale, out=work)
            np.add(model, work, out=decoded)
        return decoded


def can_encode(update: Array[Any], model: Array[Any]) -> bool:
    """Whether there is an encoding of an update of this model, by what they are."""
    little = np.dtype("<f4")
    return update.dtype == little and model.dtype == little and update.shape == model.shape
