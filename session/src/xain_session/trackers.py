"""Trackers of experiments, for `xain.session(..., trackers=[...])`.

A tracker is any object with on_round(record) and on_end(result). The session notes in its folder
which record each of them has taken last, so that after a restart none is told again that was taken.
"""

import os
from collections.abc import Sequence
from typing import Any, Protocol

from xain.result import SessionError
from xain_coordinator.telemetry import trackers
from xain_foundation.exit_statuses import CommandFailed
from xain_session.record import Record, Result


class Tracker(Protocol):
    """Where the figures of a session go besides."""

    def on_round(self, record: Record[Any]) -> None:
        """Take a round that is over, and the body of the loop as well."""

    def on_end(self, result: Result[Any]) -> None:
        """Take the end of the session."""


def by_name(trackers: Sequence[Tracker]) -> dict[str, Tracker]:
    """Name trackers by their classes, with a number behind the name of a second one."""
    found: dict[str, Tracker] = {}
    for tracker in trackers:
        kind = type(tracker).__name__
        number = 1 + sum(type(other).__name__ == kind for other in found.values())
        found[kind if number == 1 else f"{kind}-{number}"] = tracker
    return found


class TensorBoard(trackers.TensorBoard):
    """Scalars of each round below FOLDER/SESSION, for `tensorboard --logdir FOLDER`."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        try:
            super().__init__(folder)
        except CommandFailed as error:
            raise SessionError(str(error)) from None


class MLflow(trackers.MLflow):
    """A run of MLflow for the session, with the metrics of each round.

    experiment: its name. Where the runs are kept is a setting of MLflow, MLFLOW_TRACKING_URI.
    """

    def __init__(self, experiment: str = trackers.EXPERIMENT) -> None:
        try:
            super().__init__(experiment)
        except CommandFailed as error:
            raise SessionError(str(error)) from None


class WeightsAndBiases(trackers.WeightsAndBiases):
    """A run of Weights & Biases for the session. options: of wandb.init(), such as project="wards"
    and mode="offline"."""

    def __init__(self, **options: Any) -> None:
        try:
            super().__init__(**options)
        except CommandFailed as error:
            raise SessionError(str(error)) from None
