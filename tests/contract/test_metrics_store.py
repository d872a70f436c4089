"""The contract of every MetricsStore."""

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, cast

import pytest

from support.influx_servers import StrictInflux, VictoriaMetrics
from support.stores import CONTRACT, in_folder
from xain_coordinator.assembly.coordinator import metrics_plugin
from xain_coordinator.core.vocabulary.values import Point
from xain_coordinator.ports import MetricsStore
from xain_coordinator.telemetry import queue
from xain_coordinator.telemetry.influx import LINGER_S, InfluxWriter
from xain_coordinator.telemetry.local_file import LocalMetricsFile
from xain_coordinator.telemetry.null import NullMetricsStore
from xain_coordinator.telemetry.queue import QueuedMetrics

# Whole milliseconds, which is all that some stores keep, and not too long ago for any of them.
START_NS = time.time_ns() // 10**6 * 10**6 - 3600 * 10**9
MS = 10**6

# (measurement, id, field, nanoseconds, value): what every store keeps that keeps anything.
Number = tuple[str, str, str, int, float]


@dataclass(frozen=True)
class Kept:
    """A store, and how to read what it has kept; None if it keeps nothing."""

    store: MetricsStore
    read: Callable[[], list[Number]] | None


def null(_: Path) -> Iterator[Kept]:
    yield Kept(NullMetricsStore(), None)


def file(folder: Path) -> Iterator[Kept]:
    path = folder / "metrics.jsonl"

    def read() -> list[Number]:
        points = [json.loads(line) for line in path.read_bytes().splitlines()]
        return [
            (point["measurement"], point["tags"].get("id", ""), name, point["time"], value)
            for point in points
            for name, value in point["fields"].items()
            if not isinstance(value, str)
        ]

    yield Kept(LocalMetricsFile(path), read)


def strict_influx(_: Path) -> Iterator[Kept]:
    with StrictInflux() as server:

        def read() -> list[Number]:
            return [
                (line.measurement, line.tags.get("id", ""), name, line.at_ns, value)
                for line in server.lines
                for name, value in line.fields.items()
                if not isinstance(value, str)
            ]

        writer = InfluxWriter(server.url, server.org, server.bucket, lambda: server.token, 10.0)
        yield Kept(QueuedMetrics(writer, time.time_ns, linger_s=LINGER_S), read)


def victoria_metrics(_: Path) -> Iterator[Kept]:
    missing = VictoriaMetrics.missing()
    if missing is not None:
        pytest.skip(missing)  # says what is not installed
    with VictoriaMetrics() as server:

        def read() -> list[Number]:
            found = []
            for (name, participant_id), points in server.series().items():
                measurement, _, field = name.partition("_")
                found += [(measurement, participant_id, field, ms * MS, v) for ms, v in points]
            return found

        writer = InfluxWriter(server.url, "org", "bucket", str, 10.0)
        yield Kept(QueuedMetrics(writer, time.time_ns, linger_s=LINGER_S), read)


ADAPTERS: dict[str, Callable[[Path], Iterator[Kept]]] = {
    f.__name__: f for f in (null, file, strict_influx, victoria_metrics)
}
# Plug-ins that are installed, see support/stores.py: {"metrics": {NAME: {OPTION: VALUE}},
# "read": {NAME: "MODULE:FUNCTION"}}. The function is called with the options, and returns Numbers.


def plugged_in(name: str) -> Callable[[Path], Iterator[Kept]]:
    def adapter(folder: Path) -> Iterator[Kept]:
        options = in_folder(CONTRACT["metrics"][name], folder)
        read = CONTRACT.get("read", {}).get(name)
        reader = None if read is None else partial(resolve_name(read), **options)
        yield Kept(metrics_plugin(name, options), reader)

    return adapter


ADAPTERS |= {f"plugin-{name}": plugged_in(name) for name in CONTRACT.get("metrics", {})}


@pytest.fixture(params=ADAPTERS)
def kept(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Kept]:
    for one in ADAPTERS[request.param](tmp_path):
        # A slow machine is to fail no test; that the end is bounded is tested with each adapter.
        if isinstance(one.store, QueuedMetrics):
            one.store.close_timeout_s = 60.0
        yield one
        one.store.close()


