"""Predictions for rows that came as JSON, with a model of this process."""

import json
from collections.abc import Sequence
from functools import cached_property
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from xain_coordinator.core.vocabulary.values import GlobalModel
from xain_coordinator.http_face.errors import HttpError
from xain_coordinator.server.predictions import Predictions
from xain_workloads import workload
from xain_workloads.ensembles.bagging_options import options_of_model
from xain_workloads.exported.formats import columns_of
from xain_workloads.measures.thresholds import classes_at, threshold_of
from xain_workloads.model import Model
from xain_workloads.names import folded
from xain_workloads.tables.preprocessing import COLUMNS_KEY, prepare
from xain_workloads.tables.rows import table_of_rows
from xain_workloads.tables.schema import shown

Cell = str | bool | int | float | None
Rows = Sequence[Sequence[Cell]]


def fold(name: str) -> str:
    """A column's name as names are compared here: folded, and without case."""
    return folded(name).casefold()


class Predictor:
    """A model that predicts many times. Its estimators are loaded once. Used by one thread at a
    time."""

    def __init__(self, session_id: str, source: GlobalModel, model: Model) -> None:
        """source: the model as the session knows it. Raises HttpError if no workload made it."""
        self.session_id = session_id
        self.source = source
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
        """The fitted scikit-learn estimator of the model. Raises ValueError if it has none."""
        return workload.from_metadata(self._metadata).to_sklearn(self._model)

    def predict(
        self,
        columns: Sequence[str],
        rows: Rows,
        *,
        probabilities: Literal["if_any"] | bool = False,
    ) -> Predictions:
        """Predict rows with the model. probabilities: those of the classes, too; with "if_any" a
        model without them is no error. Raises HttpError and DataError."""
        table = table_of_rows(self._metadata, self.names(columns), rows)
        features = prepare(self._metadata, table).features
        if self.workload != "bagging":
            values = workload.predict_prepared(self._model, features)
        elif self.threshold is None:  # its estimators are read from files of skops, once
            values = np.asarray(self._estimator.predict(features))
        else:
            values = classes_at(self.threshold, self._probabilities(features), self.classes)
        if not probabilities or (probabilities == "if_any" and not self._has_probabilities):
            return Predictions(values, self.classes)
        return Predictions(values, self.classes, self._probabilities(features))

    @property
    def round(self) -> int:
        """The model's number."""
        return self.source.round

    @property
    def threshold(self) -> float | None:
        """The probability from which on the second class of two is predicted; None: the larger
        probability counts."""
        return threshold_of(self._metadata)

    @property
    def is_held(self) -> bool:
        """Whether the estimators are at the participants, which must be asked."""
        return self.workload == "bagging" and not options_of_model(self._metadata).publish

    @property
    def _has_probabilities(self) -> bool:
        """Whether the model gives probabilities of classes."""
        try:
            return bool(self.classes) and hasattr(self._estimator, "predict_proba")
        except ValueError:  # a network that scikit-learn does not have
            return False

    def _probabilities(self, features: NDArray[Any]) -> NDArray[Any]:
        """Probabilities of the classes, (n, k). Raises HttpError if the model gives none."""
        if not self._has_probabilities:
            what = "is a regression" if not self.classes else "has none with these options"
            raise HttpError(
                "NO_PROBABILITIES", f"the model {what}; leave out probabilities, or use log_loss"
            )
        return np.asarray(self._estimator.predict_proba(features), dtype=np.float64)

    def names(self, columns: Sequence[str]) -> list[str]:
        """The columns under the names that the model has for them. Raises HttpError."""
        return _named(self._columns, columns) if self._columns else list(columns)

    @cached_property
    def _columns(self) -> list[str]:
        """Names of the model's columns; empty if its metadata do not tell."""
        if known := columns_of(self._metadata):
            return [column["name"] for column in known]
        names: list[str] = json.loads(self._metadata.get(COLUMNS_KEY, "{}")).get("names", [])
        return names


def _named(expected: Sequence[str], given: Sequence[str]) -> list[str]:
    """The model's name of each given column; case and blanks may differ. Raises HttpError for
    unknown, missing or repeated columns."""
    known = {fold(name): name for name in expected}
    if len(known) < len(expected):
        raise HttpError(
            "OTHER_WORKLOAD", "two columns of the model differ in case or blanks only; rename one"
        )
    folded = [fold(name) for name in given]
    if unknown := [name[:80] for name, key in zip(given, folded, strict=True) if key not in known]:
        raise HttpError(
            "UNKNOWN_COLUMN",
            f"the model does not know {shown(unknown)}; its columns are {shown(expected, 20)}",
        )
    if missing := [name for key, name in known.items() if key not in folded]:
        raise HttpError("MISSING_COLUMN", f"the model needs {shown(missing)} too")
    if len(set(folded)) < len(folded):
        twice = next(name for name, key in zip(given, folded, strict=True) if folded.count(key) > 1)
        raise HttpError("INVALID_REQUEST", f"column {twice[:80]!r} is given more than once")
    return [known[key] for key in folded]
