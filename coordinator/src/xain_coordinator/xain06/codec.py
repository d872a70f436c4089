"""Pickles of vectors: reading them without unpickling, and writing them.

A pickle is a program. Python's own unpickler runs it, and no list of allowed names makes that safe
for what comes from outside: the calls that are left take arguments of the sender's choice, and
memory is reserved for whatever lengths are claimed. So this is a stack machine of our own, which
knows only the opcodes that Python writes for a vector. What a pickle would call is a mere name
here; what the call would give is worked out, and only for the arguments that numpy gives. The
machine makes numbers, short texts and tuples of them. The elements of the vector it finds, and
leaves where they are.

Read are flat vectors of little-endian floats in the protocols 3 to 5, which are the defaults of
Python 3, with numpy 1 and 2.
"""

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

MAX_OPCODES = 256  # Python writes about 70 for a vector
MAX_SHORT_BYTES = 100  # of a text or a number; longer bytes can only be the elements
WINDOW_BYTES = 4096

_FLOATS = ("f2", "f4", "f8")
_OPCODES = {opcode.code: opcode.name for opcode in pickletools.opcodes}


class NotAnArray(ValueError):
    """The bytes are not the pickle of a flat vector of floats. The message says why."""


class _Name(Enum):
    """Functions and classes that the pickle of an array names."""

    RECONSTRUCT = "numpy.core.multiarray._reconstruct"
    NDARRAY = "numpy.ndarray"
    DTYPE = "numpy.dtype"
    FROMBUFFER = "numpy.core.numeric._frombuffer"  # protocol 5


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
class _Bytes:
    """Bytes of the object, left where they are."""

    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class PickledArray:
    """A vector that was found in a pickle. Its elements are read through the same reader."""

    dtype: np.dtype[Any]
    shape: tuple[int]
    _data: _Bytes
    _reader: Reader

    @property
    def num_bytes(self) -> int:
        return self._data.length

    def pieces(self) -> Iterator[bytes]:
        """Yield the elements.

        Raises NotAnArray if the object has become shorter, and the reader's errors.
        """
        offset, end = self._data.offset, self._data.offset + self._data.length
        while offset < end:
            piece = self._reader.read(offset, min(CHUNK_BYTES, end - offset))
            if not piece:
                raise _too_short()
            offset += len(piece)
            yield piece


def find_array(reader: Reader) -> PickledArray:
    """The vector that the object is a pickle of.

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
        """The next bytes, at most WINDOW_BYTES of them."""
        start = self.skip(length).offset
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

    def text(self, length: int) -> str:
        if length > MAX_SHORT_BYTES:
            raise NotAnArray(f"it has a text of {length} bytes")
        return _text(self.take(length))

    def line(self) -> str:
        """Read to the next end of line, which is not part of the result."""
        line = b""
        while (byte := self.take(1)) != b"\n":
            line += byte
            if len(line) > MAX_SHORT_BYTES:
                raise NotAnArray(f"it names something with more than {MAX_SHORT_BYTES} characters")
        return _text(line)

    def skip(self, length: int) -> _Bytes:
        """Leave out a value; returns where it is."""
        if length > self.num_left:
            raise _too_short()
        start = self.offset
        self.offset += length
        return _Bytes(start, length)


class _Machine:
    """The pickle machine. Values on its stack are immutable: an opcode replaces them by others."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._cursor = _Cursor(reader)
        self._stack: list[object] = []
        self._memo: dict[int, object] = {}

    def run(self) -> PickledArray:
        if self._cursor.take(1) != b"\x80" or not 3 <= self._cursor.number("<B") <= 5:
            raise NotAnArray("it does not begin with a protocol from 3 to 5")
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
        cursor = self._cursor
        match _OPCODES.get(opcode):
            case "FRAME":
                if cursor.number("<Q") > cursor.num_left:
                    raise _too_short()
            case "NONE":
                self._stack.append(None)
            case "NEWTRUE":
                self._stack.append(True)
            case "NEWFALSE":
                self._stack.append(False)
            case "BININT":
                self._stack.append(cursor.number("<i"))
            case "BININT1":
                self._stack.append(cursor.number("<B"))
            case "BININT2":
                self._stack.append(cursor.number("<H"))
            case "LONG1":
                self._stack.append(self._long())
            case "SHORT_BINUNICODE":
                self._stack.append(cursor.text(cursor.number("<B")))
            case "BINUNICODE":
                self._stack.append(cursor.text(cursor.number("<I")))
            case "SHORT_BINBYTES":
                self._stack.append(cursor.skip(cursor.number("<B")))
            case "BINBYTES":
                self._stack.append(cursor.skip(cursor.number("<I")))
            case "BINBYTES8" | "BYTEARRAY8":
                self._stack.append(cursor.skip(cursor.number("<Q")))
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
                self._memo[cursor.number("<B")] = self._top()
            case "MEMOIZE":
                self._memo[len(self._memo)] = self._top()
            case "BINGET":
                self._get(cursor.number("<B"))
            case "GLOBAL":
                self._stack.append(_name(cursor.line(), cursor.line()))
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

    def _called(self, function: object, arguments: object) -> object:
        match function, arguments:
            case _Name.RECONSTRUCT, (_Name.NDARRAY, (0,), _Bytes()):
                return _Sign.EMPTY_ARRAY
            case _Name.DTYPE, (str(code), 0, 1):
                if code not in _FLOATS:
                    raise NotAnArray(f"its elements are of type {code!r}; only floats are taken")
                return code
            case _Name.FROMBUFFER, (data, np.dtype() as dtype, tuple(shape), "C" | "F"):
                return self._array(shape, dtype, data)
        name = f"{function.value} with arguments that" if isinstance(function, _Name) else "what"
        raise NotAnArray(f"it calls {name} numpy does not")

    def _built(self, value: object, state: object) -> object:
        match value, state:
            case "f2" | "f4" | "f8" as code, (3, str(order), None, None, None, -1, -1, 0):
                if order != "<":
                    raise NotAnArray(f"its elements have the byte order {order!r} instead of '<'")
                return np.dtype(f"<{code}")
            case _Sign.EMPTY_ARRAY, (1, tuple(shape), np.dtype() as dtype, bool(), data):
                return self._array(shape, dtype, data)
        raise NotAnArray("it fills something in a way that numpy does not")

    def _array(self, shape: tuple[object, ...], dtype: np.dtype[Any], data: object) -> PickledArray:
        if len(shape) != 1:
            raise NotAnArray(f"it has {len(shape)} dimensions; hand in one flat vector")
        (num,) = shape
        if type(num) is not int or num < 0:
            raise NotAnArray("its shape is none")
        if not isinstance(data, _Bytes):
            raise NotAnArray("its elements are not bytes")
        if data.length != num * dtype.itemsize:
            raise NotAnArray("it has more or fewer elements than its shape says")
        return PickledArray(dtype, (num,), data, self._reader)


def _name(module: object, name: object) -> _Name:
    if not isinstance(module, str) or not isinstance(name, str):
        raise NotAnArray("it names something by what is no text")
    whole = f"{module}.{name}"
    if whole not in _NAMES:
        raise NotAnArray(f"it names {whole!r}, which is no part of a plain array")
    return _NAMES[whole]


def _text(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise NotAnArray("a text in it is not UTF-8") from None


def _too_short() -> NotAnArray:
    return NotAnArray("it ends too early")


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