@pytest.fixture
def metrics(kept: Kept) -> MetricsStore:
    return kept.store


def test_points_are_taken(metrics):
    metrics.write([Point("coordinator", {"round": 1, "loss": 0.5, "note": "x"}, {"id": "a"}, 7)])
    metrics.write([])
    metrics.write((Point("coordinator", {"round": 2}),))
    metrics.close()
    assert metrics.num_lost == 0


def test_every_number_is_read_back(kept):
    """Point by point: series, field, time and value."""
    coordinator = [
        Point("coordinator", {"round": n, "round_seconds": n / 8}, {}, START_NS + n * MS)
        for n in range(5)
    ]
    participants = [
        Point("participant", {"state": 4, "loss": n - 0.375}, {"id": name}, START_NS + n * MS)
        for n in range(5)
        for name in ("ward-7", "a b,c=d")
    ]
    kept.store.write(coordinator)
    kept.store.write(participants)
    kept.store.close()
    assert kept.store.num_lost == 0
    if kept.read is None:
        return
    assert sorted(kept.read()) == sorted(
        (point.measurement, point.tags.get("id", ""), name, point.at_ns, value)
        for point in (*coordinator, *participants)
        for name, value in point.fields.items()
    )


FORGED = '1"\ncoordinator state=2i,round=9i 5\r\nx y="'


@pytest.mark.parametrize("text", [FORGED, FORGED + "\\", "a\\", '\\"', "a\u2028b", "# a"])
def test_a_point_forges_no_other(kept, text):
    """Names, tags and text of a sender, whatever they hold, put no number into another series."""
    fields = {"loss": 0.5, f"f{text}": 2.0, "note": text}
    kept.store.write([Point("participant", fields, {"id": "me"}, START_NS)])
    kept.store.close()
    assert kept.store.num_lost == 0
    if kept.read is not None:
        found = kept.read()
        assert {(measurement, id_) for measurement, id_, *_ in found} == {("participant", "me")}
        # VictoriaMetrics keeps 0 for a text, and for all that follows a quote in a field's name.
        assert {value for *_, value in found} <= {0, 0.5, 2.0}


def test_points_without_a_time_are_stamped(kept):
    """Their time is that of their writing."""
    before = time.time_ns() // MS * MS
    kept.store.write([Point("coordinator", {"round": 1})])
    after = time.time_ns()
    kept.store.close()
    if kept.read is not None:
        ((*_, at_ns, value),) = kept.read()
        assert before <= at_ns <= after
        assert value == 1


def test_waiting_is_bounded_and_lost_points_are_counted(kept):
    """Writing returns at any load, and every point is stored or counted as lost, except by a store
    that drops all. Points within the bound are never lost, the newest beyond it may be."""
    size = queue.cost(Point("coordinator", {"round": 10**6}, {}, START_NS))
    may_wait = queue.MAX_WAITING_BYTES // size
    points = [
        Point("coordinator", {"round": n}, {}, START_NS + n * MS) for n in range(2 * may_wait)
    ]
    kept.store.write(points)
    kept.store.close()
    if kept.read is None:
        assert kept.store.num_lost == 0
    else:
        stored = sorted(int(value) for *_, value in kept.read())
        assert len(stored) + kept.store.num_lost == len(points)
        is_newest = stored[-may_wait:] == list(range(may_wait, 2 * may_wait))
        assert is_newest  # a difference of so many numbers would take pytest an hour to show


def test_points_after_close_are_lost(metrics):
    """Lost points are counted, where there is anything to lose."""
    metrics.close()
    metrics.write([Point("x", {"late": n}) for n in range(3)])
    assert metrics.num_lost == (0 if isinstance(metrics, NullMetricsStore) else 3)


def test_close_may_be_repeated(metrics):
    metrics.close()
    metrics.close()


def test_metrics_store_raises_nothing(metrics):
    """A point that cannot be stored, or comes late, raises nothing: metrics never fail a call."""
    metrics.write([Point("x", {"bad": float("nan")}), Point("x", cast(Any, {"bad": object()}))])
    metrics.write([Point("x", cast(Any, None))])
    metrics.close()
    assert metrics.num_lost == (0 if isinstance(metrics, NullMetricsStore) else 3)
    metrics.write([Point("x", {"late": 1})])
