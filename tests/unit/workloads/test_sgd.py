"""Linear models: local training is exact, repeatable and safe with whatever data a participant has,
and averaging it gives what training in one place would have given."""

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression, SGDClassifier, SGDRegressor
from sklearn.metrics import hinge_loss, log_loss, mean_squared_error, r2_score

from xain_workloads.errors import DataError, Diverged
from xain_workloads.linear.sgd_options import LEARNING_RATES, LOSSES
from xain_workloads.model import Model, TensorSpec, unflatten
from xain_workloads.tables.data import Dataset, from_arrays, load
from xain_workloads.tables.profile import DataProfile
from xain_workloads.tables.reading.dialect import Dialect
from xain_workloads.workload import Workload, create, evaluate, fit_centralised, from_metadata

REGRESSION = {"task": "regression"}


@pytest.fixture(scope="module")
def digits() -> Dataset:
    return load("digits", dialect=Dialect(scale=1 / 16))


@pytest.fixture(scope="module")
def binary() -> Dataset:
    data = load("breast_cancer")
    spread = (data.features - data.features.mean(axis=0)) / data.features.std(axis=0)
    return Dataset(spread, data.target, data.feature_names)


@pytest.fixture(scope="module")
def diabetes() -> Dataset:
    return load("diabetes", task="regression", dialect=Dialect(scale=20.0))


def _start(workload: Workload, *data: Dataset) -> Model:
    return workload.initial_model([part.profile() for part in data])


def _with(model: Model, vector: Any) -> Model:
    return replace(model, vector=vector)


# The model


def test_initial_model_is_zeros_for_the_union():
    """Layout and class order come from all participants, and empty ones change nothing."""
    profiles = [DataProfile(5, 4, ("10", "9")), DataProfile(0, 1), DataProfile(1, 4, ("2",))]
    model = create("sgd").initial_model(profiles)
    assert model.layout == (
        TensorSpec("coef", (3, 4), "float32"),
        TensorSpec("intercept", (3,), "float32"),
    )
    assert model.vector.dtype == np.float32
    np.testing.assert_array_equal(model.vector, np.zeros(15))
    assert json.loads(model.metadata["classes"]) == ["2", "9", "10"]


@pytest.mark.parametrize(
    ("options", "classes"), [({}, ("a", "b")), (REGRESSION, ()), ({"dtype": "float64"}, ("a", "b"))]
)
def test_two_classes_and_regression_have_one_row(options, classes):
    """The shapes are those of scikit-learn, so that its estimators can be built from the arrays."""
    model = create("sgd", options).initial_model([DataProfile(5, 4, classes)])
    dtype = str(options.get("dtype", "float32"))
    assert model.layout == (TensorSpec("coef", (1, 4), dtype), TensorSpec("intercept", (1,), dtype))


@pytest.mark.parametrize("classes", [(), ("a",)])
def test_classification_needs_two_classes(classes):
    """A fit that cannot learn anything is refused before the first round."""
    with pytest.raises(DataError, match="needs two classes or more"):
        create("sgd").initial_model([DataProfile(5, 4, classes), DataProfile(2, 4, classes)])


def test_metadata_alone_rebuild_the_workload(digits):
    """A participant that knows nothing but the model trains as the one that made it."""
    workload = create("sgd", {"loss": "hinge", "penalty": "elasticnet", "l1_ratio": 0.5})
    model = _start(workload, digits)
    assert all(type(value) is str for value in model.metadata.values())

    rebuilt = from_metadata(dict(model.metadata))

    assert rebuilt == workload
    assert from_metadata(_start(create("sgd", REGRESSION), digits).metadata) == create(
        "sgd", REGRESSION
    )
    first = workload.train(model, digits, epochs=1, epoch_base=0, seed=1)
    again = rebuilt.train(model, digits, epochs=1, epoch_base=0, seed=1)
    assert first.vector.tobytes() == again.vector.tobytes()


def test_participants_of_earlier_versions_know_the_options_of_federated_models():
    """A participant refuses options that it does not know."""
    profile = DataProfile(5, 4, ("a", "b"))
    model = create("sgd").initial_model([profile])
    assert " ".join(sorted(json.loads(model.metadata["options"]))) == (
        "alpha dtype epsilon fit_intercept l1_ratio learning_rate loss penalty power_t task"
    )
    gradients = create("sgd", {"mode": "gradient", "batch_size": 8})
    assert from_metadata(gradients.initial_model([profile]).metadata) == gradients


