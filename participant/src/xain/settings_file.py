"""Settings of a program's caller as a TOML file, in which each value keeps its type."""

import json
import os
import tomllib
from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import numpy as np


def as_toml(settings: Mapping[str, Any]) -> str:
    """Settings by dotted key as a file, in which each keeps its type. Raises ValueError."""
    tree: dict[str, Any] = {}
    for key, value in settings.items():
        *sections, name = _parts(key)
        at = tree
        for section in sections:
            at = at.setdefault(section, {})
            if not isinstance(at, dict):
                raise ValueError(f"{key} is within {section}, which is given as a value")
        if isinstance(value, Mapping):
            before = at.get(name)
            value = {**(before if isinstance(before, dict) else {}), **deepcopy(value)}
        at[name] = value
    return "".join(f"{_text(key)} = {_value(value, key)}\n" for key, value in tree.items())


def _parts(key: str) -> list[str]:
    """The parts of a dotted key; a part that has dots itself is in quotes, as in TOML."""
    try:
        at: Any = tomllib.loads(f"{key} = 0")
    except ValueError:
        raise ValueError(f"{key!r} is no key of a setting, such as rounds.epochs") from None
    parts = []
    while isinstance(at, dict):
        ((part, at),) = at.items()
        parts.append(part)
    return parts


def _value(value: Any, at: str) -> str:
    """A value in TOML. at: its key, for messages."""
    if isinstance(value, np.generic):
        value = value.item()
    match value:
        case bool():
            return str(value).lower()
        case int() | float():
            return repr(value)
        case str() | os.PathLike():
            return _text(os.fspath(value))
        case Mapping():
            items = (f"{_text(str(k))} = {_value(v, f'{at}.{k}')}" for k, v in value.items())
            return f"{{{', '.join(items)}}}"
        case list() | tuple():
            return f"[{', '.join(_value(item, at) for item in value)}]"
    raise ValueError(
        f"{at} is {value!r}; a setting is a number, text, true, false, or a list or table of them"
    )


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
