"""Metrics in InfluxDB against a server that is strict, and misbehaves when told to."""

import socket

import pytest

from integration.coordinator.influx.conftest import Waits
from integration.coordinator.influx.points import connect, numbered, numbers
from support.influx_servers import Answer
from support.logs import capture_logs, restored
from xain_coordinator.core.vocabulary.values import Point
from xain_coordinator.ports import StoreError
from xain_coordinator.telemetry.influx import InfluxWriter
from xain_coordinator.telemetry.queue import cost
from xain_foundation.logs.logs import configure


def test_request_follows_the_influxdb_api(server):
    """The server checks address, token, precision and compression of everything it is sent."""
    metrics = connect(server)
    metrics.write(
        [Point("m", {"a": 1, "b": 1.0, "c": "x"}, {"id": "p q"}, 1_700_000_000_000_000_001)]
    )
    metrics.close()
    (line,) = server.lines
    assert (line.tags, line.fields) == ({"id": "p q"}, {"a": 1, "b": 1.0, "c": "x"})
    assert [type(value) for value in line.fields.values()] == [int, float, str]
    assert line.at_ns == 1_700_000_000_000_000_001
    assert server.statuses == [204]


def test_names_and_text_are_stored_without_what_could_escape(server):
    """A backslash becomes a slash and a line end two characters; numbers keep their types, and the
    fields beside one that has no form in line protocol are written."""
    fields = {"a\\": 1.0, "b": "x\\\r\ny", "n": 3, "nan": float("nan"), "": 2.0}
    metrics = connect(server)
    metrics.write([Point("participant", fields, {"id": "w,a=r d\\", "empty": ""}, 7)])
    metrics.close()
    (line,) = server.lines
    assert line.tags == {"id": "w,a=r d/"}
    assert line.fields == {"a/": 1.0, "b": "x\\\\ny", "n": 3}
    assert [type(value) for value in line.fields.values()] == [float, str, int]


def test_many_points_are_few_requests(server):
    metrics = connect(server)
    metrics.write(numbered(*range(2500)))
    metrics.close()
    assert numbers(server) == list(range(2500))
    assert server.num_requests <= 4


def test_large_points_are_written_in_smaller_batches(server):
    """A batch is a second time in memory, as lines; and servers have limits of their own."""
    large = [Point("m", {"n": n, "text": "x" * 1000}, {}, n) for n in range(10)]
    metrics = connect(server, bounds={"max_batch_bytes": 2 * cost(large[0]) + 100})
    metrics.write([*large, Point("m", {"n": 10, "text": "x" * 10_000}, {}, 10), *large])
    metrics.close()
    assert numbers(server) == [*range(11), *range(10)]
    assert server.num_requests >= 11
    assert metrics.num_lost == 0


def test_a_full_batch_does_not_linger(server):
    """Meanwhile others might be lost."""
    metrics = connect(server, linger_s=1000.0, bounds={"max_batch_bytes": 1_000_000})
    metrics.write([Point("m", {"n": 1, "text": "x" * 1_000_000})])
    server.wait_for(lambda: len(server.lines) == 1)
    metrics.close()


# --- a server that is away ---


AWAY = [
    Answer(500, "an error of its own"),
    Answer(503, "starting"),
    Answer(503, raw=b"<html>\xff\xfe not text"),
    Answer(429, "busy"),
    Answer(408),
    Answer(cuts=True),
]


@pytest.mark.parametrize("answer", AWAY, ids=str)
def test_a_server_that_is_away_is_tried_again(server, answer):
    """Nothing is lost, and the order stays."""
    server.next.extend([answer] * 3)
    with capture_logs() as logs:
        metrics = connect(server)
        metrics.write(numbered(1, 2))
        server.wait_for(lambda: server.num_requests == 4)
        metrics.write(numbered(3))
        metrics.close()
    assert [entry["event"] for entry in logs] == ["metrics_unavailable", "metrics_available"]
    assert numbers(server) == [1, 2, 3]
    assert metrics.num_lost == 0


def test_an_answer_that_does_not_come_is_not_waited_for(server):
    server.next.append(Answer(hangs=True))
    metrics = connect(server, timeout_s=0.05)
    metrics.write(numbered(1))
    server.wait_for(lambda: bool(server.lines))
    metrics.close()
    assert numbers(server) == [1]
    assert metrics.num_lost == 0


def test_points_are_lost_where_no_server_listens(server):
    with socket.socket() as taken:  # bound, and not listening: nobody else can
        taken.bind(("127.0.0.1", 0))
        metrics = connect(server, url=f"http://127.0.0.1:{taken.getsockname()[1]}")
        metrics.write(numbered(1, 2))
        metrics.close_timeout_s = 0.1
        metrics.close()
    assert metrics.num_lost == 2


def test_the_time_between_tries_grows_to_a_limit(server, write):
    server.always = Answer(503)
    waits = Waits(20)
    assert write(numbered(1), waits) == 1
    assert all(length <= min(0.01 * 2**n, 0.02) for n, length in enumerate(waits.lengths_s))
    assert server.num_requests == 21, "once more at the end"


# --- a server that does not let us in ---


@pytest.mark.parametrize(
    ("wrong", "status", "why"),
    [
        ({"token": "another"}, 401, "unauthorized access"),
        ({"token": ""}, 401, "unauthorized access"),
        ({"org": "another"}, 404, 'organization name "another" not found'),
        ({"bucket": "another"}, 404, 'bucket "another" not found'),
    ],
)
def test_a_wrong_setting_is_told_once(server, wrong, status, why):
    """The points wait until the setting is put right."""
    with capture_logs() as logs:
        metrics = connect(server, **wrong)
        metrics.write(numbered(1, 2))
        server.wait_for(lambda: server.num_requests == 5)
        server.always = Answer()
        metrics.close()
    assert metrics.num_lost == 0
    warning, info = logs
    assert (warning["event"], warning["log_level"]) == ("metrics_unavailable", "warning")
    assert warning["status"] == status
    assert why in warning["error"]
    assert "url, org, bucket and token" in warning["error"]
    assert info == {"event": "metrics_available", "log_level": "info"}