@pytest.mark.parametrize(
    ("metadata", "complaint"),
    [
        ({}, "do not name its workload"),
        (
            {"workload": "os"},
            "unknown workload 'os'; known: bagging, describe, glm, mlp, neural, sgd",
        ),
        ({"workload": "sgd", "options": "{"}, "not JSON"),
        ({"workload": "sgd", "options": "[" * 100_000}, "not JSON"),
        ({"workload": "sgd", "options": "[]"}, "not a JSON object"),
        ({"workload": "sgd", "options": '{"n_jobs": 64}'}, "unknown option 'n_jobs'"),
        ({"workload": "sgd", "options": '{"eta0": NaN}'}, "eta0 is nan"),
    ],
)
def test_hostile_metadata_are_refused(metadata, complaint):
    """Metadata come from the network: they choose among known workloads and options, no more."""
    with pytest.raises(ValueError, match=complaint):
        from_metadata(metadata)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda model: replace(model, metadata={}),
        lambda model: replace(model, metadata={**model.metadata, "classes": "{"}),
        lambda model: replace(model, metadata={**model.metadata, "classes": "[1, 2]"}),
        lambda model: replace(model, metadata={**model.metadata, "classes": '["a", "b"]'}),
        lambda model: replace(model, metadata={**model.metadata, "classes": "[]"}),
        lambda model: replace(model, vector=model.vector[1:]),
        lambda model: replace(model, layout=model.layout[:1], vector=model.vector[:640]),
    ],
)
def test_foreign_models_are_refused(digits, spoil):
    """A model whose parts contradict each other is a ValueError, not a wrong prediction."""
    workload = create("sgd")
    model = spoil(_start(workload, digits))
    with pytest.raises(ValueError):  # noqa: PT011  # each has its own words
        workload.predict(model, digits.features)


# Training


@pytest.mark.parametrize("learning_rate", LEARNING_RATES)
@pytest.mark.parametrize("penalty", ["l2", "none"])
def test_steps_of_one_row_are_scikit_learns_own(penalty, learning_rate, digits, diabetes):
    """Every loss gives, on one site, the weights of scikit-learn in the same order of the rows: of
    two classes, of more, each against the rest, and of numbers. Multinomial loss it has not."""
    seed, epochs = 4, 2
    # The schedule "optimal" begins with steps that diverge, unless alpha is large.
    alpha = 100.0 if learning_rate == "optimal" else 0.3
    options = {"penalty": penalty, "alpha": alpha, "eta0": 0.01, "power_t": 0.25}
    options["learning_rate"] = learning_rate
    theirs = {**options, "penalty": None if penalty == "none" else penalty, "shuffle": False}
    ours = {**options, "batch_size": 1, "dtype": "float64"}
    orders = []
    for epoch in range(epochs):
        order = np.arange(120)
        chance = int(np.random.SeedSequence((seed, epoch)).generate_state(1)[0])
        np.random.RandomState(chance).shuffle(order)
        orders.append(order)

    def compare(loss, data, estimator, **known):
        data = data.subset(np.arange(120))
        workload = create("sgd", {**ours, "loss": loss, "task": data.task})
        model = _start(workload, data)
        vector = workload.train(model, data, epochs=epochs, epoch_base=0, seed=seed).vector
        for order in orders:
            estimator.partial_fit(data.features[order], data.target[order], **known)
        expected = np.concatenate([estimator.coef_.ravel(), estimator.intercept_])
        np.testing.assert_allclose(vector, expected, rtol=1e-9, atol=1e-12, err_msg=loss)

    for loss in LOSSES["classification"]:
        for labels in (["3", "8"], ["0", "1", "2"]):
            if loss != "log_loss" or len(labels) == 2:
                data = digits.subset(np.flatnonzero(np.isin(digits.target, labels)))
                compare(loss, data, SGDClassifier(loss=loss, **theirs), classes=np.array(labels))
    scaled = replace(diabetes, target=(diabetes.target - 150) / 77)
    for loss in LOSSES["regression"]:
        compare(loss, scaled, SGDRegressor(loss=loss, **theirs))


