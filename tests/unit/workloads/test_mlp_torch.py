"""Multi-layer perceptrons by PyTorch, compared with those by scikit-learn."""

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from xain_workloads import neural_modules
from xain_workloads.data import load
from xain_workloads.dataset import Dataset
from xain_workloads.errors import Diverged
from xain_workloads.mlp import NUM_WEIGHTS_FOR_TORCH
from xain_workloads.mlp_options import ACTIVATIONS, SOLVERS
from xain_workloads.model import Vector
from xain_workloads.workload import create

ENGINES = ("sklearn", "torch")


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """On a busy machine the threads of one small operation wait for each other."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(neural_modules, "_num_threads", [1])
        yield


@pytest.fixture(scope="module")
def problems() -> dict[str, Dataset]:
    iris = load("iris")
    scaled = (iris.features - iris.features.mean(axis=0)) / iris.features.std(axis=0)
    return {
        "two classes": Dataset(scaled[:100], iris.target[:100]),
        "three classes": Dataset(scaled, iris.target),
        "regression": Dataset(scaled[:, :3], scaled[:, 3]),
    }


def trained(engine: str, data: Dataset, epochs: int = 5, **options: Any) -> Vector:
    """The weights after training. Without options a batch of iris has 9 rows, the last one 6."""
    settings = {"hidden_layers": [16, 8], "dtype": "float64", "alpha": 0.01, **options}
    workload = create("mlp", {"task": data.task, "engine": engine, **settings})
    model = workload.initial_model([data.profile()])
    before = model.vector.copy()
    result = workload.train(model, data, epochs=epochs, epoch_base=2, seed=7)
    assert model.vector.tobytes() == before.tobytes(), "the model stays as it is"
    assert np.abs(result.vector - before).max() > 1e-3
    return result.vector


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("problem", ["two classes", "three classes", "regression"])
def test_both_engines_give_the_same_weights(
    problems: dict[str, Dataset], problem: str, activation: str, solver: str
) -> None:
    data = problems[problem]
    by_sklearn, by_torch = (
        trained(engine, data, activation=activation, solver=solver) for engine in ENGINES
    )
    assert np.abs(by_torch - by_sklearn).max() <= 1e-9


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
def test_both_engines_give_the_same_weights_with_other_options(
    problems: dict[str, Dataset], options: dict[str, Any]
) -> None:
    data = problems["three classes"]
    by_sklearn, by_torch = (trained(engine, data, **options) for engine in ENGINES)
    assert np.abs(by_torch - by_sklearn).max() <= 1e-9


def test_site_without_some_classes_trains_all_outputs_by_torch(
    problems: dict[str, Dataset],
) -> None:
    data = problems["three classes"]
    one_class = data.subset(range(50, 100))
    vectors = []
    for engine in ENGINES:
        workload = create("mlp", {"engine": engine, "dtype": "float64"})
        model = workload.initial_model([data.profile()])
        result = workload.train(model, one_class, epochs=5, epoch_base=0, seed=0)
        vectors.append(result.vector)
        assert result.metrics["accuracy"] == 1
    assert np.abs(vectors[0] - vectors[1]).max() <= 1e-9


def test_both_engines_name_the_same_epoch_of_divergence() -> None:
    iris = load("iris")
    data = Dataset(1e6 * iris.features, np.arange(150.0))
    complaints = []
    for engine in ENGINES:
        with pytest.raises(Diverged) as caught:
            trained(engine, data, learning_rate_init=100.0)
        complaints.append(str(caught.value))
    assert complaints[0] == complaints[1]
    assert complaints[0].startswith("training diverged in epoch 3 with solver = 'sgd'")


PROGRAM = """
import sys

import numpy as np

from xain_workloads.dataset import Dataset
from xain_workloads.workload import create

data = Dataset(np.eye(8), np.repeat(["no", "yes"], 4))
for engine, units in (("auto", 64), ("sklearn", {large}), ("auto", {large})):
    workload = create("mlp", dict(hidden_layers=[units], engine=engine))
    model = workload.initial_model([data.profile()])
    workload.train(model, data, epochs=1, epoch_base=0, seed=0)
    print("torch" in sys.modules)
"""


def test_torch_is_imported_for_large_networks_only() -> None:
    """The import takes longer than the training of a small network."""
    program = PROGRAM.format(large=NUM_WEIGHTS_FOR_TORCH // 10)
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["False", "False", "True"]
