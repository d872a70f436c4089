"""Names as they are compared: of columns, categories and classes."""

import re
import unicodedata

import numpy as np

# Spellings of the two booleans, without case. Not y, n, t and f, which are codes of other things.
BOOLEANS = {
    **dict.fromkeys(("yes", "true", "ja", "oui", "sí"), "yes"),
    **dict.fromkeys(("no", "false", "nein", "non"), "no"),
}

# A label of digits, but not "007": a leading zero says that it is a code, not a number.
_NUMBER = re.compile(r"[+-]?(0|[1-9][0-9]*)(\.[0-9]*)?", re.ASCII)


def folded(text: str) -> str:
    """Normalise a text to Unicode's composed form (NFC), with single blanks and none around it."""
    if text.isascii() and text.isalnum():
        return text
    return " ".join(unicodedata.normalize("NFC", text).split())


def class_name(label: object) -> str:
    """Canonical name of a class or category.

    3, 3.0, "3" and "3.0" are "3"; 0.5 is "0.5"; True, "TRUE" and "Yes" are "yes", see BOOLEANS.
    Other text, "007" among it, is folded() and stays.
    """
    match label:
        case bool() | np.bool_():
            return "yes" if label else "no"
        case int() | np.integer():
            return str(int(label))
        case float() | np.floating():
            number = float(label)
            return str(int(number)) if number.is_integer() else repr(number)
        case bytes():
            return class_name(label.decode())
    text = folded(str(label))
    if not _NUMBER.fullmatch(text):
        return BOOLEANS.get(text.casefold(), text)
    whole, _, fraction = text.partition(".")
    if not fraction.strip("0"):
        return str(int(whole))  # not through float, which would merge ids beyond 2**53
    return class_name(float(text))