def test_full_batches_reach_the_optimum_of_multinomial_regression(digits):
    """The loss of more than two classes is the softmax, with the penalty of LogisticRegression."""
    data = digits.subset(np.flatnonzero(np.isin(digits.target, ["0", "1", "2"]))[:150])
    options = {"batch_size": 150, "alpha": 0.1, "dtype": "float64"}
    options["fit_intercept"] = False
    workload = create("sgd", options)
    model = _start(workload, data)
    result = workload.train(model, data, epochs=1500, epoch_base=0, seed=0)
    model = _with(model, result.vector)
    theirs = LogisticRegression(C=1 / 15, tol=1e-10, max_iter=1000, fit_intercept=False)
    theirs.fit(data.features, data.target)
    arrays = unflatten(model.vector, model.layout)
    np.testing.assert_allclose(arrays["coef"], theirs.coef_, atol=1e-6)
    np.testing.assert_allclose(
        workload.probabilities(model, data.features), theirs.predict_proba(data.features), atol=1e-6
    )


def test_l1_penalty_makes_weights_zero(binary):
    """A soft threshold after each step, so that weights become zero and not only small."""
    options = {"penalty": "l1", "alpha": 0.05, "dtype": "float64"}
    model = fit_centralised(create("sgd", options), binary, epochs=30, seed=0)
    coef = unflatten(model.vector, model.layout)["coef"]
    assert 0 < np.count_nonzero(coef) < coef.size


@pytest.mark.parametrize("learning_rate", LEARNING_RATES)
def test_rounds_continue_where_the_last_one_stopped(digits, learning_rate):
    """Five epochs are three and then two: shuffling and the learning rate go by the epoch's number.
    So a round that is done again after a crash gives the same weights."""
    data = digits.subset(np.arange(200))
    workload = create("sgd", {"dtype": "float64", "learning_rate": learning_rate})
    model = _start(workload, data)
    at_once = workload.train(model, data, epochs=5, epoch_base=0, seed=9)
    first = workload.train(model, data, epochs=3, epoch_base=0, seed=9)
    then = workload.train(_with(model, first.vector), data, epochs=2, epoch_base=3, seed=9)
    assert then.vector.tobytes() == at_once.vector.tobytes()


@pytest.mark.parametrize(
    ("fixture", "options"),
    [("digits", {}), ("digits", {"dtype": "float64"}), ("binary", {}), ("diabetes", REGRESSION)],
)
def test_training_is_repeatable(fixture, options, request):
    """The same inputs give the same bits, whatever chance others have drawn; seeds and rounds
    differ; and the model that was given stays as it is, also where no conversion copies it."""
    data = request.getfixturevalue(fixture)
    data = data.subset(np.arange(300))
    workload = create("sgd", options)
    model = _start(workload, data)
    start = workload.train(model, data, epochs=1, epoch_base=0, seed=0).vector
    model = _with(model, start.copy())

    def train(epoch_base=2, seed=5):
        return workload.train(model, data, epochs=2, epoch_base=epoch_base, seed=seed)

    np.random.seed(1)
    first = train()
    np.random.seed(2)
    again = train()
    assert first.vector.tobytes() == again.vector.tobytes()
    assert first.metrics == again.metrics
    assert first.num_samples == 300
    assert first.vector.dtype == options.get("dtype", "float32")
    assert train(seed=6).vector.tobytes() != first.vector.tobytes()
    assert train(epoch_base=4).vector.tobytes() != first.vector.tobytes()
    assert model.vector.tobytes() == start.tobytes()


@pytest.mark.parametrize("local", [["0", "1", "2"], ["7"]])
def test_classes_missing_locally_keep_their_rows(digits, local):
    """A hospital that never saw a disease still trains the whole model, even with one class."""
    workload = create("sgd", {"eta0": 0.1})
    model = _start(workload, digits)
    data = digits.subset(np.flatnonzero(np.isin(digits.target, local)))

    result = workload.train(model, data, epochs=2, epoch_base=0, seed=1)

    arrays = unflatten(result.vector, model.layout)
    assert arrays["coef"].shape == (10, 64)
    assert set(workload.predict(_with(model, result.vector), data.features)) <= set(local)
    for code, name in enumerate("0123456789"):
        # A class that is not there can only be pushed away.
        assert (arrays["intercept"][code] < 0) or name in local


