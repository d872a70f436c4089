"""Trackers of experiments, for `xain.session(..., trackers=[...])`.

A tracker is any object with on_round(record) and on_end(result). The session notes in its folder
which record a tracker has taken last, so that after a restart none is told again that was taken.
"""

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from xain_session.errors import SessionFailed
from xain_session.record import Record, Result


class Tracker(Protocol):
    """Where the figures of a session go besides."""

    def on_round(self, record: Record[Any]) -> None:
        """A round is over, and the body of the loop as well."""

    def on_end(self, result: Result[Any]) -> None:
        """The session is over."""


class TensorBoard:
    """Scalars of each round below `folder`/SESSION, for `tensorboard --logdir FOLDER`."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        with _installed("tensorboard"):
            from tensorboard import summary
        self._open = summary.Writer
        self._folder = os.fspath(folder)
        self._writer: Any = None

    def on_round(self, record: Record[Any]) -> None:
        if self._writer is None:
            self._writer = self._open(os.path.join(self._folder, record.session))  # noqa: PTH118  # as it was given
        for name, value in _scalars(record).items():
            self._writer.add_scalar(name, value, record.round)
        self._writer.flush()

    def on_end(self, result: Result[Any]) -> None:
        if self._writer is not None:
            self._writer.close()


class MLflow:
    """A run of MLflow for the session, with the metrics of each round.

    experiment: its name. Where the runs are kept is a setting of MLflow, MLFLOW_TRACKING_URI.
    """

    def __init__(self, experiment: str) -> None:
        with _installed("mlflow-skinny"):
            import mlflow
        self._mlflow = mlflow
        self._experiment = experiment
        self._client: Any = None
        self._run = ""

    def on_round(self, record: Record[Any]) -> None:
        if self._client is None:
            self._client = self._mlflow.MlflowClient()
            number = self._mlflow.set_experiment(self._experiment).experiment_id
            known = self._client.search_runs([number], f"tags.session = '{record.session}'")
            run = (
                known[0]
                if known
                else self._client.create_run(
                    number, tags={"session": record.session, "mlflow.runName": record.session}
                )
            )
            self._run = run.info.run_id
        for name, value in _scalars(record).items():
            self._client.log_metric(self._run, name, value, step=record.round)

    def on_end(self, result: Result[Any]) -> None:
        if self._client is not None:
            self._client.set_terminated(self._run)


class WeightsAndBiases:
    """A run of Weights & Biases for the session. options: of wandb.init(), such as project="wards"
    and mode="offline"."""

    def __init__(self, **options: Any) -> None:
        with _installed("wandb"):
            import wandb
        self._init = wandb.init
        self._options = options
        self._run: Any = None

    def on_round(self, record: Record[Any]) -> None:
        if self._run is None:
            self._run = self._init(id=record.session, resume="allow", **self._options)
        self._run.log(_scalars(record), step=record.round)

    def on_end(self, result: Result[Any]) -> None:
        if self._run is not None:
            self._run.finish()


def _scalars(record: Record[Any]) -> dict[str, float]:
    figures = {
        **record.metrics,
        "samples": float(record.samples),
        "updates": float(record.num_updates),
        "seconds": record.seconds,
    }
    return {name: value for name, value in figures.items() if math.isfinite(value)}


@contextmanager
def _installed(wheel: str) -> Iterator[None]:
    """Raises SessionFailed, which says what to install."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise SessionFailed(f"this tracker needs {error.name}: pip install {wheel}") from None
