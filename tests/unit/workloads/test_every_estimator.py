"""Each estimator of scikit-learn: fitted by its name on prepared columns, or refused."""

import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from sklearn.utils import all_estimators

from xain_coordinator.config.coordinator import CoordinatorConfig
from xain_foundation.settings.settings import ConfigError, load
from xain_workloads.ensembles.bagging_options import BaggingOptions
from xain_workloads.ensembles.estimators import described
from xain_workloads.ensembles.estimators.allowed import CLASSIFIERS, ESTIMATORS, TRANSFORMERS
from xain_workloads.tables.data import load_table
from xain_workloads.tables.preprocessing import prepare
from xain_workloads.tables.table import Table
from xain_workloads.workload import create, evaluate, initial_model

ROWS = 80
WEAK = {"classification": "LogisticRegression", "regression": "Ridge"}
EVERY = [name for kind in ("classifier", "regressor") for name, _ in all_estimators(kind)]


def rows_for(task: str) -> Table:
    source = "breast_cancer" if task == "classification" else "diabetes"
    whole = load_table(source, task=task)
    return whole.subset(np.random.default_rng(0).permutation(whole.num_samples)[:ROWS])


def fitted_score(estimator: Any, parameters: Mapping[str, Any] = {}) -> float:
    options: dict[str, Any] = {"estimator": estimator, "parameters": parameters}
    options |= {"estimators": 1, "publish": True, "vote": "hard"}
    task = BaggingOptions(estimator, dict(parameters)).task
    workload, table = create("bagging", options), rows_for(task)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of iterations that do not suffice
        model = initial_model(workload, [table.profile()])
        prepared = prepare(model.metadata, table)
        result = workload.train(model, prepared, epochs=1, epoch_base=0, seed=1)
        measured = evaluate(replace(model, vector=result.vector), table)
    return measured["accuracy" if task == "classification" else "mse"]


@pytest.mark.filterwarnings("ignore:Class PassiveAggressive:FutureWarning")
@pytest.mark.parametrize("name", EVERY)
def test_estimator_is_fitted_or_refused_before_anything_starts(name):
    """Refused when the settings are read, with what to do; fitted, it predicts what is finite."""
    assert len(EVERY) >= 90
    if name in described.REFUSED:
        with pytest.raises(ValueError, match=f"^{name} cannot be fitted: "):
            BaggingOptions(name)
        return
    if name in described.COUNTS:
        bagging = {"workload.name": "bagging", "aggregation.rule": "ensemble"}
        with pytest.raises(ConfigError, match=f"{name} takes no negative numbers"):
            load(CoordinatorConfig, overrides=bagging | {"workload.options.estimator": name})
        discretizer = {"estimator": "KBinsDiscretizer", "parameters": {"encode": "ordinal"}}
        bins = {"estimator": name, "parameters": {"min_categories": 5}}
        before = [discretizer, bins] if name == "CategoricalNB" else ["MinMaxScaler", name]
        assert np.isfinite(fitted_score({"pipeline": before}))
        return
    parameters = {}
    try:
        BaggingOptions(name)
    except ValueError as error:
        task = "classification" if name in CLASSIFIERS else "regression"
        key = str(error).rpartition("the parameter ")[2].strip("'")
        parameters = {key: [WEAK[task], {"pipeline": ["PCA", WEAK[task]]}]}
        if key != "estimators":
            parameters = {key: WEAK[task]}
    assert np.isfinite(fitted_score(name, parameters))


def test_tables_name_every_estimator():
    """scikit-learn's later versions may have more."""
    assert set(EVERY) - described.REFUSED.keys() <= ESTIMATORS.keys()


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_transformers_of_pipelines_are_fitted(name):
    step = name
    if name in ("RFE", "SelectFromModel"):
        step = {"estimator": name, "parameters": {"estimator": "Ridge"}}
    steps = [step, "Ridge"] if name != "NMF" else ["MinMaxScaler", step, "Ridge"]
    if name in ("GaussianRandomProjection",):
        steps = [{"estimator": name, "parameters": {"n_components": 3}}, "Ridge"]
    if name in ("SelectFdr", "SelectFpr", "SelectFwe", "SelectKBest", "SelectPercentile"):
        steps = [{"estimator": name, "parameters": {"score_func": "f_regression"}}, "Ridge"]
    assert np.isfinite(fitted_score({"pipeline": steps}))
