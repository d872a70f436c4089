"""Sessions that train neural networks, over real channels."""

from typing import Any

import numpy as np
import pytest
import torch

from integration.coordinator.test_gradients import parts, run_agents
from unit.workloads.test_neural_layers import CONVOLUTION
from xain_workloads.model import Model, unflatten
from xain_workloads.tables.data import load
from xain_workloads.tables.dataset import Dataset
from xain_workloads.tables.preprocessing import prepare
from xain_workloads.tables.table import Table
from xain_workloads.workload import create, initial_model

pytestmark = pytest.mark.usefixtures("one_torch_thread")
STEPS = 12
NUM = 7  # participants
ETA0 = 0.3


def settings(num: int, rounds: int, options: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "rounds": {"rounds": rounds, "min_participants": num, "start_participants": num},
        "workload": {"name": "neural", "options": options},
        **more,
    }


def descended(model: Model, data: Dataset, steps: int) -> Any:
    """Gradient descent by torch alone, on all rows in one place."""
    tensors = unflatten(model.vector, model.layout)
    module = torch.nn.Sequential(
        torch.nn.Linear(*tensors["0.weight"].shape[::-1]),
        torch.nn.ReLU(),
        torch.nn.Linear(*tensors["2.weight"].shape[::-1]),
    ).double()
    module.load_state_dict({name: torch.tensor(values) for name, values in tensors.items()})
    made = torch.optim.SGD(module.parameters(), lr=ETA0, weight_decay=0.01)
    rows = torch.tensor(data.features)
    if data.task == "regression":
        scaled = (data.target - data.target.mean()) / data.target.std()
        target, loss = torch.tensor(scaled), torch.nn.MSELoss()
    else:
        target = torch.tensor(np.unique(data.target, return_inverse=True)[1])
        loss = torch.nn.CrossEntropyLoss()
    for _ in range(steps):
        made.zero_grad()
        outputs = module(rows)
        loss(outputs[:, 0] if data.task == "regression" else outputs, target).backward()
        made.step()
    return torch.cat([values.ravel() for values in module.state_dict().values()]).numpy()


@pytest.mark.parametrize("name", ["wine", "breast_cancer", "diabetes"])
async def test_gradient_steps_are_those_of_torch_on_the_union_of_the_rows(start, join, name):
    """However the rows are divided, by label here."""
    task = "regression" if name == "diabetes" else "classification"
    data = load(name, task=task)
    options = {"task": task, "mode": "gradient", "weight_decay": 0.01}
    rule = {"rule": "gradient", "options": {"eta0": ETA0}}
    known = {"classes": data.profile().classes}  # to those who lack some of them, too
    coordinator = await start(**settings(NUM, STEPS, options), aggregation=rule, schema=known)
    await run_agents(coordinator, parts(data, NUM, by_label=True))
    session = coordinator.driver.session
    assert session.cause == "completed"
    model = session.model
    reader = join(coordinator, "reader")
    begun = Model(await reader.model(0), model.layout, model.metadata)
    found = await reader.model(STEPS)
    expected = descended(begun, prepare(model.metadata, data), STEPS)
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-11)


async def test_objective_of_the_union_decides_when_gradient_steps_end(start):
    rule = {"rule": "gradient", "options": {"eta0": 0.5, "tol": 1e-2, "n_iter_no_change": 2}}
    coordinator = await start(**settings(2, 300, {"mode": "gradient"}), aggregation=rule)
    await run_agents(coordinator, parts(load("wine"), 2, by_label=False))
    session = coordinator.driver.session
    assert session.evaluation.ended_because.startswith("converged: the loss has not fallen by 0.01")
    assert 5 < session.model.round < 300


@pytest.mark.parametrize("mode", ["federated", "gradient"])
async def test_statistics_of_batch_normalisation_are_averaged_by_rows(start, join, mode):
    """A server optimiser, or a step against the gradient, does not touch them."""
    data = load("digits").subset(range(400))
    ours = parts(data, 2, by_label=False)
    assert len({part.num_samples for part in ours}) == 2
    options = {"mode": mode, "layers": CONVOLUTION}
    aggregation = {"rule": "gradient" if mode == "gradient" else "weighted_average"}
    coordinator = await start(**settings(2, 1, options), aggregation=aggregation)
    await run_agents(coordinator, ours)
    session = coordinator.driver.session
    model = session.model
    found = unflatten(await join(coordinator, "reader").model(1), model.layout)
    workload = create("neural", options)
    begun = initial_model(workload, [Table.from_dataset(part).profile() for part in ours])
    sent = [
        workload.train(begun, prepare(begun.metadata, part), epochs=1, epoch_base=0, seed=0)
        for part in ours
    ]
    total = sum(update.num_samples for update in sent)
    for name in ("2.running_mean", "2.running_var"):
        expected = sum(
            unflatten(update.vector, model.layout)[name] * update.num_samples / total
            for update in sent
        )
        np.testing.assert_allclose(found[name], expected, rtol=1e-5, atol=1e-6)


async def test_module_of_a_builder_is_trained_and_measured_by_the_coordinator(
    start, tmp_path, monkeypatch
):
    """The coordinator measures on its own data too; without permission the module is not made."""
    from xain_workloads.nets import neural_builders

    (tmp_path / "clinic_nets.py").write_text(
        "from torch import nn\n"
        "def make(num_features, num_outputs):\n"
        "    return nn.Sequential(nn.Linear(num_features, num_outputs))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(neural_builders, "_allowed", {"clinic_nets:make"})
    coordinator = await start(
        **settings(1, 2, {"builder": "clinic_nets:make"}), evaluate={"data": "wine"}
    )
    await run_agents(coordinator, [load("wine")])
    session = coordinator.driver.session
    assert session.cause == "completed"
    assert [spec.name for spec in session.model.layout] == ["0.weight", "0.bias"]
    await coordinator.stop()
    data = load("wine")
    monkeypatch.setattr(neural_builders, "_allowed", set())
    workload = create("neural", {"builder": "clinic_nets:make"})
    with pytest.raises(ValueError, match="is not allowed here"):
        workload.measure(
            Model(np.zeros(42), session.model.layout, session.model.metadata),
            prepare(session.model.metadata, data),
        )


async def test_gradient_steps_go_on_from_a_federated_model(start, join, tmp_path):
    """The mode of the configuration counts, and the network is that of the model."""
    data = load("wine")
    layers = [{"type": "linear", "out_features": 5}, {"type": "tanh"}, {"type": "linear"}]
    federated = await start(**settings(2, 2, {"layers": layers}))
    await run_agents(federated, parts(data, 2, by_label=False))
    first = federated.driver.session
    await federated.stop()
    rule = {"rule": "gradient", "options": {"eta0": ETA0}}
    options = {"mode": "gradient", "layers": layers}
    gradient = await start(
        **settings(2, 2, options),
        aggregation=rule,
        new_session=True,
        from_model=f"{first.session_id}/2",
    )
    await run_agents(gradient, parts(data, 2, by_label=False))
    session = gradient.driver.session
    assert session.cause == "completed"
    assert [spec.shape for spec in session.model.layout] == [(5, 13), (5,), (3, 5), (3,)]
    reader = join(gradient, "reader")
    before, after = [await reader.model(round_) for round_ in (0, 2)]
    assert 0 < np.abs(after - before).max() < 1
