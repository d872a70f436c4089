"""Gradient-boosted trees by XGBoost as a workload."""

import json
import sys
from dataclasses import replace

import numpy as np
import pytest

from support.learning import table_of
from xain_workloads.errors import DataError
from xain_workloads.tables.data import from_arrays, load, load_table
from xain_workloads.tables.preprocessing import prepare
from xain_workloads.tables.profile import DataProfile
from xain_workloads.workload import create, evaluate, from_metadata, initial_model


def test_participants_of_earlier_versions_know_the_options_of_bagging():
    """An unknown option is refused, and earlier participants always send trees."""
    profile = DataProfile(5, 4, ("a", "b"))
    model = create("xgboost", {"mode": "bagging"}).initial_model([profile])
    assert "mode" not in json.loads(model.metadata["options"])
    cyclic = create("xgboost", {"mode": "cyclic"})
    assert from_metadata(cyclic.initial_model([profile]).metadata) == cyclic


def test_training_is_the_same_every_time_and_subsamples_anew_in_each_round():
    data = load("breast_cancer")
    workload = create("xgboost", {"subsample": 0.5, "max_depth": 2})
    model = workload.initial_model([data.profile()])

    def bytes_of(epoch_base, seed):
        result = workload.train(model, data, epochs=2, epoch_base=epoch_base, seed=seed)
        return result.vector.tobytes()

    assert bytes_of(0, 1) == bytes_of(0, 1)
    assert len({bytes_of(0, 1), bytes_of(2, 1), bytes_of(0, 2)}) == 3


def test_initial_model_needs_no_xgboost(monkeypatch):
    """A coordinator makes it; what trains says how to install the package."""
    monkeypatch.setitem(sys.modules, "xgboost", None)
    data = load("wine")
    workload = create("xgboost")
    model = workload.initial_model([data.profile()])
    assert json.loads(model.vector.tobytes())["learner"]["gradient_booster"]["name"] == "gbtree"
    with pytest.raises(ModuleNotFoundError, match="pip install xgboost"):
        workload.train(model, data, epochs=1, epoch_base=0, seed=0)


def test_wrong_data_and_models_are_refused():
    data = load("wine")
    workload = create("xgboost")
    model = workload.initial_model([data.profile()])
    with pytest.raises(DataError, match=r"the model needs \(n, 13\)"):
        workload.predict(model, data.features[:, 1:])
    with pytest.raises(DataError, match="only NaN stands for a missing value"):
        workload.predict(model, np.full((1, 13), np.inf))
    with pytest.raises(DataError, match="no rows"):
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


def test_missing_numbers_of_a_table_stay_missing():
    """The preprocessing that is fitted for trees neither fills nor scales; other workloads fill."""
    values = {"a": np.array([1.0, np.nan, 3.0, 500.0]), "b": np.array([np.nan] * 4)}
    table = table_of(values, np.array(["x", "y", "x", "y"]))
    kept = prepare(initial_model(create("xgboost"), [table.profile()]).metadata, table)
    np.testing.assert_array_equal(kept.features, np.stack(list(values.values()), axis=1))
    filled = prepare(initial_model(create("sgd"), [table.profile()]).metadata, table)
    assert np.isfinite(filled.features).all()


def test_regression_starts_at_the_mean_target_of_all_sites():
    """The mean comes from the statistics in their profiles; without them it is 0."""
    whole = load_table("diabetes", task="regression")
    parts = [whole.subset(range(100)), whole.subset(range(100, 442))]
    workload = create("xgboost", {"task": "regression"})
    model = initial_model(workload, [part.profile() for part in parts])
    assert evaluate(model, whole)["r2"] == pytest.approx(0.0, abs=1e-9)
    bare = workload.initial_model([DataProfile(3, 10)])
    assert workload.predict(bare, np.zeros((1, 10))).tolist() == [0.0]
