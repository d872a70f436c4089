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
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, field_validator

from xain_coordinator.core.parts.evaluation import MAX_METRICS, why_not_metric
from xain_coordinator.core.vocabulary.values import Evaluation, Point
from xain_foundation.names import shortened
from xain_wire.limits import MAX_METRICS_BYTES, MAX_POINTS

MAX_FIELDS = 200  # of a point
MAX_NAME = 200  # characters; a key of InfluxDB is less than 64 KiB, with the sender's id

# Between what a round may last and what a clock in another time zone may be wrong by. A database
# keeps points by the day or so; times all over the centuries would open a file for each.
MAX_AGE_NS = 7 * 24 * 3600 * 10**9
MAX_AHEAD_NS = 24 * 3600 * 10**9

WHOLE_FIELDS = ("state", "round")
NO_METRICS = (*WHOLE_FIELDS, "epoch_global")

_INT64 = 2**63  # what a time-series database keeps of a whole number
_MAX_WHERE = 80  # characters of the place of an error, which has names that its sender chose

Name = Annotated[str, Field(max_length=MAX_NAME)]


class _Sent(BaseModel):
    """A point as a participant sends it."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)

    measurement: Literal["participant"]
    time: int | float
    tags: dict[str, str] = Field(default_factory=dict, fail_fast=True)
    fields: dict[Name, float | str] = Field(min_length=1, max_length=MAX_FIELDS, fail_fast=True)

    @field_validator("fields")
    @classmethod
    def _has_whole_numbers(cls, fields: dict[str, float | str]) -> dict[str, float | str]:
        """The same fields, if those of WHOLE_FIELDS are whole numbers of 64 bits. Raises
        ValueError."""
        for name in WHOLE_FIELDS:
            value = fields.get(name, 0.0)
            if isinstance(value, str) or not value.is_integer() or not abs(value) < _INT64:
                raise ValueError(f"{name!r} must be a whole number of 64 bits")
        return fields

    def point(self, now_ns: int, index: int) -> Point:
        """The point, at `now_ns` plus `index` if its sender's clock is wrong."""
        at_ns = int(self.time)
        if not now_ns - MAX_AGE_NS <= at_ns <= now_ns + MAX_AHEAD_NS:
            at_ns = now_ns + index
        fields = {n: int(v) if n in WHOLE_FIELDS else v for n, v in self.fields.items()}
        return Point("participant", {**_epoch(self.tags), **fields}, at_ns=at_ns)


_POINTS = TypeAdapter(Annotated[list[_Sent], Field(max_length=MAX_POINTS, fail_fast=True)])


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
        sent = _POINTS.validate_json(json_text)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        where = "".join(
            f"[{step!r}]" for step in first["loc"][:3]
        )  # not the types that it may have
        return (), f"metrics{shortened(where, _MAX_WHERE)}: {first['msg']}"
    except UnicodeEncodeError as error:
        return (), f"the metrics are not text: {error.reason}"
    return tuple(one.point(now_ns, index) for index, one in enumerate(sent)), None


def newest_metrics(points: Iterable[Point], evaluation: Evaluation | None) -> dict[str, float]:
    """The newest value of each name in a participant's points, at most MAX_METRICS of them.
    evaluation: what is in it is left out here, under its own name with "test_" before it."""
    evaluated = {f"test_{name}" for name in evaluation.metrics} if evaluation is not None else set()
    newest: dict[str, float] = {}
    for point in sorted(points, key=lambda point: point.at_ns or 0):
        for name, value in point.fields.items():
            if name in evaluated or name in NO_METRICS or isinstance(value, str):
                continue
            if why_not_metric(name, value) is None:
                newest[name] = float(value)
    return {name: newest[name] for name in sorted(newest)[:MAX_METRICS]}


def _epoch(tags: Mapping[str, str]) -> dict[str, float]:
    """XAIN's epoch, counted over the rounds; empty if there is none."""
    try:
        epoch = float(tags["epoch_global"])
    except (KeyError, ValueError):
        return {}
    return {"epoch_global": epoch} if math.isfinite(epoch) else {}
