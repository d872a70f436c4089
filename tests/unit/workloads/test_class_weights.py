"""Class weights: from the counts of all sites, and equal to those of the libraries."""

from collections.abc import Sequence
from dataclasses import replace
from json import loads
from typing import Any

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression, SGDClassifier
from sklearn.utils.class_weight import compute_class_weight

from support.learning import opened
from xain_workloads.class_weights import KEY
from xain_workloads.ensembles.ensembles import load, unpack
from xain_workloads.errors import DataError
from xain_workloads.model import Model, unflatten
from xain_workloads.tables.data import from_arrays
from xain_workloads.tables.dataset import Dataset
from xain_workloads.tables.table import Table
from xain_workloads.trees.growing import grown
from xain_workloads.trees.histograms import growing, parse_sums
from xain_workloads.trees.trees import BoosterKind, joined, parse_update
from xain_workloads.workload import create, initial_model

BALANCED: dict[str, Any] = {"class_weight": "balanced"}


def rows(counts: Sequence[int], seed: int = 0) -> Dataset:
    """Rows of classes "0", "1", ... that lie in different places, in a random order."""
    chance = np.random.default_rng(seed)
    codes = chance.permutation(np.repeat(np.arange(len(counts)), counts))
    features = chance.normal(size=(len(codes), 3)) + codes[:, np.newaxis]
    return from_arrays(features, codes.astype(str))


def weights_in(model: Model) -> list[float]:
    return list(loads(model.metadata[KEY]))


def test_weights_are_scikit_learns_of_all_rows():
    """A site has none of a class, and another has too few rows of it to tell how many."""
    sites = [rows([50, 30, 0]), rows([40, 0, 3]), rows([60, 10, 8])]
    model, _ = opened(create("sgd", BALANCED), *sites)
    every = np.concatenate([site.target for site in sites])
    expected = compute_class_weight("balanced", classes=np.unique(every), y=every)
    assert weights_in(model) == pytest.approx(expected.tolist())


def test_weights_stay_with_a_model_that_is_made_again():
    """Statistics are dropped after the first time."""
    workload, site = create("sgd", BALANCED), rows([50, 10])
    model, _ = opened(workload, site)
    profile = replace(Table.from_dataset(site).profile(), statistics="")
    again = initial_model(workload, [profile], made=model.metadata)
    assert again.metadata[KEY] == model.metadata[KEY]


def test_site_without_statistics_is_refused():
    profile = Table.from_dataset(rows([50, 10])).profile()
    with pytest.raises(DataError, match="needs the counts of the classes at all sites"):
        initial_model(create("sgd", BALANCED), [replace(profile, statistics="")])


@pytest.mark.parametrize("name", ["sgd", "mlp", "neural", "xgboost"])
def test_weights_are_for_classification(name):
    with pytest.raises(ValueError, match="class_weight is 'balanced'; it is for task"):
        create(name, {**BALANCED, "task": "regression"})


