"""Points in line protocol."""

import json
from typing import Any, cast

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from support.influx_servers import Line, parse_line
from xain_coordinator.core.values import Point
from xain_coordinator.metrics.influx import to_line
from xain_coordinator.metrics.points import parse_points


def test_a_whole_number_is_one_and_a_float_is_one() -> None:
    """The type does not depend on the value: the database keeps the type that it first sees."""
    point = Point("participant", {"round": 3, "loss": 1.0, "note": "a b"}, {"id": "a b,c=d"})
    text = to_line(7, point).decode()
    assert text == r'participant,id=a\ b\,c\=d loss=1,note="a b",round=3i 7'
    assert parse_line(text) == Line("participant", dict(point.tags), dict(point.fields), 7)
    assert type(parse_line(text).fields["loss"]) is float


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"": 1.0},
        {"x": float("nan")},
        {"x": float("inf"), "y": 1.0},
        {"x": None},
        {"x": object()},
        {"x": "\ud800"},
        None,
    ],
)
def test_points_without_a_line(fields: Any) -> None:
    """A point with a field that has no form in a line is lost as a whole."""
    assert to_line(0, Point("x", fields)) == b""
    assert to_line(0, Point("x", {"ok": 1}, cast(Any, {"t": 1}))) == b""


@pytest.mark.parametrize(
    ("field", "stored"),
    [
        ("a\\", "a/"),
        ("a\\,b", "a/,b"),
        ('"', '"'),
        ("a\nb", "a\\nb"),
    ],
)
def test_names_cannot_escape_the_line(field: str, stored: str) -> None:
    line = parse_line(to_line(0, Point("x", {field: 1.0, "z": "t"}, {field: "v\\"})).decode())
    assert line == Line("x", {stored: "v/"}, {stored: 1.0, "z": "t"}, 0)


def test_names_that_become_the_same_are_one_field() -> None:
    line = parse_line(
        to_line(0, Point("x", {"a\\": 1.0, "a/": 2.0}, {"b\\": "u", "b/": "v"})).decode()
    )
    assert line == Line("x", {"b/": "v"}, {"a/": 2.0}, 0)


def test_text_cannot_forge_another_point() -> None:
    """Some servers end a line within quotes."""
    forged = '1"\ncoordinator state=2i,round=9i 5\r\nx y="'
    fields = {"a\\": 1.0, "b": forged, f"{forged}\\": 2.0}
    line = to_line(0, Point("participant", fields, {"id": "a", "b": forged, "c\\": forged}))
    assert b"\n" not in line
    assert b"\r" not in line
    assert parse_line(line.decode()).measurement == "participant"
    assert parse_line(line.decode()).fields["b"] == forged.replace("\r\n", "\n").replace(
        "\n", "\\n"
    )


NOW = 1_700_000_000_000_000_000

texts = st.text(st.sampled_from('ab\\,= "\n\r\t#\u2028é')) | st.text()


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.dictionaries(
        texts, st.one_of(texts, st.floats(allow_nan=False, allow_infinity=False), st.integers())
    ),
    st.dictionaries(texts, texts),
    st.integers(NOW - 10**12, NOW + 10**12),
)
def test_points_of_participants_are_one_valid_line(
    fields: dict[str, Any], tags: dict[str, str], time_ns: int
) -> None:
    """The line has the participants' series, one field for each name, and every number exact."""
    document = [{"measurement": "participant", "time": time_ns, "tags": tags, "fields": fields}]
    points, _ = parse_points(json.dumps(document), NOW)
    for point in points:
        tagged = Point(point.measurement, point.fields, {**tags, "id": "me"}, point.at_ns)
        text = to_line(time_ns, tagged).decode()
        if not text:
            assert "" in fields
            continue
        line = parse_line(text)
        assert (line.measurement, line.tags["id"], line.at_ns) == ("participant", "me", time_ns)
        numbers = {name: value for name, value in point.fields.items() if name.isidentifier()}
        for name, value in numbers.items():
            if not isinstance(value, str):
                assert line.fields[name] == value
                assert type(line.fields[name]) is type(value)
