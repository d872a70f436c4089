"""Keys as names of S3 objects, and back.

A name is its key wherever that is possible, so that people and other programs find "3/global" as
"3/global". Servers that keep objects in folders cannot hold every name that S3 could, so a control
character, a backslash, and a dot or blank at either end of a part are written as %xx, and so is the
per cent sign itself. A part of more than _MAX_PART bytes continues in a folder, as in
stores/paths.py: every piece of it but the last ends with a bare '%'.

No part of a name begins with a dot: such names are for our own bookkeeping.
"""

import re

from xain_coordinator.core.keys import check_key

# S3 takes 1024 bytes; a claim's name is that of the object it is for, and 74 bytes more.
MAX_NAME_BYTES = 940

_MAX_PART = 200  # of the 255 bytes that a file system takes, with room for what is escaped
_CUT = "%"
_ESCAPED = frozenset([*map(chr, range(32)), "\x7f", "\\", "%"])
_WRITTEN = re.compile(rb"%([0-9a-f]{2})")


def key_to_name(key: str) -> str:
    """Raises ValueError, as check_key does."""
    check_key(key)
    return "/".join(_encode(part) for part in key.split("/"))


def name_to_key(name: str) -> str | None:
    """The key whose object has this name; None if the object is none of ours."""
    whole = name.replace(f"{_CUT}/", "").encode()
    try:
        key = _WRITTEN.sub(lambda match: bytes([int(match[1], 16)]), whole).decode()
        # Only what we would write ourselves: else two names could stand for one key.
        return key if key_to_name(key) == name else None
    except ValueError:
        return None


def _encode(part: str) -> str:
    pieces = [""]
    size = 0
    for character in part:
        cell = _written(character) if character in _ESCAPED else character
        cell_bytes = len(cell.encode())
        if size + cell_bytes > _MAX_PART:
            pieces.append("")
            size = 0
        pieces[-1] += cell
        size += cell_bytes
    pieces = [_harmless(piece) for piece in pieces]
    return f"{_CUT}/".join(pieces)


def _harmless(piece: str) -> str:
    if piece[0] in ". ":
        piece = _written(piece[0]) + piece[1:]
    if piece[-1] in ". ":
        piece = piece[:-1] + _written(piece[-1])
    return piece


def _written(character: str) -> str:
    return f"%{ord(character):02x}"
