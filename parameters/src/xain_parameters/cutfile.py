"""The file of a range's checkpoint.

    "XAINCUT2", then pieces, each: u64 length of the record | u64 XXH3 of the record | record

Both numbers are little-endian. A record is a msgpack array: name, meta, keys or nil, body. Keys are
uint64, and the body is raw arrays, little-endian too; replica.py and tables/part.py tell what each
name means. The last piece is called "end", and its meta is the number of pieces before it.
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
MAX_RECORD_BYTES = MAX_BODY_BYTES + (1 << 20)  # meta names all tables of the group
_HEAD = struct.Struct("<QQ")

_decode = msgspec.msgpack.Decoder(tuple[str, bytes, memoryview | None, memoryview]).decode


def encoded(pieces: Iterable[Piece]) -> Iterator[bytes]:
    """The content of a file with these pieces, step by step."""
    yield MAGIC
    number = 0
    for number, piece in enumerate(pieces, 1):  # noqa: B007  # the last one
        yield from _encoded(piece)
    yield from _encoded(Piece("end", b"%d" % number, None, np.empty(0, np.uint8)))


def _encoded(piece: Piece) -> Iterator[bytes]:
    keys = None if piece.keys is None else bytes_of(np.ascontiguousarray(piece.keys))
    body = bytes_of(np.ascontiguousarray(piece.body))
    record = msgspec.msgpack.encode((piece.name, piece.meta, keys, body))
    yield _HEAD.pack(len(record), xxhash.xxh3_64_intdigest(record))
    yield record


def read(file: IO[bytes], name: str) -> Iterator[Piece]:
    """The pieces of a file, but for the last. Raises Damaged, which names the file by `name`."""
    if file.read(len(MAGIC)) != MAGIC:
        raise Damaged(f"{name} is no checkpoint of a key range")
    number = 0
    while True:
        where = f"{name}, piece {number}"
        length, digest = _HEAD.unpack(_exactly(file, _HEAD.size, where))
        if length > MAX_RECORD_BYTES:
            raise Damaged(f"{where}: a record of {length} bytes")
        record = _exactly(file, length, where)
        if digest != xxhash.xxh3_64_intdigest(record):
            raise Damaged(f"{where}: it was changed")
        kind, meta, keys, body = _decode(record)
        if kind == "end":
            if int(meta) != number:
                raise Damaged(f"{where}: the end comes after {int(meta)} others")
            return
        # A copy, so that keys are aligned.
        array = None if keys is None else np.frombuffer(keys, "<u8").astype(np.uint64)
        yield Piece(kind, meta, array, np.frombuffer(body, np.uint8))
        number += 1


def _exactly(file: IO[bytes], num_bytes: int, where: str) -> bytes:
    data = file.read(num_bytes)
    if len(data) != num_bytes:
        raise Damaged(f"{where}: the file was cut short")
    return data