@pytest.mark.parametrize("loss", ["squared_error", "squared_epsilon_insensitive"])
def test_default_step_is_safe_for_any_number_of_columns(loss):
    """A step that suits narrow tables diverges with some hundreds of columns."""
    chance = np.random.default_rng(0)
    features = chance.normal(size=(600, 400))
    data = from_arrays(features, features @ chance.normal(size=400), task="regression")
    options = {"task": "regression", "loss": loss}
    with pytest.raises(Diverged):
        fit_centralised(create("sgd", {**options, "eta0": 0.5}), data, epochs=10, seed=0)
    model = fit_centralised(create("sgd", options), data, epochs=10, seed=0)
    assert evaluate(model, data)["r2"] > 0.95


@pytest.mark.parametrize(
    ("options", "told"),
    [
        *[({"eta0": eta0}, r"eta0 = .*: lower eta0") for eta0 in (3.0, 10.0, 1e6, 1e300)],
        # The schedule ignores eta0, so lowering it would not help.
        ({"learning_rate": "optimal"}, "choose another learning_rate, or scale the data"),
    ],
)
def test_divergence_says_what_to_do(options, told, diabetes):
    """Weights that run away are never handed in, whether they reach infinity or are on their way
    there; the error says what to change."""
    workload = create("sgd", {"task": "regression", **options})
    with pytest.raises(Diverged, match=told):
        workload.train(_start(workload, diabetes), diabetes, epochs=20, epoch_base=0, seed=0)


def test_overflow_on_the_wire_is_divergence():
    """Weights that are finite in float64 and infinite in float32 count as diverged, silently."""
    options = {"task": "regression", "eta0": 1e57, "alpha": 0.0, "fit_intercept": False}
    data = from_arrays([[1e-30]], [1e13], task="regression")
    # The weight is 1e57 * 1e13 * 1e-30 = 1e40, and the score 1e10 looks harmless.
    wide = create("sgd", options | {"dtype": "float64"})
    wide.train(_start(wide, data), data, epochs=1, epoch_base=0, seed=0)
    workload = create("sgd", options)
    with pytest.raises(Diverged):
        workload.train(_start(workload, data), data, epochs=1, epoch_base=0, seed=0)


def test_data_without_rows_are_refused(digits):
    workload = create("sgd")
    model = _start(workload, digits)
    with pytest.raises(DataError, match="no rows"):
        workload.train(model, digits.subset([]), epochs=1, epoch_base=0, seed=0)
    with pytest.raises(DataError, match="no rows"):
        workload.measure(model, digits.subset([]))
    assert workload.predict(model, np.empty((0, 64))).shape == (0,)


def test_unknown_label_is_named(digits):
    """A label that joined too late is refused with the classes that are known."""
    workload = create("sgd")
    model = _start(workload, digits)
    data = from_arrays(np.ones((2, 64)), ["3", "eleven"])
    complaint = r"label 'eleven' is none of the model's classes: \['0', '1', .*'9'\]"
    with pytest.raises(DataError, match=complaint):
        workload.train(model, data, epochs=1, epoch_base=0, seed=0)
    with pytest.raises(DataError, match=complaint):
        workload.measure(model, data)


def test_data_that_do_not_fit_are_refused(digits, diabetes):
    """Wrong widths, tasks and values are DataErrors, in training and in prediction."""
    workload = create("sgd")
    model = _start(workload, digits)
    narrow = from_arrays(np.ones((2, 3)), ["3", "4"])
    with pytest.raises(DataError, match=r"\(2, 3\), .*\(n, 64\)"):
        workload.train(model, narrow, epochs=1, epoch_base=0, seed=0)
    with pytest.raises(DataError, match="the data are for regression"):
        workload.train(model, diabetes, epochs=1, epoch_base=0, seed=0)
    with pytest.raises(DataError, match=r"shape \(64,\)"):
        workload.predict(model, np.ones(64))
    with pytest.raises(DataError, match="not all finite"):
        workload.predict(model, np.full((1, 64), np.nan))
    with pytest.raises(DataError, match="not a matrix of numbers"):
        workload.predict(model, [["a"] * 64])


