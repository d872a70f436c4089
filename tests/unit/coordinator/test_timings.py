"""`xain-coordinator timings`: percentiles of a latency stream."""

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from xain_coordinator.cli import main as cli
from xain_coordinator.cli.timings import read

HEARTBEAT = "/xain_proto.fl.Coordinator/Heartbeat"


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli.app, ("timings", *arguments), env={"NO_COLOR": "1"})


def call(
    seconds: float, participant: str = "a", method: str = HEARTBEAT, status: str = "OK"
) -> str:
    named = {"participant": participant} if participant else {}
    line = {"time": "", "method": method, **named, "status": status, "seconds": seconds}
    return json.dumps(line)


def update(seconds: float, participant: str = "a") -> str:
    line = {"time": "", "participant": participant, "round": 0, "seconds": seconds}
    return json.dumps(line)


@pytest.fixture
def stream(tmp_path: Path) -> Path:
    """Two calls of each of two participants, a health check, two updates and three other lines."""
    lines = [call(0.25), call(0.75, status="UNAVAILABLE"), call(1.0, "b"), call(2.0, "b")]
    lines += [call(0.5, "", "/grpc.health.v1.Health/Check"), update(8.0), update(4.0, "b")]
    lines += ["", '{"time": "", "seconds": 1', "[]", '{"event": "round_opened", "round": 3}']
    path = tmp_path / "latency.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.mark.parametrize("count", [1, 2, 3, 10, 1001])
def test_percentiles_are_those_of_numpy(count):
    seconds = np.random.default_rng(count).lognormal(size=count)
    timings = read(call(value).encode() for value in seconds)
    (row,), _ = timings.tables()
    assert (row["endpoint"], row["count"], row["failed"]) == ("Heartbeat", count, 0)
    expected = np.percentile(seconds, [50, 90, 99])
    assert [row["median"], row["p90"], row["p99"]] == pytest.approx(expected.tolist())
    assert row["max"] == seconds.max()


def test_json_has_endpoints_participants_and_the_number_of_unreadable_lines(stream):
    result = run(str(stream), "--json")
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    endpoints = {row["endpoint"]: row for row in told["endpoints"]}
    assert {name: (row["count"], row["failed"]) for name, row in endpoints.items()} == {
        "Heartbeat": (4, 1),
        "Health/Check": (1, 0),
        "training": (2, 0),
    }
    assert endpoints["Heartbeat"]["median"] == 0.875
    rows = [(row["participant"], row["endpoint"], row["median"]) for row in told["participants"]]
    assert rows == [
        ("a", "Heartbeat", 0.5),
        ("a", "training", 8.0),
        ("b", "Heartbeat", 1.5),
        ("b", "training", 4.0),
    ]
    assert told["unreadable_lines"] == 3


def test_table_in_a_pipe_is_plain(stream):
    """One line for each row, with as many cells as headings, for grep and sort."""
    result = run(str(stream))
    assert result.exit_code == 0
    first, second = (text.splitlines() for text in result.stdout.split("\n\n"))
    assert first[0].split() == ["endpoint", "count", "failed", "median", "p90", "p99", "max"]
    assert first[-1].split() == ["training", "2", "0", "6.00000", "7.60000", "7.96000", "8.00000"]
    assert second[0].split()[:2] == ["participant", "endpoint"]
    assert [line.split()[:3] for line in second[1:]] == [
        ["a", "Heartbeat", "2"],
        ["a", "training", "1"],
        ["b", "Heartbeat", "2"],
        ["b", "training", "1"],
    ]
    assert "3 lines could not be read" in result.stderr


@pytest.mark.parametrize(
    "line",
    [
        b"\xff\xfe",
        b'"text"',
        b'{"seconds": 1}',
        b'{"seconds": "x", "round": 1}',
        b'{"seconds": -1, "round": 1}',
        b'{"seconds": NaN, "round": 1}',
        b'{"seconds": 1e999, "round": 1}',
        b'{"seconds": 1' + b"0" * 400 + b', "round": 1}',
        b'{"seconds": 1, "method": 7, "status": "OK"}',
        b'{"seconds": 1, "method": "/a/b"}',
        b"[" * 100_000,
    ],
)
def test_unreadable_line_is_counted_and_left_out(line):
    timings = read([line, call(1.0).encode()])
    assert timings.num_unreadable == 1
    assert len(timings.by_caller) == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "No such file or directory"),
        ("", "has no latency; name a file that [logging] latency_file named"),
        ("x\n", "has no latency (1 other lines); name a file"),
    ],
)
def test_file_without_latencies_is_one_line_and_exit_status_1(tmp_path, text, message):
    path = tmp_path / "latency.jsonl"
    if text is not None:
        path.write_text(text)
    result = run(str(path))
    assert result.exit_code == 1
    assert result.stdout == ""
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
