"""Thresholds for two classes, chosen on tallies that add up, beside scikit-learn's choice."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from sklearn.metrics import confusion_matrix, roc_curve

from support.learning import trained
from xain_coordinator.assembly.warm_start import load_model_file
from xain_coordinator.core.vocabulary.values import GlobalModel, WeightsRef
from xain_coordinator.http_face.predicting import Predictor
from xain_workloads.errors import DataError
from xain_workloads.exported import formats
from xain_workloads.exported.predicting import predict_with
from xain_workloads.measures.tallies import Tallies, add, probability_at, records, tally_classes
from xain_workloads.measures.thresholds import KEY, Criterion, Threshold, choose, with_threshold
from xain_workloads.tables.data import load
from xain_workloads.tables.preprocessing import prepare
from xain_workloads.tables.table import Table
from xain_workloads.workload import predict, predict_prepared, probabilities

CRITERIA = ("youden", "cost = 5", "cost = 0.2", "sensitivity >= 0.9", "specificity >= 0.95")


def scored(num_rows: int, seed: int = 3) -> tuple[NDArray[Any], NDArray[np.float64]]:
    """Targets of two classes, and probabilities (n, 2) that tell of them."""
    chance = np.random.default_rng(seed)
    target = (chance.random(num_rows) < 0.3).astype(np.intp)
    odds = chance.normal(2.0 * target - 1.5, 1.3)
    second = 1 / (1 + np.exp(-odds))
    return target, np.stack([1 - second, second], axis=1)


def of_sites(target: NDArray[Any], shares: NDArray[np.float64], num_sites: int = 3) -> Tallies:
    """Tallies of the rows, which are divided over sites."""
    predicted = shares.argmax(axis=1)
    parts = np.array_split(np.arange(len(target)), num_sites)
    together = add(tally_classes(2, target[p], predicted[p], shares[p]) for p in parts)
    assert together is not None
    return together


def chosen(tallies: Tallies, text: str) -> Threshold:
    found = choose(tallies, text)
    assert found is not None
    return found


def binned(shares: NDArray[np.float64], level: int) -> NDArray[np.float64]:
    """Probabilities of the second class, each at the lower edge of its bin."""
    odds = np.log(shares[:, 1]) - np.log1p(-shares[:, 1])
    edges = np.floor(odds * 256).astype(int) >> level
    return np.array([probability_at(edge, level) for edge in edges.tolist()])


@pytest.mark.parametrize("num_rows", [40, 400, 20_000])
def test_threshold_is_that_of_the_roc_curve_of_the_same_rows(num_rows):
    """The candidates are scikit-learn's, with scores of one bin counting as equal; of bins of a few
    rows, or of hundreds, the best is the same as that of the exact scores, but for a bin."""
    target, shares = scored(num_rows)
    tallies = of_sites(target, shares)
    false, true, edges = roc_curve(target, binned(shares, tallies.level), drop_intermediate=False)
    found = chosen(tallies, "youden")
    assert found.value == pytest.approx(edges[np.argmax(true - false)], rel=1e-12)
    assert chosen(tallies, "sensitivity >= 0.9").value == edges[np.argmax(true >= 0.9)]
    last = np.flatnonzero(1 - false >= 0.95)
    best = last[np.argmax(true[last])]
    assert chosen(tallies, "specificity >= 0.95").value == edges[best]

    false, true, _ = roc_curve(target, shares[:, 1], drop_intermediate=False)
    value = found.figures["sensitivity"].value + found.figures["specificity"].value - 1
    assert max(true - false) - 0.01 <= value <= max(true - false) + 1e-12
    assert found.resolution < 0.02
    if num_rows == 40:  # each score has a bin of its own
        assert value == pytest.approx(max(true - false), abs=1e-12)


@pytest.mark.parametrize("cost", [0.2, 1.0, 5.0])
def test_threshold_by_cost_is_the_cheapest_of_all(cost):
    target, shares = scored(3000)
    tallies = of_sites(target, shares)
    found = chosen(tallies, f"cost = {cost}")

    def cost_at(threshold):
        _, wrong, missed, _ = confusion_matrix(target, shares[:, 1] >= threshold).ravel()
        return float(wrong + cost * missed)

    edges = [probability_at(at, tallies.level) for at, _, _ in records(tallies.scores[1], 3)]
    assert cost_at(found.value) == min(map(cost_at, [*edges, 1.1]))


@pytest.mark.parametrize("text", CRITERIA)
def test_figures_are_those_of_the_rows_that_are_predicted_by_it(text):
    """Rows of one bin lie on one side of the threshold: the counts are exact."""
    target, shares = scored(5000)
    found = chosen(of_sites(target, shares), text)
    right, wrong, missed, hit = confusion_matrix(target, shares[:, 1] >= found.value).ravel()
    expected = {
        "sensitivity": hit / (hit + missed),
        "specificity": right / (right + wrong),
        "positive_predictive_value": hit / (hit + wrong),
        "negative_predictive_value": right / (right + missed),
    }
    assert {name: one.value for name, one in found.figures.items()} == expected
    for one in found.figures.values():
        assert one.low < one.value < one.high


def test_perfect_scores_leave_no_row_on_the_wrong_side():
    target = np.array([0, 0, 1, 1])
    shares = np.array([[1.0, 0.0], [0.9, 0.1], [0.1, 0.9], [0.0, 1.0]])
    found = chosen(tally_classes(2, target, target, shares), "youden")
    assert (shares[:, 1] >= found.value).tolist() == [False, False, True, True]
    least = chosen(tally_classes(2, 1 - target, target, shares), "sensitivity >= 1")
    assert least.value == 0.0, "the first bin has all probabilities below it, too"


@pytest.mark.parametrize(
    "tallies",
    [
        Tallies(4),
        tally_classes(3, np.array([0, 1, 2]), np.array([0, 1, 2]), np.full((3, 3), 1 / 3)),
        tally_classes(2, np.array([0, 1]), np.array([0, 1])),
        tally_classes(2, np.array([1, 1]), np.array([0, 1]), np.full((2, 2), 0.5)),
    ],
    ids=["regression", "three classes", "no probabilities", "one class only"],
)
def test_no_threshold_without_scores_of_rows_of_two_classes(tallies):
    assert choose(tallies, "youden") is None


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("best", "must be"),
        ("sensitivity", "must be"),
        ("sensitivity >= high", "'high' is no number"),
        ("sensitivity >= 1.2", "at most 1"),
        ("specificity >= 0", "above 0"),
        ("cost = -1", "above 0"),
        ("cost = inf", "above 0"),
    ],
)
def test_wrong_criterion_says_what_it_must_be(text, why):
    with pytest.raises(ValueError, match=why):
        Criterion.parse(text)


# --- models with a threshold ----------------------------------------------------------------------

TUMOURS = Table.from_dataset(load("breast_cancer"))
MODELS: tuple[tuple[str, Mapping[str, Any]], ...] = (
    ("sgd", {}),
    ("mlp", {"hidden_layers": [4]}),
    ("xgboost", {"max_depth": 2}),
    ("bagging", {"estimator": "DecisionTreeClassifier", "publish": True}),
)


@pytest.mark.parametrize(("name", "options"), MODELS)
def test_model_predicts_by_its_threshold(name, options):
    _, model = trained(name, options, TUMOURS)
    shares = probabilities(model, TUMOURS)
    value = float(np.unique(shares[:, 1])[1])
    fixed = with_threshold(model, Threshold(value, "youden"))
    expected = np.array(["benign", "malignant"])[(shares[:, 1] >= value).astype(int)]
    assert predict(fixed, TUMOURS).tolist() == expected.tolist()
    assert predict(model, TUMOURS).tolist() != expected.tolist()
    assert with_threshold(model, None) is model


@pytest.mark.parametrize(("name", "options"), [MODELS[0], MODELS[-1]])
def test_prediction_over_http_follows_the_threshold(name, options):
    """With the probabilities that are asked for, or without."""
    _, model = trained(name, options, TUMOURS)
    shares = probabilities(model, TUMOURS)
    value = float(np.unique(shares[:, 1])[1])
    fixed = with_threshold(model, Threshold(value, "youden"))
    source = GlobalModel(1, WeightsRef("1/global", 1, "0" * 32), "float32", (1,))
    predictor = Predictor("5e5510", source, fixed)
    assert predictor.threshold == value
    columns = [column.name for column in TUMOURS.columns]
    rows = np.column_stack([TUMOURS.values[column] for column in columns]).tolist()
    for wanted in (True, False):
        found = predictor.predict(columns, rows, probabilities=wanted)
        assert found.values.tolist() == predict(fixed, TUMOURS).tolist()


@pytest.mark.parametrize("suffix", [".npz", ".safetensors", ".skops", ".onnx"])
def test_exported_model_predicts_by_its_threshold(suffix, tmp_path):
    """The tensors' files keep it in the metadata, a Pipeline as a FixedThresholdClassifier."""
    _, model = trained("sgd", {}, TUMOURS)
    shares = probabilities(model, TUMOURS)
    value = float(np.quantile(shares[:, 1], 0.2))
    fixed = with_threshold(model, Threshold(value, "youden"))
    about = {"classes": ["benign", "malignant"], "columns": formats.columns_of(model.metadata)}
    path = tmp_path / f"model{suffix}"
    formats.write(path, fixed, about)
    expected = predict(fixed, TUMOURS).tolist()
    if suffix == ".onnx":
        import onnxruntime

        session = onnxruntime.InferenceSession(path)
        rows = np.column_stack([TUMOURS.values[column.name] for column in TUMOURS.columns])
        found = session.run(None, {"X": rows.astype(np.float32)})[0]
        assert np.mean(found == np.array(expected)) > 0.99  # in single precision
        return
    assert predict_with(formats.read(path))(TUMOURS).values.tolist() == expected


def test_session_that_begins_with_an_exported_model_has_not_its_threshold(tmp_path):
    """The threshold is of that model alone, and the session makes others."""
    _, model = trained("sgd", {}, TUMOURS)
    formats.write(tmp_path / "model.npz", with_threshold(model, Threshold(0.2, "youden")), {})
    assert load_model_file(tmp_path / "model.npz")[0].metadata == model.metadata


def test_threshold_that_is_no_probability_is_refused():
    _, model = trained("sgd", {}, TUMOURS)
    for text in ("high", "nan", "1.5", "-0.1"):
        wrong = replace(model, metadata={**model.metadata, KEY: text})
        with pytest.raises(DataError, match="no probability"):
            predict_prepared(wrong, prepare(model.metadata, TUMOURS).features)
