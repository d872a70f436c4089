"""Frames of messages.py on a blocking socket. No number is copied on its way.

A message is sent as a list of pieces: its head, its keys and its values, as they lie in memory. It
is received through a small buffer, which takes many small messages with one call; the rest of a
large body goes from the socket to where it is needed.
"""

import socket
import struct
import sys
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Final, Protocol, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from xain_parameters.keys import Keys
from xain_parameters.messages import (
    MAX_BODY_BYTES,
    MAX_HEAD_BYTES,
    AnyHead,
    Entry,
    Head,
    Message,
    Pull,
    Push,
    Rows,
    Several,
    Tile,
    decode_head,
    encode_head,
)

Piece: TypeAlias = bytes | memoryview
# Chooses the memory for a body, given its head, number of keys and bytes of its values: as many
# bytes, or None for a buffer of the connection. Raises Malformed if the sender may not send it.
Destination: TypeAlias = Callable[[AnyHead, int, int], Sequence[memoryview] | None]

_SIZES: Final = struct.Struct("<IIQ")
_READ_BYTES: Final = 64 << 10  # as large as the largest head, and many small messages
_KEY_BYTES: Final = 8
MAX_PIECES: Final = 64  # in one system call
_MAY_HAVE_KEYS: Final = (Pull, Push, Several, Entry, Tile)
_MAY_HAVE_VALUES: Final = (Push, Several, Rows, Entry, Tile)


class Socket(Protocol):
    """A connected socket, or one with TLS around it; see tls.py.

    Methods raise BlockingIOError where the socket must not wait, or TLS has to wait for the other
    side.
    """

    def recv_into(self, buffer: memoryview, nbytes: int, flags: int, /) -> int: ...

    def sendmsg(
        self, pieces: Sequence[Piece], ancillary: tuple[()] = ..., flags: int = ..., /
    ) -> int: ...

    def sendall(self, piece: Piece, /) -> None: ...

    def settimeout(self, timeout_s: float | None, /) -> None: ...

    def shutdown(self, how: int, /) -> None: ...

    def fileno(self) -> int: ...

    def close(self) -> None: ...


class Malformed(Exception):
    """The bytes received are no message; nothing after them can be read."""


def pieces_of(message: Message) -> list[Piece]:
    """Return the bytes of a message in order. Its arrays must not change until they are sent."""
    head = encode_head(message.head)
    num_keys = num_bytes = 0
    pieces: list[Piece] = [b""]
    bodies = message.bodies or ((message.keys, message.values),)
    for keys, _ in bodies:
        if keys is not None and (size := len(keys)):
            num_keys += size
            pieces.append(bytes_of(keys))
    for _, values in bodies:
        if values is not None and (size := values.nbytes):
            num_bytes += size
            pieces.append(bytes_of(values))
    pieces[0] = _SIZES.pack(len(head), num_keys, num_bytes) + head
    return pieces


def bytes_of(array: NDArray[np.generic]) -> memoryview:
    return array.data.cast("B")  # raises TypeError unless it is C-contiguous


def _check_sections(several: Several, num_keys: int, num_bytes: int) -> None:
    sections = several.sections
    left_keys, left_bytes = num_keys, num_bytes
    is_wrong = not sections
    for each in sections:
        is_wrong |= each.num_keys < 0 or each.num_bytes < 0
        left_keys -= each.num_keys
        left_bytes -= each.num_bytes
    if is_wrong or left_keys or left_bytes:
        raise Malformed(
            f"{len(sections)} sections of other sizes than {num_keys} keys and {num_bytes} bytes"
        )


