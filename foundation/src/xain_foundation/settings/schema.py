"""Keys of a settings model: their types and allowed values, and the key that a misspelt one
means."""

import json
import re
from collections.abc import Iterator, Mapping
from datetime import date, datetime, time
from difflib import get_close_matches
from fractions import Fraction
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel, SecretBytes, SecretStr
from pydantic.fields import FieldInfo

from xain_foundation.settings.fields import Allowed, parse_json

Key = tuple[str, ...]  # ("rounds", "epochs")

MASK = "********"
_SECRET_NAME = re.compile("password|secret|token|key", re.IGNORECASE)
_BARE = re.compile("[A-Za-z0-9_-]+")
_MAX_SHOWN = 80  # characters of a value in a message
_MAX_KEY = 80  # characters of an unknown key in a message
_MAX_TEXT = 64 * 1024  # characters of a value
_INT64 = 2**63

# An address with or without a scheme, up to its path or query.
_ORIGIN = re.compile(
    r"([A-Za-z][A-Za-z0-9+.-]*://)?([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])?(:\d{1,5})?(?=[/?#]|$)"
)
# A scheme, or a password as it stands in a URL.
_LIKE_URL = re.compile(r"://|:[^:@]*@")


def is_secret_name(name: str) -> bool:
    """Whether the name of a key says that its values are secret, so that all output masks them."""
    return _SECRET_NAME.search(name) is not None


def dotted(key: Key) -> str:
    """The key as it stands in TOML; parts with dots or blanks are in quotes."""
    return ".".join(part if _BARE.fullmatch(part) else json.dumps(part) for part in key)


def dotted_unknown(key: Key) -> str:
    """An unknown key as messages show it.

    Parts with characters that no key has are masked: with a wrong character in place of "=", the
    key contains the value, which may be secret.
    """
    parts = (part if _BARE.fullmatch(part) else MASK for part in key)
    text = ".".join(parts)
    return text if len(text) <= _MAX_KEY else f"{text[: _MAX_KEY - 3]}..."


def show_url(text: str) -> str:
    """Scheme, host and port of a URL, in quotes; MASK if the URL has a user, or is none."""
    if not text:
        return '""'
    match = _ORIGIN.match(text)
    if "@" in text or match is None or not (match[1] or match[3]):
        return MASK
    return f'"{match[0]}"' if text[match.end() :] in ("", "/") else f'"{match[0]}/..."'


def may_hold_password(value: object) -> bool:
    """Whether a value looks like a URL, and must be shown as one whatever its key is."""
    return isinstance(value, str) and _LIKE_URL.search(value) is not None


def why_not_value(value: object) -> str | None:
    """Why a value is refused for every key; None if it is not."""
    match value:
        case str() if len(value) > _MAX_TEXT:
            return f"it must have at most {_MAX_TEXT} characters"
        case str() if "\0" in value or any("\ud800" <= char <= "\udfff" for char in value):
            return "it must be text in UTF-8 without NUL"
        case int() if not -_INT64 <= value < _INT64:
            return "a whole number must have at most 64 bits"
        case Mapping():
            return next(filter(None, map(why_not_value, (*value, *value.values()))), None)
        case list() | tuple():
            return next(filter(None, map(why_not_value, value)), None)
    return None


def show(value: object, *, whole: bool = False) -> str:
    """A value on one line, as in TOML. What is within tables and lists stays there: it may be
    secret.

    whole: also where it is longer than a message should be.
    """
    match value:
        case dict():
            return "a table"
        case list():
            return "a list"
        case tuple():
            text = f"[{', '.join(show(item, whole=whole) for item in value)}]"
        case str() if may_hold_password(value):
            text = show_url(value)
        case int() if not -_INT64 <= value < _INT64:
            text = "a number of more than 64 bits"
        case bool() | str():
            text = json.dumps(value, ensure_ascii=False)
            text = text.encode(errors="backslashreplace").decode()  # surrogates
        case Path() | Fraction():
            text = show(str(value), whole=whole)
        case datetime() | date() | time():
            text = value.isoformat()
        case _:
            text = str(value)
    return text if whole or len(text) <= _MAX_SHOWN else f"{text[: _MAX_SHOWN - 3]}..."


