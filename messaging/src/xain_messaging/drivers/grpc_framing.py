"""Packets in a gRPC stream of bytes.

A packet is a prelude and its frames, one after another, in messages of at most CHUNK_BYTES:

    number of frames    4 bytes, unsigned, little-endian
    size of each        8 bytes each
    the frames

The next packet begins with a message of its own. There is no protobuf in the stream: protobuf would
copy every array twice more at each end.
"""

import struct
from collections.abc import Iterator
from typing import Final

from xain_messaging.codec import MAX_FRAMES, Frame, Frames
from xain_messaging.spare import spare

# Each message costs some hand-overs between threads at both ends, whatever its size.
CHUNK_BYTES: Final = 2 << 20
# Bytes of the largest message: a chunk, and the prelude before it.
MAX_CHUNK_BYTES: Final = CHUNK_BYTES + 8 * MAX_FRAMES + 64


class Malformed(Exception):
    """A stream that carries no packets."""


def to_chunks(frames: Frames) -> Iterator[bytes]:
    """Yield the messages of one packet."""
    views = [memoryview(frame).cast("B") for frame in frames]
    prelude = struct.pack(f"<I{len(views)}Q", len(views), *(view.nbytes for view in views))
    pieces: list[Frame] = [prelude]
    room = CHUNK_BYTES
    for view in views:
        while view.nbytes > room:
            yield b"".join([*pieces, view[:room]])
            view, pieces, room = view[room:], [], CHUNK_BYTES
        pieces.append(view)
        room -= view.nbytes
    if pieces:
        yield b"".join(pieces)


class Reader:
    """Puts the packets of one stream together; each frame is a buffer of its own.

    frames: of the packet that is coming.
    """

    def __init__(self, max_packet_bytes: int) -> None:
        self._max_bytes = max_packet_bytes
        self.frames: list[Frame] = []
        self._unfilled: list[memoryview] = []  # the rest of each frame that is to come

    def feed(self, chunk: bytes) -> list[Frame] | None:
        """Return the packet that this message completes, or None. Raises Malformed."""
        rest = memoryview(chunk)
        if not self._unfilled:
            rest = self._begin(rest)
        elif not chunk:
            self.end()
        while self._unfilled and rest.nbytes:
            target = self._unfilled[0]
            size = min(target.nbytes, rest.nbytes)
            target[:size] = rest[:size]
            rest = rest[size:]
            if size < target.nbytes:
                self._unfilled[0] = target[size:]
            else:
                del self._unfilled[0]
        if self._unfilled:
            return None
        if rest.nbytes:
            raise Malformed(f"{rest.nbytes} bytes more than a message has")
        frames, self.frames = self.frames, []
        return frames

    def end(self) -> None:
        """Raises Malformed if the stream ends within a packet."""
        if self._unfilled:
            raise Malformed("the stream ends within a message")

    def _begin(self, chunk: memoryview) -> memoryview:
        """Read the prelude; return what follows."""
        try:
            (number,) = struct.unpack_from("<I", chunk)
            if number > MAX_FRAMES:
                raise Malformed(f"a message of {number} frames; at most {MAX_FRAMES} are taken")
            sizes = struct.unpack_from(f"<{number}Q", chunk, 4)
        except struct.error:
            raise Malformed("a message without its prelude") from None
        if sum(sizes) > self._max_bytes:
            raise Malformed(f"a message of {sum(sizes)} bytes; at most {self._max_bytes} are taken")
        # Not bytearrays: memory for what is announced is used only when it comes.
        self.frames = [spare.take(size).data for size in sizes]
        self._unfilled = [memoryview(frame) for frame in self.frames if len(frame)]
        return chunk[4 + 8 * number :]
