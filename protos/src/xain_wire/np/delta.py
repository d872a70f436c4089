"""Updates in fewer bytes: the difference to the model that they were trained from, tile by tile.

Both sides compute the same decoded elements, to the bit: single-precision products and sums of one
element each, which IEEE 754 defines. So a sender knows the digest of what its receiver will have.

An encoded tile of n elements is

    scale      float32, little-endian, not negative
    steps      n float16, little-endian

and stands for model + scale * steps, each operation rounded to float32. All tiles but the last have
tile_elements of DeltaCodec. With d the difference and D the largest magnitude of it in a tile,
scale is a power of two that brings D between 0.5 and 1, so no difference overflows, and what is
decoded is off by at most |d| / 2048, or D / 2**24 where that is more. To that comes what float32
itself rounds: 2**-22 of the larger of |model| and |update|.

Of float32 only. A float64 model does not get smaller without losing what it was chosen for.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray as Array

_STEP = np.dtype("<f2")
_SCALE_BYTES = 4
# Below it 1 / scale would overflow; such differences are zero for every purpose.
_SMALLEST = np.float32(2.0**-120)
# Above it what is decoded might overflow though the update does not.
_LARGEST = np.float32(2.0**100)

Float32s = Array[np.float32]


class DeltaCodec:
    """Encodes and decodes tiles. It owns the buffers for one tile, so one thread uses it at a time,
    and what it returns is good until the next call.
    """

    tile_elements = 65_536

    def __init__(self) -> None:
        self._work = np.empty(self.tile_elements, dtype=np.float32)
        self._decoded = np.empty(self.tile_elements, dtype="<f4")
        self._encoded = np.empty(self.encoded_bytes(self.tile_elements), dtype=np.uint8)

    @staticmethod
    def encoded_bytes(num_elements: int) -> int:
        """Bytes of an encoded tile with this number of elements."""
        return _SCALE_BYTES + num_elements * _STEP.itemsize

    def encode(self, tile: Float32s, model: Float32s) -> memoryview:
        """Encode the difference of a tile to the model, both (n,) float32, n at most tile_elements:
        a scale, and a float16 step for each element. Returns a view of a buffer.

        Raises ValueError if a difference is no number, infinite, or nearly so: the update must
        travel as it is.
        """
        count = len(tile)
        work = self._work[:count]
        with np.errstate(over="ignore", invalid="ignore"):
            np.subtract(tile, model, out=work)
            largest = max(np.float32(work.max()), np.float32(-work.min()))  # NaN stays NaN
        if not largest <= _LARGEST:
            raise ValueError(f"the largest difference to the model is {largest}")
        scale = _scale(largest)
        encoded = self._encoded[: self.encoded_bytes(count)]
        encoded[:_SCALE_BYTES].view("<f4")[0] = scale
        steps = encoded[_SCALE_BYTES:].view(_STEP)
        if scale == 0:
            steps[:] = 0
        else:
            np.divide(work, scale, out=work)
            steps[:] = work
        return encoded.data

    def decode(self, encoded: bytes | memoryview, model: Float32s) -> Float32s:
        """Decode a tile into model + scale * steps, (n,) float32 in the codec's buffer.

        encoded: encoded_bytes(n) bytes. Raises ValueError for another size, or for a scale that
        encode() does not write.
        """
        count = len(model)
        if len(encoded) != self.encoded_bytes(count):
            raise ValueError(f"{len(encoded)} bytes for a tile of {count} elements")
        scale = np.frombuffer(encoded, "<f4", 1)[0]
        if not (np.isfinite(scale) and scale >= 0):
            raise ValueError(f"a tile with scale {scale}")
        steps = np.frombuffer(encoded, _STEP, count, _SCALE_BYTES)
        work, decoded = self._work[:count], self._decoded[:count]
        # Values that a hostile sender makes overflow are found where all updates are checked.
        with np.errstate(over="ignore", invalid="ignore"):
            work[:] = steps
            np.multiply(work, scale, out=work)
            np.add(model, work, out=decoded)
        return decoded


def _scale(largest: np.float32) -> np.float32:
    """Return the power of two that brings the largest difference to 0.5 to 1; 0 for a tiny one."""
    if largest < _SMALLEST:
        return np.float32(0)
    # largest = mantissa * 2**exponent with a mantissa from 0.5 to 1.
    return np.float32(np.ldexp(np.float32(1), int(np.frexp(largest)[1])))


def can_encode(update: Array[Any], model: Array[Any]) -> bool:
    """Whether there is an encoding of an update of this model, by what they are."""
    little = np.dtype("<f4")
    return update.dtype == little and model.dtype == little and update.shape == model.shape
