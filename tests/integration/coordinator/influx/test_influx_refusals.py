"""A server that does not take the points: which are lost, and that no others are."""

import pytest

from integration.coordinator.influx.points import connect, numbered, numbers
from support.influx_servers import Answer
from support.logs import capture_logs
from xain_coordinator.core.vocabulary.values import Point


def test_dropped_points_of_a_partial_write_count_as_lost(server, write):
    """No point is sent again, and no caller waits."""
    server.partial = True
    server.refuses = lambda line: line.fields["n"] in (3, 5)
    assert write(numbered(*range(10))) == 2
    assert numbers(server) == [0, 1, 2, 4, 6, 7, 8, 9]
    assert server.statuses == [422]


@pytest.mark.parametrize("status", [400, 500])
def test_a_partial_write_is_one_with_any_status(server, write, status):
    """InfluxDB 2.0 said so with status 500; again and again it would be the same."""
    said = "unexpected error writing points to database: partial write: x dropped=2"
    server.next.append(Answer(status, said))
    assert write(numbered(*range(10))) == 2
    assert server.num_requests == 1


def test_a_field_of_another_type_costs_its_point(server):
    """One participant sends text where the others send numbers, which are written."""
    server.partial = True
    metrics = connect(server)
    values = [0.5, "high", 0.25]
    metrics.write(
        [Point("participant", {"loss": v}, {"id": str(i)}, i) for i, v in enumerate(values)]
    )
    metrics.close()
    assert [line.fields["loss"] for line in server.lines] == [0.5, 0.25]
    assert metrics.num_lost == 1


def test_refused_points_are_told_seldom(server, write):
    """A participant may send such a point in every round; the counter tells of the others."""
    server.refuses = lambda line: True
    with capture_logs() as logs:
        assert [write(numbered(n)) for n in range(5)] == [1] * 5
    (told,) = logs
    assert (told["event"], told["log_level"]) == ("metric_points_refused", "warning")
    assert told["status"] == 400