@pytest.mark.parametrize("loss", ["log_loss", "hinge"])
def test_steps_of_one_row_are_scikit_learns_own(loss):
    options = {"loss": loss, "eta0": 0.01, "batch_size": 1, "dtype": "float64"}
    workload = create("sgd", {**options, **BALANCED})
    model, (data,) = opened(workload, rows([90, 10]))
    result = workload.train(model, data, epochs=1, epoch_base=0, seed=4)
    order = np.arange(100)
    chance = int(np.random.SeedSequence((4, 0)).generate_state(1)[0])
    np.random.RandomState(chance).shuffle(order)
    # partial_fit() does not take "balanced" itself.
    weights = dict(enumerate(weights_in(model)))
    theirs = SGDClassifier(
        loss=loss, class_weight=weights, learning_rate="constant", eta0=0.01, shuffle=False
    )
    theirs.partial_fit(data.features[order], data.target[order].astype(int), classes=[0, 1])
    expected = np.concatenate([theirs.coef_.ravel(), theirs.intercept_])
    np.testing.assert_allclose(result.vector, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("counts", [(90, 10), (60, 30, 10)])
def test_optimum_is_that_of_logistic_regression(counts):
    """Training with full batches ends in the weighted optimum, where the gradient is zero."""
    alpha, num_rows = 0.1, sum(counts)
    options = {"alpha": alpha, "dtype": "float64", **BALANCED}
    workload = create("sgd", {**options, "batch_size": num_rows})
    model, (data,) = opened(workload, rows(counts))
    result = workload.train(model, data, epochs=2000, epoch_base=0, seed=0)
    theirs = LogisticRegression(
        C=1 / (alpha * num_rows), class_weight="balanced", tol=1e-10, max_iter=1000
    ).fit(data.features, data.target)
    arrays = unflatten(result.vector, model.layout)
    np.testing.assert_allclose(arrays["coef"], theirs.coef_, atol=1e-5)

    gradient = create("sgd", {**options, "mode": "gradient"})
    there = replace(model, vector=result.vector)
    descent = gradient.train(there, data, epochs=1, epoch_base=0, seed=0).vector
    np.testing.assert_allclose(descent, 0.0, atol=1e-6)


@pytest.mark.parametrize("name", ["mlp", "neural"])
def test_networks_predict_the_rarest_class(name):
    """Without weights a network seldom predicts the rarest of three classes."""
    chance = np.random.default_rng(1)
    codes = np.repeat([0, 1, 2], [930, 50, 20])
    features = chance.normal(size=(1000, 4)) + 0.5 * codes[:, np.newaxis]
    data = from_arrays(features, codes.astype(str))
    recalls = []
    for options in ({}, BALANCED):
        workload = create(name, options)
        model, (prepared,) = opened(workload, data)
        result = workload.train(model, prepared, epochs=10, epoch_base=0, seed=0)
        trained = replace(model, vector=result.vector)
        predicted = workload.predict(trained, prepared.features[codes == 2])
        recalls.append(float(np.mean(predicted == "2")))
    assert recalls[0] < 0.4
    assert recalls[1] > recalls[0] + 0.3


def test_gradients_of_networks_have_the_weights():
    """The gradient over all rows is that of rows which are there as often as they weigh."""
    options = {"mode": "gradient", "layers": [{"type": "linear"}]}
    weighted = create("neural", {**options, **BALANCED})
    model, (data,) = opened(weighted, rows([30, 10]))  # they weigh 2/3 and 2
    ours = weighted.train(model, data, epochs=1, epoch_base=0, seed=0).vector
    times = np.where(data.target == "1", 3, 1)
    repeated = data.subset(np.repeat(np.arange(40), times))
    plain = create("neural", options)
    metadata = {name: text for name, text in model.metadata.items() if name != KEY}
    alike = replace(model, metadata=metadata)
    theirs = plain.train(alike, repeated, epochs=1, epoch_base=0, seed=0).vector
    np.testing.assert_allclose(ours, theirs, atol=1e-12)


@pytest.mark.parametrize("counts", [(90, 10), (60, 30, 10)])
@pytest.mark.parametrize("mode", ["bagging", "histogram"])
def test_trees_are_those_of_sample_weights(mode, counts):
    """The trees of one site are those that XGBoost grows with the weights of its rows."""
    import xgboost

    workload = create("xgboost", {"mode": mode, "max_depth": 3, **BALANCED})
    times = 1 if mode == "bagging" else 10  # for a sketch with more points
    model, (data,) = opened(workload, rows([times * count for count in counts]))
    if mode == "histogram":
        for level in range(3):
            before = model.vector.tobytes()
            update = workload.train(model, data, epochs=1, epoch_base=level, seed=0).vector
            sums = parse_sums(update.tobytes(), growing(before, model.metadata))
            vector = np.frombuffer(grown(before, model.metadata, [sums]), np.uint8)
            model = replace(model, vector=vector)
    else:
        kind = BoosterKind.from_metadata(model.metadata)
        update = workload.train(model, data, epochs=1, epoch_base=0, seed=0).vector
        added = parse_update(update.tobytes(), kind, 1)
        joint = joined(model.vector.tobytes(), [(added, 100)], kind)
        model = replace(model, vector=np.frombuffer(joint, np.uint8))

    codes = data.target.astype(int)
    weights = np.array(weights_in(model))[codes]
    objective = "binary:logistic" if len(counts) == 2 else "multi:softprob"
    parameters = {"objective": objective, "max_depth": 3, "tree_method": "hist", "nthread": 1}
    parameters["eta"] = workload.options.eta
    parameters["base_score"] = 0.5
    if len(counts) > 2:
        parameters["num_class"] = len(counts)
    matrix = xgboost.DMatrix(data.features, codes, weight=weights)
    theirs = xgboost.train(parameters, matrix, num_boost_round=1).predict(matrix)
    ours = workload.probabilities(model, data.features)
    ours = ours[:, 1] if len(counts) == 2 else ours
    if mode == "bagging":
        np.testing.assert_allclose(ours, theirs, atol=1e-5)
    else:  # its edges are those of a sketch
        assert np.corrcoef(ours.ravel(), theirs.ravel())[0, 1] > 0.95


def test_bagged_estimators_are_fitted_with_the_weights():
    """A linear model of rows with weights favours the rare class as scikit-learn's does."""
    options = {"estimator": "LogisticRegression", "publish": True, "estimators": 1, "vote": "soft"}
    options |= BALANCED
    workload = create("bagging", options)
    model, (data,) = opened(workload, rows([95, 5]))
    result = workload.train(model, data, epochs=1, epoch_base=0, seed=0)
    (frame,) = unpack(result.vector.tobytes())
    fitted = load(frame.file, workload.options, data.num_features)
    drawn = np.random.default_rng((0, 0, 0)).integers(0, 100, 100)
    codes = data.target[drawn].astype(int)
    theirs = LogisticRegression().fit(
        data.features[drawn], codes, sample_weight=np.array(weights_in(model))[codes]
    )
    np.testing.assert_allclose(fitted.coef_, theirs.coef_, atol=1e-6)


def test_estimator_without_weights_is_refused():
    with pytest.raises(ValueError, match="KNeighborsClassifier takes no weights of rows"):
        create("bagging", {"estimator": "KNeighborsClassifier", **BALANCED})
