"""Probabilities and tallies that workloads give of a model on data."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from sklearn import metrics as sk

from support.learning import trained
from xain_workloads.measures.figures import figures
from xain_workloads.measures.tallies import tally_classes
from xain_workloads.tables.data import load
from xain_workloads.tables.preprocessing import prepare
from xain_workloads.tables.table import Table
from xain_workloads.workload import probabilities

LAYERS = [{"type": "linear", "out_features": 8}, {"type": "relu"}, {"type": "linear"}]
WITH_PROBABILITIES: tuple[tuple[str, Mapping[str, Any]], ...] = (
    ("sgd", {}),
    ("sgd", {"loss": "modified_huber"}),
    ("sgd", {"mode": "gradient"}),
    ("mlp", {"hidden_layers": [8]}),
    ("neural", {"layers": LAYERS}),
    ("xgboost", {"mode": "bagging", "max_depth": 3}),
    ("bagging", {"estimator": "DecisionTreeClassifier", "publish": True}),
)


@pytest.mark.parametrize("source", ["breast_cancer", "iris"])
@pytest.mark.parametrize(("name", "options"), WITH_PROBABILITIES)
def test_probabilities_are_those_of_the_exported_estimator(name, options, source):
    data = load(source)
    workload, model = trained(name, options, data)
    rows = prepare(model.metadata, Table.from_dataset(data)).features
    found = workload.probabilities(model, rows)
    expected = workload.to_sklearn(model).predict_proba(rows)
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(found.sum(axis=1), 1.0, rtol=1e-6)
    names = np.array(data.profile().classes)
    assert names[found.argmax(axis=1)].tolist() == workload.predict(model, rows).tolist()
    again = probabilities(model, Table.from_dataset(data))
    assert again.tolist() == found.tolist()


@pytest.mark.parametrize(
    ("name", "options", "source"),
    [
        ("sgd", {"loss": "hinge"}, "iris"),
        ("sgd", {"task": "regression"}, "diabetes"),
        ("mlp", {"task": "regression", "hidden_layers": [4]}, "diabetes"),
        ("xgboost", {"task": "regression", "mode": "bagging"}, "diabetes"),
        ("bagging", {"estimator": "DecisionTreeClassifier", "vote": "hard"}, "iris"),
    ],
)
def test_model_without_probabilities_has_none(name, options, source):
    data = load(source, task=options.get("task", "classification"))
    options = {**options, "publish": True} if name == "bagging" else options
    _, model = trained(name, options, data)
    assert probabilities(model, Table.from_dataset(data)) is None


@pytest.mark.parametrize("options", [{}, {"loss": "modified_huber"}, {"mode": "gradient"}])
def test_probabilities_of_scores_far_from_zero_are_finite_and_of_sum_one(options):
    """Logistic functions of -1000 are all 0, and their sum is no divisor."""
    workload, model = trained("sgd", options, load("iris"))
    far = replace(model, vector=np.full_like(model.vector, -1000.0))
    np.testing.assert_allclose(workload.probabilities(far, np.ones((2, 4))), 1 / 3)


REGRESSIONS: tuple[tuple[str, Mapping[str, Any]], ...] = (
    ("sgd", {}),
    ("mlp", {"hidden_layers": [4]}),
    ("neural", {"layers": [{"type": "linear", "out_features": 4}, {"type": "linear"}]}),
    ("xgboost", {"mode": "bagging"}),
    ("bagging", {"estimator": "DecisionTreeRegressor", "publish": True}),
)


@pytest.mark.parametrize(
    ("name", "options", "task"),
    [
        *((name, options, "classification") for name, options in WITH_PROBABILITIES),
        ("sgd", {"loss": "hinge"}, "classification"),
        *((name, {**options, "task": "regression"}, "regression") for name, options in REGRESSIONS),
    ],
)
def test_tallies_of_a_model_give_the_figures_of_its_own_predictions(name, options, task):
    data = load("diabetes" if task == "regression" else "iris", task=task)
    workload, model = trained(name, options, data)
    prepared = prepare(model.metadata, Table.from_dataset(data))
    measured = workload.measure(model, prepared)
    found = figures(measured.tallies)
    predicted = workload.predict(model, prepared.features)
    if task == "regression":
        assert found["r2"].value == pytest.approx(sk.r2_score(data.target, predicted), rel=1e-9)
        assert found["mse"].value == pytest.approx(measured.metrics["mse"], rel=1e-9)
        return
    assert found["accuracy"].value == np.mean(predicted == data.target)
    p = workload.probabilities(model, prepared.features)
    assert ("log_loss" in found) == (p is not None)
    if p is not None:
        assert found["log_loss"].value == pytest.approx(sk.log_loss(data.target, p), rel=1e-9)


def test_interval_of_the_calibration_error_holds_the_true_one():
    """A model says .6 where .7 of the rows are of the class."""
    chance = np.random.default_rng(0)
    probabilities = np.tile([0.4, 0.6], (300, 1))
    held = 0
    for _ in range(200):
        target = (chance.random(300) < 0.7).astype(int)
        tallies = tally_classes(2, target, np.ones(300, int), probabilities)
        figure = figures(tallies)["calibration_error"]
        held += figure.low <= 0.1 <= figure.high
    assert held >= 180
