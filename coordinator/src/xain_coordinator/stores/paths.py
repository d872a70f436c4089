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
from functools import lru_cache

from xain_coordinator.core.keys import check_key

SUFFIX = ".weights"
PREPROCESSING = "preprocessing.json"  # a key, or the last part of one
# File systems take 255 bytes. A longer name continues in a folder: every part of it but the last
# ends with a bare '%', which cannot stand at the end of a name that is not cut.
_MAX_PART = 200
_CUT = "%"

# Paths that are remembered: each small round lists the folder of its owners.
_NUM_KEPT = 64

_PLAIN = frozenset(b"abcdefghijklmnopqrstuvwxyz0123456789._-")
# Windows opens the device whatever follows the first dot.
_DEVICE = re.compile(r"(con|prn|aux|nul|com[0-9]|lpt[0-9])(\..*)?")
_WRITTEN = re.compile(r"%([0-9a-f]{2})")


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
    whole = path.removesuffix(SUFFIX).replace(f"{_CUT}/", "")
    try:
        raw = _WRITTEN.sub(lambda match: chr(int(match[1], 16)), whole).encode("latin-1")
        key = raw.decode()
        # Only what we would write ourselves: else two files could stand for one key.
        return key if key_to_path(key) == path else None
    except ValueError:
        return None


def _encode(name: str, suffix: str = "") -> str:
    """Encode a part of a key as one or more parts of a path."""
    cells = [chr(b) if b in _PLAIN else f"%{b:02x}" for b in name.encode()]
    parts = [""]
    for cell in cells:
        if len(parts[-1]) + len(cell) > _MAX_PART:
            parts.append("")
        parts[-1] += cell
    encoded = [f"{_harmless(part)}{_CUT}" for part in parts[:-1]]
    last = _harmless(parts[-1])
    if not suffix and last.endswith(SUFFIX):
        last = last.removesuffix(SUFFIX) + SUFFIX.replace(".", "%2e")
    return "/".join([*encoded, last + suffix])


def _harmless(part: str) -> str:
    if part.startswith(".") or _DEVICE.fullmatch(part):
        part = f"%{ord(part[0]):02x}{part[1:]}"
    if part.endswith("."):
        part = f"{part[:-1]}%2e"
    return part
