"""Trackers of experiments, which take the figures of rounds: TensorBoard, MLflow, Weights & Biases.

A session has one run in each, which goes on after a restart.
"""

import math
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, Protocol

import structlog

from xain_coordinator.core.values import Point
from xain_coordinator.metrics.queue import QueuedMetrics, Stamped
from xain_coordinator.ports import MetricsStore

log = structlog.get_logger(__name__)

LINGER_S: Final = 1.0
EXPERIMENT: Final = "xain"  # of MLflow, and the project of Weights & Biases


class NotInstalled(ValueError):
    """The program of a tracker is missing. The text says what to install."""


class Tracker(Protocol):
    """Where the figures of rounds go. May raise anything, as other programs do."""

    def log(self, session_id: str, round_: int, figures: Mapping[str, float]) -> None:
        """round_: number of the model that the figures are of, or of the round that made it."""

    def close(self) -> None:
        """End the run of the session."""


class TensorBoard:
    """Scalars below FOLDER/SESSION, for `tensorboard --logdir FOLDER`. Raises NotInstalled."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        with _installed("pip install tensorboard"):
            from tensorboard import summary
        self._open = summary.Writer
        self._folder = Path(folder)
        self._writer: Any = None

    def log(self, session_id: str, round_: int, figures: Mapping[str, float]) -> None:
        if self._writer is None:
            self._writer = self._open(str(self._folder / session_id))
        for name, value in figures.items():
            self._writer.add_scalar(name, value, round_)
        self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


class MLflow:
    """A run with the metrics of each round. Raises NotInstalled.

    experiment: its name. Where the runs are kept is a setting of MLflow, MLFLOW_TRACKING_URI.
    """

    def __init__(self, experiment: str = EXPERIMENT) -> None:
        with _installed("pip install mlflow-skinny"):
            import mlflow
        self._mlflow = mlflow
        self._experiment = experiment
        self._client: Any = None
        self._run = ""

    def log(self, session_id: str, round_: int, figures: Mapping[str, float]) -> None:
        if self._client is None:
            client = self._mlflow.MlflowClient()
            number = self._mlflow.set_experiment(self._experiment).experiment_id
            known = client.search_runs([number], f"tags.session = '{session_id}'")
            tags = {"session": session_id, "mlflow.runName": session_id}
            run = known[0] if known else client.create_run(number, tags=tags)
            self._client, self._run = client, run.info.run_id
        for name, value in figures.items():
            self._client.log_metric(self._run, name, value, step=round_)

    def close(self) -> None:
        if self._client is not None:
            self._client.set_terminated(self._run)


class WeightsAndBiases:
    """A run of Weights & Biases. options: of wandb.init(), such as project="wards" and
    mode="offline". Raises NotInstalled."""

    def __init__(self, **options: Any) -> None:
        with _installed("pip install wandb"):
            import wandb
        self._init = wandb.init
        self._options = {"project": EXPERIMENT, **options}
        self._run: Any = None

    def log(self, session_id: str, round_: int, figures: Mapping[str, float]) -> None:
        if self._run is None:
            self._run = self._init(id=session_id, resume="allow", **self._options)
        self._run.log(dict(figures), step=round_)

    def close(self) -> None:
        if self._run is not None:
            self._run.finish()


# Trackers by their name in [metrics] trackers. folder: that of metrics.path.
TRACKERS: Final[Mapping[str, Callable[[Path], Tracker]]] = {
    "mlflow": lambda folder: MLflow(),
    "tensorboard": lambda folder: TensorBoard(folder / "runs"),
    "wandb": lambda folder: WeightsAndBiases(dir=str(folder)),
}


class TrackedMetrics:
    """MetricsStore in front of another one, which has trackers take the figures of rounds too, each
    in a thread of its own."""

    def __init__(
        self,
        store: MetricsStore,
        trackers: Sequence[Tracker],
        session_id: str,
        wall_ns: Callable[[], int],
    ) -> None:
        self._stores = [
            store,
            *(
                QueuedMetrics(_Writer(one, session_id), wall_ns, linger_s=LINGER_S)
                for one in trackers
            ),
        ]

    @property
    def num_lost(self) -> int:
        return sum(store.num_lost for store in self._stores)

    def write(self, points: Sequence[Point]) -> None:
        for store in self._stores:
            store.write(points)

    def close(self) -> None:
        for store in self._stores:
            store.close()


class _Writer:
    def __init__(self, tracker: Tracker, session_id: str) -> None:
        self._tracker = tracker
        self._session_id = session_id

    def write(self, batch: Sequence[Stamped], closing: threading.Event) -> int:
        num_lost = 0
        for _, point in batch:
            figures = figures_of(point)
            model = point.fields.get("model", point.fields.get("round"))
            if not figures or not isinstance(model, int):
                continue
            try:
                self._tracker.log(self._session_id, model, figures)
            except Exception as error:  # another's program, and its server
                name = type(self._tracker).__name__
                log.warning("tracker_failed", tracker=name, round=model, error=str(error))
                num_lost += 1
        return num_lost

    def close(self) -> None:
        try:
            self._tracker.close()
        except Exception as error:  # another's program, and its server
            log.warning("tracker_failed", tracker=type(self._tracker).__name__, error=str(error))


def figures_of(point: Point) -> dict[str, float]:
    """The figures of a round in a metric point; none in points of states and of single sites."""
    of, names = "", ["num_updates", "round_seconds", "connected"]
    if point.measurement == "evaluation":
        of, names = f"{point.tags['source']}/", list(point.fields)
    elif point.measurement != "coordinator" or "num_updates" not in point.fields:
        return {}
    found = {}
    for name in names:
        value = point.fields.get(name)
        if name != "round" and isinstance(value, int | float) and math.isfinite(value):
            found[of + name] = float(value)
    return found


@contextmanager
def _installed(command: str) -> Iterator[None]:
    try:
        yield
    except ModuleNotFoundError as error:
        raise NotInstalled(f"this tracker needs {error.name}: {command}") from None
