"""The metrics that participants send."""

import json
import re
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from xain_coordinator.core.vocabulary.values import Point
from xain_coordinator.telemetry.points import (
    MAX_AGE_NS,
    MAX_AHEAD_NS,
    MAX_FIELDS,
    MAX_NAME,
    parse_points,
)

NOW = 1_582_017_500_123_456_789
GOOD: dict[str, Any] = {
    "measurement": "participant",
    "time": 1_582_017_483_000_000_000,
    "tags": {"id": "p"},
    "fields": {"loss": 0.5, "epoch": 3, "note": "x"},
}

SHORT = '{"measurement":"participant","time":1,"fields":{"x":1}}'


def with_(**changes: Any) -> dict[str, Any]:
    return {**GOOD, **changes}


@pytest.mark.parametrize("text", ["", "  \n", "[]", " [ ] "])
def test_no_points(text):
    """An unset field is no error, as it was in XAIN."""
    assert parse_points(text, NOW) == ((), None)


def test_points_as_xain_sends_them():
    document = [GOOD, {key: GOOD[key] for key in ("measurement", "time", "fields")}]
    points, error = parse_points(json.dumps(document), NOW)
    assert error is None
    assert points == (
        Point("participant", GOOD["fields"], {}, GOOD["time"]),
        Point("participant", GOOD["fields"], {}, GOOD["time"]),
    )


def test_tags_are_not_for_participants_to_choose():
    """Each value of one would begin a series of its own. The epoch of XAIN's SDK is kept, as a
    number to draw."""
    tags = {"id": "p", "epoch_global": "12", "host": "a", "round": "3"}
    points, error = parse_points(json.dumps([with_(tags=tags, fields={"loss": 0.5})]), NOW)
    assert error is None
    assert points == (Point("participant", {"epoch_global": 12.0, "loss": 0.5}, {}, GOOD["time"]),)
    assert type(points[0].fields["epoch_global"]) is float


@pytest.mark.parametrize("off_ns", [0, -MAX_AGE_NS, MAX_AHEAD_NS, -3600 * 10**9, 3600 * 10**9])
def test_a_time_is_kept(off_ns):
    """That of a clock which is an hour wrong, too: the distances between its points are right."""
    (point,), _ = parse_points(json.dumps([with_(time=NOW + off_ns)]), NOW)
    assert point.at_ns == NOW + off_ns


@pytest.mark.parametrize(
    "time",
    [
        0,
        NOW - MAX_AGE_NS - 10**9,
        NOW + MAX_AHEAD_NS + 10**9,
        -(2**63),
        2**63 - 1,
        -1e18,
        2**63,
        1e300,
    ],
)
def test_a_wrong_clock_costs_no_point(time):
    """Points of a wrong clock stay close together, in order, and none hides another."""
    document = [with_(time=time), GOOD, with_(time=time), with_(time=time)]
    points, error = parse_points(json.dumps(document), NOW)
    assert error is None
    first, good, second, third = [point.at_ns for point in points]
    assert good == GOOD["time"]
    assert NOW <= first < second < third < NOW + 1000


def test_a_point_has_no_more_fields_than_it_may():
    fields = {f"f{n}": n for n in range(MAX_FIELDS)}
    points, error = parse_points(json.dumps([with_(fields=fields)]), NOW)
    assert (len(points), error) == (1, None)
    points, error = parse_points(json.dumps([with_(fields={**fields, "more": 1})]), NOW)
    assert points == ()
    assert "at most 200 items" in error


def test_a_name_is_no_longer_than_it_may():
    """A key of InfluxDB, with the sender's id and all escapes, must stay below 64 KiB."""
    points, error = parse_points(json.dumps([with_(fields={"," * MAX_NAME: 1})]), NOW)
    assert (len(points), error) == (1, None)
    points, error = parse_points(json.dumps([with_(fields={"a" * (MAX_NAME + 1): 1})]), NOW)
    assert points == ()
    assert "at most 200 characters" in error
    assert len(error) < 200