class Schema:
    """The keys of a model.

    sections: keys that hold keys. leaves: keys that hold values. A leaf may be a table; the names
    of its items are the user's.
    """

    def __init__(self, model: type[BaseModel]) -> None:
        self.sections: list[Key] = []
        self.leaves: dict[Key, FieldInfo] = {}
        self.moved: Mapping[str, str] = getattr(model, "moved", {})
        self._add(model, ())

    def _add(self, model: type[BaseModel], at: Key) -> None:
        for name, field in model.model_fields.items():
            key = (*at, field.alias or name)
            if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
                self.sections.append(key)
                self._add(field.annotation, key)
            else:
                self.leaves[key] = field

    def is_table(self, key: Key) -> bool:
        return key in self.leaves and dict in _types(self.leaves[key].annotation)

    def depth(self, leaf: Key) -> int:
        """How many names the keys of a leaf have behind its own: of a table of tables 2."""
        if not self.is_table(leaf):
            return 0
        items = get_args(self.leaves[leaf].annotation)[-1]
        return 2 if dict in _types(items) else 1

    def is_secret(self, key: Key) -> bool:
        """Whether a key is secret, by name or by type. An unknown key may be a misspelt secret."""
        leaf = self.leaf_of(key)
        types = _types(self.leaves[leaf].annotation) if leaf is not None else frozenset()
        return bool({SecretStr, SecretBytes} & types) or any(map(is_secret_name, key))

    def shown(self, key: Key, value: object, *, whole: bool = False) -> str:
        """A value as messages show it, or as check-config does, whole."""
        if self.is_secret(key):
            return MASK
        if self.is_url(key) and isinstance(value, str):
            return show_url(value)
        return show(value, whole=whole)

    def is_url(self, key: Key) -> bool:
        """Whether the values of the key are URLs."""
        leaf = self.leaf_of(key)
        notes = _metadata(self.leaves[leaf]) if leaf is not None else iter(())
        return any(isinstance(note, Allowed) and note.is_url for note in notes)

    def leaf_of(self, key: Key) -> Key | None:
        """Return the leaf of a key, or the table that the key is an item of; None: unknown."""
        if key in self.leaves:
            return key
        return next((key[:n] for n in range(1, len(key)) if self.is_table(key[:n])), None)

    def knows(self, key: Key) -> bool:
        """Whether the key is a leaf of the schema, or an item of one of its tables."""
        leaf = self.leaf_of(key)
        return leaf is not None and len(key) <= len(leaf) + self.depth(leaf)

    def items(self, leaf: Key, value: Any) -> Iterator[tuple[Key, object]]:
        """Yield a leaf and its value; for a table with items, the key and value of each."""
        if value and self.is_table(leaf) and isinstance(value, Mapping):
            yield from (((*leaf, str(name)), item) for name, item in value.items())
        else:
            yield leaf, value

    def parse(self, key: Key, text: str) -> object:
        """Parse text as a value of the key's type. Text that cannot be parsed stays text, and the
        check refuses it.

        Text may be in quotes, and a list in brackets, as in TOML. Items of tables have no type, so
        what would be a value in TOML is one: 3, 0.5, true.
        """
        leaf = self.leaf_of(key)
        assert leaf is not None
        types = _types(self.leaves[leaf].annotation)
        if key != leaf:
            return _parse_toml(text)
        if dict in types:
            table = _parse_json(text)
            return _parse_toml(text) if table is text else table
        if NoneType in types and not text:
            return None
        if bool in types and text.lower() in _BOOLEANS:
            return _BOOLEANS[text.lower()]
        for number in (int, float):
            if number in types:
                try:
                    return number(text)
                except ValueError:
                    continue
        read = _parse_toml(text)
        return (
            read if isinstance(read, str) or (isinstance(read, list) and tuple in types) else text
        )

    def allowed(self, key: Key) -> str:
        """The values that a key may have: "it must be ..."."""
        leaf = self.leaf_of(key)
        assert leaf is not None
        field = self.leaves[leaf]
        # Limits of a table's items are annotated too.
        notes = field.metadata if key == leaf and self.is_table(leaf) else _metadata(field)
        for note in notes:
            if isinstance(note, Allowed):
                return note.text
        annotation: object = field.annotation
        if key != leaf:  # an item of a table
            annotation = get_args(annotation)[-1]
        parts = [_kind(part) for part in _flat(annotation) if part is not NoneType]
        kind, *others = sorted(dict.fromkeys(parts), key=lambda kind: "number" not in kind)
        comma = "," if (bounds := _bounds(field)) and others else ""
        return " or ".join((kind + bounds + comma, *others))

    def nearest(self, key: Key) -> Key | None:
        """Return the section or leaf that a wrong key was probably meant to be, or None."""
        if len(key) == 1:
            # One underscore where the environment needs two, then a section's name.
            joined = {"_".join(leaf): leaf for leaf in self.leaves}
            sections = {section[-1]: section for section in self.sections}
            if meant := _closest(key[0], joined, cutoff=0.9) or _closest(key[0], sections):
                return meant
        siblings = {leaf[-1]: leaf for leaf in self.leaves if leaf[:-1] == key[:-1]}
        everywhere = {".".join(leaf): leaf for leaf in self.leaves}
        return (
            _closest(key[-1], siblings)
            or _closest(".".join(key), everywhere, cutoff=0.75)
            # The right name in the wrong section.
            or next((leaf for leaf in self.leaves if leaf[-1] == key[-1].lower()), None)
        )


