"""LocalMetricsFile beyond the contract: lines, bounds and bad disks."""

import json
import threading
import tracemalloc
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from xain_coordinator.core.vocabulary.values import Point
from xain_coordinator.telemetry import queue
from xain_coordinator.telemetry.local_file import LocalMetricsFile
from xain_coordinator.telemetry.points import parse_points


class Gated(Mapping[str, float]):
    """Fields that hold up the writer when it reads them."""

    def __init__(self, value: float = -1) -> None:
        self.value = value
        self.reached = threading.Event()
        self.gate = threading.Event()

    def __iter__(self) -> Iterator[str]:
        if threading.current_thread() is not threading.main_thread():
            self.reached.set()
            self.gate.wait()
        return iter(["n"])

    def __len__(self) -> int:
        return 1

    def __getitem__(self, key: str) -> float:
        return self.value


def numbered(*numbers: int) -> list[Point]:
    return [Point("m", {"n": number}) for number in numbers]


def lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def numbers(path: Path) -> list[int]:
    return [line["fields"]["n"] for line in lines(path)]


def hold(metrics: LocalMetricsFile) -> Gated:
    """Stop the writer within a batch of one point."""
    gated = Gated()
    metrics.write([Point("m", gated)])
    gated.reached.wait()
    return gated


def test_a_line_is_json(tmp_path):
    """A point that has no time is given that of its writing."""
    path = tmp_path / "new" / "metrics.jsonl"
    metrics = LocalMetricsFile(path, lambda: 1_700_000_000_000_000_001)
    metrics.write([Point("a", {"x": 1, "y": 0.1 + 0.2, "z": "é\n"}, {"id": "p"}, 2**62)])
    metrics.write([Point("b", {"x": 1})])
    metrics.close()
    assert lines(path) == [
        {
            "measurement": "a",
            "time": 2**62,
            "tags": {"id": "p"},
            "fields": {"x": 1, "y": 0.1 + 0.2, "z": "é\n"},
        },
        {"measurement": "b", "time": 1_700_000_000_000_000_001, "tags": {}, "fields": {"x": 1}},
    ]


@pytest.mark.parametrize("num_fields", [1, 5, 200])
def test_cost_of_a_point_is_close_to_its_memory(num_fields):
    """The estimate for a participant's point may be a little too high, and never too low."""
    texts = [
        json.dumps(
            [
                {
                    "measurement": "participant",
                    "time": 10**18 + n,
                    "tags": {},
                    "fields": {f"field-{i}-of-{n}": n + i / 8 for i in range(num_fields)},
                }
            ]
        )
        for n in range(100)
    ]
    waiting = []
    tracemalloc.start()
    try:
        for text in texts:
            points, _ = parse_points(text, 10**18)
            waiting += [(0, (point.at_ns, point)) for point in points]
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    estimated = sum(queue.cost(point) for _, (_, point) in waiting)
    assert len(waiting) == 100
    assert taken <= estimated <= 3 * taken


def test_a_disk_that_fails_and_comes_back(tmp_path):
    """Points are lost and counted meanwhile, later ones are written."""
    folder = tmp_path / "folder"
    folder.touch()
    metrics = LocalMetricsFile(folder / "metrics", lambda: 0)
    metrics.write(numbered(1, 2))
    hold(metrics).gate.set()  # of three points or fewer, none was written
    hold(metrics).gate.set()
    gated = hold(metrics)
    assert metrics.num_lost == 4
    folder.unlink()
    gated.gate.set()
    metrics.write(numbered(3))
    metrics.close()
    assert numbers(folder / "metrics") == [-1, 3]
    assert metrics.num_lost == 4


def test_the_line_that_a_killed_writer_left_spoils_no_other(tmp_path):
    path = tmp_path / "metrics"
    path.write_bytes(b'{"measurement":"m","ti')
    metrics = LocalMetricsFile(path, lambda: 0)
    metrics.write(numbered(1))
    metrics.close()
    torn, rest = path.read_bytes().splitlines()
    assert torn == b'{"measurement":"m","ti'
    assert json.loads(rest)["fields"] == {"n": 1}


def test_size_is_bounded(tmp_path):
    """Two files of max_bytes at most, the newer points in the one without a suffix."""
    path, old = tmp_path / "metrics", tmp_path / "metrics.1"
    max_bytes = 4000
    for start in range(0, 200, 20):
        metrics = LocalMetricsFile(path, lambda: 0, max_bytes=max_bytes)
        metrics.write(numbered(*range(start, start + 20)))
        metrics.close()
        assert metrics.num_lost == 0
    assert path.stat().st_size <= max_bytes
    assert old.stat().st_size <= max_bytes
    kept = numbers(old) + numbers(path)
    assert kept == list(range(200 - len(kept), 200))
    assert len(numbers(old)) > 5
    assert sorted(tmp_path.iterdir()) == [path, old]
