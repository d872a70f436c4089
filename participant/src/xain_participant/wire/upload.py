"""A local update on its way out, as the object that the coordinator will store."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from xain_participant.sdk.encoded import Encoded
from xain_wire.fl import coordinator_pb2 as pb
from xain_wire.np import DeltaCodec, npy_header


class Upload:
    """The upload of a contiguous vector, (d,), which is not copied.

    encoded: a shorter form of the same vector, which travels in its place.
    size_bytes, digest: of the object that will be stored. The encoded form does not change them.
    share: how much of it the other side has, from 0 to 1; for another thread to show.
    """

    def __init__(self, vector: NDArray[Any], encoded: Encoded | None = None) -> None:
        """Write the header, and compute size and digest of the object. Raises ValueError."""
        if vector.ndim != 1 or not vector.flags.c_contiguous:
            raise ValueError(f"expected a contiguous vector, got shape {vector.shape}")
        self.start = npy_header(vector.dtype, vector.shape)
        self.data = vector.view(np.uint8).data
        self.size_bytes = len(self.start) + len(self.data)
        self.encoding: pb.Encoding.ValueType = pb.PLAIN if encoded is None else pb.FLOAT16
        self.share = 0.0
        self._encoded = encoded
        self._tile_bytes = DeltaCodec.tile_elements * vector.itemsize
        digest = xxhash.xxh3_128(self.start)
        digest.update(self.data)
        self.digest = digest.digest()

    def can_begin_at(self, offset: int) -> bool:
        """Whether chunks() can leave out so many bytes of the object."""
        if self._encoded is None:
            return 0 <= offset <= self.size_bytes
        at = offset - len(self.start)
        return offset in (0, self.size_bytes) or (
            0 <= at < len(self.data) and at % self._tile_bytes == 0
        )

    def part(self, offset: int, most: int | None = None) -> int:
        """Number of bytes in the part that begins at byte `offset`: at most `most`, or one tile of
        the encoded form. most: None for all."""
        start = len(self.start[offset:])
        left = start + len(self._data_from(max(0, offset - len(self.start))))
        if most is None:
            return left
        if self._encoded is not None:
            tile_bytes = self._encoded.tile_bytes
            most = start + max(1, (most - start) // tile_bytes) * tile_bytes
        return min(left, most)

    def is_last(self, offset: int, num_bytes: int) -> bool:
        """Whether a part that begins at byte `offset` reaches to the end."""
        return num_bytes == self.part(offset)

    def chunks(self, offset: int, size: int, num_bytes: int) -> Iterator[bytes]:
        """Yield the object from a byte on, as it travels: at least one piece.

        size: of each piece in bytes; the last one may be shorter. num_bytes: of all of them; see
        part().
        A message owns its bytes, so one chunk is copied, never the whole.
        """
        start, data = self.start[offset:], self._data_from(max(0, offset - len(self.start)))
        at = 0
        while True:
            end = min(at + size, num_bytes)
            yield start[at:end] + data[max(0, at - len(start)) : max(0, end - len(start))]
            at = end
            if at >= num_bytes:
                return

    def _data_from(self, at: int) -> memoryview:
        """The bytes that travel behind the header, from byte `at` of the vector on."""
        if self._encoded is None:
            return self.data[at:]
        return self._encoded.tiles_from(-(-at // self._tile_bytes))  # at the end there is no tile
