"""Keys as names of S3 objects, and back.

A name is its key wherever that is possible, so that people and other programs find "3/global" as
"3/global". Servers that keep objects in folders cannot hold every name that S3 could, so a control
character, a backslash, and a dot or blank at either end of a part are written as %xx, and so is the
per cent sign itself. A long part continues in a folder, as in stores/paths.py: every piece of it
but the last ends with a bare '%'.

No part of a name begins with a dot: such names are for our own bookkeeping.
"""

from xain_coordinator.core.vocabulary.keys import check_key
from xain_coordinator.stores.paths import decoded, encoded

# S3 takes 1024 bytes; a claim's name is that of the object it is for, and 74 bytes more.
MAX_NAME_BYTES = 940

_ESCAPED = frozenset([*map(chr, range(32)), "\x7f", "\\", "%"])


def key_to_name(key: str) -> str:
    """The name of the object with this key, without the store's prefix. Raises ValueError for what
    can be no key."""
    check_key(key)
    return "/".join(encoded(part, _is_plain) for part in key.split("/"))


def name_to_key(name: str) -> str | None:
    """The key whose object has this name; None if the object is none of ours."""
    try:
        key = decoded(name)
        # Only what we would write ourselves: else two names could stand for one key.
        return key if key_to_name(key) == name else None
    except ValueError:
        return None


def _is_plain(character: str) -> bool:
    """Whether a character stands in a name as it is."""
    return character not in _ESCAPED
