"""Predictions for the rows of a file, with what the model does not know of them."""

import csv
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xain_foundation.exit_statuses import EXIT_OK, EXIT_UNKNOWN_INPUT
from xain_foundation.names import shortened
from xain_foundation.settings.fields import Section
from xain_foundation.settings.hints import hint
from xain_workloads import workload
from xain_workloads.errors import NoModel
from xain_workloads.exported.formats import Exported
from xain_workloads.exported.model_files import metadata_of
from xain_workloads.measures.figures import figures
from xain_workloads.measures.tallies import Tallies, tally_classes, tally_numbers
from xain_workloads.measures.thresholds import threshold_of
from xain_workloads.tables.data import Rows, load_rows
from xain_workloads.tables.dataset import Task
from xain_workloads.tables.preprocessing import CategoryColumn, preprocessing_of
from xain_workloads.tables.reading.dialect import Dialect
from xain_workloads.tables.schema import shown
from xain_workloads.tables.table import Table

MAX_UNKNOWN = 0.2  # default share of the values of a column
_SHOWN = {"accuracy": "accuracy", "auc": "AUC", "log_loss": "log loss", "r2": "R²", "rmse": "RMSE"}
_BASELINES = {
    "accuracy": "always the commonest class:",
    "log_loss": "always the shares of the classes:",
    "rmse": "always the mean:",
}


class RowsSettings(Section):
    """Settings of a command that has no others."""

    data: Dialect = Dialect()


@dataclass(frozen=True, slots=True, eq=False)
class Predictions:
    """values: (n,) class names or numbers. probabilities: (n, k) in the order of the classes; None
    for a regression, and for a model that has none."""

    values: NDArray[Any]
    classes: tuple[str, ...] = ()
    probabilities: NDArray[np.float64] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Unknown:
    """Values of one column that a model does not know.

    rows: (n,) whether the value is missing, or a category that no site had in training.
    num_missing: how many of them are missing. known: the model's categories; empty for numbers.
    others: the categories of the file that are none of them, the commonest first.
    in_training: share of the rows of training that had no such value either.
    """

    column: str
    rows: NDArray[np.bool_]
    num_missing: int
    known: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    in_training: float = 0.0

    @property
    def share(self) -> float:
        """Share of the rows, from 0 to 1."""
        return float(np.mean(self.rows))

    @property
    def excess(self) -> float:
        """Share of the rows, less the share in training."""
        return self.share - self.in_training

    def __str__(self) -> str:
        number = int(self.rows.sum())
        text = f"column {self.column!r}: {number} of {len(self.rows)} values are "
        if not self.others:
            before = f", as were {self.in_training:.0%} in training" if self.in_training else ""
            return f"{text}missing{before}"
        missing = f" ({self.num_missing} of them are missing)" if self.num_missing else ""
        return (
            f"{text}unknown to the model{missing}, which knows {shown(self.known, 10)}; the file"
            f" has {shown(self.others, 10)}"
        )


