"""Messages as bytes: an envelope, and the arrays of the body as they lie in memory.

    frames = [envelope, array, array, ...]

The envelope is msgpack, encoded with the head of its packet if it is small and plain, see parts(),
and by itself otherwise: a list of the format's version, tag, session id, message id, the number of
its stage (None for a message that has none), and the body. In the body an array is an extension of
type 1, which holds the number of its frame, its dtype and its shape; an array of up to 1 KiB lies
in the extension itself, and so does each that is beyond the first 4,095. Who sent the message, and
to whom, the connection tells.

Nothing is pickled, so nothing that comes is run. What msgpack has no words for is refused at the
sender: sets, objects, dates, integers beyond 64 bits, arrays of objects, and arrays that are more
than their elements, as masked ones are. So are msgpack's own ExtType and Timestamp.

A tuple comes out as a list, a numpy scalar as a number, a bytearray as bytes, and an array in
C order and the machine's byte order, of the same dtype and shape. An array that came is writable,
and nobody else's.
"""

import math
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain
from typing import Any, Final, TypeAlias

import msgpack
import numpy as np
from numpy.typing import NDArray

from xain_foundation.spare import spare
from xain_messaging.errors import InvalidMessage, MalformedMessage
from xain_messaging.format.messages import STAGES, Body, Message, SessionMessage, SessionStage

VERSION: Final = 1
MAX_DEPTH = 500  # of lists and maps in each other; msgpack goes no deeper than 511
MAX_NDIM = 32
MAX_ID = 256  # characters of the id of a message or a session
BUFFER_BYTES = 2048  # of msgpack for an envelope, which grows; by default it takes 256 KiB for each
SMALL_ARRAY_BYTES = 1024  # what is smaller costs more as a frame of its own
MAX_FRAMES = 4096  # with the envelope, which takes care of further arrays
MAX_MESSAGE_BYTES = 8 << 30
MAX_ENVELOPE_BYTES = (4 << 30) - 1  # what msgpack takes as one piece, see links.py

Frame: TypeAlias = bytes | bytearray | memoryview
Frames: TypeAlias = Sequence[Frame]
Plain: TypeAlias = tuple[Any, ...] | list[Any]  # an envelope that is not encoded by itself
Parts: TypeAlias = Sequence[Frame | Plain]
MAX_PLAIN = 4096  # elements of text or bytes in such an envelope
PLAIN_BYTES = 100  # in such an envelope beside them: ids and a tag

_ARRAY: Final = 1
# As they travel: the number of a stage among those of all types.
_STAGES: Final = dict(
    enumerate((kind, stage) for kind, stages in STAGES.items() for stage in stages)
)
_NUMBERS: Final[dict[SessionStage | None, int]] = {
    stage: number for number, (_, stage) in _STAGES.items()
}
_KINDS: Final = "biufc"  # of dtypes: truth values, integers, floats, complex numbers
_ARRAYS: Final = (np.ndarray, np.memmap)  # but no other subclass: what it adds would be lost
_FOREIGN: Final = frozenset({msgpack.ExtType, msgpack.Timestamp})
_EXTENSIONS: Final = bytes([0xC7, 0xC8, 0xC9, *range(0xD4, 0xD9)])  # bytes that one begins with
_SCALAR_KINDS: Final = "biuf"  # msgpack has no complex numbers
_PLAIN: Final = frozenset({type(None), bool, int, float, str, bytes})
_SIZED: Final = frozenset({str, bytes})
_ENVELOPES: Final = (tuple, list)


# --- to bytes -------------------------------------------------------------------------------------


def parts(message: Message) -> Parts:
    """The frames of a message. The envelope of a small one, whose body is a value that cannot
    change, is not encoded: that costs less for all of a packet at once.

    Raises InvalidMessage as encode() does.
    """
    body, session_id, message_id = message.body, message.session_id, message.message_id
    kind = type(body)
    if kind in _SIZED:
        is_small = len(body) <= MAX_PLAIN and (kind is bytes or body.isascii())
    else:
        is_small = body is None or kind is float or kind is bool
    if is_small and type(session_id) is type(message_id) is str:
        ids = session_id + message_id
        if len(ids) <= MAX_ID and ids.isascii():
            return (_envelope(message),)
    return encode(message)  # which refuses what cannot be sent before it is kept


def _envelope(message: Message) -> tuple[Any, ...]:
    stage = _NUMBERS[message.session_stage] if isinstance(message, SessionMessage) else None
    return (VERSION, message.tag, message.session_id, message.message_id, stage, message.body)


