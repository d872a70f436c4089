"""A server that does not take the points: which are lost, and that no others are."""

from collections.abc import Callable, Sequence

import pytest
from structlog.testing import capture_logs

from integration.coordinator.influx.points import connect, numbered, numbers
from support.influx_servers import Answer, StrictInflux
from xain_coordinator.core.values import Point
from xain_coordinator.metrics import influx
from xain_coordinator.metrics.queue import Outcome


def is_bad(*bad: int) -> Callable[[object], bool]:
    return lambda line: line.fields["n"] in bad  # type: ignore[attr-defined]  # a Line


def of(participant_id: str, *numbers: int) -> list[Point]:
    return [Point("m", {"n": n}, {"id": participant_id}, 1000 + n) for n in numbers]


def mixed(*parts: Sequence[Point]) -> list[Point]:
    """By time, as they come from several at once."""
    return sorted((point for part in parts for point in part), key=lambda point: point.at_ns or 0)


@pytest.mark.parametrize("bad", [(0,), (500,), (999,), (3, 4, 700)])
def test_a_bad_point_is_lost_alone(
    server: StrictInflux, write: Callable[[Sequence[Point]], Outcome], bad: tuple[int, ...]
) -> None:
    """Though the server takes none of a request that has one in it."""
    server.refuses = is_bad(*bad)
    assert write(numbered(*range(1000))) == Outcome(num_lost=len(bad))
    assert numbers(server) == [n for n in range(1000) if n not in bad]
    assert server.num_requests < influx.MAX_REQUESTS


@pytest.mark.parametrize("num_bad", [1, 3])
def test_the_bad_points_of_one_cost_the_others_none(
    server: StrictInflux, write: Callable[[Sequence[Point]], Outcome], num_bad: int
) -> None:
    """However many there are, and wherever they stand among the others: what is lost is of those
    who sent them, and what does not fit into one search goes on in the next."""
    bad = [of(f"bad-{i}", *range(i, 700, num_bad)) for i in range(num_bad)]
    good = [of(f"p{n % 40}", n) for n in range(0, 700, 7)]
    own = [Point("m", {"n": n}, {}, 1000 + n) for n in range(0, 700, 35)]
    server.refuses = lambda line: line.tags.get("id", "").startswith("bad")
    rest, num_lost, num_batches = mixed(*bad, *good, own), 0, 0
    while rest:
        before = server.num_requests
        outcome = write(rest)
        assert server.num_requests - before <= influx.MAX_REQUESTS + 1
        rest = [point for _, point in outcome.rest]
        assert rest == mixed(rest), "oldest first"
        assert bool(rest) == (outcome.retry_s > 0)
        num_lost += outcome.num_lost
        num_batches += 1
    assert num_lost == 700
    # Some twice, to see whether the server takes them, which in InfluxDB are one.
    written = {(line.tags.get("id", ""), line.at_ns) for line in server.lines}
    assert written == {(p.tags.get("id", ""), p.at_ns) for p in mixed(*good, own)}
    assert (num_batches > 1) == (num_bad > 1)


def test_a_few_bad_points_cost_their_sender_no_other(
    server: StrictInflux, write: Callable[[Sequence[Point]], Outcome]
) -> None:
    server.refuses = lambda line: line.tags["id"] == "a" and line.fields["n"] in (3, 500)
    assert write(mixed(of("a", *range(600)), of("b", *range(300)))) == Outcome(num_lost=2)
    assert len(server.lines) == 898


def test_what_the_server_has_dropped_it_says(
    server: StrictInflux, write: Callable[[Sequence[Point]], Outcome]
) -> None:
    """InfluxDB takes the others: nothing is to be sent again."""
    server.partial = True
    server.refuses = is_bad(3, 5)
    assert write(numbered(*range(10))) == Outcome(num_lost=2)
    assert numbers(server) == [0, 1, 2, 4, 6, 7, 8, 9]
    assert server.statuses == [422]


@pytest.mark.parametrize("said", ["11", "99999999", "1" + "0" * 30, "9" * 5000])
def test_no_more_points_are_lost_than_were_sent(
    server: StrictInflux, write: Callable[[Sequence[Point]], Outcome], said: str
) -> None:
    """Whatever the server says: what does not fit into 64 bits would spoil `status`."""
    server.always = Answer(422, f"partial write: x dropped={said}")
    assert write(numbered(*range(10))) == Outcome(num_lost=10)


@pytest.mark.parametrize("status", [400, 500])
def test_a_partial_write_is_one_with_any_status(
    server: StrictInflux, write: Callable[[Sequence[Point]], Outcome], status: int
) -> None:
    """InfluxDB 2.0 said so with status 500; again and again it would be the same."""
    said = "unexpected error writing points to database: partial write: x dropped=2"
    server.next.append(Answer(status, said))
    assert write(numbered(*range(10))) == Outcome(num_lost=2)
    assert server.num_requests == 1


