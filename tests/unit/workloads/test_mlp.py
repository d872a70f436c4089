"""Multi-layer perceptrons, compared with those of scikit-learn."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from sklearn.neural_network import MLPClassifier, MLPRegressor

from xain_workloads.errors import DataError, Diverged
from xain_workloads.model import Model, unflatten
from xain_workloads.nets.mlp import MlpWorkload
from xain_workloads.nets.mlp_options import ACTIVATIONS, SOLVERS
from xain_workloads.tables.data import load
from xain_workloads.tables.dataset import Dataset
from xain_workloads.tables.preprocessing import target_scale
from xain_workloads.workload import from_metadata


@pytest.fixture(scope="module")
def iris() -> Dataset:
    return load("iris")


def mlp(**options: Any) -> MlpWorkload:
    return MlpWorkload.from_options(options)


def train(workload: MlpWorkload, model: Model, data: Dataset, **more: int) -> Model:
    given = {"epochs": 1, "epoch_base": 0, "seed": 0, **more}
    return replace(model, vector=workload.train(model, data, **given).vector)


def test_initial_weights_come_from_the_seed_alone(iris):
    """Initial weights are the same at all sites, and after a restart."""
    first = mlp().initial_model([iris.profile()])
    parts = [iris.subset(range(100)).profile(), iris.subset(range(100, 150)).profile()]
    assert mlp().initial_model(parts).vector.tobytes() == first.vector.tobytes()
    other = mlp(seed=1).initial_model(parts)
    assert other.vector.tobytes() != first.vector.tobytes()


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_initial_weights_have_the_range_of_scikit_learn(iris, activation):
    model = mlp(activation=activation, hidden_layers=[50, 20]).initial_model([iris.profile()])
    estimator = MLPClassifier((50, 20), activation=activation, random_state=0)
    estimator.partial_fit(iris.features[:1], [0], classes=[0, 1, 2])
    ours = list(unflatten(model.vector, model.layout).values())
    for array, theirs in zip(ours[::2], estimator.coefs_, strict=True):
        assert array.shape == theirs.shape
        assert np.abs(array).max() == pytest.approx(np.abs(theirs).max(), rel=0.1)


def test_same_inputs_give_the_same_bytes(iris):
    """The model that was trained from stays as it is."""
    for solver in ("sgd", "adam"):
        workload = mlp(solver=solver)
        model = workload.initial_model([iris.profile()])
        before = model.vector.copy()
        first, second = (train(workload, model, iris, epochs=2, seed=5) for _ in range(2))
        assert first.vector.tobytes() == second.vector.tobytes()
        assert model.vector.tobytes() == before.tobytes()
        assert train(workload, model, iris, epochs=2, seed=6).vector.tobytes() != (
            first.vector.tobytes()
        )


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("problem", ["two classes", "three classes", "regression"])
def test_training_is_that_of_scikit_learn(iris, problem, activation, solver):
    check_against_sklearn(iris, problem, activation=activation, solver=solver)


@pytest.mark.parametrize(
    "options",
    [
        {"momentum": 0.0},
        {"momentum": 0.5, "learning_rate_init": 0.1},
        {"alpha": 0.0, "solver": "adam", "learning_rate_init": 0.001},
        {"alpha": 10.0},
        {"alpha": 10.0, "solver": "adam"},
        {"batch_size": 1},
        {"batch_size": 1000},
        {"hidden_layers": [32, 16, 8, 4]},
    ],
)
def test_training_with_other_options_is_that_of_scikit_learn(iris, options):
    check_against_sklearn(iris, "three classes", **options)


def check_against_sklearn(iris: Dataset, problem: str, **options: Any) -> None:
    """scikit-learn's estimator with the same weights and shuffles ends with the same weights."""
    scaled = (iris.features - iris.features.mean(axis=0)) / iris.features.std(axis=0)
    data = {
        "two classes": Dataset(scaled[:100], iris.target[:100]),
        "three classes": Dataset(scaled, iris.target),
        "regression": Dataset(scaled[:, :3], scaled[:, 3]),
    }[problem]
    settings = {
        "hidden_layers": [16, 8],
        "alpha": 0.01,
        "activation": "relu",
        "solver": "sgd",
        "momentum": 0.9,
        "learning_rate_init": 0.01,
        "batch_size": 9,
        **options,
    }
    workload = mlp(task=data.task, dtype="float64", **settings)
    model = workload.initial_model([data.profile()])
    trained = train(workload, model, data, epochs=3, epoch_base=2, seed=7).vector

    settings["batch_size"] = min(settings["batch_size"], data.num_samples)
    kind = MLPRegressor if problem == "regression" else MLPClassifier
    layers = settings.pop("hidden_layers")
    estimator = kind(hidden_layer_sizes=layers, n_iter_no_change=np.inf, **settings)
    target = data.target
    if problem == "regression":
        scale = target_scale(model.metadata)
        target = (target - scale.center) / scale.scale
        estimator.partial_fit(data.features, target)
    else:
        target = np.unique(target, return_inverse=True)[1]
        estimator.partial_fit(data.features, target, classes=np.unique(target))
    arrays = list(unflatten(model.vector.copy(), model.layout).values())
    estimator.coefs_, estimator.intercepts_ = list(arrays[::2]), list(arrays[1::2])
    del estimator._optimizer
    for epoch in (2, 3, 4):
        estimator.random_state = int(np.random.SeedSequence((7, epoch)).generate_state(1)[0])
        estimator.partial_fit(data.features, target)
    pairs = zip(estimator.coefs_, estimator.intercepts_, strict=True)
    expected = np.concatenate([array.ravel() for pair in pairs for array in pair])
    assert np.abs(trained - model.vector).max() > 1e-3
    assert np.abs(trained - expected).max() <= 1e-9