def encode(message: Message) -> list[Frame]:
    """The frames of a message. The second and further are views on its arrays: see snapshot().

    Raises InvalidMessage with the path in the body.
    """
    packing = _Packing()
    try:
        packing.frames[0] = msgpack.packb(
            list(_envelope(message)),
            default=packing.pack_other,
            strict_types=True,
            buf_size=BUFFER_BYTES,
        )
    except (TypeError, ValueError, OverflowError, RecursionError, BufferError) as error:
        for path, why in _faults(message.body, "body", 0):
            raise InvalidMessage(f"{path} cannot be sent: {why}") from None
        raise InvalidMessage(f"the body cannot be sent: {error}") from error
    frames = packing.frames
    # As a key, a tuple goes out, and no receiver can read it.
    if packing.has_tuples or _has_foreign(message.body, frames[0]):
        for path, why in _faults(message.body, "body", 0):
            raise InvalidMessage(f"{path} cannot be sent: {why}")
    if (size := len(frames[0])) > MAX_ENVELOPE_BYTES:
        raise InvalidMessage(
            f"a body of {size} bytes beside its arrays; at most {MAX_ENVELOPE_BYTES} travel at once"
        )
    if len(frames) > 1 and (size := num_bytes(frames)) > MAX_MESSAGE_BYTES:
        raise InvalidMessage(f"a body of {size} bytes; at most {MAX_MESSAGE_BYTES} travel at once")
    return frames


class _Packing:
    """Encode a value that msgpack does not know; msgpack calls this for each."""

    __slots__ = ("frames", "has_tuples")

    def __init__(self) -> None:
        self.frames: list[Frame] = [b""]
        self.has_tuples = False

    def pack_other(self, value: object) -> object:
        """Pack a value that MessagePack does not know: an array, a number of NumPy, a tuple, or one
        of a class of its own."""
        match value:
            case np.ndarray():
                return _pack_array(value, self.frames)
            case np.generic() if _is_number(value):
                return value.item()
            case tuple():
                self.has_tuples = True
                return list(value)
            # What is of a class of its own, as members of an Enum are, counts as what it is.
            case int():
                return int(value)
            case float():
                return float(value)
            case str():
                return str.__str__(value)
            case bytes():
                return bytes(value)
            case list():
                return list(value)
            case dict():
                return dict(value)
        raise TypeError


def snapshot(frames: Parts) -> Parts:
    """Copy frames, so that they no longer change when the sender goes on with its arrays. A
    read-only array is taken at its word and not copied."""
    return [
        spare.copy(np.frombuffer(frame, np.uint8)).data
        if isinstance(frame, memoryview) and not frame.readonly
        else frame
        for frame in frames
    ]


def num_bytes(frames: Parts) -> int:
    """Return the size of all frames together, roughly if the envelope is not encoded."""
    size = 0
    for frame in frames:
        if type(frame) is bytes:
            size += len(frame)
        elif isinstance(frame, _ENVELOPES):
            body = frame[-1]
            size += PLAIN_BYTES + (len(body) if type(body) in _SIZED else 0)
        else:
            size += frame.nbytes if isinstance(frame, memoryview) else len(frame)
    return size


def _pack_array(array: NDArray[Any], frames: list[Frame]) -> msgpack.ExtType:
    """Pack an array: a small one whole, else its dtype and shape and the number of its frame."""
    if _why_not(array):
        raise TypeError
    plain = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
    is_small = plain.nbytes <= SMALL_ARRAY_BYTES or len(frames) >= MAX_FRAMES
    inside = plain.tobytes() if is_small else None
    if inside is None:
        # A view of bytes: of an empty array there is none, but that one is small.
        frames.append(plain.reshape(-1).view(np.uint8).data)
    number = 0 if inside is not None else len(frames) - 1
    return msgpack.ExtType(_ARRAY, msgpack.packb([number, plain.dtype.str, array.shape, inside]))


def _why_not(array: NDArray[Any]) -> str | None:
    """Say why an array cannot be sent; None if it can."""
    if array.dtype.kind not in _KINDS:
        return f"an array of dtype {array.dtype} is not one of plain numbers"
    if array.ndim > MAX_NDIM:
        return f"an array of {array.ndim} axes; at most {MAX_NDIM} travel"
    if type(array) not in _ARRAYS:
        kind = type(array).__name__
        return f"a {kind} is more than its elements; send what it holds, as plain arrays"
    return None


def _is_number(scalar: np.generic) -> bool:
    """Whether a numpy scalar has a Python number; one of more than 64 bits has none."""
    return scalar.dtype.kind in _SCALAR_KINDS and scalar.itemsize <= 8


def _can_be_key(value: object) -> bool:
    if isinstance(value, np.generic) and not isinstance(value, str | bytes):
        return _is_number(value)
    return isinstance(value, str | int | float | bytes | memoryview | None)


