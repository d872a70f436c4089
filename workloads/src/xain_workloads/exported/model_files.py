"""Bounds of model files, which may come from anybody, asked before a file is read."""

import json
import re
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from zipfile import BadZipFile, ZipFile

import numpy as np

MAX_JSON_BYTES = 256 << 20  # of a file, or of the JSON object in one
MAX_DEPTH = 100  # of lists and objects of JSON in each other; an exported pipeline has 40 or so
# What the members of an archive may have unpacked: one of these, whichever is more. Weights can
# hardly be compressed.
MAX_SMALL_BYTES = 64 << 20
MAX_RATIO = 20  # to the bytes of the archive
MAX_SCHEMA_BYTES = 32 << 20  # of skops, as Python objects many times as much

# What a reader raises for a file that is damaged or none of its kind.
UNREADABLE = (
    ArithmeticError,
    AttributeError,
    BadZipFile,
    EOFError,
    LookupError,
    MemoryError,
    OSError,
    RuntimeError,  # RecursionError and NotImplementedError, too
    SyntaxError,
    TypeError,
    ValueError,
    zlib.error,
)

_STRING = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
_CHUNK = 1 << 20


def read_json(path: Path) -> Any:
    """Read the JSON of a file. Raises ValueError, also for too large a file, and OSError."""
    if (size := path.stat().st_size) > MAX_JSON_BYTES:
        raise ValueError(f"it has {size} bytes, and {MAX_JSON_BYTES} of JSON at most are read")
    return parse_json(path.read_bytes())


def parse_json(text: str | bytes) -> Any:
    """Parse the JSON of a file that is not trusted. Raises ValueError, also for text that is nested
    deeper than MAX_DEPTH."""
    if isinstance(text, bytes):
        text = text.decode()
    if len(text) > MAX_JSON_BYTES:
        raise ValueError(f"its JSON has {len(text)} bytes, and {MAX_JSON_BYTES} at most are read")
    require_shallow(text)
    return json.loads(text)


def require_shallow(text: str) -> None:
    """Raise ValueError if the text, read as JSON, is nested deeper than MAX_DEPTH."""
    bare = _STRING.sub("", text).encode()
    depth = 0
    for start in range(0, len(bare), _CHUNK):
        codes = np.frombuffer(bare, np.uint8, min(_CHUNK, len(bare) - start), start)
        opened = (codes == ord("[")) | (codes == ord("{"))
        closed = (codes == ord("]")) | (codes == ord("}"))
        depths = depth + np.cumsum(opened.astype(np.int64) - closed)
        if depths.max() > MAX_DEPTH:
            raise ValueError(f"lists or objects of JSON are nested deeper than {MAX_DEPTH}")
        depth = int(depths[-1])


def metadata_of(about: Mapping[str, Any]) -> dict[str, str]:
    """Read the metadata of a model in the JSON object of its file, {} if there are none. Raises
    ValueError, also for JSON in them that is nested too deep, TypeError or AttributeError."""
    metadata = {str(key): str(value) for key, value in about.get("metadata", {}).items()}
    for value in metadata.values():
        require_shallow(value)
    return metadata


def check_archive(path: Path) -> None:
    """Refuse an archive whose members are too large when they are unpacked, by the sizes that it
    declares, which hold: no reader of ZIP takes more of a member.

    Raises ValueError, also for a file that is no archive, and OSError.
    """
    size = path.stat().st_size
    try:
        with ZipFile(path) as archive:
            sizes = {info.filename: info.file_size for info in archive.infolist()}
            whole = sum(info.file_size for info in archive.infolist())
            schema = sizes.get("schema.json", 0)
            if whole > (most := max(MAX_SMALL_BYTES, MAX_RATIO * size)):
                raise ValueError(
                    f"its {size} bytes unpack to {whole}, and {most} at most are read; store the "
                    "arrays without compression"
                )
            if schema > MAX_SCHEMA_BYTES:
                raise ValueError(
                    f"its schema has {schema} bytes, and {MAX_SCHEMA_BYTES} at most are read"
                )
            if schema:
                require_shallow(archive.read("schema.json").decode())
    except (BadZipFile, NotImplementedError, RuntimeError, EOFError, zlib.error) as error:
        raise ValueError(f"it is no archive that can be read: {error}") from None
