"""The metrics that a participant sends with its update: XAIN's JSON.

    [{"measurement": "participant", "time": NANOSECONDS,
      "tags": {NAME: TEXT}, "fields": {NAME: NUMBER OR TEXT}}, ...]

`tags` may be missing; other keys are passed over, as XAIN did.

A time-series database keeps a field of the type that it first had, and refuses points in which it
has another. JSON has both 1 and 1.0 for a loss, so every number becomes a float, except in the two
fields that the coordinator writes of participants itself: those are whole numbers, and a
participant that could make them something else would keep the others' out.
"""

import math
from typing import Any

from pydantic_core import from_json

from xain_coordinator.core.values import Point

MAX_BYTES = 64 * 1024
MAX_POINTS = 1000

WHOLE_FIELDS = ("state", "round")

_INT64 = 2**63  # what a time-series database keeps of a whole number
_SHOWN = 40  # characters of a name in a message


def parse_points(json_text: str) -> tuple[tuple[Point, ...], str | None]:
    """(points, None), or ((), what is wrong with the first bad element): all are taken or none.

    "" and "[]" are no points.
    """
    if not json_text.strip():
        return (), None
    try:
        size = len(json_text.encode())
        if size > MAX_BYTES:
            return (), f"the metrics have {size} bytes, the limit is {MAX_BYTES}"
        # Not the standard library's: that one runs out of stack on deep nesting.
        document = from_json(json_text, allow_inf_nan=False)
    except ValueError as error:
        return (), f"the metrics are not JSON: {error}"
    if not isinstance(document, list):
        return (), f"the metrics must be a list of points, got {_kind(document)}"
    if len(document) > MAX_POINTS:
        return (), f"there are {len(document)} metrics, the limit is {MAX_POINTS}"
    points = []
    for index, element in enumerate(document):
        try:
            points.append(_point(element))
        except ValueError as error:
            return (), f"metrics element {index}: {error}"
    return tuple(points), None


def _point(element: Any) -> Point:
    """Raises ValueError with the reason."""
    if not isinstance(element, dict):
        raise ValueError(f"it must be an object, got {_kind(element)}")
    for key in ("measurement", "time", "fields"):
        if key not in element:
            raise ValueError(f"{key!r} is missing")
    if element["measurement"] != "participant":
        raise ValueError("'measurement' must be \"participant\"")
    time = element["time"]
    if _is_number(time):
        time = int(time)  # which may still be out of range
    if not _is_number(time):
        raise ValueError(f"'time' must be a finite 64-bit number, got {_kind(time)}")
    tags = element.get("tags", {})
    if not isinstance(tags, dict):
        raise ValueError(f"'tags' must be an object, got {_kind(tags)}")
    for name, value in tags.items():
        if not isinstance(value, str):
            raise ValueError(f"tag {name[:_SHOWN]!r} must be a string, got {_kind(value)}")
    fields = element["fields"]
    if not isinstance(fields, dict):
        raise ValueError(f"'fields' must be an object, got {_kind(fields)}")
    if not fields:
        raise ValueError("'fields' is empty")  # there would be nothing to store
    typed = {name: _field(name, value) for name, value in fields.items()}
    return Point("participant", typed, tags, at_ns=time)


def _field(name: str, value: Any) -> int | float | str:
    """Raises ValueError."""
    if name in WHOLE_FIELDS:
        if isinstance(value, float) and value.is_integer():
            value = int(value)  # which may still be out of range
        if isinstance(value, float) or not _is_number(value):
            raise ValueError(f"field {name!r} must be a whole number, got {_kind(value)}")
        return int(value)
    if isinstance(value, str):
        return value
    if not _is_number(value):
        raise ValueError(
            f"field {name[:_SHOWN]!r} must be a string or a finite 64-bit number, "
            f"got {_kind(value)}"
        )
    return float(value)


def _is_number(value: Any) -> bool:
    if isinstance(value, bool):
        return False
    if isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, int) and -_INT64 <= value < _INT64


def _kind(value: Any) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "a boolean"
        case int():
            return "a whole number out of range" if not _is_number(value) else "a number"
        case float():
            return "a number" if math.isfinite(value) else "a number that is not finite"
        case str():
            return "a string"
        case list():
            return "a list"
    return "an object"
