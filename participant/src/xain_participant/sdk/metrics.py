"""Metrics that a participant measures while it trains, as XAIN's metrics points."""

import json
import math
import numbers
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from xain_wire.limits import MAX_METRICS_BYTES

# The coordinator refuses longer metrics of a round all at once.
MAX_JSON_BYTES = MAX_METRICS_BYTES - 4096


@dataclass(frozen=True, slots=True)
class Measured:
    """Measured numbers by name, all finite. time_ns: since the epoch."""

    time_ns: int
    values: Mapping[str, float]


def flatten_values(values: Mapping[str, object]) -> dict[str, float]:
    """Convert values to numbers by name; items of a nested sequence become name_0, name_1,
    name_1_0.

    Raises TypeError for what is not a number, ValueError for what is not finite: JSON has neither
    NaN nor infinity, and a metrics store refuses them.
    """
    return {name: number for key, value in values.items() for name, number in _flatten(key, value)}


def _flatten(name: str, value: object) -> Iterator[tuple[str, float]]:
    """A number, or each number of a nested sequence, with its name. Raises TypeError and
    ValueError."""
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray):
        for i, item in enumerate(value):
            yield from _flatten(f"{name}_{i}", item)
        return
    # bool is an int to Python, and to a time series a type of its own.
    if isinstance(value, bool | np.bool_) or not isinstance(value, numbers.Real):
        raise TypeError(
            f"metric {name!r} is {value!r} ({type(value).__name__}); it must be a number, "
            "or a sequence of numbers"
        )
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"metric {name!r} is {number}; it must be finite")
    yield name, number


def to_json(measured: Sequence[Measured], *, participant_id: str, round_: int) -> tuple[str, int]:
    """Write EndTrainingRoundRequest.metrics: a JSON list of points, "[]" if there are none.

    measured: oldest first. The oldest are left out where all would have more than MAX_JSON_BYTES.
    Returns the list and how many were left out.
    """
    points: list[str] = []
    size = len("[]")
    for point in reversed(measured):
        text = json.dumps(
            {
                "measurement": "participant",
                "time": point.time_ns,
                "tags": {"id": participant_id},
                # A field: as a tag, every round would begin new series in the metrics store.
                "fields": {**point.values, "round": round_},
            },
            allow_nan=False,
        )
        size += len(text) + len(_COMMA)  # the text is ASCII, so characters are bytes
        if size > MAX_JSON_BYTES:
            break
        points.append(text)
    return f"[{_COMMA.join(reversed(points))}]", len(measured) - len(points)


_COMMA = ", "
