"""Gradient-boosted trees by XGBoost as a workload."""

import json
import sys
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from xain_workloads.errors import DataError, NoData
from xain_workloads.model import Model
from xain_workloads.tables.data import from_arrays, load, load_table
from xain_workloads.tables.dataset import Dataset
from xain_workloads.tables.preprocessing import prepare
from xain_workloads.tables.profile import DataProfile
from xain_workloads.tables.schema import Column
from xain_workloads.tables.table import Table
from xain_workloads.trees import trees
from xain_workloads.workload import Workload, create, evaluate, from_metadata, initial_model


def federated(
    workload: Workload, parts: Sequence[Dataset], *, rounds: int, epochs: int = 1
) -> Model:
    """Bagging without a coordinator."""
    model = workload.initial_model([part.profile() for part in parts])
    kind = trees.BoosterKind.from_metadata(model.metadata)
    for number in range(rounds):
        updates = []
        for part in parts:
            result = workload.train(model, part, epochs=epochs, epoch_base=number * epochs, seed=0)
            added = trees.parse_update(result.vector.tobytes(), kind, epochs)
            updates.append((added, result.num_samples))
        joined = trees.joined(model.vector.tobytes(), updates, kind)
        model = replace(model, vector=np.frombuffer(joined, np.uint8))
    return model


def test_participants_of_earlier_versions_know_the_options_of_bagging() -> None:
    """An unknown option is refused, and earlier participants always send trees."""
    profile = DataProfile(5, 4, ("a", "b"))
    model = create("xgboost", {"mode": "bagging"}).initial_model([profile])
    assert "mode" not in json.loads(model.metadata["options"])
    cyclic = create("xgboost", {"mode": "cyclic"})
    assert from_metadata(cyclic.initial_model([profile]).metadata) == cyclic


def halves(data: Dataset) -> tuple[Dataset, Dataset]:
    rows = np.random.default_rng(0).permutation(data.num_samples)
    middle = data.num_samples // 2
    return data.subset(rows[:middle]), data.subset(rows[middle:])


@pytest.mark.parametrize(
    ("name", "task", "metric", "least"),
    [
        ("breast_cancer", "classification", "accuracy", 0.93),
        ("wine", "classification", "accuracy", 0.93),
        ("diabetes", "regression", "r2", 0.3),
    ],
)
def test_three_participants_learn_what_they_hold_together(
    name: str, task: str, metric: str, least: float
) -> None:
    """The accuracy is measured on rows that were not trained on."""
    train, test = halves(load(name, task=task))
    rows = np.array_split(np.arange(train.num_samples), 3)
    workload = create("xgboost", {"task": task, "max_depth": 3, "eta": 0.2})
    model = federated(workload, [train.subset(part) for part in rows], rounds=20)
    assert workload.measure(model, test).metrics[metric] > least
    predicted = workload.predict(model, test.features)
    if task == "classification":
        assert (
            np.mean(predicted == test.target) == workload.measure(model, test).metrics["accuracy"]
        )


def test_training_is_the_same_every_time_and_subsamples_anew_in_each_round() -> None:
    data = load("breast_cancer")
    workload = create("xgboost", {"subsample": 0.5, "max_depth": 2})
    model = workload.initial_model([data.profile()])

    def bytes_of(epoch_base: int, seed: int) -> bytes:
        result = workload.train(model, data, epochs=2, epoch_base=epoch_base, seed=seed)
        return result.vector.tobytes()

    assert bytes_of(0, 1) == bytes_of(0, 1)
    assert len({bytes_of(0, 1), bytes_of(2, 1), bytes_of(0, 2)}) == 3


def test_model_is_rebuilt_from_its_metadata() -> None:
    data = load("wine")
    workload = create("xgboost", {"max_depth": 2})
    model = workload.initial_model([data.profile()])
    assert model.layout == ()
    assert from_metadata(model.metadata) == workload
    assert workload.predict(model, data.features[:2]).tolist() == ["class_0", "class_0"]


