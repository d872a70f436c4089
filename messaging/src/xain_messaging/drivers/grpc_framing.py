"""Packets in a gRPC stream of bytes.

A packet is a prelude and its frames, one after another, in messages of at most CHUNK_BYTES:

    number of frames    4 bytes, unsigned, little-endian
    size of each        8 bytes each
    the frames

The next packet begins with a message of its own. There is no protobuf in the stream: protobuf would
copy every array twice more at each end.
"""

import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from itertools import chain
from typing import Final

import numpy as np

from xain_foundation.spare import spare
from xain_messaging.errors import MalformedMessage
from xain_messaging.format.codec import MAX_FRAMES, Frame, Frames

# Each message costs some hand-overs between threads at both ends, whatever its size.
CHUNK_BYTES: Final = 2 << 20
# Bytes of the largest message: a chunk, and the prelude before it.
MAX_CHUNK_BYTES: Final = CHUNK_BYTES + 8 * MAX_FRAMES + 64

_ONE_FRAME: Final = struct.Struct("<IQ")  # the prelude of a packet without arrays
_ONE_FRAME_BYTES: Final = _ONE_FRAME.size


# Nearly all packets are one frame in one message. They have a path of their own: between changes of
# threads a few lines of Python take ten times as long as in a loop.


def to_chunks(frames: Frames) -> Iterator[bytes]:
    """Encode a packet as gRPC messages of CHUNK_BYTES at most, the sizes of the frames first."""
    if len(frames) == 1 and type(frames[0]) is bytes and len(frames[0]) <= CHUNK_BYTES:
        return iter((_ONE_FRAME.pack(1, len(frames[0])) + frames[0],))
    sizes = [frame.nbytes if isinstance(frame, memoryview) else len(frame) for frame in frames]
    prelude = struct.pack(f"<I{len(sizes)}Q", len(sizes), *sizes)
    if sum(sizes) <= CHUNK_BYTES:
        return iter((b"".join((prelude, *frames)),))
    return _cut(prelude, frames)


def _cut(prelude: bytes, frames: Frames) -> Iterator[bytes]:
    pieces: list[Frame] = [prelude]
    room = CHUNK_BYTES
    for frame in frames:
        view = memoryview(frame).cast("B")
        while view.nbytes > room:
            yield b"".join([*pieces, view[:room]])
            view, pieces, room = view[room:], [], CHUNK_BYTES
        pieces.append(view)
        room -= view.nbytes
    yield b"".join(pieces)


def packets(
    chunks: Iterator[bytes],
    max_packet_bytes: int,
    reserved: Callable[[int], AbstractContextManager[None]],
) -> Iterator[list[Frame]]:
    """Yield the packets of one stream. Each frame after the first is a buffer of its own that can
    be written to.

    reserved: called with the size of a packet that is not whole in its first message; holds memory
        for the packet until the next one is asked for.
    Raises MalformedMessage.
    """
    for chunk in chunks:
        is_short = _ONE_FRAME_BYTES <= len(chunk) <= max_packet_bytes
        if is_short and _ONE_FRAME.unpack_from(chunk) == (1, len(chunk) - _ONE_FRAME_BYTES):
            yield [chunk[_ONE_FRAME_BYTES:]]
            del chunk  # the next may be long in coming
            continue
        try:
            (number,) = struct.unpack_from("<I", chunk)
            if number > MAX_FRAMES:
                raise MalformedMessage(
                    f"a message of {number} frames; at most {MAX_FRAMES} are taken"
                )
            sizes = struct.unpack_from(f"<{number}Q", chunk, 4)
        except struct.error:
            raise MalformedMessage("a message without its prelude") from None
        size = sum(sizes)
        if size > max_packet_bytes:
            raise MalformedMessage(
                f"a message of {size} bytes; at most {max_packet_bytes} are taken"
            )
        begin = 4 + 8 * number
        if begin + size <= len(chunk):
            _require_end(len(chunk) - begin - size)
            yield _split(chunk, begin, sizes)
            del chunk
        else:
            first: Iterator[bytes | memoryview] = iter((memoryview(chunk)[begin:],))
            pieces = chain(first, chunks)
            del chunk
            with reserved(size):
                yield _put_together(pieces, sizes)


def _split(chunk: bytes, begin: int, sizes: Sequence[int]) -> list[Frame]:
    """Return the frames of a packet that is whole in one message."""
    frames: list[Frame] = []
    for size in sizes:
        end = begin + size
        if frames:
            frames.append(spare.copy(np.frombuffer(chunk, np.uint8)[begin:end]).data)
        else:
            frames.append(chunk[begin:end])
        begin = end
    return frames


def _put_together(pieces: Iterator[bytes | memoryview], sizes: Sequence[int]) -> list[Frame]:
    """Return the frames of a packet that is in several messages."""
    # Not bytearrays: memory for what is announced is used only when it comes.
    frames: list[Frame] = [spare.take(size).data for size in sizes]
    # Copied by numpy, which lets other threads go on meanwhile.
    piece = np.frombuffer(next(pieces), np.uint8)
    for frame in frames:
        unfilled = np.frombuffer(frame, np.uint8)
        while unfilled.size:
            if not piece.size:
                piece = np.frombuffer(next(pieces, b""), np.uint8)
                if not piece.size:
                    raise MalformedMessage("the stream ends within a message")
            size = min(unfilled.size, piece.size)
            unfilled[:size] = piece[:size]
            unfilled, piece = unfilled[size:], piece[size:]
    _require_end(piece.size)
    return frames


def _require_end(num_left: int) -> None:
    if num_left:
        raise MalformedMessage(f"{num_left} bytes more than a message has")
