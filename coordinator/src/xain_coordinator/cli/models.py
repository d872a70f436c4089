"""`xain-coordinator models`, `export` and `predict`."""

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import typer
from rich.console import Console
from rich.table import Table as Grid
from rich.text import Text

from xain_coordinator.config.coordinator import CoordinatorConfig
from xain_coordinator.core.vocabulary.values import Evaluation
from xain_coordinator.export.trained import Entry, Trained, ask, open_files
from xain_coordinator.inspection.client import open_channel
from xain_foundation.net.grpc_calls import details_of
from xain_wire.fl.inspection_pb2 import AskPredictionsRequest
from xain_wire.fl.inspection_pb2_grpc import InspectionStub
from xain_workloads.errors import NoModel
from xain_workloads.exported import formats
from xain_workloads.exported.predicting import Predictions, predict_file, predict_with
from xain_workloads.measures.figures import CLASS_FIGURES, NUMBER_FIGURES, SHOWN, Figure
from xain_workloads.tables.table import Table

PART_BYTES = 1 << 20  # a coordinator takes no more rows in a request
# Longer than any timeout_s and max_retries that are of use; the coordinator answers before.
ASK_S = 24 * 3600.0


def models(config: CoordinatorConfig, address: str | None, *, as_json: bool = False) -> None:
    """Print a line for each global model. Raises NoModel, NoStatus, JournalError and StoreError."""
    with _opened(config, address) as trained:
        if as_json:
            listed = [trained.described(entry) for entry in trained.entries.values()]
            typer.echo(json.dumps(listed))
        else:
            _show(trained)


def export(
    config: CoordinatorConfig,
    address: str | None,
    which: str,
    to: Path | None,
    registered_name: str | None = None,
    session_id: str = "",
) -> None:
    """Write a model to a file, or register it with MLflow. which: "last", "best", or the number of
    a model. session_id: of which session, by default the latest one. Raises NoModel, NoStatus,
    JournalError and StoreError."""
    with _opened(config, address, session_id) as trained:
        entry = trained.choose(which)
        model = trained.load(entry.model)
        about = trained.described(entry)
    told = f"model {entry.model.round} of session {trained.session_id}"
    if to is not None:
        formats.write(to, model, about)
        typer.echo(f"{told} is in {to}")
    if registered_name is not None:
        from xain_coordinator.export.registry import register

        typer.echo(f"{told} is {register(registered_name, model, about)}")


def predict(file: Path, data: Path, to: Path | None, **options: Any) -> int:
    """Predict the rows of a file with an exported model. options: of predict_file(). Returns the
    exit status. Raises NoModel, DataError and OSError."""
    exported = formats.read(file)
    return predict_file(exported.about, predict_with(exported), data, to, **options)


def ask_predictions(
    address: str,
    data: Path,
    to: Path | None,
    timeout_s: float | None,
    max_retries: int | None,
    **options: Any,
) -> int:
    """Predict the rows of a file through the coordinator that runs at "host:port".

    With bagging whose estimators stay at the participants, these are asked; who answered is printed
    to standard error. Any other model is fetched, and used here.
    timeout_s, max_retries: of the question; None: as the coordinator is configured.
    options: of predict_file().
    Returns the exit status. Raises NoModel, NoStatus, DataError and OSError.
    """
    with ask(address) as trained:
        entry = trained.choose("last")
        model = trained.load(entry.model)
        about = {**trained.described(entry), "metadata": model.metadata}
    if formats.is_held(model):
        ask_them = partial(_ask_participants, address, timeout_s=timeout_s, max_retries=max_retries)
        return predict_file(about, ask_them, data, to, **options)
    return predict_file(about, predict_with(formats.Exported(about, model)), data, to, **options)


def _opened(
    config: CoordinatorConfig, address: str | None, session_id: str = ""
) -> AbstractContextManager[Trained]:
    """The models of a coordinator that runs at an address, or of the files of a stopped one."""
    return open_files(config, session_id) if address is None else ask(address)


