"""A local update on its way out, as the object that the coordinator will store."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from xain_proto.fl import coordinator_pb2 as pb
from xain_proto.np import (
    ENCODING_BITS,
    TILE_ELEMENTS,
    DeltaCodec,
    NotEncodable,
    can_encode,
    npy_header,
)


class Upload:
    """Of a contiguous vector, (d,), which it does not copy.

    base: what it was trained from, if it may travel in an encoding.
    encoding: the one that is wanted; what cannot be encoded travels as it is.
    size_bytes, digest: of the object that will be stored, which is the decoded one.
    """

    def __init__(
        self,
        vector: NDArray[Any],
        base: NDArray[Any] | None = None,
        encoding: "pb.Encoding.ValueType" = pb.PLAIN,
    ) -> None:
        if vector.ndim != 1 or not vector.flags.c_contiguous:
            raise ValueError(f"expected a contiguous vector, got shape {vector.shape}")
        self.start = npy_header(vector.dtype, vector.shape)
        self.data = vector.view(np.uint8).data
        self.size_bytes = len(self.start) + len(self.data)
        self._vector = vector
        self._base = base
        self._codec: DeltaCodec | None = None
        self.encoding: pb.Encoding.ValueType = pb.PLAIN
        if base is not None and encoding in ENCODING_BITS and can_encode(vector, base):
            codec = DeltaCodec(ENCODING_BITS[encoding])
            try:
                self.digest = self._decoded_digest(codec, base)
            except NotEncodable:
                pass  # the coordinator says what is wrong with it, and where
            else:
                self._codec, self.encoding = codec, encoding
                return
        digest = xxhash.xxh3_128(self.start)
        digest.update(self.data)
        self.digest = digest.digest()

    def _decoded_digest(self, codec: DeltaCodec, base: NDArray[Any]) -> bytes:
        digest = xxhash.xxh3_128(self.start)
        for first in range(0, len(base), TILE_ELEMENTS):
            tile = slice(first, first + TILE_ELEMENTS)
            decoded = codec.decode(codec.encode(self._vector[tile], base[tile]), base[tile])
            digest.update(decoded.view("u1").data)
        return digest.digest()

    def can_begin_at(self, offset: int) -> bool:
        """Whether chunks() can leave out so many bytes of the object."""
        if self._codec is None:
            return 0 <= offset <= self.size_bytes
        at = offset - len(self.start)
        tile_bytes = TILE_ELEMENTS * self._vector.itemsize
        return offset in (0, self.size_bytes) or (0 <= at < len(self.data) and at % tile_bytes == 0)

    def chunks(self, offset: int, size: int) -> Iterator[bytes]:
        """The object from a byte on, as it travels: at least one piece.

        size: of each piece in bytes; the last one may be shorter.
        A message owns its bytes, so one chunk is copied, never the whole.
        """
        if self._codec is None:
            yield from self._plain_chunks(offset, size)
        else:
            yield from self._encoded_chunks(offset, size)

    def _plain_chunks(self, offset: int, size: int) -> Iterator[bytes]:
        data_offset = len(self.start)
        while True:
            end = offset + size
            data = self.data[max(0, offset - data_offset) : max(0, end - data_offset)]
            yield self.start[offset:end] + data
            offset = end
            if offset >= self.size_bytes:
                return

    def _encoded_chunks(self, offset: int, size: int) -> Iterator[bytes]:
        assert self._codec is not None
        assert self._base is not None
        gathered = bytearray(self.start[offset:])
        at = max(0, offset - len(self.start))
        for first in range(at // self._vector.itemsize, len(self._vector), TILE_ELEMENTS):
            tile = slice(first, first + TILE_ELEMENTS)
            gathered += self._codec.encode(self._vector[tile], self._base[tile])
            while len(gathered) > size:
                yield bytes(gathered[:size])
                del gathered[:size]
        yield bytes(gathered)
