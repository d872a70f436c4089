"""Keys as file names, and back.

One rule for every system, so that a folder may be copied from one to another: a name is made of
lower-case letters, digits, '.', '_' and '-'; every other byte of its UTF-8 is written as %xx.
Capital letters are among the others, because some systems do not tell them apart. Written as %xx is
also what would mean something else to a system: a dot at the beginning or end, and the first letter
of a device's name such as con or nul.

An object's file name ends in ".weights" and no folder's does, so that "3" and "3/global" may both
be keys. Only PREPROCESSING, a text for people, is called what it is.
"""

import re
from collections.abc import Iterable
from functools import lru_cache

from xain_coordinator.core.keys import check_key

SUFFIX = ".weights"
PREPROCESSING = "preprocessing.json"  # a key, or the last part of one
# File systems take 255 bytes. A longer name continues in a folder: every part of it but the last
# ends with a bare '%', which cannot stand at the end of a name that is not cut.
_MAX_PART = 200
CUT = "%"

# Paths that are remembered: each small round lists the folder of its owners.
_NUM_KEPT = 64

_PLAIN = frozenset(b"abcdefghijklmnopqrstuvwxyz0123456789._-")
# Windows opens the device whatever follows the first dot.
_DEVICE = re.compile(r"(con|prn|aux|nul|com[0-9]|lpt[0-9])(\..*)?")
_WRITTEN = re.compile(rb"%([0-9a-f]{2})")


def key_to_path(key: str) -> str:
    """The relative path, with '/' between its parts, of the file that holds an object.

    Raises ValueError, as check_key does.
    """
    check_key(key)
    *folders, name = key.split("/")
    last = name if name == PREPROCESSING else _encode(name, SUFFIX)
    return "/".join([*(_encode(folder) for folder in folders), last])


@lru_cache(_NUM_KEPT)
def folder_to_path(folder: str) -> str:
    """The relative path of the folder that holds every key that begins with `folder` and '/'.

    Raises ValueError, as check_key does.
    """
    check_key(folder)
    return "/".join(_encode(part) for part in folder.split("/"))


@lru_cache(_NUM_KEPT)
def path_to_key(path: str) -> str | None:
    """The key whose object lies at this relative path; None if the file is none of ours."""
    if not path.endswith((SUFFIX, PREPROCESSING)):
        return None
    try:
        key = decoded(path.removesuffix(SUFFIX))
        # Only what we would write ourselves: else two files could stand for one key.
        return key if key_to_path(key) == path else None
    except ValueError:
        return None


def decoded(name: str) -> str:
    """The text that was cut and written with %xx. Raises ValueError if there is none."""
    whole = name.replace(f"{CUT}/", "").encode()
    return _WRITTEN.sub(lambda match: bytes([int(match[1], 16)]), whole).decode()


def cut(cells: Iterable[str]) -> list[str]:
    """Pieces of a name made of these cells, none of which is cut in two."""
    pieces = [""]
    size = 0
    for cell in cells:
        size += len(cell.encode())
        if size > _MAX_PART:
            pieces.append("")
            size = len(cell.encode())
        pieces[-1] += cell
    return pieces


def _encode(name: str, suffix: str = "") -> str:
    *parts, end = cut(chr(b) if b in _PLAIN else f"%{b:02x}" for b in name.encode())
    encoded = [f"{_harmless(part)}{CUT}" for part in parts]
    last = _harmless(end)
    if not suffix and last.endswith(SUFFIX):
        last = last.removesuffix(SUFFIX) + SUFFIX.replace(".", "%2e")
    return "/".join([*encoded, last + suffix])


def _harmless(part: str) -> str:
    if part.startswith(".") or _DEVICE.fullmatch(part):
        part = f"%{ord(part[0]):02x}{part[1:]}"
    if part.endswith("."):
        part = f"{part[:-1]}%2e"
    return part