def _show(trained: Trained) -> None:
    """Print a line for each model, with its updates, samples and metrics."""
    entries = trained.entries.values()
    measured = [e for entry in entries for e in (entry.evaluation, entry.coordinator_evaluation)]
    names = headings([one for one in measured if one is not None])
    typer.echo(f"session {trained.session_id}")
    table = Grid(box=None, padding=(0, 2, 0, 0))
    for heading in ("model", "updates", "samples", *names):
        table.add_column(Text(heading), justify="right", header_style="dim")
    table.add_column("", header_style="dim")
    for entry in entries:
        number = entry.model.round
        marks = (("best", trained.best), ("last", trained.last))
        table.add_row(
            str(number),
            str(entry.num_updates),
            f"{entry.num_samples:,}",
            *(_measured(entry, name) for name in names),
            ", ".join(mark for mark, marked in marks if marked == number),
        )
    # Wide enough for any table, so that no line is broken in a pipe.
    console = Console(width=None if sys.stdout.isatty() else 10_000)
    console.print(table)
    if trained.removed:
        typer.echo(
            f"{len(trained.removed)} of the models 0 to {max(trained.removed)} were removed by "
            "[storage] keep_models"
        )


def headings(measured: Sequence[Evaluation]) -> list[str]:
    """Names of metrics: the most important figures in their usual order, then averages. "loss" is
    left out beside figures, where log_loss or mse is the same."""
    found = {name for one in measured for name in one.metrics}
    order = (*CLASS_FIGURES, *NUMBER_FIGURES)
    if any(one.figures for one in measured):
        found -= {"loss", *order}.difference(SHOWN)
    return [*(name for name in order if name in found), *sorted(found.difference(order))]


def _measured(entry: Entry, name: str) -> str:
    """A metric with its 95 % interval, on the coordinator's own data, or else at the participants;
    "" if it was measured nowhere."""
    for evaluation in (entry.coordinator_evaluation, entry.evaluation):
        if evaluation is not None and name in evaluation.metrics:
            figure = evaluation.figures.get(name, Figure(evaluation.metrics[name]))
            if figure.low is None or figure.high is None:
                return f"{figure.value:.4g}"
            return f"{figure.value:.4g} ({figure.low:.3g} to {figure.high:.3g})"
    return ""


# --- predictions ---


def _ask_participants(
    address: str, table: Table, timeout_s: float | None, max_retries: int | None
) -> Predictions:
    """Ask the participants for predictions for the rows of a table; print to standard error which
    of them answered all. Raises NoModel."""
    names = [column.name for column in table.columns]
    columns = [table.values[name].tolist() for name in names]
    rows = [[None if cell != cell else cell for cell in row] for row in zip(*columns, strict=True)]
    answered: set[str] | None = None
    missing: dict[str, str] = {}
    values: list[Any] = []
    classes: tuple[str, ...] = ()
    shares = b""
    with open_channel(address) as channel:
        stub = InspectionStub(channel)
        for part in _parts(rows):
            request = AskPredictionsRequest(
                columns=names, rows=part, timeout_s=timeout_s, max_retries=max_retries
            )
            try:
                response = stub.AskPredictions(request, timeout=ASK_S)
            except grpc.RpcError as error:
                raise NoModel(f"{address}: {details_of(error)}") from None
            values += json.loads(response.values)
            classes, shares = tuple(response.classes), shares + response.probabilities
            missing |= response.missing
            found = set(response.answered)
            answered = found if answered is None else answered & found
    typer.echo(f"answered: {', '.join(sorted(answered or ()))}", err=True)
    for name, why in sorted(missing.items()):
        typer.echo(f"missing: {name}: {why}", err=True)
    probabilities = np.frombuffer(shares, "<f8").reshape(len(values), -1) if shares else None
    return Predictions(np.array(values), classes, probabilities)


def _parts(rows: list[list[Any]]) -> Iterator[str]:
    """The rows as JSON, in parts that a coordinator takes."""
    part: list[str] = []
    num_bytes = 0
    for row in rows:
        text = json.dumps(row)
        if part and num_bytes + len(text) > PART_BYTES:
            yield f"[{','.join(part)}]"
            part, num_bytes = [], 0
        part.append(text)
        num_bytes += len(text) + 1
    yield f"[{','.join(part)}]"