def _closest(name: str, keys: Mapping[str, Key], cutoff: float = 0.6) -> Key | None:
    matches = get_close_matches(name.lower(), keys, n=1, cutoff=cutoff)
    return keys[matches[0]] if matches else None


_BOOLEANS = {
    **dict.fromkeys(("true", "yes", "on", "1"), True),
    **dict.fromkeys(("false", "no", "off", "0"), False),
}


def _parse_toml(text: str) -> object:
    """Parse text as a value in TOML; text that is none is returned."""
    import tomllib

    try:
        document = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):  # no TOML, a number of thousands of digits, or too deep
        return text
    # More than one key: the text had line breaks in it.
    return document["value"] if len(document) == 1 else text


def _parse_json(text: str) -> object:
    """Parse text as JSON; text that is none is returned."""
    try:
        return parse_json(text)
    except ValueError:
        return text


def _flat(annotation: object) -> list[object]:
    """The members of a union; Annotated is taken off, Literal and tables stay whole."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return _flat(get_args(annotation)[0])
    if origin is None or origin in (Literal, dict, list, tuple):
        return [annotation]
    return [part for member in get_args(annotation) for part in _flat(member)]


def _types(annotation: object) -> frozenset[object]:
    """The plain types of an annotation: {int, NoneType} of int | None, {dict} of a table."""
    return frozenset(get_origin(part) or part for part in _flat(annotation))


def _kind(part: object) -> str:
    """Say in words which values a type has, such as "a whole number"."""
    if get_origin(part) is Literal:
        return f"one of: {', '.join(map(str, get_args(part)))}"
    kinds = {bool: "true or false", int: "a whole number", float: "a number", dict: "a table"}
    return next((kinds[kind] for kind in kinds if (get_origin(part) or part) is kind), "text")


def _bounds(field: FieldInfo) -> str:
    """Say in words which limits the values of a field have: ", at least 1 and below 5"."""
    texts = {}
    for note in _metadata(field):
        match note:
            case Ge(ge):
                texts["low"] = f"at least {ge}"
            case Gt(gt):
                texts["low"] = f"above {gt}"
            case Le(le):
                texts["high"] = f"at most {le}"
            case Lt(lt):
                texts["high"] = f"below {lt}"
    both = " and ".join(texts[side] for side in ("low", "high") if side in texts)
    return f", {both}" if both else ""


def _metadata(field: FieldInfo) -> Iterator[object]:
    """Yield what annotates a field, and the members of its union."""
    yield from field.metadata
    for part in (field.annotation, *get_args(field.annotation)):
        if get_origin(part) is Annotated:
            for note in get_args(part)[1:]:
                yield from note.metadata if isinstance(note, FieldInfo) else (note,)