def predict_file(
    about: Mapping[str, Any],
    predict: Callable[[Table], Predictions],
    data: Path,
    to: Path | None,
    *,
    id_column: str = "",
    max_unknown: float = MAX_UNKNOWN,
    dialect: Dialect | None = None,
    note: Callable[[str], None],
) -> int:
    """Predict the rows of a file, and write a line of CSV for each: its id, the prediction, and the
    probability of each class.

    about: the JSON object of the model; see formats. to: a file; None for standard output.
    id_column: identifies the rows; "" for their numbers, from 1.
    max_unknown: share of a column's values beyond that of training; with more the status is
        EXIT_UNKNOWN_INPUT.
    dialect: how the file is written; keys that are set count more than those of the model.
    note: takes a line of what a user should know: the threshold, unknown values, and the score
        where the file has the target.
    Returns the exit status. Raises NoModel, DataError and OSError.
    """
    classes = tuple(about.get("classes", ()))
    task: Task = "classification" if classes else "regression"
    types = {column["name"]: column["type"] for column in about.get("columns", ())}
    target = str(about.get("target") or "")
    written = Dialect.from_json(str(about.get("dialect") or ""))
    if dialect is not None:
        for key in dialect.model_fields_set & set(Dialect.model_fields):
            value = getattr(dialect, key)
            if isinstance(value, dict):  # other columns stay as the model has them
                value = getattr(written, key) | value
            written = written.model_copy(update={key: value})
    rows = load_rows(data, types, target=target, task=task, id_column=id_column, dialect=written)
    metadata = metadata_of(about)
    unknown = unknown_values(metadata, rows.table)
    predictions = predict(rows.table)
    if to is None:
        _write(sys.stdout, id_column or "row", target or "prediction", rows, predictions)
    else:
        with to.open("w", encoding="utf-8", newline="") as file:
            _write(file, id_column or "row", target or "prediction", rows, predictions)
    if (threshold := threshold_of(metadata)) is not None and len(classes) == 2:
        note(_by_threshold(threshold, classes[1], about.get("threshold")))
    for one in unknown:
        note(f"{'warning: ' if one.excess > max_unknown else ''}{one}")
    for line in scores(predictions, rows.truth, _rows_with_unknown(unknown, len(rows.ids))):
        note(line)
    worst = max(unknown, key=lambda one: one.excess, default=None)
    if worst is None or worst.excess <= max_unknown:
        return EXIT_OK
    before = f", in training {worst.in_training:.0%}" if worst.in_training else ""
    note(
        f"do not rely on these predictions: of column {worst.column!r} the model does not know"
        f" {worst.share:.0%} of the values{before}, and at most {max_unknown:.0%} more than in"
        " training are taken; correct the file, or, if these rows are right as they are, "
        + hint("xain-participant", "--max-unknown 1")
    )
    return EXIT_UNKNOWN_INPUT


def _by_threshold(threshold: float, name: str, told: Any) -> str:
    criterion = told.get("criterion", "") if isinstance(told, dict) else ""
    text = f"predicted as {name!r} from a probability of {threshold:.3g} on"
    return f"{text}, the threshold by {shortened(str(criterion), 80)}" if criterion else text


def predict_with(exported: Exported) -> Callable[[Table], Predictions]:
    """Make the function that predicts rows by a model from a file. Raises NoModel."""
    classes = tuple(exported.about.get("classes", ()))
    model, pipeline = exported.model, exported.pipeline
    if model is not None and "workload" not in model.metadata:
        raise NoModel("only the script that trained this model can use it")

    def by_model(table: Table) -> Predictions:
        assert model is not None
        values = workload.predict(model, table)
        return Predictions(values, classes, workload.probabilities(model, table))

    def by_pipeline(table: Table) -> Predictions:
        matrix = np.empty((table.num_samples, len(table.columns)), dtype=object)
        for i, column in enumerate(table.columns):
            matrix[:, i] = table.values[column.name]
        values = np.asarray(pipeline.predict(matrix))
        if classes and values.dtype.kind in "iu":  # XGBoost knows no names
            values = np.array(classes, dtype=np.str_)[values]
        shares = pipeline.predict_proba(matrix) if hasattr(pipeline, "predict_proba") else None
        return Predictions(values, classes, shares)

    return by_pipeline if model is None else by_model


def unknown_values(metadata: Mapping[str, str], table: Table) -> list[Unknown]:
    """The columns of which a model does not know all values, in the order of the table.

    metadata: of the model. A model without preprocessing takes no such values.
    """
    preprocessing = preprocessing_of(metadata)
    found = []
    for column in () if preprocessing is None else preprocessing.columns:
        values = table.values[column.name]
        if isinstance(column, CategoryColumn):
            is_known = {name: name in column.categories for name in set(values.tolist())}
            rows = np.array([not is_known[name] for name in values], dtype=np.bool_)
            others = Counter(values[rows].tolist())
            num_missing = others.pop(None, 0)
            names = tuple(name for name, _ in others.most_common())
            one = Unknown(column.name, rows, num_missing, column.categories, names, column.unknown)
        else:
            rows = np.isnan(values)
            one = Unknown(column.name, rows, int(rows.sum()), in_training=column.unknown)
        if rows.any():
            found.append(one)
    return found


