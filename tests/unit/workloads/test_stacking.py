"""Stacked votes: rounds, features against numpy, sites that differ, and what is refused."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from xain_workloads.ensembles.bagging import LoadedEstimators, seed_of
from xain_workloads.ensembles.ensembles import pack
from xain_workloads.ensembles.stacking import (
    MAX_NUMBERS,
    Shape,
    Stack,
    halfway,
    next_model,
    shape_of,
)
from xain_workloads.errors import InvalidContent
from xain_workloads.model import Model
from xain_workloads.tables.data import load
from xain_workloads.tables.dataset import Dataset
from xain_workloads.tables.preprocessing import prepare
from xain_workloads.tables.table import Table
from xain_workloads.workload import create, initial_model

TREES = {"estimators": 3, "parameters": {"max_depth": 4}, "publish": True}


def divided(data: Dataset, num_sites: int) -> tuple[list[Table], Dataset]:
    """Sites with rows in the order of the target, and rows that none of them has."""
    rows = np.random.default_rng(0).permutation(data.num_samples)
    held_out, rest = np.array_split(rows, [data.num_samples // 4])
    rest = rest[np.argsort(data.target[rest], kind="stable")]
    names = tuple(sorted(set(data.target.tolist()))) if data.task == "classification" else ()
    parts = [Table.from_dataset(data.subset(part)) for part in np.array_split(rest, num_sites)]
    return [replace(part, classes=names) for part in parts], data.subset(held_out)


class Federation:
    """Sites that train in this process, and what they keep."""

    def __init__(self, parts: Sequence[Table], **options: Any) -> None:
        self.workload: Any = create("bagging", options)
        self.parts = parts
        self.model = initial_model(self.workload, [part.profile() for part in parts])
        self.kept: list[tuple[int, bytes]] = []
        self.metrics: dict[str, float] = {}

    @property
    def stack(self) -> Stack:
        return Stack.parse(self.model.vector.tobytes())

    def train(self, num_rounds: int = 0, first: int = 0) -> Model:
        """Rounds from the number `first` on, by default as many as the options need."""
        for round_ in range(first, first + (num_rounds or self.workload.options.rounds)):
            updates = []
            for site, part in enumerate(self.parts):
                result = self.workload.train(
                    self.model,
                    prepare(self.model.metadata, part),
                    epochs=1,
                    epoch_base=round_,
                    seed=seed_of(0, f"p{site}"),
                )
                updates.append((f"p{site}", result.vector.tobytes(), result.num_samples))
                self.metrics = dict(result.metrics)
                if result.kept:
                    self.kept.append((result.num_samples, result.kept))
            vector = next_model(
                Stack.parse(self.model.vector.tobytes()), updates, self.model.metadata
            )
            self.model = replace(self.model, vector=np.frombuffer(vector, np.uint8))
        return self.model

    def votes(self, rows: np.ndarray) -> np.ndarray:
        """Mean votes of the estimators that stay at the sites."""
        loaded = [(n, LoadedEstimators(kept, self.model.metadata)) for n, kept in self.kept]
        total = sum(n * one.sum_of_votes(rows) for n, one in loaded)
        return np.asarray(total / sum(n * len(one) for n, one in loaded))


def rows_of(federation: Federation, data: Dataset) -> np.ndarray:
    return prepare(federation.model.metadata, data).features


def score(predicted: np.ndarray, data: Dataset) -> float:
    """Accuracy, or R2."""
    if data.task == "classification":
        return float(np.mean(predicted == data.target))
    errors = np.square(predicted - data.target).sum()
    return float(1 - errors / np.square(data.target - data.target.mean()).sum())


@pytest.mark.parametrize(
    ("name", "estimator", "soft", "stacked"),
    [
        ("wine", "DecisionTreeClassifier", 0.75, 0.95),
        ("breast_cancer", "DecisionTreeClassifier", 0.95, 0.94),
        ("diabetes", "DecisionTreeRegressor", 0.2, 0.4),
    ],
)
def test_stacked_votes_help_where_sites_have_other_targets(name, estimator, soft, stacked):
    """Rows are divided strictly by their target; estimators are published, or stay at the sites."""
    task = "regression" if name == "diabetes" else "classification"
    parts, test = divided(load(name, task=task), 3 if name == "wine" else 7)
    options = {"estimator": estimator, "estimators": 5}
    published = Federation(parts, **options, publish=True)
    published.train(1)
    rows = rows_of(published, test)
    assert score(published.workload.predict(published.model, rows), test) < soft
    published.train(published.workload.options.rounds - 1, first=1)
    assert score(published.workload.predict(published.model, rows), test) > stacked
    kept = Federation(parts, **options)
    kept.train()
    found = halfway(kept.votes(rows), rows, kept.stack, kept.model.metadata)
    if task == "classification":
        assert found.sum(axis=1) == pytest.approx(np.ones(len(rows)))
        names = np.array(parts[0].classes)
        assert score(names[found.argmax(axis=1)], test) > stacked - 0.05
    else:
        assert score(found[:, 0], test) > stacked - 0.05


@pytest.mark.parametrize("name", ["wine", "breast_cancer", "diabetes"])
def test_prediction_is_the_linear_model_of_votes_and_columns(name):
    task = "regression" if name == "diabetes" else "classification"
    parts, test = divided(load(name, task=task), 2)
    kind = "DecisionTreeRegressor" if name == "diabetes" else "DecisionTreeClassifier"
    federation = Federation(parts, **TREES, estimator=kind)
    federation.train()
    rows, workload = rows_of(federation, test), federation.workload
    shape, coefficients = federation.stack.linear(federation.model.metadata)
    stacking = workload.to_sklearn(federation.model)
    votes = [
        one.predict_proba(rows) if shape.num_classes else one.predict(rows)[:, None]
        for one in stacking.estimators_
    ]
    if shape.num_classes == 2:
        votes = [one[:, 1:] for one in votes]
    if not shape.num_classes:
        scale = initial_scale(federation)
        votes = [(one - scale.center) / scale.scale for one in votes]
    features = np.hstack([*votes, rows, np.ones((len(rows), 1))])
    scores = features @ coefficients
    if not shape.num_classes:
        expected = scores[:, 0] * scale.scale + scale.center
        np.testing.assert_allclose(workload.predict(federation.model, rows), expected, rtol=1e-9)
        return
    if shape.num_classes == 2:
        scores = np.hstack([np.zeros_like(scores), scores])
    shares = np.exp(scores) / np.exp(scores).sum(axis=1, keepdims=True)
    np.testing.assert_allclose(
        workload.probabilities(federation.model, rows), shares, rtol=1e-9, atol=1e-12
    )


def initial_scale(federation: Federation) -> Any:
    from xain_workloads.tables.preprocessing import target_scale

    return target_scale(federation.model.metadata)


def test_estimators_do_not_vote_for_rows_that_they_were_fitted_on():
    """Labels are chance: deep trees know those of their own rows, and the linear model does not
    trust them."""
    chance = np.random.default_rng(0)
    data = Dataset(chance.normal(size=(400, 3)), chance.choice(["no", "yes"], 400))
    federation = Federation([Table.from_dataset(data)], publish=True)
    federation.train()
    assert 0.35 < federation.metrics["oob_score"] < 0.65
    other = prepare(federation.model.metadata, data.subset(range(399)))
    result = federation.workload.train(
        federation.model, other, epochs=1, epoch_base=1, seed=seed_of(0, "p0")
    )
    assert result.metrics == {}, "estimators vote, though the rows have changed"


def test_rounds_fit_estimators_first_and_later_ones_add_to_them():
    parts, _ = divided(load("wine"), 2)
    federation = Federation(parts, **TREES, fit_rounds=2)
    assert federation.workload.options.rounds == 2 + 5
    federation.train(3)
    assert len(federation.stack.frames) == 2 * 2 * 3
    assert len(federation.stack.numbers)
    # A session that goes on with more rounds of estimators.
    options = federation.model.metadata["options"].replace('"fit_rounds": 2', '"fit_rounds": 3')
    federation.model = replace(
        federation.model, metadata={**federation.model.metadata, "options": options}
    )
    federation.workload = create("bagging", {**TREES, "fit_rounds": 3})
    federation.train(1, first=3)
    assert len(federation.stack.frames) == 3 * 2 * 3
    assert not len(federation.stack.numbers), "the linear model of fewer estimators"


@pytest.mark.parametrize(
    ("options", "rounds"),
    [
        ({}, 6),
        ({"estimator": "Ridge"}, 2),
        ({"vote": "soft"}, 5),
        ({"publish": True, "fit_rounds": 3}, 8),
    ],
)
def test_rounds_follow_from_the_options(options, rounds):
    workload = create("bagging", options)
    assert workload.options.rounds == rounds


def test_linear_model_leaves_out_what_would_be_too_large():
    assert shape_of(20, 3, 50) == Shape(20, 3, 50)
    assert shape_of(400, 3, 700) == Shape(1, 3, 700)
    assert shape_of(200, 3, 5000) == Shape(200, 3, 0)
    assert shape_of(5000, 3, 5000) == Shape(1, 3, 0)
    assert shape_of(2, 60, 5) is None
    assert shape_of(0, 3, 50) == Shape(0, 3, 50)
    assert shape_of(0, 3, 5000) is None
    for sites in (1, 20, 5000):
        shape = shape_of(sites, 3, 700)
        assert shape.num_numbers <= MAX_NUMBERS


def test_with_many_classes_all_rounds_fit_estimators():
    labels = np.array([f"c{i:02}" for i in range(60)] * 3)
    data = Dataset(np.random.default_rng(0).normal(size=(180, 4)), labels)
    federation = Federation([Table.from_dataset(data)], **TREES)
    federation.train(2)
    assert len(federation.stack.frames) == 2 * 3
    assert len(federation.workload.predict(federation.model, data.features)) == 180


def test_damaged_linear_models_are_refused():
    parts, _ = divided(load("wine"), 2)
    federation = Federation(parts, **TREES)
    good = federation.train(2).vector.tobytes()
    assert Stack.parse(good).to_bytes(is_held=False) == good
    for data, why in (
        (good[:-8], "another size than it says"),
        (good + b"x", "another size than it says"),
        (pack([]) + b"hello", "5 bytes that are no linear model follow"),
    ):
        with pytest.raises(InvalidContent, match=why):
            Stack.parse(data)
    stack = federation.stack
    other = replace(stack, frames=stack.frames[:3])
    vector = np.frombuffer(other.to_bytes(is_held=False), np.uint8)
    with pytest.raises(InvalidContent, match="is of other estimators"):
        federation.workload.to_sklearn(replace(federation.model, vector=vector))
