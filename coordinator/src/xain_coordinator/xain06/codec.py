"""Pickles of plain arrays: reading them without unpickling, and writing them.

A pickle is a program. Python's own unpickler runs it, and no list of allowed names makes that safe
for what comes from outside: the calls that are left take arguments of the sender's choice, and
memory is reserved for whatever lengths are claimed. So this is a stack machine of our own, which
knows only the opcodes that Python writes for an array. What a pickle would call is a mere name
here; what the call would give is worked out, and only for the arguments that numpy gives. The
machine makes numbers, short texts and tuples of them. The elements of the array it finds, and
leaves where they are.

Read are the protocols 2 to 5, as Python 3 writes them with numpy 1 and 2.
"""

import codecs
import pickletools
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from math import prod
from typing import Any

import numpy as np

from xain_coordinator.ports import Reader
from xain_coordinator.stores.reading import CHUNK_BYTES

MAX_OPCODES = 256  # Python writes about 70 for a vector, and a few more for each dimension
MAX_SHORT_BYTES = 100  # what is longer can only be the elements
MAX_DIMENSIONS = 32  # numpy 1 has no more
WINDOW_BYTES = 4096

_NUMBERS = frozenset(
    ["b1", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16"]
)
_OPCODES = {opcode.code: opcode.name for opcode in pickletools.opcodes}


class NotAnArray(ValueError):
    """The bytes are not the pickle of a plain array of numbers. The message says why."""


class _Name(Enum):
    """Functions and classes that the pickle of an array names."""

    RECONSTRUCT = "numpy.core.multiarray._reconstruct"
    NDARRAY = "numpy.ndarray"
    DTYPE = "numpy.dtype"
    FROMBUFFER = "numpy.core.numeric._frombuffer"  # protocol 5
    ENCODE = "_codecs.encode"  # protocol 2 has no bytes
    BYTES = "__builtin__.bytes"  # the same, if they are empty


_NAMES = {
    **{name.value: name for name in _Name},
    # Since numpy 2:
    "numpy._core.multiarray._reconstruct": _Name.RECONSTRUCT,
    "numpy._core.numeric._frombuffer": _Name.FROMBUFFER,
}


class _Sign(Enum):
    """Entries of the stack that are no values."""

    TUPLE_BEGINS = 1
    EMPTY_ARRAY = 2  # made, and to be filled


@dataclass(frozen=True, slots=True)
class _Code:
    """A dtype whose byte order is not known yet."""

    code: str


@dataclass(frozen=True, slots=True)
class _LongText:
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class _LongBytes:
    """is_text: written as text, in which each byte is the character of that number."""

    offset: int
    length: int
    is_text: bool = False


@dataclass(frozen=True, slots=True)
class PickledArray:
    """An array that was found in a pickle. Its elements are read through the same reader.

    dtype: little-endian, as pieces() gives the elements, whatever the pickle has.
    """

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    _pickled_dtype: np.dtype[Any]
    _data: bytes | _LongBytes
    _reader: Reader

    def pieces(self) -> Iterator[bytes]:
        """Yield the elements in C order.

        Raises NotAnArray, at the end at the latest, if they are not what the pickle promised, and
        the reader's errors.
        """
        missing = prod(self.shape) * self.dtype.itemsize
        for piece in self._raw() if self._pickled_dtype == self.dtype else self._swapped():
            missing -= len(piece)
            if missing < 0:
                break
            yield piece
        if missing:
            raise _wrong_length()

    def _swapped(self) -> Iterator[bytes]:
        rest = b""
        for piece in self._raw():
            data = rest + piece
            num_elements = len(data) // self.dtype.itemsize
            whole = num_elements * self.dtype.itemsize
            rest = data[whole:]
            yield np.frombuffer(data[:whole], self._pickled_dtype).astype(self.dtype).tobytes()

    def _raw(self) -> Iterator[bytes]:
        if isinstance(self._data, bytes):
            yield self._data
            return
        decoder = codecs.getincrementaldecoder("utf-8")()
        offset, end = self._data.offset, self._data.offset + self._data.length
        while offset < end:
            piece = self._reader.read(offset, min(CHUNK_BYTES, end - offset))
            if not piece:
                raise _too_short()
            offset += len(piece)
            if self._data.is_text:
                piece = _encoded(_decoded(decoder, piece, final=offset == end))
            yield piece


def find_array(reader: Reader) -> PickledArray:
    """The array that the object is a pickle of.

    Reads a few windows of the object, however large it is. Raises NotAnArray and the reader's
    errors.
    """
    return _Machine(reader).run()


class _Cursor:
    """Sequential reader of small pieces of an object."""

    def __init__(self, reader: Reader) -> None:
        self.offset = 0
        self._reader = reader
        self._window = b""
        self._window_offset = 0

    @property
    def num_left(self) -> int:
        return self._reader.size - self.offset

    def take(self, length: int) -> bytes:
        """The next bytes, at most MAX_SHORT_BYTES of them."""
        start = self.skip(length)
        if self.offset > self._window_offset + len(self._window):
            num_left = self._reader.size - start
            self._window = self._reader.read(start, min(WINDOW_BYTES, num_left))
            self._window_offset = start
        start -= self._window_offset
        piece = self._window[start : start + length]
        if len(piece) < length:
            raise _too_short()
        return piece

    def number(self, layout: str) -> int:
        """Read a number in a layout of `struct`."""
        (number,) = struct.unpack(layout, self.take(struct.calcsize(layout)))
        assert isinstance(number, int)
        return number

    def line(self) -> str:
        """Read to the next end of line, which is not part of the result."""
        line = b""
        while (byte := self.take(1)) != b"\n":
            line += byte
            if len(line) > MAX_SHORT_BYTES:
                raise NotAnArray(f"it names something with more than {MAX_SHORT_BYTES} characters")
        return _text(line)

    def skip(self, length: int) -> int:
        """Leave out a value; returns where it begins."""
        if length > self.num_left:
            raise _too_short()
        start = self.offset
        self.offset += length
        return start


class _Machine:
    """The pickle machine. Values on its stack are immutable: an opcode replaces them by others."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._cursor = _Cursor(reader)
        self._stack: list[object] = []
        self._memo: dict[int, object] = {}

    def run(self) -> PickledArray:
        if self._cursor.take(1) != b"\x80" or not 2 <= self._cursor.number("<B") <= 5:
            raise NotAnArray("it does not begin with a protocol from 2 to 5")
        for _ in range(MAX_OPCODES):
            opcode = self._cursor.take(1).decode("latin-1")
            if opcode == ".":
                return self._result()
            self._step(opcode)
        raise NotAnArray(f"it has more than {MAX_OPCODES} opcodes")

    def _result(self) -> PickledArray:
        array = self._pop()
        if not isinstance(array, PickledArray) or self._stack:
            raise NotAnArray("it holds something else than one array")
        if self._cursor.num_left:
            raise NotAnArray(f"{self._cursor.num_left} bytes follow after its end")
        return array

    def _step(self, opcode: str) -> None:
        match _OPCODES.get(opcode):
            case "FRAME":
                if self._cursor.number("<Q") > self._cursor.num_left:
                    raise _too_short()
            case "NONE":
                self._stack.append(None)
            case "NEWTRUE":
                self._stack.append(True)
            case "NEWFALSE":
                self._stack.append(False)
            case "BININT":
                self._stack.append(self._cursor.number("<i"))
            case "BININT1":
                self._stack.append(self._cursor.number("<B"))
            case "BININT2":
                self._stack.append(self._cursor.number("<H"))
            case "LONG1":
                self._stack.append(self._long())
            case "SHORT_BINUNICODE":
                self._stack.append(self._text(self._cursor.number("<B")))
            case "BINUNICODE":
                self._stack.append(self._text(self._cursor.number("<I")))
            case "SHORT_BINBYTES":
                self._stack.append(self._bytes(self._cursor.number("<B")))
            case "BINBYTES":
                self._stack.append(self._bytes(self._cursor.number("<I")))
            case "BINBYTES8" | "BYTEARRAY8":
                self._stack.append(self._bytes(self._cursor.number("<Q")))
            case "MARK":
                self._stack.append(_Sign.TUPLE_BEGINS)
            case "EMPTY_TUPLE":
                self._stack.append(())
            case "TUPLE1" | "TUPLE2" | "TUPLE3" as sized:
                values = [self._pop() for _ in range(int(sized[-1]))]
                self._stack.append(tuple(reversed(values)))
            case "TUPLE":
                values = []
                while (value := self._pop()) is not _Sign.TUPLE_BEGINS:
                    values.append(value)
                self._stack.append(tuple(reversed(values)))
            case "BINPUT":
                self._memo[self._cursor.number("<B")] = self._top()
            case "MEMOIZE":
                self._memo[len(self._memo)] = self._top()
            case "BINGET":
                self._get(self._cursor.number("<B"))
            case "GLOBAL":
                self._stack.append(_name(self._cursor.line(), self._cursor.line()))
            case "STACK_GLOBAL":
                name, module = self._pop(), self._pop()
                self._stack.append(_name(module, name))
            case "REDUCE":
                arguments, function = self._pop(), self._pop()
                self._stack.append(self._called(function, arguments))
            case "BUILD":
                state, value = self._pop(), self._pop()
                self._stack.append(self._built(value, state))
            case None:
                raise NotAnArray(f"{opcode!r} is no opcode")
            case other:
                raise NotAnArray(f"the pickle of an array has no use for the opcode {other}")

    def _top(self) -> object:
        if not self._stack:
            raise NotAnArray("it takes from an empty stack")
        return self._stack[-1]

    def _pop(self) -> object:
        value = self._top()
        del self._stack[-1]
        return value

    def _get(self, index: int) -> None:
        if index not in self._memo:
            raise NotAnArray(f"it remembers nothing under {index}")
        self._stack.append(self._memo[index])

    def _long(self) -> int:
        length = self._cursor.number("<B")
        if length > 8:
            raise NotAnArray(f"it has a number of {length} bytes; a dimension has at most 8")
        return int.from_bytes(self._cursor.take(length), "little", signed=True)

    def _text(self, length: int) -> str | _LongText:
        if length > MAX_SHORT_BYTES:
            return _LongText(self._cursor.skip(length), length)
        return _text(self._cursor.take(length))

    def _bytes(self, length: int) -> bytes | _LongBytes:
        if length > MAX_SHORT_BYTES:
            return _LongBytes(self._cursor.skip(length), length)
        return self._cursor.take(length)

    def _called(self, function: object, arguments: object) -> object:
        match function, arguments:
            case _Name.RECONSTRUCT, (_Name.NDARRAY, (0,), b"b"):
                return _Sign.EMPTY_ARRAY
            case _Name.DTYPE, (str(code), 0, 1):
                if code not in _NUMBERS:
                    raise NotAnArray(f"its elements are of type {code!r}; only numbers are taken")
                return _Code(code)
            case _Name.FROMBUFFER, (data, np.dtype() as dtype, tuple(shape), "C" | "F" as order):
                return self._array(shape, dtype, order == "F", data)
            case _Name.ENCODE, (str(text), "latin1"):
                return _encoded(text)
            case _Name.ENCODE, (_LongText(offset, length), "latin1"):
                return _LongBytes(offset, length, is_text=True)
            case _Name.BYTES, ():
                return b""
        name = f"{function.value} with arguments that" if isinstance(function, _Name) else "what"
        raise NotAnArray(f"it calls {name} numpy does not")

    def _built(self, value: object, state: object) -> object:
        match value, state:
            case _Code(code), (3, "<" | ">" | "|" as order, None, None, None, -1, -1, 0):
                return _dtype(code, order)
            case _Sign.EMPTY_ARRAY, (1, tuple(shape), np.dtype() as dtype, bool(fortran), data):
                return self._array(shape, dtype, fortran, data)
        raise NotAnArray("it fills something in a way that numpy does not")

    def _array(
        self, shape: tuple[object, ...], dtype: np.dtype[Any], fortran: bool, data: object
    ) -> PickledArray:
        extents = tuple(extent for extent in shape if type(extent) is int and extent >= 0)
        if extents != shape or len(shape) > MAX_DIMENSIONS:
            raise NotAnArray("its shape is none")
        if fortran:
            raise NotAnArray("it is in Fortran order; hand in one flat vector")
        if not isinstance(data, bytes | _LongBytes):
            raise NotAnArray("its elements are not bytes")
        size = prod(extents) * dtype.itemsize
        length = len(data) if isinstance(data, bytes) else data.length
        if isinstance(data, _LongBytes) and data.is_text:
            # A character has one byte or two. How many there are is seen when they are read.
            fits = size <= length <= 2 * size
        else:
            fits = length == size
        if not fits:
            raise _wrong_length()
        return PickledArray(dtype.newbyteorder("<"), extents, dtype, data, self._reader)


def _dtype(code: str, order: str) -> np.dtype[Any]:
    if (order == "|") != code.endswith("1"):
        raise NotAnArray(f"its elements are of type {code!r}, which has no order {order!r}")
    return np.dtype(f"{order}{code}")


def _name(module: object, name: object) -> _Name:
    if not isinstance(module, str) or not isinstance(name, str):
        raise NotAnArray("it names something by what is no text")
    whole = f"{module}.{name}"
    if whole not in _NAMES:
        raise NotAnArray(f"it names {whole!r}, which is no part of a plain array")
    return _NAMES[whole]


def _text(data: bytes) -> str:
    return _decoded(codecs.getincrementaldecoder("utf-8")(), data, final=True)


def _decoded(decoder: codecs.IncrementalDecoder, data: bytes, *, final: bool) -> str:
    try:
        return decoder.decode(data, final)
    except UnicodeDecodeError:
        raise NotAnArray("a text in it is not UTF-8") from None


def _encoded(text: str) -> bytes:
    try:
        return text.encode("latin-1")
    except UnicodeEncodeError:
        raise NotAnArray("bytes written as text have characters above 255") from None


def _too_short() -> NotAnArray:
    return NotAnArray("it ends too early")


def _wrong_length() -> NotAnArray:
    return NotAnArray("it has more or fewer elements than its shape says")


def pickle_around(dtype: np.dtype[Any], shape: tuple[int, ...]) -> tuple[bytes, bytes]:
    """Bytes of a pickle before and after the elements of an array, which are in C order.

    Protocol 4, which Python reads since 3.4, and the names of numpy 1, which numpy 2 knows too. Its
    own pickles name numpy._core, which numpy 1 does not.
    """
    extents = b"".join(b"\x8a\x08" + struct.pack("<q", extent) for extent in shape)
    head = (
        b"\x80\x04"
        b"cnumpy.core.multiarray\n_reconstruct\n"
        b"cnumpy\nndarray\n"
        b"K\x00\x85C\x01b\x87R"  # ((0,), b"b"), as numpy has it
        b"(K\x01" + b"(" + extents + b"t"
        b"cnumpy\ndtype\n" + _short(dtype.str[1:]) + b"\x89\x88\x87R"
        b"(K\x03" + _short(dtype.str[0]) + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
        b"\x89\x8e" + struct.pack("<Q", prod(shape) * dtype.itemsize)
    )
    return head, b"tb."


def _short(text: str) -> bytes:
    return b"\x8c" + struct.pack("<B", len(text)) + text.encode()
