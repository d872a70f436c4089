"""Frames of messages.py on a blocking socket. No number is copied on its way.

A message is sent as a list of pieces: its head, its keys and its values, as they lie in memory. It
is received through a small buffer, which takes many small messages with one call; the rest of a
large body goes from the socket to where it is needed.
"""

import socket
import struct
import sys
from collections.abc import Callable
from typing import Final, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from xain_parameters.messages import (
    MAX_BODY_BYTES,
    MAX_HEAD_BYTES,
    AnyHead,
    Entry,
    Message,
    Pull,
    Push,
    Rows,
    Tile,
    decode_head,
    encode_head,
)

Piece: TypeAlias = bytes | memoryview
# Where a body goes, given its head, number of keys and bytes of its values: as many bytes of
# memory, or None for a buffer of the connection. Raises Malformed if the sender may not send it.
Place: TypeAlias = Callable[[AnyHead, int, int], memoryview | None]

_SIZES: Final = struct.Struct("<IIQ")
_READ_BYTES: Final = 64 << 10  # as large as the largest head, and many small messages
_KEY_BYTES: Final = 8
_MAY_HAVE_KEYS: Final = (Pull, Push, Entry, Tile)
_MAY_HAVE_VALUES: Final = (Push, Rows, Entry, Tile)


class Malformed(Exception):
    """What was received is no message; nothing after it can be read."""


class HungUp(Exception):
    """The other side has closed the connection between two messages."""


def pieces_of(message: Message) -> list[Piece]:
    """What goes over the wire, in its order. The arrays must not change until it is sent."""
    head = encode_head(message.head)
    keys, values = message.keys, message.values
    num_keys = 0 if keys is None else len(keys)
    num_bytes = 0 if values is None else values.nbytes
    pieces: list[Piece] = [_SIZES.pack(len(head), num_keys, num_bytes) + head]
    if keys is not None and num_keys:
        pieces.append(_bytes_of(keys))
    if values is not None and num_bytes:
        pieces.append(_bytes_of(values))
    return pieces


def _bytes_of(array: NDArray[np.generic]) -> memoryview:
    assert array.flags.c_contiguous
    return array.reshape(-1).view(np.uint8).data


def after(pieces: list[Piece], num_bytes: int) -> list[Piece]:
    """What remains of the pieces when so many bytes have been sent."""
    for index, piece in enumerate(pieces):
        if num_bytes < len(piece):
            return [memoryview(piece)[num_bytes:], *pieces[index + 1 :]]
        num_bytes -= len(piece)
    return []


class Buffers:
    """Memory for large bodies, used again as soon as no array in it is in use any more.

    Fresh memory costs a page fault every 4 KiB, which is a third of the time of receiving it. A
    buffer is known to be free by its reference count: every array that lies in it holds one.
    """

    NUM_KEPT: Final = 256  # a server keeps its latest entries of each range in use
    KEPT_BYTES: Final = 256 << 20
    SMALL_BYTES: Final = 32 << 10  # malloc has these at hand

    def __init__(self) -> None:
        self._kept: list[NDArray[np.uint8]] = []

    def take(self, num_bytes: int) -> NDArray[np.uint8]:
        """(num_bytes,), not initialised. Raises MemoryError."""
        if num_bytes <= self.SMALL_BYTES:
            return np.empty(num_bytes, np.uint8)
        kept = self._kept
        # The one used last is the likeliest to be in the processor's cache.
        for index in reversed(range(len(kept))):
            # The list and the argument of getrefcount have one each.
            if len(kept[index]) >= num_bytes and sys.getrefcount(kept[index]) == 2:
                kept.append(kept.pop(index))
                return kept[-1][:num_bytes]
        new = np.empty(num_bytes, np.uint8)
        kept.append(new)
        while len(kept) > self.NUM_KEPT or sum(map(len, kept)) > self.KEPT_BYTES:
            del kept[0]
        return new[:]


class Receiver:
    """Receives the messages of one socket, in one thread.

    Arrays of a message that no `place` was given for are its owner's until they are dropped.
    """

    def __init__(
        self,
        connection: socket.socket,
        place: Place | None = None,
        max_body_bytes: int = MAX_BODY_BYTES,
    ) -> None:
        self._socket = connection
        self.place = place
        self._max_body_bytes = max_body_bytes
        self._buffers = Buffers()
        self._read = memoryview(bytearray(_SIZES.size + max(MAX_HEAD_BYTES, _READ_BYTES)))
        self._start = self._stop = 0  # of what is read and not yet used

    def receive(self) -> Message:
        """Raises HungUp, Malformed, or OSError; all of them end the connection."""
        self._fill(_SIZES.size, at_begin=True)
        head_bytes, num_keys, num_bytes = _SIZES.unpack_from(self._read, self._start)
        if head_bytes > MAX_HEAD_BYTES:
            raise Malformed(f"a head of {head_bytes} bytes; at most {MAX_HEAD_BYTES} are allowed")
        if num_bytes + _KEY_BYTES * num_keys > self._max_body_bytes:
            raise Malformed(
                f"a body of {num_keys} keys and {num_bytes} bytes of values; at most "
                f"{self._max_body_bytes} bytes are allowed"
            )
        self._start += _SIZES.size
        self._fill(head_bytes)
        try:
            head = decode_head(self._read[self._start : self._start + head_bytes])
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise Malformed(f"a head that is none: {error}") from None
        self._start += head_bytes
        if num_keys and not isinstance(head, _MAY_HAVE_KEYS):
            raise Malformed(f"{type(head).__name__} has no keys, and these came with {num_keys}")
        if num_bytes and not isinstance(head, _MAY_HAVE_VALUES):
            raise Malformed(f"{type(head).__name__} has no values, and {num_bytes} bytes came")
        return self._with_body(head, num_keys, num_bytes)

    def _with_body(self, head: AnyHead, num_keys: int, num_bytes: int) -> Message:
        place = None if self.place is None else self.place(head, num_keys, num_bytes)
        if not num_keys and not num_bytes:
            return Message(head)
        num_key_bytes = _KEY_BYTES * num_keys
        if place is not None:
            body: NDArray[np.uint8] = np.frombuffer(place, np.uint8)
            assert len(body) == num_key_bytes + num_bytes
        else:
            try:
                body = self._buffers.take(num_key_bytes + num_bytes)
            except MemoryError:
                raise Malformed(
                    f"no memory for a body of {num_key_bytes + num_bytes} bytes"
                ) from None
        self._fill_body(body.data)
        return Message(
            head,
            body[:num_key_bytes].view(np.uint64) if num_keys else None,
            body[num_key_bytes:] if num_bytes else None,
        )

    def _fill(self, num_bytes: int, *, at_begin: bool = False) -> None:
        """Have num_bytes more of a head in the buffer."""
        while self._stop - self._start < num_bytes:
            if self._start == self._stop:
                self._start = self._stop = 0
            elif len(self._read) - self._start < num_bytes:
                left = self._stop - self._start
                self._read[:left] = bytes(self._read[self._start : self._stop])
                self._start, self._stop = 0, left
            count = self._socket.recv_into(self._read[self._stop :])
            if not count:
                if at_begin and self._start == self._stop:
                    raise HungUp
                raise Malformed("the connection ended within a message")
            self._stop += count

    def _fill_body(self, body: memoryview) -> None:
        have = min(len(body), self._stop - self._start)
        body[:have] = self._read[self._start : self._start + have]
        self._start += have
        while have < len(body):
            count = self._socket.recv_into(body[have:], 0, socket.MSG_WAITALL)
            if not count:
                raise Malformed("the connection ended within a message")
            have += count