def test_missing_values_are_a_direction_of_their_own() -> None:
    """The label is whether the value is missing, which no number could stand for."""
    chance = np.random.default_rng(3)
    features = chance.normal(size=(200, 2))
    missing = chance.random(200) < 0.5
    features[missing, 0] = np.nan
    data = Dataset(features, np.where(missing, "yes", "no"))
    workload = create("xgboost", {"max_depth": 1})
    model = federated(workload, halves(data), rounds=5)
    assert workload.measure(model, data).metrics["accuracy"] == 1.0


def test_initial_model_needs_no_xgboost(monkeypatch: pytest.MonkeyPatch) -> None:
    """A coordinator makes it; what trains says how to install the package."""
    monkeypatch.setitem(sys.modules, "xgboost", None)
    data = load("wine")
    workload = create("xgboost")
    model = workload.initial_model([data.profile()])
    assert json.loads(model.vector.tobytes())["learner"]["gradient_booster"]["name"] == "gbtree"
    with pytest.raises(ModuleNotFoundError, match="pip install xgboost"):
        workload.train(model, data, epochs=1, epoch_base=0, seed=0)


def test_wrong_data_and_models_are_refused() -> None:
    data = load("wine")
    workload = create("xgboost")
    model = workload.initial_model([data.profile()])
    with pytest.raises(DataError, match=r"the model needs \(n, 13\)"):
        workload.predict(model, data.features[:, 1:])
    with pytest.raises(DataError, match="only NaN stands for a missing value"):
        workload.predict(model, np.full((1, 13), np.inf))
    with pytest.raises(NoData):
        workload.measure(model, data.subset([]))
    other = from_arrays(data.features[:2], ["0", "9"])
    with pytest.raises(DataError, match="none of the model's classes"):
        workload.measure(model, other)
    with pytest.raises(ValueError, match="the model is no booster"):
        workload.measure(replace(model, vector=model.vector[:-9]), data)
    with pytest.raises(ValueError, match="a model of float32 is no booster"):
        workload.measure(replace(model, vector=np.zeros(3, np.float32)), data)
    with pytest.raises(DataError, match="classification needs two classes or more"):
        workload.initial_model([DataProfile(3, 2, ("a",))])


@pytest.mark.parametrize(
    ("option", "value"),
    [("eta", 0.0), ("max_depth", 0), ("max_depth", 17), ("subsample", 1.5), ("gamma", -1.0)],
)
def test_wrong_options_are_named(option: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"^{option} is {value}; it must be"):
        create("xgboost", {option: value})


def test_missing_numbers_of_a_table_stay_missing() -> None:
    """The preprocessing that is fitted for trees neither fills nor scales; other workloads fill."""
    values = {"a": np.array([1.0, np.nan, 3.0, 500.0]), "b": np.array([np.nan] * 4)}
    table = Table((Column("a"), Column("b")), values, np.array(["x", "y", "x", "y"]))
    kept = prepare(initial_model(create("xgboost"), [table.profile()]).metadata, table)
    np.testing.assert_array_equal(kept.features, np.stack(list(values.values()), axis=1))
    filled = prepare(initial_model(create("sgd"), [table.profile()]).metadata, table)
    assert np.isfinite(filled.features).all()


def test_regression_starts_at_the_mean_target_of_all_sites() -> None:
    """The mean comes from the statistics in their profiles; without them it is 0."""
    whole = load_table("diabetes", task="regression")
    parts = [whole.subset(range(100)), whole.subset(range(100, 442))]
    workload = create("xgboost", {"task": "regression"})
    model = initial_model(workload, [part.profile() for part in parts])
    assert evaluate(model, whole)["r2"] == pytest.approx(0.0, abs=1e-9)
    bare = workload.initial_model([DataProfile(3, 10)])
    assert workload.predict(bare, np.zeros((1, 10))).tolist() == [0.0]
