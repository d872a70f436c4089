"""Tags that a participant tells of itself for the selection, such as {"site": "north"}.

Tags are journalled, listed, and compared as text; so they are few and short.
"""

import re
from collections.abc import Mapping

from xain_foundation.names import shortened

MAX_TAGS = 32
MAX_KEY_BYTES = 64
MAX_VALUE_BYTES = 256

# How "it must be ..." goes on.
KEY_RULE = f'a key of at most {MAX_KEY_BYTES} ASCII letters, digits, "_", "-", "." and "/"'
VALUE_RULE = f"printable text of at most {MAX_VALUE_BYTES} bytes"

_KEY = re.compile(r"[A-Za-z0-9_./-]+")


def why_not_key(key: str) -> str | None:
    """Why this cannot be the key of a tag; None if it can."""
    if _KEY.fullmatch(key) is None or len(key) > MAX_KEY_BYTES:
        return f"it must be {KEY_RULE}"
    return None


def why_not_value(value: str) -> str | None:
    """Why this cannot be the value of a tag; None if it can."""
    # Printable text has no lone surrogates, so it can be encoded.
    if not value.isprintable() or len(value.encode()) > MAX_VALUE_BYTES:
        return f"it must be {VALUE_RULE}"
    return None


def why_not(tags: Mapping[str, str]) -> str | None:
    """Why these cannot be the tags of a participant, by the first wrong one; None if they can."""
    if len(tags) > MAX_TAGS:
        return f"there are {len(tags)} tags; at most {MAX_TAGS} are taken"
    for key, value in tags.items():
        shown = shortened(key, MAX_KEY_BYTES)
        if (why := why_not_key(key)) is not None:
            return f"the tag {shown!r} cannot be used: {why}"
        if (why := why_not_value(value)) is not None:
            return f"the value of the tag {shown!r} cannot be used: {why}"
    return None