@pytest.mark.parametrize("status", [200, 201, 202, 301, 307, 402, 403, 405, 501])
def test_other_answers_lose_nothing(server, write, status):
    server.next.append(Answer(status))
    assert write(numbered(1), Waits(1)) == 0
    assert numbers(server) == [1]


def test_a_page_to_log_in_at_is_no_success(server):
    """Only InfluxDB's own answer is."""
    with capture_logs() as logs:
        server.next.extend([Answer(200, raw=b"<html>Log in</html>")] * 2)
        metrics = connect(server)
        metrics.write(numbered(1))
        server.wait_for(lambda: bool(server.lines))
        metrics.close()
    assert numbers(server) == [1]
    assert metrics.num_lost == 0
    assert "it answers 200" in logs[0]["error"]
    assert "[metrics]" in logs[0]["error"]


def test_a_redirection_in_a_circle_ends(server, write):
    target = f"/api/v2/write?org={server.org}&bucket={server.bucket}&precision=ns"
    server.always = Answer(307, headers={"Location": target})
    assert write(numbered(1)) == 1
    assert server.num_requests < 10


# --- one that hangs, and the end ---


def test_a_server_that_hangs_holds_up_no_write(server):
    """Points are taken while one request hangs; there is never a second one beside it."""
    server.always = Answer(hangs=True)
    bounds = {"max_waiting_bytes": 100 * cost(*numbered(1000))}
    metrics = connect(server, timeout_s=60.0, bounds=bounds)
    metrics.write(numbered(0))
    server.wait_for(lambda: server.num_open == 1)
    for n in range(1, 1000):
        metrics.write(numbered(n))
    assert metrics.num_lost == 899
    assert (server.num_open, server.num_requests) == (1, 1)
    metrics.close_timeout_s = 0.0
    with capture_logs() as logs:
        metrics.close()
    assert metrics.num_lost == 1000
    (told,) = (line for line in logs if line["event"] == "metrics_lost")
    assert (told["points"], told["in_all"]) == (101, 1000)
    assert (server.num_open, server.num_requests) == (1, 1)
    server.release()
    metrics.close_timeout_s = 60.0
    metrics.close()
    assert metrics.num_lost == 1000


def test_the_end_waits_for_a_server_that_comes_back(server):
    server.next.append(Answer(503))
    metrics = connect(server)
    metrics.write(numbered(1))
    server.wait_for(lambda: server.num_requests == 1)
    metrics.close()
    assert numbers(server) == [1]
    assert metrics.num_lost == 0


# --- the token ---


def test_the_token_is_shown_to_the_server_alone(server, capsys):
    """A proxy that repeats the refused request does not bring the token into a log, not even
    through what the client logs of an answer that it does not understand."""
    echo = f"bad header: Authorization: Token {server.token}"
    answers = [Answer(s, echo, {"X-Echo": echo}) for s in (401, 400, 503, 200, 422, 302)]
    raw = [Answer(s, raw=echo.encode()) for s in (404, 413, 500)]
    server.next.extend([*answers, *raw, Answer(cuts=True)])
    with restored():
        configure("debug", console=False, third_party=True)
        metrics = connect(server)
        while server.next:
            num_before = server.num_requests
            metrics.write(numbered(num_before))
            server.wait_for(lambda before=num_before: server.num_requests > before)
        metrics.close()
    shown = capsys.readouterr().err
    assert "metrics_unavailable" in shown
    assert "Cannot parse error response" in shown, "the client's own log is looked at too"
    assert "Authorization: Token ***" in shown
    assert server.token not in shown + repr(metrics) + repr(vars(metrics))


@pytest.mark.parametrize("token", ["sec\nret", "sécret", " secret", "secret\r"])
def test_a_token_that_cannot_be_one(token):
    """A token that cannot be sent is refused at the start; the client's error would show it."""
    with pytest.raises(StoreError, match="printable ASCII") as caught:
        InfluxWriter("http://127.0.0.1:1", "o", "b", lambda: token, 1.0)
    assert token.strip() not in str(caught.value)


def test_a_token_that_changes_in_its_file_is_used_from_then_on(server, tmp_path):
    """Points wait while the server refuses the old token, and go when the file holds the new one;
    a file that is empty or gone for a moment changes nothing."""
    path = tmp_path / "token"
    path.write_text(f"{server.token}\n")
    metrics = connect(server, token="", token_file=str(path))
    metrics.write(numbered(1))
    server.wait_for(lambda: numbers(server) == [1])
    path.write_text("")
    metrics.write(numbered(2))
    server.wait_for(lambda: numbers(server) == [1, 2])
    path.unlink()
    server.token = "renewed-token-7"
    metrics.write(numbered(3))
    server.wait_for(lambda: server.statuses[-1:] == [401])
    path.write_text(f"{server.token}\n")
    metrics.close()
    assert numbers(server) == [1, 2, 3]
    assert metrics.num_lost == 0


@pytest.mark.parametrize("content", ["", " \n"])
def test_an_empty_file_is_no_token(server, tmp_path, content):
    path = tmp_path / "token"
    path.write_text(content)
    with pytest.raises(StoreError, match=r"metrics\.token_file .* holds no text"):
        connect(server, token="", token_file=str(path))
