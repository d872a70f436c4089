"""Keys as file names, and back.

One rule for every system, so that a folder may be copied from one to another: a name is made of
lower-case letters, digits, '.', '_' and '-'; every other byte of its UTF-8 is written as %xx.
Capital letters are among the others, because some systems do not tell them apart. Written as %xx is
also a dot at the beginning or end, which would mean something else to a system.

An object's file name ends in ".weights" and no folder's does, so that "3" and "3/global" may both
be keys. Only TEXTS for people are called what they are.
"""

import re
from collections.abc import Callable
from functools import lru_cache

from xain_coordinator.core.vocabulary.keys import check_key

SUFFIX = ".weights"
TEXTS = ("preprocessing.json", "table_one.json")  # keys, or the last parts of some
# File systems take 255 bytes. A longer name continues in a folder: every part of it but the last
# ends with a bare '%', which cannot stand at the end of a name that is not cut.
_MAX_PART = 200
_CUT = "%/"

# Paths that are remembered: each small round lists the folder of its owners.
_NUM_KEPT = 64

_PLAIN = frozenset("abcdefghijklmnopqrstuvwxyz0123456789._-")
_WRITTEN = re.compile(rb"%([0-9a-f]{2})")


def key_to_path(key: str) -> str:
    """The relative path, with '/' between its parts, of the file that holds an object. Raises
    ValueError for what can be no key."""
    check_key(key)
    *folders, name = key.split("/")
    last = name if name in TEXTS else encoded(name, _PLAIN.__contains__) + SUFFIX
    return "/".join([*map(_folder, folders), last])


@lru_cache(_NUM_KEPT)
def folder_to_path(folder: str) -> str:
    """The relative path of the folder that holds every key that begins with `folder` and '/'.
    Raises ValueError for what can be no key."""
    check_key(folder)
    return "/".join(map(_folder, folder.split("/")))


@lru_cache(_NUM_KEPT)
def path_to_key(path: str) -> str | None:
    """The key whose object lies at this relative path; None if the file is none of ours."""
    if not path.endswith((SUFFIX, *TEXTS)):
        return None
    try:
        key = decoded(path.removesuffix(SUFFIX))
        # Only what we would write ourselves: else two files could stand for one key.
        return key if key_to_path(key) == path else None
    except ValueError:
        return None


def encoded(part: str, is_plain: Callable[[str], bool]) -> str:
    """A part of a key as a name, in pieces of at most _MAX_PART bytes. Characters that are not
    plain are written as %xx, and so is a dot or a blank at either end of a piece."""
    pieces, size = [""], 0
    for character in part:
        cell = character if is_plain(character) else _written(character)
        size += len(cell.encode())
        if size > _MAX_PART:
            pieces.append("")
            size = len(cell.encode())
        pieces[-1] += cell
    return _CUT.join(map(_harmless, pieces))


def decoded(name: str) -> str:
    """The text that was encoded. Raises ValueError if there is none."""
    whole = name.replace(_CUT, "").encode()
    return _WRITTEN.sub(lambda match: bytes([int(match[1], 16)]), whole).decode()


def _folder(name: str) -> str:
    """A part of a key as a folder's name, escaped, so that it never ends as an object's does."""
    last = encoded(name, _PLAIN.__contains__)
    if last.endswith(SUFFIX):
        last = last.removesuffix(SUFFIX) + SUFFIX.replace(".", "%2e")
    return last


def _harmless(piece: str) -> str:
    """A piece of a name, whose first and last character are escaped if they are a dot or a
    blank."""
    if piece[0] in ". ":
        piece = _written(piece[0]) + piece[1:]
    if piece[-1] in ". ":
        piece = piece[:-1] + _written(piece[-1])
    return piece


def _written(character: str) -> str:
    """A character as %xx, one for each byte of its UTF-8."""
    return "".join(f"%{byte:02x}" for byte in character.encode())
