"""Bounds of tables at their declaration, and of the heads that carry them between servers."""

import pytest
from msgspec.structs import replace

from xain_parameters import messages as m
from xain_parameters.errors import Invalid
from xain_parameters.scheduler import commands as c
from xain_parameters.scheduler.decider import decide
from xain_parameters.scheduler.state import MAX_FORMER, State, view_of
from xain_parameters.specs import (
    MAX_NAME_BYTES,
    MAX_SPEC_BYTES,
    MAX_TABLES,
    Plugin,
    TableSpec,
    encoded,
)
from xain_parameters.tables.part import plugins_of
from xain_wire.limits import MAX_INT32

TABLE = TableSpec(0, "w", 10, 4, True, "float32", Plugin("add"), Plugin("zeros"), (10, 4))
MAX_MESSAGE_BYTES = 4 << 20  # gRPC's


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"name": ""}, f"1 to {MAX_NAME_BYTES} bytes"),
        ({"name": "w" * 70_000}, r"\(70000 characters\)"),
        ({"name": "ä" * MAX_NAME_BYTES}, f"1 to {MAX_NAME_BYTES} bytes"),
        ({"name": "a\nb"}, "printable"),
        ({"shape": (3,), "dim": 1}, r"shape \(3,\) is none of 10 rows of 1 values"),
        ({"shape": (10, 5)}, "shape"),
        ({"shape": (10, 2, -2, -1)}, "shape"),
        ({"is_dense": False}, "shape"),
        ({"bound": None, "shape": ()}, "number of rows"),
        ({"init": Plugin("zeros", {"x" * 5000: 1})}, f"{MAX_SPEC_BYTES} at most"),
        ({"shape": (10, 4, *[1] * 5000)}, f"{MAX_SPEC_BYTES} at most"),
    ],
)
def test_table_over_a_bound_is_refused_by_scheduler_and_servers(change, says):
    table = replace(TABLE, **change)
    with pytest.raises(Invalid, match=says):
        decide(State.first(7), c.DeclareTable(table))
    with pytest.raises(Invalid, match=says) as caught:
        plugins_of(table)
    assert len(str(caught.value)) < 1000


def test_as_many_tables_as_there_may_be_fit_into_a_view():
    state = State.first(7)
    name = "n" * (MAX_NAME_BYTES - 4)
    options = {"x" * 3000: 1}
    largest = encoded(replace(TABLE, name=name, update=Plugin("add", options)))
    assert len(largest) <= MAX_SPEC_BYTES
    for number in range(MAX_TABLES):
        state = decide(state, c.DeclareTable(replace(TABLE, name=f"{name}{number}"))).state
    with pytest.raises(Invalid, match=f"has {MAX_TABLES} tables"):
        decide(state, c.DeclareTable(TABLE))
    assert decide(state, c.DeclareTable(replace(TABLE, name=f"{name}0"))).events == ()
    assert MAX_TABLES * MAX_SPEC_BYTES < MAX_MESSAGE_BYTES
    assert len(encoded(view_of(state))) < MAX_MESSAGE_BYTES


def test_heads_between_servers_fit_at_the_bounds_of_their_parts():
    """The largest declaration, and an entry that names every worker that has ended or has a gap."""
    workers = {f"{number:0128}": 2**62 for number in range(2 * MAX_FORMER)}
    heads = [
        m.Declare(MAX_INT32, MAX_INT32, b"x" * MAX_SPEC_BYTES),
        m.Entry(MAX_INT32, MAX_INT32, 2**62, "open", clock=2**62, ended=workers),
    ]
    for head in heads:
        assert len(m.encode_head(head)) <= m.MAX_HEAD_BYTES
