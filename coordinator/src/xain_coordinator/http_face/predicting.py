"""Predictions for rows that came as JSON, with a model of this process."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import nan
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from xain_coordinator.export.formats import columns_of
from xain_coordinator.http_face.errors import HttpError
from xain_workloads import workload
from xain_workloads.data import MISSING
from xain_workloads.model import Model
from xain_workloads.preprocessing import COLUMNS_KEY, prepare
from xain_workloads.schema import Column, ColumnType, shown
from xain_workloads.table import Table

Cell = str | bool | int | float | None
Rows = Sequence[Sequence[Cell]]


@dataclass(frozen=True, slots=True)
class Predicted:
    """values: (n,), class names or float64. probabilities: (n, c), if they were asked for."""

    values: NDArray[Any]
    classes: tuple[str, ...] = ()
    probabilities: NDArray[Any] | None = None
    answered: tuple[str, ...] = ()
    missing: Mapping[str, str] = field(default_factory=dict)


def fold(name: str) -> str:
    """A column's name as names are compared: without case and surrounding blanks."""
    return name.strip().casefold()


class Predictor:
    """A model that predicts many times; what is slow is done once. Used by one thread at a time."""

    def __init__(self, session_id: str, round_: int, model: Model) -> None:
        self.session_id = session_id
        self.round = round_
        self._model = model
        self._metadata = model.metadata
        self.workload = model.metadata.get("workload", "")
        self.classes = tuple(json.loads(model.metadata.get("classes", "[]")))
        if not self.workload:
            raise HttpError(
                "OTHER_WORKLOAD",
                f"session {session_id} has no workload: only the script that trained its model can "
                "use it",
            )

    @cached_property
    def _estimator(self) -> Any:
        return workload.from_metadata(self._metadata).to_sklearn(self._model)

    def predict(
        self, columns: Sequence[str], rows: Rows, *, probabilities: bool = False
    ) -> Predicted:
        """Raises HttpError and DataError."""
        features = prepare(self._metadata, self.table(columns, rows)).features
        made = workload.from_metadata(self._metadata)
        if self.workload == "bagging":  # its estimators are read from files of skops
            values = np.asarray(self._estimator.predict(features))
        else:
            values = made.predict(self._model, features)
        if not probabilities:
            return Predicted(values, self.classes)
        return Predicted(values, self.classes, self._probabilities(features))

    @property
    def has_probabilities(self) -> bool:
        """Whether it tells more of a class than its name."""
        return bool(self.classes) and hasattr(self._estimator, "predict_proba")

    def _probabilities(self, features: NDArray[Any]) -> NDArray[Any]:
        if not self.has_probabilities:
            what = "is a regression" if not self.classes else "has none with these options"
            raise HttpError(
                "NO_PROBABILITIES", f"the model {what}; leave out probabilities, or use log_loss"
            )
        return np.asarray(self._estimator.predict_proba(features), dtype=np.float64)

    def table(self, columns: Sequence[str], rows: Rows) -> Table:
        """The rows as a table with the model's columns. Raises HttpError and DataError."""
        types = self._types(columns)
        order = _order(tuple(types), columns)
        for number, row in enumerate(rows, start=1):
            if len(row) != len(columns):
                raise HttpError(
                    "INVALID_REQUEST",
                    f"row {number} has {len(row)} values, and there are {len(columns)} columns",
                )
        values: dict[str, NDArray[Any]] = {}
        for (name, kind), at in zip(types.items(), order, strict=True):
            cells = [row[at] for row in rows]
            values[name] = _numbers(name, cells) if kind == "number" else _categories(cells)
        named = tuple(Column(name, cast(ColumnType, kind)) for name, kind in types.items())
        # A name that no column can have: the rows have no target.
        return Table(named, values, np.full(len(rows), nan), target_name="\0", origin="the rows")

    def _types(self, given: Sequence[str]) -> Mapping[str, str]:
        """Types of the model's columns by name. Without any in its metadata: those given."""
        if known := columns_of(self._metadata):
            return {column["name"]: column["type"] for column in known}
        names = json.loads(self._metadata.get(COLUMNS_KEY, "{}")).get("names", given)
        return dict.fromkeys(names, "number")


def _order(expected: Sequence[str], given: Sequence[str]) -> list[int]:
    """For each expected column its place among the given ones. Raises HttpError."""
    places: dict[str, int] = {}
    for at, name in enumerate(given):
        if fold(name) in places:
            raise HttpError("INVALID_REQUEST", f"column {name[:80]!r} is given more than once")
        places[fold(name)] = at
    known = {fold(name) for name in expected}
    if len(known) < len(expected):
        raise HttpError(
            "OTHER_WORKLOAD", "two columns of the model differ in case or blanks only; rename one"
        )
    if unknown := [name for name in given if fold(name) not in known]:
        raise HttpError(
            "UNKNOWN_COLUMN",
            f"the model does not know {shown([n[:80] for n in unknown])}; its columns are "
            f"{shown(expected, 20)}",
        )
    if missing := [name for name in expected if fold(name) not in places]:
        raise HttpError("MISSING_COLUMN", f"the model needs {shown(missing)} too")
    return [places[fold(name)] for name in expected]


def _numbers(name: str, cells: Sequence[Cell]) -> NDArray[Any]:
    numbers = np.empty(len(cells))
    for at, cell in enumerate(cells):
        try:
            missing = cell is None or (isinstance(cell, str) and cell.strip() in MISSING)
            numbers[at] = nan if missing else float(cast(float, cell))
        except (ValueError, OverflowError):
            raise HttpError(
                "INVALID_DATA", f"column {name!r}, row {at + 1}: {str(cell)[:40]!r} is no number"
            ) from None
    return numbers


def _categories(cells: Sequence[Cell]) -> NDArray[Any]:
    categories = np.empty(len(cells), dtype=object)
    for at, cell in enumerate(cells):
        text = ("true" if cell else "false") if isinstance(cell, bool) else str(cell)
        categories[at] = None if cell is None or text in MISSING else text
    return categories
