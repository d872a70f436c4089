"""Each estimator of scikit-learn that can be bagged, on columns as they are prepared for it."""

import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from xain_workloads.bagging_options import CLASSIFIERS, REGRESSORS
from xain_workloads.data import load_table
from xain_workloads.errors import DataError
from xain_workloads.preprocessing import PreprocessingOptions, prepare
from xain_workloads.table import Table
from xain_workloads.workload import create, evaluate, initial_model

ROWS = 80

# Estimators that the data do not suit with standardised columns, what their refusal says, and the
# options with which they fit. docs/bagging.md names them.
UNSUITED: Mapping[str, tuple[str, Mapping[str, Any], str]] = {
    "ComplementNB": ("Negative values", {}, "none"),
    "MultinomialNB": ("Negative values", {}, "none"),
    "QuadraticDiscriminantAnalysis": ("not full rank", {"solver": "eigen", "shrinkage": 0.1}, ""),
}


def table_of(task: str) -> Table:
    source = "breast_cancer" if task == "classification" else "diabetes"
    whole = load_table(source, task=task)  # type: ignore[arg-type]  # one of the literals
    return whole.subset(np.random.default_rng(0).permutation(whole.num_samples)[:ROWS])


def fitted_score(name: str, parameters: Mapping[str, Any] = {}, scaling: str = "") -> float:
    task = "classification" if name in CLASSIFIERS else "regression"
    options = {
        "estimator": name,
        "estimators": 1,
        "publish": True,
        "vote": "hard",
        "parameters": parameters,
    }
    workload, table = create("bagging", options), table_of(task)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of iterations that do not suffice
        model = initial_model(workload, [table.profile()], PreprocessingOptions(scaling))
        prepared = prepare(model.metadata, table)
        result = workload.train(model, prepared, epochs=1, epoch_base=0, seed=1)
        measured = evaluate(replace(model, vector=result.vector), table)
    return measured["accuracy" if task == "classification" else "mse"]


@pytest.mark.parametrize("name", [*CLASSIFIERS, *REGRESSORS])
def test_estimator_is_fitted_or_refused_with_its_reason(name):
    if name not in UNSUITED:
        assert np.isfinite(fitted_score(name))
        return
    reason, parameters, scaling = UNSUITED[name]
    with pytest.raises(DataError, match=f"^{name} cannot be fitted on these rows: .*{reason}"):
        fitted_score(name)
    assert np.isfinite(fitted_score(name, parameters, scaling))
