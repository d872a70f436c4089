"""The metrics that a participant sends with its update: XAIN's JSON.

    [{"measurement": "participant", "time": NANOSECONDS,
      "tags": {NAME: TEXT}, "fields": {NAME: NUMBER OR TEXT}}, ...]

`tags` may be missing; other keys are passed over, as XAIN did. So are tags: each new value of one
would begin a series of its own, and a database of many is a slow one. XAIN's "epoch_global" becomes
a field; who the sender is, the coordinator knows.

A time-series database keeps a field of the type that it first had, and refuses points in which it
has another. JSON has both 1 and 1.0 for a loss, so every number becomes a float, except in the two
fields that the coordinator writes of participants itself: those are whole numbers, and a
participant that could make them something else would keep the others' out.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic_core import from_json

from xain_coordinator.core.evaluation import MAX_METRICS, why_not_metric
from xain_coordinator.core.values import Evaluation, Point
from xain_proto.limits import MAX_METRICS_BYTES, MAX_POINTS

MAX_FIELDS = 200  # of a point
MAX_NAME = 200  # characters; a key of InfluxDB is less than 64 KiB, with the sender's id

# Between what a round may last and what a clock in another time zone may be wrong by. A database
# keeps points by the day or so; times all over the centuries would open a file for each.
MAX_AGE_NS = 7 * 24 * 3600 * 10**9
MAX_AHEAD_NS = 24 * 3600 * 10**9

WHOLE_FIELDS = ("state", "round")
NO_METRICS = (*WHOLE_FIELDS, "epoch_global")

_INT64 = 2**63  # what a time-series database keeps of a whole number
_SHOWN = 40  # characters of a name in a message


def parse_points(json_text: str, now_ns: int) -> tuple[tuple[Point, ...], str | None]:
    """Parse metrics JSON to (points, None), or ((), reason of the first bad element): all points or
    none.

    "" and "[]" are no points. A clock that is wrong by more than a time zone costs no point: its
    times become `now_ns`, a nanosecond apart, since two points of a series at one time are one.
    """
    if not json_text.strip():
        return (), None
    try:
        size = len(json_text.encode())
        if size > MAX_METRICS_BYTES:
            return (), f"the metrics have {size} bytes, the limit is {MAX_METRICS_BYTES}"
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
            points.append(_point(element, now_ns, index))
        except ValueError as error:
            return (), f"metrics element {index}: {error}"
    return tuple(points), None


def newest_metrics(points: Iterable[Point], evaluation: Evaluation | None) -> dict[str, float]:
    """The newest value of each name in a participant's points, at most MAX_METRICS of them.

    evaluation: what is in it is left out here, under its own name with "test_" before it.
    """
    evaluated = {f"test_{name}" for name in evaluation.metrics} if evaluation is not None else set()
    newest: dict[str, float] = {}
    for point in sorted(points, key=lambda point: point.at_ns or 0):
        for name, value in point.fields.items():
            if name in evaluated or name in NO_METRICS or isinstance(value, str):
                continue
            if why_not_metric(name, value) is None:
                newest[name] = float(value)
    return {name: newest[name] for name in sorted(newest)[:MAX_METRICS]}


def _point(element: Any, now_ns: int, index: int) -> Point:
    """Parse one element to a point. Raises ValueError with the reason."""
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
    if not now_ns - MAX_AGE_NS <= time <= now_ns + MAX_AHEAD_NS:
        time = now_ns + index
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
    if len(fields) > MAX_FIELDS:
        raise ValueError(f"it has {len(fields)} fields, the limit is {MAX_FIELDS}")
    typed = {name: _field(name, value) for name, value in fields.items()}
    return Point("participant", {**_epoch(tags), **typed}, at_ns=time)


def _epoch(tags: Mapping[str, str]) -> dict[str, float]:
    """XAIN's epoch, counted over the rounds; empty if there is none."""
    try:
        epoch = float(tags["epoch_global"])
    except (KeyError, ValueError):
        return {}
    return {"epoch_global": epoch} if math.isfinite(epoch) else {}


def _field(name: str, value: Any) -> int | float | str:
    """Parse a field of a point. Raises ValueError."""
    if len(name) > MAX_NAME:
        raise ValueError(
            f"field {name[:_SHOWN]!r}... has a name of {len(name)} characters, "
            f"the limit is {MAX_NAME}"
        )
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
