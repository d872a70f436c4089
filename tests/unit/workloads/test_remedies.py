"""Remedies for sites with unlike rows: SCAFFOLD's optimum is that of all rows, the proximal term
holds local training near the global model, and no remedy is where nothing is trained locally."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from support.unlike import optimum, unlike_sites
from xain_workloads.linear.minibatch import _nesterov, path_of
from xain_workloads.model import Model, is_personal, unflatten
from xain_workloads.scaffold import Variates, with_control, without_control
from xain_workloads.tables.profile import DataProfile
from xain_workloads.workload import create

REGRESSION: dict[str, Any] = {"task": "regression", "dtype": "float64"}
SGD = {**REGRESSION, "penalty": "none", "eta0": 0.05}
MLP = {**REGRESSION, "hidden_layers": [1], "activation": "identity", "alpha": 0.0}
# One linear layer, as the others are in the end.
NEURAL = {**REGRESSION, "layers": [{"type": "linear"}]}


def trained(
    name: str, options: dict[str, Any], *, rounds: int, scaffold: bool, per_round: int = 4
) -> Model:
    """The model of federated averaging by rows, of whole local epochs, or of SCAFFOLD. per_round:
    sites that train in a round, in turn."""
    sites = unlike_sites()
    workload: Any = create(name, options)
    model = workload.initial_model([site.profile() for site in sites])
    if scaffold:
        model = with_control(model)
    own: dict[int, Any] = {}
    for number in range(rounds):
        chosen = [(number * per_round + i) % len(sites) for i in range(per_round)]
        vectors, rows = [], []
        for at in chosen:
            inner = without_control(model)
            arguments = {"epochs": 5, "epoch_base": 5 * number, "seed": at}
            rows.append(sites[at].num_samples)
            if not scaffold:
                vectors.append(workload.train(inner, sites[at], **arguments).vector)
                continue
            variates = Variates.of(model, own.get(at))
            result = workload.train(inner, sites[at], correction=variates.correction, **arguments)
            update, own[at] = variates.after(inner, result.vector, result.path)
            vectors.append(update)
        mean = np.average(vectors, axis=0, weights=rows)
        if scaffold:
            size = len(without_control(model).vector)
            share = sum(rows) / sum(sites[at].num_samples for at in own)
            mean[size:] = model.vector[size:] + share * (mean[size:] - model.vector[size:])
        model = replace(model, vector=mean)
    return without_control(model)


def coefficients(model: Model) -> np.ndarray:
    coef, intercept = unflatten(model.vector, model.layout).values()
    return np.append(coef.ravel(), intercept)


@pytest.mark.parametrize(("name", "per_round"), [("sgd", 4), ("sgd", 2), ("neural", 4)])
def test_scaffold_ends_in_the_optimum_of_all_rows(name, per_round):
    """Averaging ends beside the optimum, since each site draws the model to its own. Also where
    half of the sites train in turn, and with momentum, by which steps are longer than the learning
    rate."""
    options = {**SGD, "batch_size": 100}
    if name == "neural":
        options = {**NEURAL, "learning_rate": 0.01, "momentum": 0.5, "batch_size": 100}
    wanted = optimum(unlike_sites())

    def distance(rounds, *, scaffold):
        model = trained(name, options, rounds=rounds, scaffold=scaffold, per_round=per_round)
        return float(np.linalg.norm(coefficients(model) - wanted))

    assert distance(300 * 4 // per_round, scaffold=True) < 8e-6
    # Averaging is at its end long before.
    assert distance(100, scaffold=False) > 0.01


@pytest.mark.parametrize("is_nesterov", [True, False])
def test_path_is_how_far_a_constant_gradient_leads(is_nesterov):
    """The length is that which both optimisers go, ours and that of torch."""
    sizes = [0.1] * 7
    if is_nesterov:
        vector = np.zeros(1)
        step = _nesterov(0.9, vector)
        for size in sizes:
            step(np.ones(1), size)
        moved = -float(vector[0])
    else:
        import torch

        weight = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
        optimizer = torch.optim.SGD([weight], 0.1, momentum=0.9)
        for _ in sizes:
            weight.grad = torch.ones_like(weight)
            optimizer.step()
        moved = -float(weight.detach())
    assert path_of(0.9, sizes, is_nesterov=is_nesterov) == pytest.approx(moved)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("sgd", {**SGD, "batch_size": 40}),
        ("mlp", {**MLP, "batch_size": 40, "momentum": 0.0}),
        ("neural", {**NEURAL, "batch_size": 40, "momentum": 0.0}),
    ],
)
def test_proximal_term_is_the_difference_to_the_global_model(name, options):
    """Two full steps: the second has mu times the way of the first in its gradient, by all its
    length, so that it ends that much nearer to the global model."""
    site, mu = unlike_sites()[0], 0.5
    plain = create(name, options)
    model = plain.initial_model([site.profile()])
    arguments = {"epoch_base": 0, "seed": 0}
    first = plain.train(model, site, epochs=1, **arguments).vector
    second = plain.train(model, site, epochs=2, **arguments).vector
    proximal = create(name, {**options, "remedy": "proximal", "proximal_mu": mu})
    ours = proximal.train(model, site, epochs=2, **arguments).vector
    size = options.get("eta0", 0.01)
    np.testing.assert_allclose(ours, second - size * mu * (first - model.vector), atol=1e-12)


@pytest.mark.parametrize("name", ["sgd", "mlp", "neural"])
def test_personal_tensors_are_those_of_the_output(name):
    """The intercepts of a linear model, and the last layer of a network."""
    workload = create(name, {"remedy": "personal"})
    layout = workload.initial_model([DataProfile(9, 4, ("a", "b", "c"))]).layout
    own = {spec.name for spec in layout if is_personal(spec.name, workload.personal)}
    assert own == {
        "sgd": {"intercept"},
        "mlp": {"output.coef", "output.intercept"},
        "neural": {"2.weight", "2.bias"},
    }.get(name)
