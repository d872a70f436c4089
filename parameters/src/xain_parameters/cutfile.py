"""The file of a range's checkpoint.

    "XAINCUT2", then pieces, each:
    u32 length of the head | u64 XXH3 of what follows | head | keys | body

All numbers are little-endian. The head is a msgpack array: name, meta, number of keys or nil, bytes
of the body. Keys are uint64, and the body is raw arrays; replica.py and tables/part.py tell what
each name means. The last piece is called "end", and its meta is the number of pieces before it.
"""

import struct
from collections.abc import Iterable, Iterator
from typing import IO

import msgspec
import numpy as np
import xxhash

from xain_parameters.errors import Damaged
from xain_parameters.messages import MAX_BODY_BYTES
from xain_parameters.tables.part import Piece
from xain_parameters.transport.frames import bytes_of

MAGIC = b"XAINCUT2"
MAX_HEAD_BYTES = 1 << 20
_SIZES = struct.Struct("<IQ")
_KEY_BYTES = 8

_decode_head = msgspec.msgpack.Decoder(tuple[str, bytes, int | None, int]).decode


def encoded(pieces: Iterable[Piece]) -> Iterator[bytes | memoryview]:
    """Yield the content of a checkpoint's file with these pieces, step by step."""
    yield MAGIC
    number = 0
    for number, piece in enumerate(pieces, 1):  # noqa: B007  # the last one
        yield from _encode_piece(piece)
    yield from _encode_piece(Piece("end", b"%d" % number, None, np.empty(0, np.uint8)))


def _encode_piece(piece: Piece) -> Iterator[bytes | memoryview]:
    keys = np.empty(0, np.uint64) if piece.keys is None else piece.keys
    # A piece without a key among its keys is not the same as a piece without keys.
    num_keys = None if piece.keys is None else len(keys)
    head = msgspec.msgpack.encode((piece.name, piece.meta, num_keys, piece.body.nbytes))
    arrays = (bytes_of(np.ascontiguousarray(array)) for array in (keys, piece.body))
    rest: list[bytes | memoryview] = [head, *arrays]
    yield _SIZES.pack(len(head), _digest(*rest))
    yield from rest


def _digest(*rest: bytes | memoryview) -> int:
    digest = xxhash.xxh3_64()
    for data in rest:
        digest.update(data)
    return digest.intdigest()


def read(file: IO[bytes], name: str) -> Iterator[Piece]:
    """Yield a file's pieces but the last. Raises Damaged, which names the file by `name`."""
    if file.read(len(MAGIC)) != MAGIC:
        raise Damaged(f"{name} is no checkpoint of a key range")
    number = 0
    while True:
        where = f"{name}, piece {number}"
        head_bytes, digest = _SIZES.unpack(_read_exactly(file, _SIZES.size, MAX_HEAD_BYTES, where))
        head = _read_exactly(file, head_bytes, MAX_HEAD_BYTES, where)
        try:
            kind, meta, num_keys, num_bytes = _decode_head(head)
        except (msgspec.MsgspecError, ValueError) as error:
            raise Damaged(f"{where}: its head was changed: {error}") from None
        keys = _read_exactly(file, _KEY_BYTES * (num_keys or 0), MAX_BODY_BYTES, where)
        body = _read_exactly(file, num_bytes, MAX_BODY_BYTES, where)
        if digest != _digest(head, keys, body):
            raise Damaged(f"{where}: it was changed")
        if kind == "end":
            if int(meta) != number:
                raise Damaged(f"{where}: the end comes after {int(meta)} others")
            return
        array = np.frombuffer(keys, "<u8").astype(np.uint64, copy=False)
        yield Piece(kind, meta, None if num_keys is None else array, np.frombuffer(body, np.uint8))
        number += 1


def _read_exactly(file: IO[bytes], num_bytes: int, most: int, where: str) -> bytes:
    data = file.read(num_bytes) if 0 <= num_bytes <= most else b""
    if len(data) != num_bytes:
        raise Damaged(f"{where}: the file was cut short, or its head was changed")
    return data
