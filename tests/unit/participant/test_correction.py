"""Control variates of scripts: what corrects a torch optimiser, and what it leaves."""

from typing import Any

import numpy as np
import pytest
import torch

import xain
from xain.correction import Correction
from xain_participant.keep.variates import KeptVariates
from xain_participant.sdk.participant import Assignment
from xain_workloads.linear.minibatch import path_of
from xain_workloads.model import CONTROL_LOST, Model, TensorSpec

SIZE, STEPS = 5, 20
LAYOUT = (TensorSpec("w", (SIZE,), "float64"), TensorSpec("control", (SIZE,), "float64", "control"))


def begun(kept: KeptVariates, vector: Any, round_: int, counted: int) -> Correction:
    kept.on_round(Assignment("s", round_, counted_round=counted))
    return Correction(kept, Model(vector, LAYOUT))


@pytest.mark.parametrize("nesterov", [True, False])
def test_corrected_optimisers_end_in_the_optimum_of_all_sites(nesterov):
    """Each site has a quadratic loss of its own."""
    chance = np.random.default_rng(0)
    curvatures = torch.tensor(chance.uniform(0.2, 3.0, (4, SIZE)))
    targets = torch.tensor(chance.normal(size=(4, SIZE)))
    kept, vector = [KeptVariates() for _ in range(4)], np.zeros(2 * SIZE)
    for number in range(80):
        updates = []
        for own, curvature, target in zip(kept, curvatures, targets, strict=True):
            correction = begun(own, vector, number, number - 1)
            w = torch.nn.Parameter(torch.tensor(vector[:SIZE]))
            optimizer = torch.optim.SGD([w], 0.05, momentum=0.5, nesterov=nesterov)
            correction.apply(optimizer, [(w, torch.tensor(correction.vector))])
            for _ in range(STEPS):
                optimizer.zero_grad()
                (curvature * (w - target).square()).sum().mul(0.5).backward()
                optimizer.step()
            expected = path_of(0.5, [0.05] * STEPS, is_nesterov=nesterov)
            assert correction.path == pytest.approx(expected)
            update, lost = correction.finish(w.detach().numpy(), None)
            assert not lost
            updates.append(update)
        vector = np.mean(updates, axis=0)
    optimum = (curvatures * targets).sum(0) / curvatures.sum(0)
    assert np.linalg.norm(vector[:SIZE] - optimum.numpy()) < 1e-6


def test_correction_ends_with_its_round():
    """An optimiser that is used in a later round takes plain steps there."""
    w = torch.nn.Parameter(torch.zeros(SIZE, dtype=torch.float64))
    optimizer = torch.optim.SGD([w], 0.1)
    correction = begun(KeptVariates(), np.ones(2 * SIZE), 3, 2)
    correction.apply(optimizer, [(w, torch.ones(SIZE, dtype=torch.float64))])
    optimizer.step()  # without a gradient of the script's own
    assert w.detach().tolist() == [-0.1] * SIZE
    assert correction.finish(w.detach().numpy(), None)[1] == {CONTROL_LOST: 1.0}
    w.grad = None
    optimizer.step()
    assert w.detach().tolist() == [-0.1] * SIZE


def test_steps_whose_path_is_not_known_are_refused():
    w = torch.nn.Parameter(torch.zeros(SIZE))
    correction = begun(KeptVariates(), np.zeros(2 * SIZE), 0, -1)
    for optimizer in (
        torch.optim.Adam([w]),
        torch.optim.SGD([w], 0.1, momentum=0.5, dampening=0.5),
        torch.optim.SGD([{"params": [w]}, {"params": [torch.nn.Parameter(w)], "lr": 1.0}], 0.1),
    ):
        with pytest.raises(TypeError, match=r"round.correct\(\) needs"):
            correction.apply(optimizer, [])
    with pytest.raises(ValueError, match=r"call round.correct\(model, optimizer\)"):
        correction.finish(np.zeros(SIZE), None)


def test_flat_vector_gets_no_control_variate():
    with pytest.raises(ValueError, match="a model with named tensors"):
        xain.rounds(np.zeros(3), scaffold=True)
