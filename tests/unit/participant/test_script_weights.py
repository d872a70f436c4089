"""The part of a script's model that travels, and its way back."""

from dataclasses import replace
from typing import Any

import numpy as np
import peft
import pytest
import torch

import xain
from xain.weights import agreed_layout, declare, from_vector, kept_tensors, plain_layout, to_vector
from xain_workloads.model import TensorSpec


def make_model() -> Any:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 2, bias=False)
    )


def running_statistics(model: Any) -> dict[str, Any]:
    return {name: value for name, value in model.state_dict().items() if "running_" in name}


def kinds(declared: Any) -> dict[str, str]:
    return {spec.name: spec.kind for spec in declared.layout}


def test_module_declares_trainable_tensors_and_statistics():
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


@pytest.fixture
def model() -> Any:
    return make_model()


def test_state_dict_declares_the_same_tensors_as_its_module(model):
    assert kinds(declare(model.state_dict())) == kinds(declare(model))
    assert kinds(declare(lambda: model)) == kinds(declare(model))


def test_frozen_parameters_stay_at_home(model):
    """round.weights has frozen parameters too, so that load_state_dict() finds all names."""
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


def test_weights_come_back_as_they_were_sent(model):
    declared = declare(model)
    vector = to_vector(model.state_dict(), declared.layout, "submit")
    assert vector.dtype == np.float32
    back = from_vector(vector, declared.layout, declared, {})
    assert all(torch.equal(back[name], value) for name, value in model.state_dict().items())


def test_tied_weights_travel_once_and_come_back_under_all_names():
    """load_state_dict() would otherwise write the old value over the new one."""

    class Tied(torch.nn.Module):
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


def test_half_precision_travels_in_single_and_comes_back():
    model = make_model().to(torch.bfloat16)
    declared = declare(model)
    assert {spec.dtype for spec in declared.layout} == {"float32"}
    vector = to_vector(model, declared.layout, "submit")
    back = from_vector(vector, declared.layout, declared, {})
    assert back["0.weight"].dtype == torch.bfloat16
    assert torch.equal(back["0.weight"], model[0].weight)


def test_counters_are_those_that_this_participant_left(model):
    model(torch.ones(4, 2))
    counters = kept_tensors(model, ())
    assert {name: value.item() for name, value in counters.items()} == {"1.num_batches_tracked": 1}
    declared = declare(make_model())
    vector = np.zeros(declared.num_elements, np.float32)
    weights = from_vector(vector, declared.layout, declared, counters)
    assert weights["1.num_batches_tracked"].item() == 1


def test_names_may_come_in_any_order():
    declared = declare({"a": np.zeros(2), "b": np.zeros(3)})
    ours = (TensorSpec("a", (2,), "float32"), TensorSpec("b", (3,), "float32"))
    assert agreed_layout(declared, tuple(reversed(ours)), 5) == tuple(reversed(ours))
    vector = to_vector({"a": np.ones(2), "b": np.zeros(3)}, tuple(reversed(ours)), "submit")
    assert vector.tolist() == [0, 0, 0, 1, 1]


def test_trainable_gives_the_travelling_tensors(model):
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
        ({"a": np.zeros(2, np.longdouble)}, "tensor 'a' is of (float128|longdouble)"),
        (np.zeros(2, np.longdouble), "a vector that is of"),
        ({"a": np.zeros((2, 0))}, "tensor 'a' is empty"),
        (np.zeros(0), "a vector that is empty"),
        ({"a": torch.zeros(2).to(torch.float8_e4m3fn)}, "tensor 'a' is of float8_e4m3fn"),
        ({"a": torch.eye(2).to_sparse()}, r"tensor 'a' is sparse \(sparse_coo\)"),
        ({"a": torch.zeros(2, device="meta")}, "tensor 'a' is on the device meta"),
        (torch.nn.Linear(2, 2, device="meta"), "tensor 'weight' is on the device meta"),
        (torch.nn.LazyLinear(2), "tensor 'weight' has no shape before the model has seen a batch"),
        (torch.nn.Linear(2, 2, dtype=torch.complex64), "tensor 'weight' is of complex64"),
    ],
)
def test_initial_that_is_no_weights_is_refused(initial, message):
    with pytest.raises((TypeError, ValueError), match=message):
        declare(initial)


def test_model_without_trainable_parameters_is_refused():
    with pytest.raises(ValueError, match="nothing to train"):
        declare(make_model().requires_grad_(False))


def test_frozen_tensors_may_be_of_any_type(model):
    """Types that cannot travel are no reason to refuse what stays at home."""
    model[2].weight = torch.nn.Parameter(
        torch.zeros(2, 3).to(torch.float8_e4m3fn), requires_grad=False
    )
    assert "2.weight" not in kinds(declare(model))


