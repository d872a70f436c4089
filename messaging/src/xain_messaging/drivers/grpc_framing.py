"""A stream of bytes for packets, and what comes out of one.

A packet is a prelude and its frames, one after another, in messages of at most CHUNK_BYTES:

    number of frames    4 bytes, unsigned, little-endian
    size of each        8 bytes each
    the frames

The next packet begins with a message of its own. There is no protobuf in it: that would copy every
array twice more at each end.
"""

import struct
from collections.abc import Iterator
from typing import Final

from xain_messaging.codec import MAX_FRAMES, Frame, Frames
from xain_messaging.spare import spare

# Each costs some hand-overs between threads at both ends, whatever its size.
CHUNK_BYTES: Final = 2 << 20
# Of a message: a chunk, and the prelude before it.
MAX_CHUNK_BYTES: Final = CHUNK_BYTES + 8 * MAX_FRAMES + 64


class Malformed(Exception):
    """A stream that is none of ours."""


def to_chunks(frames: Frames) -> Iterator[bytes]:
    """One packet."""
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


def from_chunks(chunks: Iterator[bytes], max_packet_bytes: int) -> Iterator[list[Frame]]:
    """The packets of a stream; each frame is a buffer of its own. Raises Malformed."""
    # Without variables: nobody here has what was read while the next is awaited.
    return iter(lambda: _read_packet(chunks, max_packet_bytes), None)


def _read_packet(chunks: Iterator[bytes], max_packet_bytes: int) -> list[Frame] | None:
    """None at the end of the stream."""
    chunk = next(chunks, None)
    if chunk is None:
        return None
    sizes, rest = _read_prelude(chunk, max_packet_bytes)
    # Not bytearrays: what is announced takes memory only when it comes.
    frames: list[Frame] = [spare.take(size).data for size in sizes]
    for frame in frames:
        target = memoryview(frame)
        while target.nbytes:
            if not rest.nbytes:
                rest = memoryview(next(chunks, b""))
                if not rest.nbytes:
                    raise Malformed("the stream ends within a message")
            size = min(target.nbytes, rest.nbytes)
            target[:size] = rest[:size]
            target, rest = target[size:], rest[size:]
    if rest.nbytes:
        raise Malformed(f"{rest.nbytes} bytes more than a message has")
    return frames


def _read_prelude(chunk: bytes, max_packet_bytes: int) -> tuple[tuple[int, ...], memoryview]:
    try:
        (number,) = struct.unpack_from("<I", chunk)
        if number > MAX_FRAMES:
            raise Malformed(f"a message of {number} frames; at most {MAX_FRAMES} are taken")
        sizes = struct.unpack_from(f"<{number}Q", chunk, 4)
    except struct.error:
        raise Malformed("a message without its prelude") from None
    if sum(sizes) > max_packet_bytes:
        raise Malformed(f"a message of {sum(sizes)} bytes; at most {max_packet_bytes} are taken")
    return sizes, memoryview(chunk)[4 + 8 * number :]
