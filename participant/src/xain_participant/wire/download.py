"""The download of a global model, from the coordinator or from the store."""

from typing import Any

import xxhash
from numpy.typing import NDArray

from xain_foundation.spare import Spare
from xain_participant.sdk.sealed import Damaged
from xain_wire.fl import coordinator_pb2 as pb
from xain_wire.np import parse_npy_header
from xain_wire.np.codec import MAX_HEADER_BYTES


class Download:
    """The bytes received of an object. One source may begin a download and another go on.

    received: number of bytes so far.
    spare: source of the memory; None allocates it.
    """

    def __init__(self, ref: pb.WeightsRef, spare: Spare | None = None) -> None:
        self.ref = ref
        self.size_bytes = ref.size_bytes
        self.received = 0
        # One buffer, and the array is a view of it: the model is in memory once.
        self._buffer = (spare or Spare()).take(ref.size_bytes)
        self._target = self._buffer.data
        self._digest = xxhash.xxh3_128()

    @property
    def is_whole(self) -> bool:
        """Whether all bytes have been received; check() tells whether they are the right ones."""
        return self.received == self.size_bytes

    @property
    def share(self) -> float:
        """Share of the object received, from 0 to 1; another thread may show it."""
        return self.received / self.size_bytes if self.size_bytes else 1.0

    def add(self, chunk: bytes | memoryview) -> None:
        """Add the next bytes. Raises Damaged, and adds none, if they are more than the reference
        promises."""
        end = self.received + len(chunk)
        if end > self.size_bytes:
            raise Damaged("more bytes than promised")
        self._target[self.received : end] = chunk
        self._digest.update(chunk)
        self.received = end

    def room(self, most: int) -> memoryview:
        """Buffer for the next bytes, at most `most`; take() adds the bytes that were written
        there."""
        return self._target[self.received : min(self.received + most, self.size_bytes)]

    def take(self, num_bytes: int) -> None:
        """Add so many bytes, which were written to room()."""
        end = self.received + num_bytes
        self._digest.update(self._target[self.received : end])
        self.received = end

    def restart(self) -> None:
        """Forget all bytes received."""
        self.received = 0
        self._digest.reset()

    def check(self) -> None:
        """Check that all bytes are there, with the promised digest. Raises Damaged."""
        if not self.is_whole:
            raise Damaged(f"{self.received} of {self.size_bytes} bytes")
        if self._digest.digest() != self.ref.digest:
            raise Damaged("another digest than promised")

    def vector(self) -> NDArray[Any]:
        """The model, (d,), writable. Raises Damaged, also if the object is no vector."""
        self.check()
        try:
            header = parse_npy_header(self._buffer[:MAX_HEADER_BYTES].tobytes())
        except ValueError as error:
            raise Damaged(str(error)) from None
        if header is None or header.size_bytes != self._buffer.size or len(header.shape) != 1:
            raise Damaged("not a whole vector in .npy format")
        return self._buffer[header.data_offset :].view(header.dtype)
