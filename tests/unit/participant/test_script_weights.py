"""The part of a script's model that travels, and its way back."""

from typing import Any

import numpy as np
import pytest
import torch

import xain
from xain.weights import declare, from_vector, kept_tensors, require_same, to_vector
from xain_workloads.model import TensorSpec


def make_model() -> Any:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 2, bias=False)
    )


def kinds(declared: Any) -> dict[str, str]:
    return {spec.name: spec.kind for spec in declared.layout}


def test_module_declares_trainable_tensors_and_statistics() -> None:
    """The counter of the batch normalisation stays at home."""
    assert kinds(declare(make_model())) == {
        "0.weight": "weight",
        "0.bias": "weight",
        "1.weight": "weight",
        "1.bias": "weight",
        "2.weight": "weight",
        "1.running_mean": "statistic",
        "1.running_var": "statistic",
    }


def test_state_dict_declares_the_same_tensors_as_its_module() -> None:
    model = make_model()
    assert kinds(declare(model.state_dict())) == kinds(declare(model))
    assert kinds(declare(lambda: model)) == kinds(declare(model))


def test_frozen_parameters_stay_at_home() -> None:
    """round.weights has frozen parameters too, so that load_state_dict() finds all names."""
    model = make_model()
    model[0].requires_grad_(False)
    declared = declare(model)
    assert [n for n in kinds(declared) if n.startswith("0.")] == []
    vector = np.zeros(declared.num_elements, np.float32)
    weights = from_vector(vector, declared.layout, declared, {})
    assert weights.keys() == model.state_dict().keys()
    assert weights["0.weight"] is not None
    before = model[0].weight.clone()
    model.load_state_dict(weights)
    assert torch.equal(model[0].weight, before)
    assert not model[2].weight.any()


def test_weights_come_back_as_they_were_sent() -> None:
    model = make_model()
    declared = declare(model)
    vector = to_vector(model.state_dict(), declared.layout, "submit")
    assert vector.dtype == np.float32
    back = from_vector(vector, declared.layout, declared, {})
    assert all(torch.equal(back[name], value) for name, value in model.state_dict().items())


def test_tied_weights_travel_once_and_come_back_under_all_names() -> None:
    """load_state_dict() would otherwise write the old value over the new one."""

    class Tied(torch.nn.Module):  # type: ignore[name-defined,misc]
        def __init__(self) -> None:
            super().__init__()
            self.embed = torch.nn.Embedding(4, 2)
            self.head = torch.nn.Linear(2, 4, bias=False)
            self.head.weight = self.embed.weight

    model = Tied()
    declared = declare(model)
    assert kinds(declared) == {"embed.weight": "weight"}
    model.load_state_dict(from_vector(np.ones(8, np.float32), declared.layout, declared, {}))
    assert model.head.weight.sum() == 8


def test_half_precision_travels_in_single_and_comes_back() -> None:
    model = make_model().to(torch.bfloat16)
    declared = declare(model)
    assert {spec.dtype for spec in declared.layout} == {"float32"}
    vector = to_vector(model, declared.layout, "submit")
    back = from_vector(vector, declared.layout, declared, {})
    assert back["0.weight"].dtype == torch.bfloat16
    assert torch.equal(back["0.weight"], model[0].weight)


def test_counters_are_those_that_this_participant_left() -> None:
    model = make_model()
    model(torch.ones(4, 2))
    counters = kept_tensors(model, ())
    assert {name: value.item() for name, value in counters.items()} == {"1.num_batches_tracked": 1}
    declared = declare(make_model())
    vector = np.zeros(declared.num_elements, np.float32)
    weights = from_vector(vector, declared.layout, declared, counters)
    assert weights["1.num_batches_tracked"].item() == 1


def test_names_may_come_in_any_order() -> None:
    ours = (TensorSpec("a", (2,), "float32"), TensorSpec("b", (3,), "float32"))
    require_same(ours, tuple(reversed(ours)))
    vector = to_vector({"a": np.ones(2), "b": np.zeros(3)}, tuple(reversed(ours)), "submit")
    assert vector.tolist() == [0, 0, 0, 1, 1]


def test_trainable_gives_the_travelling_tensors() -> None:
    model = make_model()
    model[0].requires_grad_(False)
    tensors = xain.trainable(model)
    assert tensors.keys() == kinds(declare(model)).keys()
    assert tensors["2.weight"].data_ptr() == model[2].weight.data_ptr()


@pytest.mark.parametrize(
    ("initial", "message"),
    [
        ([np.zeros(2)], "not list"),
        (np.zeros((2, 2)), r"shape \(2, 2\); an array must be a flat vector"),
        ({"a": np.zeros(2, complex)}, "tensor 'a' is of complex128"),
        ({"a": torch.zeros(2, dtype=torch.complex64)}, "tensor 'a' is complex"),
        ({"a": np.zeros(2, int)}, "no tensor of floating point"),
        ({1: np.zeros(2)}, "the name of a tensor is 1"),
    ],
)
def test_initial_that_is_no_weights_is_refused(initial: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        declare(initial)


def test_model_without_trainable_parameters_is_refused() -> None:
    with pytest.raises(ValueError, match="nothing to train"):
        declare(make_model().requires_grad_(False))