def test_a_field_has_one_type_for_all_senders():
    """A database keeps the type that a field first had: a loss of 1 must not keep out one of 0.5,
    nor a round of 1.0 those of the heartbeats."""
    fields = {"loss": 1, "n": 2**63 - 1, "note": "1", "state": 4.0, "round": 7}
    (point,), error = parse_points(json.dumps([with_(fields=fields)]), NOW)
    assert error is None
    assert point.fields == {"loss": 1.0, "n": 2.0**63, "note": "1", "state": 4, "round": 7}
    assert [type(value) for value in point.fields.values()] == [float, float, str, int, int]


def test_lenient_where_xain_was():
    """Keys that we do not know, and times with a point in them."""
    points, error = parse_points(json.dumps([with_(extra=1, time=1.582017483e18)]), NOW)
    assert error is None
    assert points[0].at_ns == GOOD["time"]


@pytest.mark.parametrize(
    ("element", "reason"),
    [
        (3, ": .* an object"),
        (None, ": .* an object"),
        ({"measurement": "participant", "time": 1}, "'fields'.*required"),
        ({"measurement": "participant", "fields": {"x": 1}}, "'time'.*required"),
        ({"time": 1, "fields": {"x": 1}}, "'measurement'.*required"),
        (with_(measurement="coordinator"), "'measurement'.* be 'participant'"),
        (with_(measurement=["participant"]), "'measurement'.* be 'participant'"),
        (with_(time="now"), "'time'"),
        (with_(time=True), "'time'"),
        (with_(tags=[]), "'tags'"),
        (with_(tags=None), "'tags'"),
        (with_(tags={"id": 1}), r"'tags'\]\['id'.* string"),
        (with_(fields=[1]), "'fields'"),
        (with_(fields={}), "'fields'.* at least 1"),
        (with_(fields={"x": 1, "ok": True}), "'ok'"),
        (with_(fields={"x": None}), "'x'"),
        (with_(fields={"x": {}}), "'x'"),
        (with_(fields={"round": 0.5}), "'round' must be a whole number"),
        (with_(fields={"state": "ready"}), "'state' must be a whole number"),
        (with_(fields={"round": True}), "'round'"),
        (with_(fields={"round": 1e300}), "'round' must be a whole number"),
    ],
)
@pytest.mark.parametrize("position", [0, 1, 5])
def test_every_element_is_checked(element, reason, position):
    """XAIN looked at the first only. One that is wrong, and none is taken."""
    document = [GOOD] * position + [element, GOOD]
    points, error = parse_points(json.dumps(document), NOW)
    assert points == ()
    assert re.match(rf"metrics\[{position}\].*{reason}", error)


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999"])
@pytest.mark.parametrize("key", ["time", "fields"])
def test_infinite_metrics_are_refused(value, key):
    document = json.dumps([with_(**{key: {"x": 7.25} if key == "fields" else 7.25})])
    points, error = parse_points(document.replace("7.25", value), NOW)
    assert points == ()
    assert error is not None


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{}", "array"),
        ("null", "array"),
        ("[", "Invalid JSON"),
        ("[1] x", "Invalid JSON"),
        ("[" * 60_000, "Invalid JSON"),
        ('["\\ud800"]', "Invalid JSON"),
        ("\ud800", "not text"),
        ("[" + "9" * 60_000 + "]", ""),
        (json.dumps([GOOD]) + " " * 65_536, "the limit is 65536"),
        (json.dumps("é" * 40_000, ensure_ascii=False), "the limit is 65536"),
        ("[" + ",".join([SHORT] * 1001) + "]", "at most 1000 items"),
    ],
)
def test_documents_that_are_refused_whole(text, reason):
    points, error = parse_points(text, NOW)
    assert points == ()
    assert reason in error
    assert len(error) < 200


json_values: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.one_of(
        st.text(),
        json_values.map(json.dumps),
        st.lists(
            st.fixed_dictionaries(
                {"measurement": st.just("participant"), "time": json_values, "fields": json_values},
                optional={"tags": json_values},
            )
        ).map(json.dumps),
    )
)
def test_parser_never_raises_and_takes_all_points_or_none(text):
    points, error = parse_points(text, NOW)
    assert not (points and error)
    for point in points:
        assert point.measurement == "participant"
        json.dumps([*point.fields.values(), point.at_ns], allow_nan=False)
