"""Pickles of vectors: found without unpickling, and written.

A pickle is a program. Python's own unpickler runs it, and no list of allowed names makes that safe
for what comes from outside: the calls that are left take arguments of the sender's choice, and
memory is reserved for whatever lengths are claimed. So nothing is run here: the bytes before and
behind the elements are compared with a regular expression for what Python and numpy write for a
vector. The elements stay where they are.

Read are flat vectors of little-endian floats in the protocols 3 to 5, which are the defaults of
Python 3, with numpy 1 and 2.
"""

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from xain_coordinator.ports import Reader
from xain_coordinator.stores.reading import CHUNK_BYTES
from xain_workloads.errors import InvalidContent

MAX_ENDS_BYTES = 1024  # before the elements, and behind them: some 250 at most

# Opcodes that remember a value, and those that say how far a frame reaches. Possessive: without it,
# 1 KB of them at the right places is matched in more ways than a processor can try in a minute.
_PASSED_OVER = rb"(?:\x94|q.|\x95.{8})*+"


@dataclass(frozen=True, slots=True)
class PickledArray:
    """A vector that was found in a pickle. Its elements are read through the same reader."""

    dtype: np.dtype[Any]
    shape: tuple[int]
    _offset: int
    _reader: Reader

    @property
    def num_bytes(self) -> int:
        return self.shape[0] * self.dtype.itemsize

    def pieces(self) -> Iterator[bytes]:
        """Yield the elements. Raises InvalidContent if the object has become shorter, and the
        reader's errors."""
        offset, end = self._offset, self._offset + self.num_bytes
        while offset < end:
            piece = self._reader.read(offset, min(CHUNK_BYTES, end - offset))
            if not piece:
                raise InvalidContent("it ends too early")
            offset += len(piece)
            yield piece


def find_array(reader: Reader) -> PickledArray:
    """The vector that the object is a pickle of. Reads the two ends of the object, however large it
    is. Raises InvalidContent and the reader's errors."""
    start = reader.read(0, min(MAX_ENDS_BYTES, reader.size)) if reader.size else b""
    for head, tail in _FORMS:
        begins = head.match(start)
        if begins is None:
            continue
        end = begins.end() + int.from_bytes(begins["num_bytes"][1:], "little")
        if not 0 < reader.size - end <= MAX_ENDS_BYTES:
            break
        ends = tail.fullmatch(reader.read(end, reader.size - end))
        if ends is None:
            break
        found = begins.groupdict() | ends.groupdict()
        num = int.from_bytes(found["num"].removeprefix(b"\x8a")[1:], "little")
        dtype = np.dtype(f"<{found['dtype'].decode()}")
        array = PickledArray(dtype, (num,), begins.end(), reader)
        if array.num_bytes != end - begins.end():
            raise InvalidContent("it has more or fewer elements than its shape says")
        return array
    raise InvalidContent(
        "hand in one flat vector of float16, float32 or float64, little-endian, pickled as Python "
        "3 does by default"
    )


def _opcodes(*patterns: bytes) -> bytes:
    """A pattern of these opcodes in a row, with others that change nothing between them."""
    return b"".join(pattern + _PASSED_OVER for pattern in patterns)


def _text(value: bytes) -> bytes:
    """A pattern of the opcodes for a text, in their short and their long form."""
    return rb"(?:\x8c\x%02x|X\x%02x\x00\x00\x00)%b" % (len(value), len(value), re.escape(value))


def _global(module: bytes, name: bytes) -> bytes:
    """A function or a class: named in one opcode, or by two texts, the first perhaps remembered."""
    texts = _opcodes(rb"(?:%b|h.)" % _text(module), _text(name), rb"\x93")
    return rb"(?:c%b\n%b\n|%b)" % (re.escape(module), re.escape(name), texts)


def _of_numpy(module: bytes, name: bytes) -> bytes:
    """A function of a module that numpy 2 has renamed."""
    old, new = (_global(b"numpy.%b.%b" % (core, module), name) for core in (b"core", b"_core"))
    return rb"(?:%b|%b)" % (old, new)


_BEGIN = _opcodes(rb"\x80[\x03-\x05]")
_DTYPE = _opcodes(
    _global(b"numpy", b"dtype"),
    rb"(?:\x8c\x02|X\x02\x00\x00\x00)(?P<dtype>f[248])",
    rb"(?:\x89\x88|K\x00K\x01)\x87",
    rb"R",
    rb"\(K\x03" + _text(b"<"),
    rb"NNNJ\xff{4}J\xff{4}K\x00t",
    rb"b",
)
_SHAPE = _opcodes(
    rb"\(?(?P<num>K.|M..|J.{4}|\x8a(?:\x05.{5}|\x06.{6}|\x07.{7}|\x08.{8}))", rb"[\x85t]"
)
_BYTES = rb"(?P<num_bytes>C.|B.{4}|[\x8e\x96].{8})"

# Opcodes before and behind the elements: in a call that fills an array, and in protocol 5.
_FORMS = [
    (re.compile(head, re.DOTALL), re.compile(tail, re.DOTALL))
    for head, tail in (
        (
            _BEGIN
            + _opcodes(_of_numpy(b"multiarray", b"_reconstruct"), _global(b"numpy", b"ndarray"))
            + _opcodes(rb"K\x00\x85", rb"C\x01b", rb"\x87", rb"R", rb"\(K\x01")
            + (_SHAPE + _DTYPE + rb"[\x88\x89]" + _BYTES),
            _opcodes(rb"", rb"t", rb"b") + rb"\.",
        ),
        (
            _BEGIN + _opcodes(_of_numpy(b"numeric", b"_frombuffer"), rb"\(") + _BYTES,
            _opcodes(rb"", _DTYPE, _SHAPE, rb"\x8c\x01[CF]", rb"t", rb"R") + rb"\.",
        ),
    )
]


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
    """The opcode of a text of at most 255 bytes."""
    return b"\x8c" + struct.pack("<B", len(text)) + text.encode()