def _rows_with_unknown(unknown: Sequence[Unknown], num_rows: int) -> NDArray[np.bool_]:
    found = np.zeros(num_rows, np.bool_)
    for one in unknown:
        found |= one.rows
    return found


def scores(predictions: Predictions, truth: NDArray[Any], unknown: NDArray[np.bool_]) -> list[str]:
    """Lines that compare predictions with what the file says of the target.

    truth: (n,) object, None where it is not known. unknown: (n,) rows with a value that the model
    does not know; without them the score is another one, which is told too.
    """
    known = np.array([one is not None for one in truth], dtype=np.bool_)
    lines = []
    if predictions.classes:
        is_class = np.array([one in predictions.classes for one in truth], dtype=np.bool_)
        if (strange := known & ~is_class).any():
            names = shown(sorted(set(truth[strange].tolist())), 10)
            lines.append(
                f"{int(strange.sum())} rows are not scored: their class is {names}, and the"
                f" model's classes are {shown(predictions.classes, 10)}"
            )
        known &= is_class
    if not known.any():
        return lines
    lines += _score(predictions, truth, known, f"of {int(known.sum())} rows")
    if (some := int((known & unknown).sum())) == known.sum():
        lines.append("each of these rows has a missing value, or one that the model does not know")
    elif some:
        rest = (
            f"of the {int(known.sum()) - some} rows without a missing value, or one that the model"
            " does not know"
        )
        lines += _score(predictions, truth, known & ~unknown, rest)
    return lines


def _score(
    predictions: Predictions, truth: NDArray[Any], rows: NDArray[np.bool_], which: str
) -> list[str]:
    """Figures of some rows, each with its 95 % interval and its baseline."""
    found, expected, shares = predictions.values[rows], truth[rows], predictions.probabilities
    tallies: Tallies | None
    if predictions.classes:
        at = {name: number for number, name in enumerate(predictions.classes)}
        target, predicted = (np.array([at[name] for name in of]) for of in (expected, found))
        tallies = tally_classes(
            len(at), target, predicted, None if shares is None else shares[rows]
        )
    else:
        tallies = tally_numbers(expected.astype(np.float64), found)
    told: list[str] = []
    for name, figure in ({} if tallies is None else figures(tallies)).items():
        if name in _SHOWN:
            notes = []
            if figure.low is not None and figure.high is not None:
                notes.append(f"95 % interval {figure.low:.3g} to {figure.high:.3g}")
            if figure.baseline is not None and name in _BASELINES:
                notes.append(f"{_BASELINES[name]} {figure.baseline:.3g}")
            told.append(
                ("  " if told else "")
                + f"{_SHOWN[name]} {figure.value:.4f}"
                + ("" if told else f" {which}")
                + (f" ({'; '.join(notes)})" if notes else "")
            )
    return told


def _write(file: Any, id_name: str, name: str, rows: Rows, predictions: Predictions) -> None:
    """Write predictions as CSV: a header, then id, prediction and probabilities of each row."""
    shares = predictions.probabilities
    writer = csv.writer(file, lineterminator="\n")
    classes = () if shares is None else predictions.classes
    writer.writerow([id_name, name, *(f"p({one})" for one in classes)])
    listed = [[]] * len(rows.ids) if shares is None else shares.tolist()
    for row, value, each in zip(rows.ids, predictions.values.tolist(), listed, strict=True):
        writer.writerow([row, value, *(f"{share:.6g}" for share in each)])
