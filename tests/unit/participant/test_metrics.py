"""Metrics points, as XAIN's coordinator takes them."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from xain_participant.sdk.metrics import MAX_JSON_BYTES, Measured, flatten_values, to_json


def test_nested_sequences_are_numbered():
    values = {"loss": 1, "per_class": [0.5, (0.25, np.float32(2))], "row": np.arange(2)}
    assert flatten_values(values) == {
        "loss": 1.0,
        "per_class_0": 0.5,
        "per_class_1_0": 0.25,
        "per_class_1_1": 2.0,
        "row_0": 0.0,
        "row_1": 1.0,
    }


@pytest.mark.parametrize("value", [None, "0.5", b"1", True, np.True_, {"a": 1}, 1j, [1, None]])
def test_only_numbers_are_metrics(value):
    """In XAIN a string ended in a RecursionError."""
    with pytest.raises(TypeError, match=r"'loss.*must be a number"):
        flatten_values({"loss": value})


@pytest.mark.parametrize("value", [float("nan"), float("inf"), np.float32("-inf"), [0, np.nan]])
def test_metrics_are_finite(value):
    """XAIN sent NaN, which is no JSON."""
    with pytest.raises(ValueError, match=r"'loss.*must be finite"):
        flatten_values({"loss": value})


def test_oldest_points_are_left_out_first():
    """The coordinator takes 64 KiB, and of more nothing at all."""
    measured = [Measured(i, {f"loss_{j}": 0.123456789 for j in range(100)}) for i in range(200)]
    text, num_dropped = to_json(measured, participant_id="p", round_=0)
    assert MAX_JSON_BYTES - 4096 < len(text.encode()) <= MAX_JSON_BYTES
    kept = [point["time"] for point in json.loads(text)]
    assert kept == list(range(num_dropped, 200))


def test_a_point_that_is_too_large_alone_is_left_out():
    point = Measured(0, {f"weight_{i}": 0.1 for i in range(10_000)})
    assert to_json([point], participant_id="p", round_=0) == ("[]", 1)


@given(st.lists(st.integers(1, 5000), max_size=40))
def test_the_limit_holds_for_points_of_any_size(sizes):
    measured = [Measured(i, {"x" * size: 1.0}) for i, size in enumerate(sizes)]
    text, num_dropped = to_json(measured, participant_id="p", round_=0)
    assert len(text.encode()) <= MAX_JSON_BYTES
    assert len(json.loads(text)) + num_dropped == len(sizes)


finite = st.floats(allow_nan=False, allow_infinity=False)


@given(st.lists(st.dictionaries(st.text(), finite), max_size=5), st.text(), st.integers(0))
def test_json_round_trip(points, name, round_):
    measured = [Measured(i, values) for i, values in enumerate(points)]
    text, num_dropped = to_json(measured, participant_id=name, round_=round_)
    assert num_dropped == 0
    assert json.loads(text) == [
        {
            "measurement": "participant",
            "time": i,
            "tags": {"id": name},
            "fields": {**values, "round": round_},
        }
        for i, values in enumerate(points)
    ]
