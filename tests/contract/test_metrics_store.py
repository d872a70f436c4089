"""What every MetricsStore does."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from xain_coordinator.core.values import Point
from xain_coordinator.metrics.local_file import MAX_WAITING, LocalMetricsFile
from xain_coordinator.metrics.null import NullMetricsStore
from xain_coordinator.ports import MetricsStore

FACTORIES: dict[str, Callable[[Path], MetricsStore]] = {
    "null": lambda _: NullMetricsStore(),
    "file": lambda folder: LocalMetricsFile(folder / "metrics.jsonl", lambda: 1),
}


@pytest.fixture(params=FACTORIES)
def metrics(request: pytest.FixtureRequest, tmp_path: Path) -> MetricsStore:
    return FACTORIES[request.param](tmp_path)


@pytest.fixture
def num_stored(tmp_path: Path) -> Callable[[], int | None]:
    """How many points the store has kept; None if it keeps none."""
    path = tmp_path / "metrics.jsonl"
    return lambda: len(path.read_bytes().splitlines()) if path.exists() else None


def test_points_are_taken(metrics: MetricsStore) -> None:
    metrics.write([Point("coordinator", {"round": 1, "loss": 0.5, "note": "x"}, {"id": "a"}, 7)])
    metrics.write([])
    metrics.write((Point("coordinator", {"round": 2}),))
    metrics.close()
    assert metrics.num_lost == 0


def test_waiting_is_bounded_and_what_is_lost_is_counted(
    metrics: MetricsStore, num_stored: Callable[[], int | None]
) -> None:
    """Whatever comes at once: writing returns, and every point is stored or counted as lost,
    except where nobody wants any. What may wait is never lost."""
    points = [Point("coordinator", {"round": n}) for n in range(3 * MAX_WAITING)]
    metrics.write(points)
    metrics.close()
    stored = num_stored()
    if stored is None:
        assert metrics.num_lost == 0
    else:
        assert stored + metrics.num_lost == len(points)
        assert stored >= MAX_WAITING


def test_what_comes_after_the_end_is_lost(metrics: MetricsStore) -> None:
    """And counted, where there is anything to lose."""
    metrics.close()
    metrics.write([Point("x", {"late": n}) for n in range(3)])
    assert metrics.num_lost == (0 if isinstance(metrics, NullMetricsStore) else 3)


def test_close_may_be_repeated(metrics: MetricsStore) -> None:
    metrics.close()
    metrics.close()


def test_nothing_is_raised(metrics: MetricsStore) -> None:
    """Not for points that cannot be stored, nor after the end: metrics never fail a call."""
    metrics.write([Point("x", {"bad": float("nan")}), Point("x", cast(Any, {"bad": object()}))])
    metrics.write([Point("x", cast(Any, None))])
    metrics.close()
    metrics.write([Point("x", {"late": 1})])
