"""What every MetricsStore does."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from xain_coordinator.core.values import Point
from xain_coordinator.metrics.local_file import LocalMetricsFile
from xain_coordinator.metrics.null import NullMetricsStore
from xain_coordinator.ports import MetricsStore

FACTORIES: dict[str, Callable[[Path], MetricsStore]] = {
    "null": lambda _: NullMetricsStore(),
    "file": lambda folder: LocalMetricsFile(folder / "metrics.jsonl", lambda: 1),
}


@pytest.fixture(params=FACTORIES)
def metrics(request: pytest.FixtureRequest, tmp_path: Path) -> MetricsStore:
    return FACTORIES[request.param](tmp_path)


def test_points_are_taken(metrics: MetricsStore) -> None:
    metrics.write([Point("coordinator", {"round": 1, "loss": 0.5, "note": "x"}, {"id": "a"}, 7)])
    metrics.write([])
    metrics.write((Point("coordinator", {"round": 2}),))
    metrics.close()
    assert metrics.num_lost == 0


def test_close_may_be_repeated(metrics: MetricsStore) -> None:
    metrics.close()
    metrics.close()


def test_nothing_is_raised(metrics: MetricsStore) -> None:
    """Not for points that cannot be stored, nor after the end: metrics never fail a call."""
    metrics.write([Point("x", {"bad": float("nan")}), Point("x", cast(Any, {"bad": object()}))])
    metrics.write([Point("x", cast(Any, None))])
    metrics.close()
    metrics.write([Point("x", {"late": 1})])