def test_a_field_of_another_type_costs_its_point(server: StrictInflux) -> None:
    """As when one participant sends text where the others send numbers."""
    metrics = connect(server)
    values: list[float | str] = [0.5, "high", 0.25]
    metrics.write(
        [Point("participant", {"loss": v}, {"id": str(i)}, i) for i, v in enumerate(values)]
    )
    metrics.close()
    assert [line.fields["loss"] for line in server.lines] == [0.5, 0.25]
    assert metrics.num_lost == 1


def test_requests_that_are_too_large_are_cut(
    server: StrictInflux, write: Callable[[Sequence[Point]], Outcome]
) -> None:
    server.max_lines = 10
    rest: Sequence[Point] = numbered(*range(1000))
    while rest:
        outcome = write(rest)
        assert outcome.num_lost == 0
        rest = [point for _, point in outcome.rest]
    assert sorted(set(numbers(server))) == list(range(1000))


def test_the_search_for_bad_points_is_bounded(
    server: StrictInflux, write: Callable[[Sequence[Point]], Outcome]
) -> None:
    server.refuses = is_bad(*range(1, 1000))
    assert write(numbered(0, *range(1, 1000))) == Outcome(num_lost=999)
    assert numbers(server) == [0]
    assert server.num_requests <= influx.MAX_REQUESTS


@pytest.mark.parametrize("is_known", [False, True])
@pytest.mark.parametrize("answer", [Answer(400, raw=b"Client sent an HTTP request"), Answer(413)])
def test_one_that_refuses_whatever_it_is_sent_is_no_influxdb(
    server: StrictInflux,
    write: Callable[[Sequence[Point]], Outcome],
    answer: Answer,
    is_known: bool,
) -> None:
    """Such as an HTTPS port, or a proxy, or one that has come in the place of an InfluxDB. The
    points wait, and it is not asked often."""
    if is_known:
        assert write(numbered(1000)) == Outcome()
    server.always = answer
    for points in ([1], range(1000)):
        before = server.num_requests
        with capture_logs() as logs:
            outcome = write(numbered(*points))
        assert outcome.num_lost == 0
        assert [point for _, point in outcome.rest] == numbered(*points)
        assert outcome.retry_s >= influx.LAST_RETRY_S / 2
        assert server.num_requests - before <= (2 if is_known else influx.MAX_REQUESTS)
        told = [(entry["event"], entry["status"], entry["error"]) for entry in logs]
        if len(points) == 1:
            ((event, status, error),) = told
            assert (event, status) == ("metrics_unavailable", answer.status)
            assert "check url, org, bucket and token of [metrics]" in error
        else:
            assert not told
    server.always = None
    server.lines.clear()
    assert write(numbered(*range(1000))) == Outcome()
    assert numbers(server) == list(range(1000))


def test_bad_points_alone_are_lost_once_the_server_is_known(
    server: StrictInflux, write: Callable[[Sequence[Point]], Outcome]
) -> None:
    """What it took before it takes again, so it is these. Until then they wait for others that
    tell."""
    server.refuses = is_bad(5, 6)
    assert len(write(numbered(5)).rest) == 1
    assert write(numbered(5, 1)) == Outcome(num_lost=1)
    assert write(numbered(5, 6)) == Outcome(num_lost=2)
    assert set(numbers(server)) == {1}


def test_a_search_that_is_cut_off_goes_on_with_the_rest(
    server: StrictInflux, write: Callable[[Sequence[Point]], Outcome]
) -> None:
    server.refuses = is_bad(1)
    server.next.extend([Answer(400), Answer(400), Answer(503)])
    outcome = write(numbered(*range(8)))
    assert [point for _, point in outcome.rest] == numbered(*range(8))
    assert outcome.retry_s > 0
    assert write([point for _, point in outcome.rest]) == Outcome(num_lost=1)
    assert numbers(server) == [0, 2, 3, 4, 5, 6, 7]


def test_refused_points_are_told_once(
    server: StrictInflux, write: Callable[[Sequence[Point]], Outcome]
) -> None:
    """A participant may send such a point in every round; the counter tells of the others."""
    assert write(numbered(9)) == Outcome()
    server.refuses = lambda line: line.tags.get("id") == "bad"
    with capture_logs() as logs:
        for n in range(5):
            write(of("bad", n))
    first, *later = logs
    assert (first["event"], first["log_level"], first["status"], first["participant"]) == (
        "metric_points_refused",
        "warning",
        400,
        "bad",
    )
    assert {entry["log_level"] for entry in later} == {"debug"}
