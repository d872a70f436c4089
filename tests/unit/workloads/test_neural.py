"""Neural networks by PyTorch, driven by their weights."""

import sys
from dataclasses import replace
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from unit.workloads.test_neural_layers import CONVOLUTION
from xain_workloads.errors import DataError, Diverged
from xain_workloads.model import Model, unflatten
from xain_workloads.nets import neural_builders, threads
from xain_workloads.nets.neural import NeuralWorkload
from xain_workloads.nets.neural_builders import allow_builders, load_builder
from xain_workloads.tables.data import load
from xain_workloads.tables.dataset import Dataset
from xain_workloads.workload import create, evaluate, fit_centralised, from_metadata, predict

pytestmark = pytest.mark.usefixtures("one_torch_thread")


@pytest.fixture
def builders(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module "nets", of which this process allows nothing."""
    monkeypatch.setattr(neural_builders, "_allowed", set())
    module = ModuleType("nets")
    monkeypatch.setitem(sys.modules, "nets", module)
    return module


@pytest.fixture(scope="module")
def digits() -> Dataset:
    return load("digits").subset(range(300))


@pytest.fixture(scope="module")
def iris() -> Dataset:
    return load("iris")


def neural(**options: Any) -> NeuralWorkload:
    return NeuralWorkload.from_options(options)


def trained(workload: NeuralWorkload, data: Dataset, **more: int) -> Model:
    model = workload.initial_model([data.profile()])
    given = {"epochs": 1, "epoch_base": 0, "seed": 0, **more}
    return replace(model, vector=workload.train(model, data, **given).vector)


def test_layout_of_the_list_is_that_of_the_module(digits):
    """The coordinator, without torch, names and orders tensors as state_dict() does."""
    workload = neural(layers=CONVOLUTION)
    model = workload.initial_model([digits.profile()])
    state = workload.network(model).module.state_dict()
    names = [name for name in state if not name.endswith("num_batches_tracked")]
    assert [spec.name for spec in model.layout] == names
    for name, array in unflatten(model.vector, model.layout).items():
        assert np.array_equal(state[name].numpy(), array)


def test_initial_weights_have_the_range_of_torch(digits):
    workload = neural(layers=CONVOLUTION)
    model = workload.initial_model([digits.profile()])
    module = workload.network(model).module
    for layer in module:
        if hasattr(layer, "reset_parameters"):
            layer.reset_parameters()
    theirs = module.state_dict()
    for name, array in unflatten(model.vector, model.layout).items():
        assert np.abs(array).max() == pytest.approx(theirs[name].abs().max().item(), rel=0.3)


def test_same_inputs_give_the_same_bytes(digits):
    """Dropout is included; its random numbers leave those of the process as they were."""
    workload = neural(layers=CONVOLUTION)
    state = torch.get_rng_state()
    first, again = (trained(workload, digits, seed=3) for _ in range(2))
    assert first.vector.tobytes() == again.vector.tobytes()
    assert torch.equal(torch.get_rng_state(), state)
    assert trained(workload, digits, seed=4).vector.tobytes() != first.vector.tobytes()


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_one_step_is_that_of_torch(iris, optimizer):
    workload = neural(optimizer=optimizer, batch_size=150, weight_decay=0.1, dtype="float64")
    before = workload.initial_model([iris.profile()])
    after = trained(workload, iris)
    module = workload.network(before).module
    settings = {"momentum": 0.9} if optimizer == "sgd" else {}
    made = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}[optimizer](
        module.parameters(), lr=0.01, weight_decay=0.1, **settings
    )
    codes = torch.tensor(np.unique(iris.target, return_inverse=True)[1])
    torch.nn.functional.cross_entropy(module(torch.tensor(iris.features)), codes).backward()
    made.step()
    expected = torch.cat([values.ravel() for values in module.state_dict().values()])
    assert np.allclose(after.vector, expected.numpy(), rtol=1e-12, atol=1e-12)


def test_gradient_is_that_of_the_objective(iris):
    """The reference are finite differences of the reported objective."""
    workload = neural(mode="gradient", weight_decay=0.3, layers=[{"type": "linear"}])
    model = workload.initial_model([iris.profile()])

    def objective(vector):
        result = workload.train(replace(model, vector=vector), iris, epochs=1, epoch_base=0, seed=0)
        return result.metrics["objective"]

    result = workload.train(model, iris, epochs=1, epoch_base=0, seed=0)
    for i in range(len(model.vector)):
        step = np.zeros(len(model.vector))
        step[i] = 1e-6
        numeric = (objective(model.vector + step) - objective(model.vector - step)) / 2e-6
        assert result.vector[i] == pytest.approx(numeric, rel=1e-5, abs=1e-7)


def test_gradient_of_mini_batches_is_drawn_anew_for_each_step(iris):
    workload = neural(mode="gradient", batch_size=20)
    model = workload.initial_model([iris.profile()])
    vectors = {
        workload.train(model, iris, epochs=1, epoch_base=step, seed=0).vector.tobytes()
        for step in (0, 0, 1, 2)
    }
    assert len(vectors) == 3


def test_gradient_mode_sends_the_statistics_of_batch_normalisation(digits):
    """The rule "gradient" averages statistics, and steps against the gradients alone."""
    workload = neural(mode="gradient", layers=CONVOLUTION)
    model = workload.initial_model([digits.profile()])
    result = workload.train(model, digits, epochs=1, epoch_base=0, seed=0)
    sent = unflatten(result.vector, model.layout)
    network = workload.network(model)
    network.module.train()
    network.outputs(network.inputs(digits.features))
    state = network.module.state_dict()
    for name in ("2.running_mean", "2.running_var"):
        assert np.array_equal(sent[name], state[name].numpy())
        assert state[name].std() > 0


@pytest.mark.parametrize(("task", "metric"), [("classification", "accuracy"), ("regression", "r2")])
def test_centralised_training_learns(task, metric):
    data = load("breast_cancer") if task == "classification" else load("diabetes", task=task)
    model = fit_centralised(create("neural", {"task": task}), data, epochs=5, seed=0)
    measured = evaluate(model, data)
    assert measured[metric] > (0.97 if task == "classification" else 0.45)
    if task == "classification":
        assert measured["accuracy"] == np.mean(predict(model, data) == data.target)
    else:
        errors = np.square(predict(model, data) - data.target)
        assert measured["mse"] == pytest.approx(errors.mean())


@pytest.mark.parametrize("activation", ["relu", "tanh", "sigmoid"])
@pytest.mark.parametrize("data", ["iris", "breast_cancer", "diabetes"])
def test_perceptrons_become_estimators_of_scikit_learn(activation, data):
    task = "regression" if data == "diabetes" else "classification"
    rows = load(data, task=task)
    layers = [
        {"type": "linear", "out_features": 8},
        {"type": activation},
        {"type": "linear", "out_features": 5, "bias": False},
        {"type": activation},
        {"type": "linear"},
    ]
    workload = neural(task=task, layers=layers, dtype="float64")
    model = fit_centralised(workload, rows, epochs=3, seed=0)
    from xain_workloads.tables.preprocessing import prepare

    prepared = prepare(model.metadata, rows)
    estimator = workload.to_sklearn(model)
    ours = workload.predict(model, prepared.features)
    theirs = estimator.predict(prepared.features)
    assert (
        theirs.tolist() == ours.tolist() if task == "classification" else np.allclose(ours, theirs)
    )
    if task == "classification":
        scores = torch.tensor(workload.network(model).scores(prepared.features))
        assert np.allclose(estimator.predict_proba(prepared.features), scores.softmax(1))


def test_other_networks_say_where_they_can_be_exported_to(digits):
    workload = neural(layers=CONVOLUTION)
    with pytest.raises(ValueError, match=r"no estimator for this network.*\.safetensors"):
        workload.to_sklearn(workload.initial_model([digits.profile()]))


def test_training_that_runs_away_is_told(iris):
    with pytest.raises(Diverged, match="learning_rate = 1e\\+30: lower learning_rate"):
        trained(neural(learning_rate=1e30), iris)
    workload = neural(mode="gradient")
    model = workload.initial_model([iris.profile()])
    with pytest.raises(Diverged, match=r"lower aggregation\.options\.eta0"):
        workload.train(
            replace(model, vector=model.vector * 1e200), iris, epochs=1, epoch_base=0, seed=0
        )


def test_rows_that_do_not_fit_are_told(iris):
    workload = neural()
    model = workload.initial_model([iris.profile()])
    with pytest.raises(DataError, match="no rows"):
        workload.train(model, iris.subset([]), epochs=1, epoch_base=0, seed=0)
    with pytest.raises(DataError, match="the model needs"):
        workload.measure(model, Dataset(np.zeros((2, 3)), iris.target[:2]))
    with pytest.raises(DataError, match="label 'x' is none"):
        workload.measure(model, Dataset(np.zeros((1, 4)), np.array(["x"])))


def test_batch_normalisation_of_one_row_is_told(iris):
    layers = [{"type": "batchnorm1d"}, {"type": "linear"}]
    workload = neural(layers=layers)
    model = workload.initial_model([iris.profile()])
    with pytest.raises(DataError, match="batch normalisation needs two rows"):
        workload.train(model, iris.subset([0]), epochs=1, epoch_base=0, seed=0)
    # The parts of an epoch are nearly equal, so that no last row is alone.
    workload = neural(layers=layers, batch_size=4)
    workload.train(model, iris.subset(range(9)), epochs=1, epoch_base=0, seed=0)


def test_model_of_another_network_is_told(iris):
    model = neural().initial_model([iris.profile()])
    other = neural(layers=[{"type": "linear"}])
    with pytest.raises(ValueError, match=r"'0\.weight' .*\(64, 4\) in the model"):
        other.measure(model, iris)
    with pytest.raises(ValueError, match="do not have the number of features"):
        neural().measure(replace(model, metadata={"classes": model.metadata["classes"]}), iris)


def test_gpu_is_used_where_there_is_one(iris):
    if not torch.cuda.is_available():
        with pytest.raises(DataError, match=r'device is "cuda", .*no GPU'):
            trained(neural(device="cuda"), iris)
        pytest.skip("torch finds no GPU on this machine")
    workload = neural()
    model = trained(workload, iris)
    assert workload.network(model).device.type == "cuda"
    on_cpu = trained(neural(device="cpu"), iris)
    assert np.allclose(model.vector, on_cpu.vector, atol=1e-4)


def test_torch_computes_with_as_many_threads_as_the_process_allows(monkeypatch, iris):
    """A participant's `[training] threads` counts, however often other code changes it."""
    monkeypatch.setattr(threads, "_num_threads", [])
    threads.use_threads(3)
    for _ in range(2):
        trained(neural(), iris)
        assert torch.get_num_threads() == 3
        torch.set_num_threads(2)


# --- builders ---


def test_builder_makes_the_network(builders, iris):
    """Frozen parameters do not travel, tied ones travel once, and buffers are statistics."""

    class Net(torch.nn.Module):
        def __init__(self, num_features: int, num_outputs: int) -> None:
            super().__init__()
            self.frozen = torch.nn.Linear(num_features, num_features)
            self.frozen.requires_grad_(False)
            self.first = torch.nn.Linear(num_features, num_features)
            self.second = torch.nn.Linear(num_features, num_features)
            self.second.weight = self.first.weight
            self.norm = torch.nn.BatchNorm1d(num_features)
            self.last = torch.nn.Linear(num_features, num_outputs)

        def forward(self, x: Any) -> Any:
            return self.last(self.norm(self.second(self.first(self.frozen(x)).relu())))

    builders.Net = Net
    allow_builders(["nets:*"])
    workload = neural(builder="nets:Net")
    model = workload.initial_model([iris.profile()])
    kinds = {spec.name: spec.kind for spec in model.layout}
    assert " ".join(kinds) == (
        "first.weight first.bias second.bias norm.weight norm.bias norm.running_mean "
        "norm.running_var last.weight last.bias"
    )
    assert {name for name, kind in kinds.items() if kind == "statistic"} == {
        "norm.running_mean",
        "norm.running_var",
    }
    again = from_metadata(model.metadata)
    assert again.initial_model([iris.profile()]).vector.tobytes() == model.vector.tobytes()
    first, second = (trained(workload, iris, epochs=5) for _ in range(2))
    assert first.vector.tobytes() == second.vector.tobytes()  # so the frozen part is the same
    assert evaluate(fit_centralised(workload, iris, epochs=20, seed=0), iris)["accuracy"] > 0.9


def test_builder_that_is_not_allowed_is_not_imported(builders, tmp_path, monkeypatch, iris):
    """A model's metadata come from the network, and an import runs code."""
    (tmp_path / "evil_nets.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    allow_builders(["nets.*", "other:make"])
    workload = from_metadata({"workload": "neural", "options": '{"builder": "evil_nets:make"}'})
    with pytest.raises(DataError, match=r"'evil_nets:make' is not allowed.*\[training\] builders"):
        workload.initial_model([iris.profile()])
    assert "evil_nets" not in sys.modules


def test_builders_that_cannot_be_used_are_told(builders, iris):
    allow_builders(["nets:*", "missing_package.*", "missing_package:*"])
    vars(builders).update(
        failing=lambda features: None,
        number=3,
        nothing=lambda features, outputs: None,
        wide=lambda features, outputs: torch.nn.Linear(features, 7),
        frozen=lambda *sizes: torch.nn.Linear(*sizes).requires_grad_(False),
    )
    for name, complaint in {
        "missing_package:make": "cannot be imported: No module named 'missing_package'",
        "nets:absent": "cannot be imported: module 'nets' has no attribute 'absent'",
        "nets:number": "is no function",
    }.items():
        with pytest.raises(DataError, match=complaint):
            load_builder(name)
    for name, complaint in {
        "nets:failing": "fails for 4 features and 3 outputs: TypeError: ",
        "nets:nothing": "returned NoneType, no torch module",
        "nets:frozen": "nothing to train",
    }.items():
        with pytest.raises(DataError, match=complaint):
            neural(builder=name).initial_model([iris.profile()])
    with pytest.raises(DataError, match=r"\(150, 7\) for 150 rows.*\(150, 3\)"):
        neural(builder="nets:wide", batch_size=150).measure(
            neural(builder="nets:wide").initial_model([iris.profile()]), iris
        )


def test_coordinator_without_torch_says_that_a_builder_needs_it(builders, monkeypatch, iris):
    monkeypatch.setitem(sys.modules, "torch", None)
    complaint = "the coordinator calls the builder, and .* needs PyTorch.*pip install"
    with pytest.raises(DataError, match=complaint):
        neural(builder="nets:make").initial_model([iris.profile()])