class Unsent:
    """Pieces that are sent in their order as the socket takes them."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._pieces: deque[Piece] = deque()

    def __bool__(self) -> bool:
        return bool(self._pieces)

    def add(self, pieces: Iterable[Piece]) -> None:
        """Queue pieces, whose arrays must not change until they have gone."""
        for piece in pieces:
            self._pieces.append(piece)
            self.num_bytes += len(piece)

    def send(self, connection: Socket, flags: int = 0) -> None:
        """Send all. Raises BlockingIOError when the socket takes no more, and OSError."""
        pieces = self._pieces
        while pieces:
            some = pieces if len(pieces) <= MAX_PIECES else islice(pieces, MAX_PIECES)
            self._drop_sent(connection.sendmsg([*some], (), flags))

    def clear(self) -> None:
        self._pieces.clear()
        self.num_bytes = 0

    def _drop_sent(self, num_bytes: int) -> None:
        pieces = self._pieces
        self.num_bytes -= num_bytes
        if not self.num_bytes:  # most often
            pieces.clear()
            return
        while pieces and num_bytes >= len(pieces[0]):
            num_bytes -= len(pieces.popleft())
        if num_bytes:
            pieces[0] = memoryview(pieces[0])[num_bytes:]


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
        """Return memory of a free buffer, (num_bytes,), not initialised. Raises MemoryError."""
        if num_bytes <= self.SMALL_BYTES:
            return np.empty(num_bytes, np.uint8)
        kept = self._kept
        # The buffer that was used last is most likely in the processor's cache.
        for index in reversed(range(len(kept))):
            # The list and the argument of getrefcount hold one reference each.
            if len(kept[index]) >= num_bytes and sys.getrefcount(kept[index]) == 2:
                kept.append(kept.pop(index))
                return kept[-1][:num_bytes]
        new = np.empty(num_bytes, np.uint8)
        kept.append(new)
        while len(kept) > self.NUM_KEPT or sum(map(len, kept)) > self.KEPT_BYTES:
            del kept[0]
        return new[:]


class Receiver:
    """Receives the messages of one socket, in one thread at a time.

    before_wait: called before the socket is asked for more.
    destination: the memory for bodies. Arrays in a buffer of the connection belong to the owner of
    the message until they are dropped.
    Each section of a large Several is received as a message of its own, so that the server works on
    it while the values of the next ones arrive.
    """

    def __init__(
        self,
        connection: Socket,
        destination: Destination | None = None,
        max_body_bytes: int = MAX_BODY_BYTES,
    ) -> None:
        self._socket = connection
        self.destination = destination
        self.before_wait: Callable[[], None] | None = None
        self._max_body_bytes = max_body_bytes
        self._buffers = Buffers()
        self._read = memoryview(bytearray(_SIZES.size + max(MAX_HEAD_BYTES, _READ_BYTES)))
        self._start = self._stop = 0  # bytes in self._read that are not used yet
        self._message: Message | None = None  # the message whose body is being received
        self._missing: deque[memoryview] = deque()  # memory that the rest of its body goes to
        self._several: Several | None = None  # the request whose sections are being received
        self._next_section = 0
        self._keys: Keys | None = None  # of all sections
        self._next_key = 0

    @property
    def has_more(self) -> bool:
        """Whether a part of the next message has been received."""
        return self._start < self._stop or self._several is not None

    def receive(self) -> Message:
        """The next message. Raises EOFError, Malformed, or OSError; all of them end the connection,
        but for BlockingIOError of a socket that does not wait: then call it again later."""
        message = self._message
        if message is None:
            message = self._message = self._begin()
        missing = self._missing
        while missing:
            count = self._receive_into(missing[0], socket.MSG_WAITALL)
            if not count:
                raise Malformed("the connection ended within a message")
            if count < len(missing[0]):
                missing[0] = missing[0][count:]
            else:
                missing.popleft()
        self._message = None
        return message

    def _begin(self) -> Message:
        """The next message, of whose body only that part is there which came with its head."""
        if self._several is not None:
            return self._section(self._several)
        if self._stop - self._start < _SIZES.size:
            self._fill(_SIZES.size)
        head_bytes, num_keys, num_bytes = _SIZES.unpack_from(self._read, self._start)
        if head_bytes > MAX_HEAD_BYTES:
            raise Malformed(f"a head of {head_bytes} bytes; at most {MAX_HEAD_BYTES} are allowed")
        if num_bytes + _KEY_BYTES * num_keys > self._max_body_bytes:
            raise Malformed(
                f"a body of {num_keys} keys and {num_bytes} bytes of values; at most "
                f"{self._max_body_bytes} bytes are allowed"
            )
        if self._stop - self._start < _SIZES.size + head_bytes:
            self._fill(_SIZES.size + head_bytes)
        begin = self._start + _SIZES.size
        try:
            head = decode_head(self._read[begin : begin + head_bytes])
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise Malformed(f"a head that is none: {error}") from None
        self._start = begin + head_bytes
        if num_keys and not isinstance(head, _MAY_HAVE_KEYS):
            raise Malformed(f"{type(head).__name__} has no keys, and these came with {num_keys}")
        if num_bytes and not isinstance(head, _MAY_HAVE_VALUES):
            raise Malformed(f"{type(head).__name__} has no values, and {num_bytes} bytes came")
        choose = self.destination
        memories = None if choose is None else choose(head, num_keys, num_bytes)
        if isinstance(head, Several):
            _check_sections(head, num_keys, num_bytes)
            if _KEY_BYTES * num_keys + num_bytes <= Buffers.SMALL_BYTES:
                return self._with_body(head, num_keys, num_bytes)
            self._several, self._next_section = head, 0
            self._keys, self._next_key = self._with_body(head, num_keys, 0).keys, 0
            return self._section(head)
        if memories is None:
            return self._with_body(head, num_keys, num_bytes)
        assert sum(map(len, memories)) == _KEY_BYTES * num_keys + num_bytes
        for memory in memories:
            self._await(memory)
        return Message(head)

    def _section(self, several: Several) -> Message:
        """Begin the message of the next section of a Several."""
        number = self._next_section
        section = several.sections[number]
        self._next_section += 1
        if self._next_section == len(several.sections):
            self._several = None
        message = self._with_body(several.part(number), 0, section.num_bytes)
        message.several = several
        if section.num_keys:
            assert self._keys is not None
            begin = self._next_key
            self._next_key += section.num_keys
            message.keys = self._keys[begin : self._next_key]
        if self._several is None:
            self._keys = None  # its buffer belongs to the messages from now on
        return message

    def _with_body(self, head: Head, num_keys: int, num_bytes: int) -> Message:
        """Begin a message whose body goes to a buffer of the connection."""
        if not num_keys and not num_bytes:
            return Message(head)
        num_key_bytes = _KEY_BYTES * num_keys
        try:
            body = self._buffers.take(num_key_bytes + num_bytes)
        except MemoryError:
            raise Malformed(f"no memory for a body of {num_key_bytes + num_bytes} bytes") from None
        self._await(body.data)
        return Message(
            head,
            body[:num_key_bytes].view(np.uint64) if num_keys else None,
            body[num_key_bytes:] if num_bytes else None,
        )

    def _await(self, memory: memoryview) -> None:
        """Copy the part of a body that has arrived to its memory, and await the rest."""
        have = min(len(memory), self._stop - self._start)
        memory[:have] = self._read[self._start : self._start + have]
        self._start += have
        if have < len(memory):
            self._missing.append(memory[have:])

    def _fill(self, num_bytes: int) -> None:
        """Receive until num_bytes of the next message are in the buffer."""
        while self._stop - self._start < num_bytes:
            if self._start == self._stop:
                self._start = self._stop = 0
            elif len(self._read) - self._start < num_bytes:
                left = self._stop - self._start
                self._read[:left] = bytes(self._read[self._start : self._stop])
                self._start, self._stop = 0, left
            count = self._receive_into(self._read[self._stop :])
            if not count:
                if self._start == self._stop:
                    raise EOFError
                raise Malformed("the connection ended within a message")
            self._stop += count

    def _receive_into(self, memory: memoryview, flags: int = 0) -> int:
        if self.before_wait is not None:
            self.before_wait()
        return self._socket.recv_into(memory, 0, flags)
