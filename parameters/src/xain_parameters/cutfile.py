"""The file of a range's checkpoint.

    "XAINCUT1", then pieces, each:
    u32 length of the head | head | u64 XXH3 of the head | keys | body | u64 XXH3 of keys and body

All numbers are little-endian. The head is a msgpack array: name, meta, number of keys, bytes of the
body. Keys are uint64, and the body is raw arrays; replica.py and tables/part.py tell what each name
means. The last piece is called "end", and its meta is the number of pieces before it.
"""

import struct
from collections.abc import Iterable, Iterator
from typing import IO, Any

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from xain_parameters.errors import Damaged
from xain_parameters.tables.part import Piece

MAGIC = b"XAINCUT1"
MAX_HEAD_BYTES = 1 << 20
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")


class _Head(msgspec.Struct, frozen=True, array_like=True):
    name: str
    meta: bytes
    num_keys: int
    num_bytes: int


_decode_head = msgspec.msgpack.Decoder(_Head).decode


def encoded(pieces: Iterable[Piece]) -> Iterator[bytes | memoryview]:
    """The content of a file with these pieces, step by step."""
    yield MAGIC
    number = 0
    for piece in pieces:
        yield from _encoded(piece)
        number += 1
    yield from _encoded(Piece("end", b"%d" % number, None, np.empty(0, np.uint8)))


def _encoded(piece: Piece) -> Iterator[bytes | memoryview]:
    keys = np.empty(0, np.uint64) if piece.keys is None else piece.keys
    # A piece without a key among its keys is not the same as a piece without keys.
    num_keys = -1 if piece.keys is None else len(keys)
    head = msgspec.msgpack.encode(_Head(piece.name, piece.meta, num_keys, piece.body.nbytes))
    yield _U32.pack(len(head)) + head + _U64.pack(xxhash.xxh3_64_intdigest(head))
    digest = xxhash.xxh3_64()
    for array in (keys, piece.body):
        data: Any = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
        digest.update(data)
        yield data
    yield _U64.pack(digest.intdigest())


def read(file: IO[bytes], name: str) -> Iterator[Piece]:
    """The pieces of a file, but for the last. Raises Damaged, which names the file by `name`."""
    if file.read(len(MAGIC)) != MAGIC:
        raise Damaged(f"{name} is no checkpoint of a key range")
    number = 0
    while True:
        where = f"{name}, piece {number}"
        (length,) = _U32.unpack(_exactly(file, _U32.size, where))
        if length > MAX_HEAD_BYTES:
            raise Damaged(f"{where}: a head of {length} bytes")
        encoded = _exactly(file, length, where)
        (said,) = _U64.unpack(_exactly(file, _U64.size, where))
        if said != xxhash.xxh3_64_intdigest(encoded):
            raise Damaged(f"{where}: its head was changed")
        head = _decode_head(encoded)
        where = f"{name}, piece {number} ({head.name})"
        keys = _exactly(file, max(0, head.num_keys) * 8, where)
        body = _exactly(file, head.num_bytes, where)
        (said,) = _U64.unpack(_exactly(file, _U64.size, where))
        digest = xxhash.xxh3_64(keys)
        digest.update(body)
        if said != digest.intdigest():
            raise Damaged(f"{where}: its data was changed")
        if head.name == "end":
            if int(head.meta) != number:
                raise Damaged(f"{where}: it comes after {int(head.meta)} others")
            return
        keys_array: NDArray[np.uint64] | None = np.frombuffer(keys, "<u8").astype(
            np.uint64, copy=False
        )
        yield Piece(
            head.name,
            head.meta,
            keys_array if head.num_keys >= 0 else None,
            np.frombuffer(body, np.uint8),
        )
        number += 1


def _exactly(file: IO[bytes], num_bytes: int, where: str) -> bytes:
    data = file.read(num_bytes)
    if len(data) != num_bytes:
        raise Damaged(f"{where}: the file was cut short")
    return data