def wrap_parallel(model: Any) -> Any:
    return torch.nn.DataParallel(model)


def wrap_compiled(model: Any) -> Any:
    model[0] = torch.compile(model[0], backend="eager")
    return torch.compile(model, backend="eager")


def wrap_both(model: Any) -> Any:
    return torch.compile(torch.nn.DataParallel(model), backend="eager")


@pytest.mark.parametrize("wrap", [wrap_parallel, wrap_compiled, wrap_both])
def test_wrapped_model_trains_with_plain_ones(wrap):
    """The prefixes of wrappers do not travel; the script sees the names that it has declared, and
    hands in its tensors by these or by the plain names."""
    plain, wrapped = declare(make_model()), wrap(make_model())
    declared = declare(wrapped)
    assert kinds(declared) == kinds(plain)
    assert agreed_layout(declared, plain.layout, plain.num_elements) == plain.layout
    vector = np.arange(plain.num_elements, dtype=np.float32)
    weights = from_vector(vector, plain.layout, declared, {})
    wrapped.load_state_dict(weights)
    for given in (wrapped, wrapped.state_dict(), from_vector(vector, plain.layout, plain, {})):
        assert to_vector(given, plain.layout, "submit", declared).tolist() == vector.tolist()
    counters = kept_tensors(wrapped.state_dict(), (), declared)
    assert counters.keys() == {"1.num_batches_tracked"}
    counters["1.num_batches_tracked"] += 7
    back = from_vector(vector, plain.layout, declared, counters)
    assert back.keys() == wrapped.state_dict().keys()
    assert 7 in [value.item() for name, value in back.items() if name.endswith("_tracked")]


def test_layout_of_a_wrapped_model_is_that_of_a_plain_one():
    layout = declare(make_model()).layout
    theirs = tuple(replace(spec, name=f"module.{spec.name}") for spec in layout)
    assert plain_layout(theirs) == layout


def test_prefixes_stay_where_two_tensors_would_have_one_name():
    declared = declare({"module.w": np.zeros(2), "w": np.zeros(3)})
    assert kinds(declared) == {"module.w": "weight", "w": "weight"}
    vector = to_vector(declared.values(), declared.layout, "submit", declared)
    back = from_vector(vector, declared.layout, declared, {})
    assert {name: value.shape for name, value in back.items()} == {"module.w": (2,), "w": (3,)}


@pytest.mark.parametrize("is_declared", [True, False])
def test_tensor_that_the_model_has_not_is_refused(is_declared, model):
    declared = declare(model)
    given = {**model.state_dict(), "3.weight": torch.ones(2)}
    with pytest.raises(xain.LayoutMismatch, match=r"submit was given a tensor '3\.weight', which"):
        to_vector(given, declared.layout, "submit", declared if is_declared else None)
    larger = make_model().append(torch.nn.Linear(2, 1))
    with pytest.raises(xain.LayoutMismatch, match=r"submit was given a tensor '3\.weight', which"):
        to_vector(larger, declared.layout, "submit", declared if is_declared else None)


def test_tensors_that_do_not_travel_may_be_handed_in(model):
    """Frozen and personal ones, and counters."""
    model[0].requires_grad_(False)
    declared = declare(model)
    vector = to_vector(model.state_dict(), declared.layout, "submit", declared)
    assert to_vector(model, declared.layout, "submit").tolist() == vector.tolist()
    personal = declared.without(["2.*"])
    layout = personal.layout
    assert to_vector(model.state_dict(), layout, "submit", personal, ["2.*"]).size == 12
    tensors = {**xain.trainable(model), "count": np.array(3)}
    assert to_vector(tensors, layout, "submit", None, ["2.*"]).size == 12


def test_adapters_travel_by_the_names_that_peft_saves():
    """So PEFT loads an exported model. The script keeps the names of its module."""
    config = peft.LoraConfig(r=2, target_modules=["0"], modules_to_save=["2"])
    model = peft.get_peft_model(make_model(), config)
    declared = declare(model)
    saved = peft.get_peft_model_state_dict(model)
    assert set(kinds(declared)) - {n for n in kinds(declared) if "running_" in n} == set(saved)
    vector = to_vector(model, declared.layout, "submit", declared)
    assert (
        to_vector(saved | running_statistics(model), declared.layout, "submit", declared).tolist()
        == vector.tolist()
    )
    weights = from_vector(vector + 1, declared.layout, declared, {})
    model.load_state_dict(weights)
    assert to_vector(model, declared.layout, "submit", declared).tolist() == (vector + 1).tolist()
    assert to_vector(model, declared.layout, "submit").tolist() == (vector + 1).tolist()
