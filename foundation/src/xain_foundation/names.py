"""Valid names of participants and uploads.

A name is the last part of a key in every store, and travels as gRPC metadata, which takes printable
ASCII only and strips blanks at the ends.
"""

MAX_BYTES = 128
GLOBAL = "global"

# How "it must be ..." goes on.
RULE = (
    f'a name of at most {MAX_BYTES} bytes of printable ASCII, without "/", "\\" and "..", without '
    f'blanks at its ends, and neither "." nor "{GLOBAL}"'
)


def why_not(name: str) -> str | None:
    """Why this cannot be a name; None if it can."""
    if not name:
        return "it is empty"
    if name == GLOBAL:
        return "it is reserved for the global model"
    if "/" in name or "\\" in name or ".." in name or name == ".":
        return "it must not contain '/', '\\' or '..', or be '.'"
    if not (name.isascii() and name.isprintable()):
        return "it must be printable ASCII, which is all that travels in gRPC's metadata"
    if name != name.strip():
        return "it must not begin or end with a blank"
    if len(name) > MAX_BYTES:
        return f"it is longer than {MAX_BYTES} bytes"
    return None


def shortened(text: str, most: int = MAX_BYTES) -> str:
    """A text for a message: whole up to `most` characters, else its beginning and its length."""
    return text if len(text) <= most else f"{text[: most // 2]}... ({len(text)} characters)"


def brief(text: str, most: int) -> str:
    """The beginning of a text, `most` characters at most: whole sentences or parts of one, if there
    is a full stop, a question mark or a semicolon in its second half."""
    if len(text) <= most:
        return text
    start = text[:most]
    ends = [start.rfind(mark) for mark in (". ", "? ", "; ")]
    return start[: max(ends) + 1].rstrip(";") if max(ends) >= most // 2 else start


def printable(text: str) -> str:
    """One line for terminals and logs: each control character is replaced by a blank."""
    return "".join(letter if letter.isprintable() else " " for letter in text)
