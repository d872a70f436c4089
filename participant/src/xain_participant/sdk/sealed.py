"""Files with a head, a body and a digest, readable by their owner only.

magic, a line | xxh3-128 of the rest, 16 bytes | head: a JSON object, a line | body
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import xxhash
from numpy.typing import NDArray

from xain_foundation.durable import replace_file

MODE = 0o600  # an update may reveal something of the data
_DIGEST_BYTES = 16


class Damaged(ValueError):
    """The file is not one of this kind and version, or its digest is another."""


def write(path: Path, magic: bytes, head: Mapping[str, Any], body: bytes | memoryview) -> None:
    """Replace a file at once, durably. magic: of its kind and version. Raises OSError."""
    line = json.dumps(head).encode() + b"\n"
    digest = xxhash.xxh3_128(line)
    digest.update(body)
    replace_file(path, [magic, digest.digest(), line, body], MODE)


def read(path: Path, magic: bytes) -> tuple[dict[str, Any], NDArray[np.uint8]]:
    """Read head and body of a file of write(). Raises Damaged, OSError and MemoryError."""
    with path.open("rb") as file:
        expected = _digest_of(file, magic)
        line = file.readline()
        body = np.fromfile(file, np.uint8)
    digest = xxhash.xxh3_128(line)
    digest.update(body.data)
    if digest.digest() != expected:
        raise Damaged("the file is damaged")
    return json.loads(line), body


def read_head(path: Path, magic: bytes) -> dict[str, Any]:
    """Read the head alone, which is not checked. Raises ValueError and OSError."""
    with path.open("rb") as file:
        _digest_of(file, magic)
        head: dict[str, Any] = json.loads(file.readline())
    return head


def _digest_of(file: BinaryIO, magic: bytes) -> bytes:
    """Read the digest of a file of this kind and version. Raises Damaged."""
    if file.read(len(magic)) != magic:
        raise Damaged("the file is damaged, or of another version")
    return file.read(_DIGEST_BYTES)