@pytest.mark.parametrize(("rows", "batch"), [(1, 1), (18, 4), (96, 6), (150, 9)])
def test_batches_are_a_share_of_the_rows_unless_stated(iris, rows, batch):
    """A site of 18 rows takes several steps in a round, where 32 rows a step made one."""
    data = iris.subset(np.arange(150)[:: 150 // rows][:rows])
    model = mlp().initial_model([iris.profile()])
    stated = train(mlp(batch_size=batch), model, data)
    assert train(mlp(), model, data).vector.tobytes() == stated.vector.tobytes()


def test_session_of_an_earlier_version_keeps_its_batches(iris):
    """The options in the model's metadata count, and not the default of this version."""
    model = mlp(batch_size=32).initial_model([iris.profile()])
    workload = from_metadata(model.metadata)
    kept = train(mlp(batch_size=32), model, iris).vector.tobytes()
    assert train(workload, model, iris).vector.tobytes() == kept
    assert train(mlp(), model, iris).vector.tobytes() != kept


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("classes", [2, 3])
def test_predictions_are_those_of_scikit_learn(iris, activation, classes):
    data = iris.subset(range(50 * classes))
    workload = mlp(activation=activation, hidden_layers=[16, 8])
    model = train(workload, workload.initial_model([data.profile()]), data, epochs=10)
    estimator = workload.to_sklearn(model)
    predicted = workload.predict(model, data.features)
    assert predicted.tolist() == estimator.predict(data.features).tolist()
    assert (
        estimator.score(data.features, data.target)
        == workload.measure(model, data).metrics["accuracy"]
    )


def test_site_without_some_classes_trains_all_outputs(iris):
    workload = mlp()
    model = workload.initial_model([iris.profile()])
    trained = train(workload, model, iris.subset(range(50)), epochs=20)
    assert trained.vector.shape == model.vector.shape
    assert set(workload.predict(trained, iris.features[:50])) == {"setosa"}


def test_one_row_is_enough_to_train_on(iris):
    workload = mlp()
    model = workload.initial_model([iris.profile()])
    assert np.isfinite(train(workload, model, iris.subset([0])).vector).all()


def test_metadata_alone_are_enough_to_go_on(iris):
    workload = mlp(hidden_layers=[8, 8], activation="tanh")
    model = workload.initial_model([iris.profile()])
    assert from_metadata(model.metadata) == workload


def test_data_that_do_not_fit_the_model_are_refused(iris):
    workload = mlp()
    model = workload.initial_model([iris.profile()])
    with pytest.raises(DataError, match="no rows"):
        train(workload, model, iris.subset([]))
    with pytest.raises(DataError, match=r"\(150, 2\), .*\(n, 4\)"):
        train(workload, model, Dataset(iris.features[:, :2], iris.target))
    with pytest.raises(DataError, match="label 'rose' is none"):
        workload.measure(model, Dataset(iris.features[:1], np.array(["rose"])))
    with pytest.raises(DataError, match="for regression, the workload for classification"):
        train(workload, model, Dataset(iris.features, np.arange(150.0)))


def test_model_of_other_layers_is_refused(iris):
    model = mlp(hidden_layers=[8]).initial_model([iris.profile()])
    with pytest.raises(ValueError, match="the model's arrays are"):
        mlp().train(model, iris, epochs=1, epoch_base=0, seed=0)


def test_training_that_runs_away_is_told(iris):
    workload = mlp(task="regression", learning_rate_init=100.0)
    data = Dataset(1e6 * iris.features, np.arange(150.0))
    with pytest.raises(Diverged, match="lower learning_rate_init"):
        train(workload, workload.initial_model([data.profile()]), data, epochs=3)


@pytest.mark.parametrize("hidden", [[8], [8, 4]])
def test_gradient_is_the_direction_of_a_local_step_of_all_rows(iris, hidden):
    """Mode "gradient" sends what a step of scikit-learn's would go down, and its penalty."""
    common = {"hidden_layers": hidden, "dtype": "float64", "alpha": 0.0}
    local = mlp(**common, momentum=0.0, learning_rate_init=0.5, batch_size=150)
    model = local.initial_model([iris.profile()])
    expected = (model.vector - train(local, model, iris).vector) / 0.5
    plain = gradient(mlp(**common, mode="gradient"), model, iris)
    assert np.abs(plain - expected).max() <= 1e-12
    penalised = gradient(mlp(**{**common, "alpha": 0.5}, mode="gradient"), model, iris)
    arrays = unflatten(model.vector, model.layout)
    of_penalty = [0.5 * a.ravel() * ("coef" in name) for name, a in arrays.items()]
    assert np.abs(penalised - plain - np.concatenate(of_penalty)).max() <= 1e-12


def test_gradients_of_sites_sum_to_that_of_their_rows(iris):
    """However the rows are divided, also by label, the step is the same."""
    workload = mlp(mode="gradient", dtype="float64", alpha=0.1)
    model = workload.initial_model([iris.profile()])
    parts = [iris.subset(range(50)), iris.subset(range(50, 60)), iris.subset(range(60, 150))]
    summed = sum(gradient(workload, model, part) * part.num_samples for part in parts)
    assert np.abs(summed / 150 - gradient(workload, model, iris)).max() <= 1e-12


def test_rows_of_a_gradient_are_drawn_anew_for_each_step(iris):
    workload = mlp(mode="gradient", batch_size=10)
    model = workload.initial_model([iris.profile()])
    first, again, second = (gradient(workload, model, iris, step) for step in (0, 0, 1))
    assert first.tolist() == again.tolist() != second.tolist()


def gradient(workload: MlpWorkload, model: Model, data: Dataset, step: int = 0) -> Any:
    return workload.train(model, data, epochs=1, epoch_base=step, seed=3).vector