@pytest.mark.parametrize(
    "wrong", [{"epochs": 0}, {"epoch_base": -1}, {"seed": -1}], ids=lambda wrong: next(iter(wrong))
)
def test_wrong_arguments_are_named(digits, wrong):
    """Counts that make no sense are a ValueError that names them."""
    workload = create("sgd")
    arguments = {"epochs": 1, "epoch_base": 0, "seed": 0} | wrong
    with pytest.raises(ValueError, match=f"{next(iter(wrong))} is"):
        workload.train(_start(workload, digits), digits, **arguments)


# Metrics


def test_metrics_agree_with_scikit_learn(digits, binary, diabetes):
    """Our few lines of metrics give what the established implementation gives."""
    workload = create("sgd")
    model = fit_centralised(workload, binary, epochs=1, seed=0)
    arrays = unflatten(model.vector, model.layout)
    scores = binary.features @ arrays["coef"][0].astype(float) + arrays["intercept"][0]
    expected = log_loss(binary.target == "malignant", 1 / (1 + np.exp(-scores)))
    assert workload.measure(model, binary).metrics["loss"] == pytest.approx(expected)

    workload = create("sgd", {"loss": "hinge"})
    model = fit_centralised(workload, digits, epochs=1, seed=0)
    arrays = unflatten(model.vector, model.layout)
    scores = digits.features @ arrays["coef"].T.astype(float) + arrays["intercept"]
    expected = sum(
        hinge_loss(np.where(digits.target == str(k), 1, -1), scores[:, k]) for k in range(10)
    )
    assert workload.measure(model, digits).metrics["loss"] == pytest.approx(expected)
    accuracy = np.mean(workload.predict(model, digits.features) == digits.target)
    assert workload.measure(model, digits).metrics["accuracy"] == accuracy

    workload = create("sgd", {"task": "regression", "eta0": 0.001})
    model = fit_centralised(workload, diabetes, epochs=1, seed=0)
    predicted = workload.predict(model, diabetes.features)
    assert workload.measure(model, diabetes).metrics == {
        "mse": pytest.approx(mean_squared_error(diabetes.target, predicted)),
        "r2": pytest.approx(r2_score(diabetes.target, predicted)),
    }


def test_r2_of_a_constant_target_is_finite():
    """One row, or one value, has no variance to explain: a number all the same, and no warning."""
    workload = create("sgd", REGRESSION)
    zero = from_arrays([[1.0]], [0.0], task="regression")
    model = _start(workload, zero)
    assert workload.measure(model, zero).metrics == {"mse": 0.0, "r2": 1.0}
    two = from_arrays([[1.0]], [2.0], task="regression")
    assert workload.measure(model, two).metrics == {"mse": 4.0, "r2": 0.0}


# Federated


def test_model_of_an_earlier_version_goes_on_with_one_class_against_the_rest():
    """Participants of that version train with ours, and a new model is refused by them: to them its
    option is unknown."""
    data = load("iris")
    new = create("sgd", {})
    model = new.initial_model([data.profile()])
    options = json.loads(model.metadata["options"])
    assert options.pop("multi_class") == "multinomial"
    before = replace(model, metadata={**model.metadata, "options": json.dumps(options)})

    def trained(workload):
        return workload.train(model, data, epochs=1, epoch_base=0, seed=1).vector

    of_before = trained(from_metadata(before.metadata))
    assert np.array_equal(of_before, trained(create("sgd", {"multi_class": "ovr"})))
    assert np.array_equal(trained(from_metadata(model.metadata)), trained(new))
    assert not np.array_equal(of_before, trained(new))


@pytest.mark.parametrize(
    ("options", "dataset"),
    [({}, "breast_cancer"), ({"loss": "hinge"}, "iris"), ({"mode": "gradient"}, "iris")],
)
def test_models_that_earlier_versions_train_alike_can_be_read_by_them(options, dataset):
    model = create("sgd", options).initial_model([load(dataset).profile()])
    assert "multi_class" not in json.loads(model.metadata["options"])
