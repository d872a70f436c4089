"""`xain-coordinator models`, `export` and `predict`."""

import csv
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import typer
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table as Rows
from rich.text import Text

from xain_coordinator.config import CoordinatorConfig
from xain_coordinator.core.values import Evaluation
from xain_coordinator.export import formats
from xain_coordinator.export.trained import Entry, NoModel, Trained, ask, open_files
from xain_messaging.process import logs
from xain_workloads.dataset import Task
from xain_workloads.errors import DataError
from xain_workloads.model import Model

EXIT_OK = 0
EXIT_ERROR = 1


def models(config: CoordinatorConfig, address: str | None, *, as_json: bool = False) -> int:
    """Print a line for each global model. Returns the exit status."""
    with _explained("models") as failed, _opened(config, address) as trained:
        if as_json:
            listed = [_described(trained, entry) for entry in trained.entries.values()]
            typer.echo(json.dumps(listed))
        else:
            _show(trained)
    return EXIT_ERROR if failed else EXIT_OK


def export(
    config: CoordinatorConfig,
    address: str | None,
    which: str,
    to: Path | None,
    registered_name: str | None = None,
) -> int:
    """Write a model to a file, or register it with MLflow. Returns the exit status.

    which: "last", "best", or the number of a model.
    """
    with _explained("export") as failed:
        with _opened(config, address) as trained:
            entry = trained.choose(which)
            model = trained.load(entry)
            about = _described(trained, entry)
        told = f"model {entry.round} of session {trained.session_id}"
        if to is not None:
            formats.write(to, model, about)
            typer.echo(f"{told} is in {to}")
        if registered_name is not None:
            from xain_coordinator.export.registry import register

            typer.echo(f"{told} is {register(registered_name, model, about)}")
    return EXIT_ERROR if failed else EXIT_OK


def predict(file: Path, data: Path, to: Path | None) -> int:
    """Predict the rows of a file with an exported model. Returns the exit status.

    The score is printed to standard error if the data have the target.
    """
    with _explained("predict") as failed:
        exported = formats.read(file)
        about = exported.about
        predicted, truth = _predict(exported, data)
        name = str(about.get("target") or "prediction")
        if to is None:
            _write_csv(sys.stdout, name, predicted)
        else:
            with to.open("w", encoding="utf-8", newline="") as opened:
                _write_csv(opened, name, predicted)
        if truth is not None:
            typer.echo(_score(truth, predicted), err=True)
    return EXIT_ERROR if failed else EXIT_OK


@contextmanager
def _opened(config: CoordinatorConfig, address: str | None) -> Iterator[Trained]:
    with open_files(config) if address is None else ask(address) as trained:
        yield trained


@contextmanager
def _explained(command: str) -> Iterator[list[str]]:
    """Print why a command failed; the list has the reason then."""
    logs.configure("warning", console=sys.stderr.isatty(), third_party=False)
    failed: list[str] = []
    try:
        yield failed
    except (NoModel, DataError, OSError) as error:
        failed.append(str(error))
        typer.echo(f"xain-coordinator {command}: {error}", err=True)


# --- what is said of a model ---


def _described(trained: Trained, entry: Entry) -> dict[str, Any]:
    """The lineage of a model and what is needed to use it, as JSON takes it."""
    metadata = entry.metadata
    return {
        "program": f"xain-coordinator {version('xain-coordinator')}",
        "exported_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "session": trained.session_id,
        "round": entry.round,
        "digest": entry.digest,
        "is_best": entry.round == trained.best,
        "is_last": entry.round == trained.last,
        "workload": metadata.get("workload", ""),
        "target": metadata.get("target", ""),
        "classes": json.loads(metadata.get("classes", "[]")),
        "columns": formats.columns_of(metadata),
        "num_updates": entry.num_updates,
        "num_samples": entry.num_samples,
        "metrics": dict(entry.metrics),
        "evaluation": _plain(entry.evaluation),
        "coordinator_evaluation": _plain(entry.coordinator_evaluation),
    }


def _plain(evaluation: Evaluation | None) -> dict[str, Any] | None:
    if evaluation is None:
        return None
    plain = asdict(evaluation)
    return {**plain, "metrics": dict(evaluation.metrics)}


def _show(trained: Trained) -> None:
    entries = trained.entries.values()
    names: dict[str, None] = {}
    for entry in entries:
        for evaluation in (entry.evaluation, entry.coordinator_evaluation):
            names |= dict.fromkeys(evaluation.metrics if evaluation else ())
    typer.echo(f"session {trained.session_id}")
    table = Rows(box=None, padding=(0, 2, 0, 0))
    table.add_column("model", justify="right", header_style="dim")
    table.add_column("updates", justify="right", header_style="dim")
    table.add_column("samples", justify="right", header_style="dim")
    for name in names:
        table.add_column(Text(name), justify="right", header_style="dim")
    table.add_column("", header_style="dim")
    for entry in entries:
        marks = [
            mark
            for mark, number in (("best", trained.best), ("last", trained.last))
            if number == entry.round
        ]
        table.add_row(
            str(entry.round),
            str(entry.num_updates),
            f"{entry.num_samples:,}",
            *(_measured(entry, name) for name in names),
            ", ".join(marks),
        )
    # Wide enough for any table, so that no line is broken in a pipe.
    console = Console(width=None if sys.stdout.isatty() else 10_000)
    console.print(table)


def _measured(entry: Entry, name: str) -> str:
    """A metric on the coordinator's own data, or else at the participants."""
    for evaluation in (entry.coordinator_evaluation, entry.evaluation):
        if evaluation is not None and name in evaluation.metrics:
            return f"{evaluation.metrics[name]:.4g}"
    return ""


# --- predictions ---


def _predict(exported: formats.Exported, data: Path) -> tuple[NDArray[Any], NDArray[Any] | None]:
    """(predictions, the target or None if the data do not have it), (n,) each."""
    from xain_workloads.data import load_rows
    from xain_workloads.preprocessing import prepare
    from xain_workloads.workload import from_metadata

    about = exported.about
    types = {column["name"]: column["type"] for column in about.get("columns", ())}
    task: Task = "classification" if about.get("classes") else "regression"
    table, has_target = load_rows(data, types, target=str(about.get("target", "")), task=task)
    truth = table.target if has_target else None
    if exported.pipeline is not None:
        rows = np.empty((table.num_samples, len(table.columns)), dtype=object)
        for i, column in enumerate(table.columns):
            rows[:, i] = table.values[column.name]
        predicted = np.asarray(exported.pipeline.predict(rows))
        if task == "classification" and predicted.dtype.kind in "iu":  # XGBoost knows no names
            predicted = np.array(about["classes"], dtype=np.str_)[predicted]
        return predicted, truth
    model = exported.model
    assert isinstance(model, Model)
    try:
        workload = from_metadata(model.metadata)
    except ValueError as error:
        raise NoModel(f"only the script that trained this model can use it: {error}") from None
    return workload.predict(model, prepare(model.metadata, table).features), truth


def _write_csv(file: Any, name: str, predicted: NDArray[Any]) -> None:
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow([name])
    writer.writerows([value] for value in predicted.tolist())


def _score(truth: NDArray[Any], predicted: NDArray[Any]) -> str:
    if truth.dtype.kind != "f":
        return f"accuracy {float(np.mean(truth == predicted)):.4f} of {len(truth)} rows"
    spread = float(np.sum(np.square(truth - truth.mean())))
    r2 = 1.0 - float(np.sum(np.square(truth - predicted))) / spread if spread else float("nan")
    return f"R² {r2:.4f} of {len(truth)} rows"
