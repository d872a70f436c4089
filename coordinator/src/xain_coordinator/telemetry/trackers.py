"""Trackers of experiments, which take the figures of rounds: TensorBoard, MLflow, Weights & Biases.

A session has one run in each, which goes on after a restart. The same trackers serve a deployment,
by their names in [metrics] trackers, and a script, `xain.session(..., trackers=[...])`.
"""

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, Protocol

from xain_foundation.durable import replace_file
from xain_foundation.exit_statuses import CommandFailed

EXPERIMENT: Final = "xain"  # of MLflow, and the project of Weights & Biases
METHODS: Final = ("on_round", "on_end")


class Round(Protocol):
    """A round that is over, as trackers are told of it.

    session: identity of the session. round: number of the round. model: number of the model that
        it has made; that of the round where it has measured a model and made none.
    samples: of all updates that count. num_updates: of these; 0 where none was asked for.
    metrics: of training: means over the sites, weighted by samples; of a script also what it has
        measured of the new model. Empty where sites made the first weights, or told none.
    evaluation: of the model that the round started from: figures over the rows of all sites, and
        as coordinator/NAME those of the coordinator's own rows.
    seconds: from the opening of the round to its model.
    """

    @property
    def session(self) -> str: ...
    @property
    def round(self) -> int: ...
    @property
    def model(self) -> int: ...
    @property
    def samples(self) -> int: ...
    @property
    def num_updates(self) -> int: ...
    @property
    def metrics(self) -> Mapping[str, float]: ...
    @property
    def evaluation(self) -> Mapping[str, float]: ...
    @property
    def seconds(self) -> float: ...


class End(Protocol):
    """The end of a session.

    session: its identity. model: number of the last model. metrics: of the last round that trained.
    cause: why the session ended.
    """

    @property
    def session(self) -> str: ...
    @property
    def model(self) -> int: ...
    @property
    def metrics(self) -> Mapping[str, float]: ...
    @property
    def cause(self) -> str: ...


class Tracker(Protocol):
    """Where the figures of rounds go. May raise anything, as other programs do: what has raised was
    not taken. A kill while a call runs has the next start make the call again."""

    def on_round(self, record: Round) -> None:
        """Take the figures of a round that is over."""

    def on_end(self, result: End) -> None:
        """End the run of the session, which is over."""


class Position:
    """How far a tracker has come with a session, in a small file that outlasts a kill."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def taken(self, session_id: str) -> int:
        """Number of the last round that was taken; -1 before the first."""
        return self._noted(session_id)[0]

    def has_ended(self, session_id: str) -> bool:
        """Whether the end of the session was taken."""
        return self._noted(session_id)[1]

    def take(self, session_id: str, round_: int, *, is_end: bool = False) -> None:
        """Note that a round, or with it the end, was taken. Raises OSError."""
        noted = {"session": session_id, "round": round_, "ended": is_end}
        self._path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(self._path, [json.dumps(noted).encode()])

    def _noted(self, session_id: str) -> tuple[int, bool]:
        """Number of the last round that the file has for a session, and whether its end; (-1,
        False) if the file is of another session, damaged or missing."""
        with suppress(OSError, ValueError, KeyError, TypeError):
            noted = json.loads(self._path.read_text(encoding="utf-8"))
            if noted["session"] == session_id:
                return int(noted["round"]), bool(noted["ended"])
        return -1, False


def figures_of(record: Round) -> dict[str, float]:
    """The finite figures of a round, by the names that the trackers here write."""
    found = dict(record.metrics)
    found |= {f"evaluation/{name}": value for name, value in record.evaluation.items()}
    if record.num_updates:
        found |= {
            "samples": float(record.samples),
            "updates": float(record.num_updates),
            "seconds": record.seconds,
        }
    return {name: float(value) for name, value in found.items() if math.isfinite(value)}


class TensorBoard:
    """Scalars below FOLDER/SESSION, for `tensorboard --logdir FOLDER`. Raises CommandFailed."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        with _installed("pip install tensorboard"):
            from tensorboard import summary
        self._open = summary.Writer
        self._folder = Path(folder)
        self._writer: Any = None

    def on_round(self, record: Round) -> None:
        """Write the figures of a round to the folder of its session."""
        if self._writer is None:
            self._writer = self._open(str(self._folder / record.session))
        for name, value in figures_of(record).items():
            self._writer.add_scalar(name, value, record.round)
        self._writer.flush()

    def on_end(self, result: End) -> None:
        if self._writer is not None:
            self._writer.close()


class MLflow:
    """A run with the metrics of each round. Raises CommandFailed.

    experiment: its name. Where the runs are kept is a setting of MLflow, MLFLOW_TRACKING_URI.
    """

    def __init__(self, experiment: str = EXPERIMENT) -> None:
        with _installed("pip install mlflow-skinny"):
            import mlflow
        self._mlflow = mlflow
        self._experiment = experiment
        self._client: Any = None
        self._run = ""

    def on_round(self, record: Round) -> None:
        self._open(record.session)
        for name, value in figures_of(record).items():
            self._client.log_metric(self._run, name, value, step=record.round)

    def on_end(self, result: End) -> None:
        self._open(result.session)
        self._client.set_terminated(self._run)

    def _open(self, session_id: str) -> None:
        """Find the run of a session, or create it; only the first call does."""
        if self._client is not None:
            return
        client = self._mlflow.MlflowClient()
        number = self._mlflow.set_experiment(self._experiment).experiment_id
        known = client.search_runs([number], f"tags.session = '{session_id}'")
        tags = {"session": session_id, "mlflow.runName": session_id}
        run = known[0] if known else client.create_run(number, tags=tags)
        self._client, self._run = client, run.info.run_id


class WeightsAndBiases:
    """A run of Weights & Biases. options: of wandb.init(), such as project="wards" and
    mode="offline". Raises CommandFailed."""

    def __init__(self, **options: Any) -> None:
        with _installed("pip install wandb"):
            import wandb
        self._init = wandb.init
        self._options = {"project": EXPERIMENT, **options}
        self._run: Any = None

    def on_round(self, record: Round) -> None:
        self._open(record.session)
        self._run.log(figures_of(record), step=record.round)

    def on_end(self, result: End) -> None:
        self._open(result.session)
        self._run.finish()

    def _open(self, session_id: str) -> None:
        """Begin or resume the run of a session; only the first call does."""
        if self._run is None:
            self._run = self._init(id=session_id, resume="allow", **self._options)


# Trackers by their name in [metrics] trackers. folder: that of metrics.path.
TRACKERS: Final[Mapping[str, Callable[[Path], Tracker]]] = {
    "mlflow": lambda folder: MLflow(),
    "tensorboard": lambda folder: TensorBoard(folder / "runs"),
    "wandb": lambda folder: WeightsAndBiases(dir=str(folder)),
}


@contextmanager
def _installed(command: str) -> Iterator[None]:
    """Turn a missing module into CommandFailed, which names the command that installs it."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise CommandFailed(f"this tracker needs {error.name}: {command}") from None
