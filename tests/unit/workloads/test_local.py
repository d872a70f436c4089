"""Local models: trained on the rows of one site alone, and compared with global ones."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import count
from typing import Any

import numpy as np
import pytest
from sklearn.metrics import balanced_accuracy_score, log_loss, mean_squared_error, roc_auc_score

from xain_workloads.comparing.gains import (
    Budget,
    Difference,
    Gain,
    LocalModel,
    added,
    check,
    difference_of,
    gain_of,
)
from xain_workloads.comparing.local import MIN_ROWS, NUM_PARTS, train_local
from xain_workloads.linear.row_losses import row_losses
from xain_workloads.measures.figures import Figure, figures
from xain_workloads.model import Model
from xain_workloads.tables.data import load
from xain_workloads.tables.preprocessing import prepare
from xain_workloads.tables.table import Table
from xain_workloads.workload import create, fit_centralised, initial_model, predict, probabilities

WORKLOADS: tuple[tuple[str, Mapping[str, Any]], ...] = (
    ("sgd", {}),
    ("sgd", {"mode": "gradient", "batch_size": 8}),
    ("sgd", {"loss": "hinge"}),
    ("mlp", {"hidden_layers": [4]}),
    ("xgboost", {"mode": "histogram", "max_depth": 2}),
    ("bagging", {"estimator": "DecisionTreeClassifier", "publish": True}),
)


def tables(task: str = "classification") -> tuple[Table, Table, Table]:
    """Rows of all sites, and those of one of them, to train on and held out."""
    whole = Table.from_dataset(load("diabetes" if task == "regression" else "iris", task=task))
    rows = np.random.default_rng(5).permutation(whole.num_samples)
    return whole, whole.subset(rows[:60]), whole.subset(rows[60:90])


def local_of(
    name: str, options: Mapping[str, Any], passes: int = 3, **given: Any
) -> tuple[LocalModel, Model, Table]:
    """A local model, a global one, and the held-out rows."""
    task = options.get("task", "classification")
    whole, own, test = tables(task)
    model = initial_model(create(name, options), [whole.profile()])
    budget = Budget(passes, given.pop("limit_s", 1e9))
    local, _ = train_local(model.metadata, own.profile(), own, test, budget, 1, **given)
    return local, model, test


@pytest.mark.parametrize(("name", "options"), WORKLOADS)
def test_each_workload_has_local_models(name, options):
    """Modes that need the coordinator have one for a site alone: what it would train by itself."""
    local, _, test = local_of(name, options)
    assert local.why_not == ""
    assert local.passes == 3
    assert local.tallies.num_rows == test.num_samples
    assert local.tallies.num_classes == 3
    assert figures(local.tallies)["accuracy"].value > 0.5


@pytest.mark.parametrize("name", ["sgd", "mlp", "xgboost"])
def test_local_model_is_the_model_that_the_site_would_train_alone(name):
    """The same training and preprocessing as that of all rows in one place."""
    local, _, test = local_of(name, {}, passes=1)
    _, own, _ = tables()
    alone = fit_centralised(create(name, {}), own, epochs=1, seed=1)
    shares = probabilities(alone, test)
    expected = log_loss(test.target, shares)
    assert figures(local.tallies)["log_loss"].value == pytest.approx(expected)


def test_best_part_of_the_training_counts():
    """A model that learns its rows by heart is not held against the site."""
    options = {"max_depth": 6, "eta": 1.0, "mode": "bagging"}
    losses = []
    for passes in (1, 40):
        local, _, _ = local_of("xgboost", options, passes=passes)
        losses.append(figures(local.tallies)["log_loss"].value)
    assert losses[1] <= losses[0] * 1.2


@pytest.mark.parametrize("task", ["classification", "regression"])
def test_difference_is_that_of_each_row(task):
    """The interval is that of paired differences of the losses that the models have anyway."""
    whole, own, test = tables(task)
    workload = create("sgd", {"task": task})
    model = fit_centralised(workload, whole, epochs=2, seed=1)
    of_all = row_losses(workload, model, prepare(model.metadata, test))
    if task == "regression":
        assert of_all.mean() == pytest.approx(mean_squared_error(test.target, predict(model, test)))
    else:
        assert of_all.mean() == pytest.approx(log_loss(test.target, probabilities(model, test)))
    local, _ = train_local(
        model.metadata, own.profile(), own, test, Budget(2, 1e9), 1, losses={7: of_all}
    )
    (difference,) = local.differences
    known = figures(local.tallies)
    name = "mse" if task == "regression" else "log_loss"
    n = test.num_samples
    assert difference.total / n == pytest.approx(known[name].value - of_all.mean())
    gain = gain_of({name: Figure(of_all.mean())}, replace(local, figures=known, num_samples=n), 7)
    assert gain.metric == name
    spread = np.sqrt((difference.squares / n - gain.difference.value**2) / (n - 1))
    assert gain.difference.low == pytest.approx(gain.difference.value - 1.96 * spread, rel=1e-3)
    assert gain_of({name: Figure(1.0)}, replace(local, figures=known), 8).difference is None


@pytest.mark.parametrize("dataset", ["breast_cancer", "iris"])
@pytest.mark.parametrize("loss", ["log_loss", "hinge"])
def test_models_with_class_weights_are_compared_by_auc_or_balanced_accuracy(dataset, loss):
    """The log loss of such models is too high on purpose. The interval is that of the figure."""
    whole = Table.from_dataset(load(dataset))
    rows = np.random.default_rng(3).permutation(whole.num_samples)
    own, test = whole.subset(rows[:60]), whole.subset(rows[60:150])
    workload = create("sgd", {"loss": loss, "class_weight": "balanced", "eta0": 0.01})
    model = fit_centralised(workload, own, epochs=1, seed=1)
    held_out = prepare(model.metadata, test)
    losses = row_losses(workload, model, held_out)
    if loss == "log_loss":
        name, shares = "auc", probabilities(model, test)
        truth = roc_auc_score(
            test.target, shares if dataset == "iris" else shares[:, 1], multi_class="ovr"
        )
    else:
        name = "balanced_accuracy"
        truth = balanced_accuracy_score(test.target, predict(model, test))
    assert 1 - losses.mean() == pytest.approx(truth)
    local, _ = train_local(
        *(model.metadata, own.profile(), own, test, Budget(1, 1e9), 1),
        losses={1: losses, 2: np.ones(90)},
    )
    known = figures(local.tallies)
    told = replace(local, figures=known, num_samples=90)
    same, alone = (gain_of(known, told, number, weighs_classes=True) for number in (1, 2))
    assert (same.metric, alone.metric) == (name, name)
    assert (same.is_gain, same.is_loss) == (False, False), "the model is the same"
    assert alone.is_loss, "the other model has nothing right"
    assert -alone.difference.value == pytest.approx(known[name].value, abs=known[name].bound + 1e-9)
    if (loss, dataset) == ("log_loss", "breast_cancer"):
        assert alone.difference.low is not None
        assert known["auc"].low is not None
        width = alone.difference.value - alone.difference.low
        assert width == pytest.approx(known["auc"].value - known["auc"].low, rel=0.05)


def test_rows_of_a_single_class_give_no_auc():
    _, own, test = tables()
    workload = create("sgd", {"class_weight": "balanced"})
    model = fit_centralised(workload, own, epochs=1, seed=1)
    of_one = test.subset(np.flatnonzero(test.target == test.target[0]))
    assert row_losses(workload, model, prepare(model.metadata, of_one)) is None


def test_site_with_too_few_rows_or_one_class_says_so():
    whole, own, test = tables()
    metadata = initial_model(create("sgd", {}), [whole.profile()]).metadata

    def why_not(rows):
        return train_local(metadata, rows.profile(), rows, test, Budget(3, 1e9), 1)[0].why_not

    assert why_not(own.subset(range(MIN_ROWS - 1))) == "there are fewer than 10 rows to train on"
    one_class = np.flatnonzero(own.target == own.target[0])
    assert why_not(own.subset(one_class)) == "all rows to train on are of one class"


def test_held_out_rows_of_a_class_that_the_site_does_not_train_on_count():
    whole, own, test = tables()
    metadata = initial_model(create("sgd", {}), [whole.profile()]).metadata
    without = own.subset(np.flatnonzero(own.target != own.target[0]))
    local, _ = train_local(metadata, without.profile(), without, test, Budget(3, 1e9), 1)
    assert local.tallies.num_classes == 3
    assert local.tallies.num_rows == test.num_samples


def test_training_that_diverges_is_no_local_model():
    local, _, _ = local_of("sgd", {"task": "regression", "eta0": 1e6})
    assert (local.tallies, local.why_not) == (None, "its training diverged")


def test_reason_without_a_model_quotes_no_data():
    whole, own, test = tables()
    metadata = dict(initial_model(create("sgd", {}), [whole.profile()]).metadata)
    metadata["classes"] = '["a", "b", "c"]'
    local, _ = train_local(metadata, own.profile(), own, test, Budget(3, 1e9), 1)
    assert local.why_not == "no model can be trained on its rows (DataError)"


def test_timeout_of_the_workload_itself_is_no_time_limit(monkeypatch):
    """A workload may wait for something of its own, in vain; there was time all the same."""

    def train(*_, **__):
        raise TimeoutError("no answer")

    monkeypatch.setattr(type(create("sgd", {})), "train", train)
    local, _, _ = local_of("sgd", {})
    assert local.why_not == "no model can be trained on its rows (TimeoutError)"


def ticking(seconds: float) -> Callable[[], float]:
    """A clock that goes on by so many seconds each time that it is read."""
    ticks = count()
    return lambda: next(ticks) * seconds


def test_time_is_bounded_by_the_parts_that_are_trained():
    """A part takes as long as those before: the training ends in time, with what it has."""
    # The clock is read after each of the 15 mini-batches of a pass.
    local, _, _ = local_of("sgd", {}, passes=20, limit_s=150, clock=ticking(1.0))
    assert 2 <= local.passes < 20
    assert local.passes % (20 // NUM_PARTS) == 0
    assert local.tallies is not None
    whole, _, _ = local_of("sgd", {}, passes=20, limit_s=1e9, clock=ticking(1.0))
    assert whole.passes == 20
    bagged, _, _ = local_of(*WORKLOADS[-1], passes=6, limit_s=14, clock=ticking(1.0))
    assert 1 <= bagged.passes < 6
    assert bagged.tallies is not None


@pytest.mark.parametrize("name", ["sgd", "mlp", "neural", "bagging"])
def test_a_part_that_takes_too_long_ends_at_the_limit(name):
    """However long an epoch takes: the time is looked at after each mini-batch or estimator."""
    options = {
        "bagging": {**WORKLOADS[-1][1], "estimators": 100},
        "neural": {"layers": [{"type": "linear"}]},
    }
    reads = []

    def clock():
        reads.append(len(reads))
        return float(len(reads))

    local, _, _ = local_of(name, options.get(name, {}), passes=200, limit_s=12, clock=clock)
    assert local.why_not == "there was no time for the first part of its training"
    assert len(reads) == 14, "at the beginning, at that of the part, and after each step"


def test_time_counts_from_the_beginning_that_is_given():
    """The participant has downloaded and measured a model before."""
    local, _, _ = local_of("sgd", {}, limit_s=45, clock=ticking(1.0), began=-100.0)
    assert local.tallies is None


def test_gain_is_told_only_beyond_chance():
    clear, blurred = Figure(0.01, 0.005, 0.02), Figure(0.01, -0.005, 0.02)
    of_all, own = Figure(0.40, 0.30, 0.50), Figure(0.41, 0.31, 0.51)
    assert Gain("log_loss", of_all, own, clear).sentence.startswith(
        "The model of all sites is better"
    )
    lost = Gain("log_loss", own, of_all, Figure(-0.01, -0.02, -0.005))
    assert lost.is_loss
    assert lost.sentence.startswith("A model of this site's rows alone is better here")
    assert "-0.01 (-0.02 to -0.005)" in lost.sentence
    for one in (Gain("log_loss", of_all, own, blurred), Gain("log_loss", of_all, own)):
        assert not one.is_gain
        assert not one.is_loss
        assert "equally good, as far as can be told" in one.sentence
    assert Gain("accuracy", Figure(0.9, 0.8, 0.95), Figure(0.6, 0.5, 0.7)).is_gain


def test_differences_of_sites_add_up_by_model():
    """A site without a difference to a model is not in the rows of the others'."""
    sites = [
        (10, [Difference(3, 1.0, 2.0), Difference(5, 4.0, 4.0)]),
        (30, [Difference(3, 0.5, 1.0)]),
        (60, []),
    ]
    together = added(sites)
    assert together == (Difference(3, 1.5, 3.0, 40), Difference(5, 4.0, 4.0, 10))
    assert difference_of(together[1], 100).value == 0.4


@pytest.mark.parametrize(
    "differences",
    [
        (Difference(0, float("nan"), 1.0),),
        (Difference(0, 1.0, float("inf")),),
        (Difference(0, 1.0, -1.0),),
        (Difference(0, -1e200, 1.0),),
        (Difference(0, 1.0, 1e300),),
        (Difference(-1, 1.0, 1.0),),
        (Difference(0, 1.0, 1.0),) * 3,
    ],
)
def test_differences_that_cannot_be_are_refused(differences):
    with pytest.raises(ValueError, match="difference"):
        check(LocalModel(differences=differences))