def _has_foreign(body: object, envelope: Frame) -> bool:
    """Whether a body that has been packed holds values of msgpack's own types."""
    if type(body) in _PLAIN:
        return False
    is_short = len(envelope) <= SMALL_ARRAY_BYTES
    if is_short and len(bytes(envelope).translate(None, _EXTENSIONS)) == len(envelope):
        return False
    level: list[Any] = [body]
    while level:  # all of one depth at once
        kinds = set(map(type, level))
        if kinds & _FOREIGN:
            return True
        lists = tuple(kind for kind in kinds if issubclass(kind, list | tuple))
        maps = tuple(kind for kind in kinds if issubclass(kind, dict))
        inner: list[Any] = [item for item in level if isinstance(item, lists)] if lists else []
        for item in level if maps else ():
            if isinstance(item, maps):
                inner += (item, item.values())
        level = list(chain.from_iterable(inner))
    return False


def _faults(value: object, path: str, depth: int) -> Iterator[tuple[str, str]]:
    """Find the values that cannot be sent, with their paths. Slow: only for a body that failed."""
    if depth > MAX_DEPTH:
        yield path, f"it lies more than {MAX_DEPTH} lists or maps deep"
        return
    match value:
        case memoryview():
            if not value.c_contiguous:
                yield path, "the view is not contiguous; send bytes(view)"
        case None | bool() | float() | bytes() | bytearray():
            return
        case np.generic() if not isinstance(value, str):
            if not _is_number(value):
                yield path, f"a scalar of dtype {value.dtype} is none; put it into an array"
        case int():
            if not -(2**63) <= value < 2**64:
                yield path, "an integer must fit into 64 bits"
        case str():
            try:
                value.encode()
            except UnicodeEncodeError:
                yield path, "the text is not Unicode: it has a lone surrogate"
        case msgpack.ExtType() | msgpack.Timestamp():
            yield path, f"{type(value).__name__} is none of the types that travel"
        case list() | tuple():
            for i, item in enumerate(value):
                yield from _faults(item, f"{path}[{i}]", depth + 1)
        case dict():
            for key, item in value.items():
                if not _can_be_key(key):
                    yield path, f"a key must be text, bytes or a number, not {key!r:.40}"
                yield from _faults(item, f"{path}[{key!r:.40}]", depth + 1)
        case np.ndarray():
            if why := _why_not(value):
                yield path, why
        case _:
            yield path, f"{type(value).__name__} is none of the types that travel"


# --- from bytes -----------------------------------------------------------------------------------


def decode(frames: Parts, source: str, destination: str) -> Message:
    """The message of these frames; its arrays are views on them, writable if they are.

    Raises MalformedMessage, whatever the bytes are.
    """
    if not frames:
        raise MalformedMessage("a message has at least one frame")
    envelope = frames[0]
    try:
        if isinstance(envelope, _ENVELOPES):
            if type(envelope[-1]) not in _PLAIN:
                raise MalformedMessage(f"an envelope in a head has the body {envelope[-1]!r:.40}")
        else:
            hook = partial(_unpack_array, frames)
            envelope = msgpack.unpackb(envelope, ext_hook=hook, strict_map_key=False)
        version, tag, session_id, message_id, stage, body = envelope
        if version != VERSION:
            raise MalformedMessage(f"version {version} of the format; this peer reads {VERSION}")
        if not type(session_id) is type(message_id) is str:
            raise MalformedMessage("an id is no text")
        if len(session_id) > MAX_ID or len(message_id) > MAX_ID:
            raise MalformedMessage(f"an id of more than {MAX_ID} characters")
        if stage is None:
            return Message(
                tag, source, destination, body, session_id=session_id, message_id=message_id
            )
        kind, at = _STAGES[stage]
        return SessionMessage(
            tag, source, destination, body, kind, at, session_id=session_id, message_id=message_id
        )
    except MalformedMessage:
        raise
    except Exception as error:  # whatever bytes lead msgpack, numpy and us to
        raise MalformedMessage(f"not a message: {error!r:.200}") from error


def _unpack_array(frames: Sequence[Any], code: int, data: bytes) -> Body:
    """Make an array of a packed one; a large one is a view of its frame."""
    if code != _ARRAY:
        raise MalformedMessage(f"extension {code} is not known")
    number, dtype_text, shape, inside = msgpack.unpackb(data)
    if type(dtype_text) is not str or len(dtype_text) > MAX_ID:
        raise MalformedMessage("a dtype is no short text")
    dtype = np.dtype(dtype_text)
    if dtype.kind not in _KINDS or dtype.str != dtype_text or len(shape) > MAX_NDIM:
        raise MalformedMessage(f"no array of plain numbers: dtype {dtype_text!r:.40}")
    if any(type(length) is not int or length < 0 for length in shape):
        raise MalformedMessage(f"no shape of an array: {shape!r:.80}")
    buffer = bytearray(inside) if inside is not None else frames[number]
    size_bytes = math.prod(shape) * dtype.itemsize
    has_bytes = memoryview(buffer).nbytes
    if size_bytes != has_bytes or (inside is None and number < 1):
        raise MalformedMessage(f"an array of {size_bytes} bytes comes with {has_bytes}")
    flat = np.frombuffer(buffer, dtype)
    return flat.astype(dtype.newbyteorder("="), copy=False).reshape(shape)
