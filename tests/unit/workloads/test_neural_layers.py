"""Networks as lists of layers: sizes, layouts and initial weights without torch."""

import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from xain_workloads.errors import DataError
from xain_workloads.model import size_of, unflatten
from xain_workloads.nets.neural_builders import require_name
from xain_workloads.nets.neural_layers import layout_of_layers, plan
from xain_workloads.nets.neural_options import MODES
from xain_workloads.tables.profile import DataProfile
from xain_workloads.workload import create, from_metadata

CONVOLUTION: list[dict[str, Any]] = [
    {"type": "unflatten", "shape": [1, 8, 8]},
    {"type": "conv2d", "out_channels": 4, "kernel_size": 3, "padding": 1},
    {"type": "batchnorm2d"},
    {"type": "relu"},
    {"type": "maxpool2d", "kernel_size": 2},
    {"type": "flatten"},
    {"type": "dropout", "p": 0.1},
    {"type": "linear", "out_features": 12},
    {"type": "layernorm"},
    {"type": "batchnorm1d"},
    {"type": "tanh"},
    {"type": "sigmoid"},
    {"type": "linear"},
]


PROFILE = DataProfile(6, 64, ("a", "b", "c"))


def test_sizes_are_inferred_from_layer_to_layer():
    layers = plan(CONVOLUTION, 64, 10)
    layout = {spec.name: spec.shape for spec in layout_of_layers(layers, "float32")}
    assert layout["1.weight"] == (4, 1, 3, 3)
    assert layers[4].shape == (4, 4, 4)
    assert layout["7.weight"] == (12, 64)
    assert layout["12.weight"] == (10, 12)


def test_statistics_of_batch_normalisation_are_no_weights():
    layout = layout_of_layers(plan(CONVOLUTION, 64, 10), "float32")
    statistics = {spec.name for spec in layout if spec.kind == "statistic"}
    assert statistics == {f"{i}.running_{what}" for i in (2, 9) for what in ("mean", "var")}


def test_coordinator_makes_initial_weights_without_torch():
    """The coordinator's image has no torch; the module that the workload is in imports none."""
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from xain_workloads.tables.profile import DataProfile\n"
        "from xain_workloads.workload import create\n"
        "model = create('neural').initial_model([DataProfile(9, 4, ('a', 'b', 'c'))])\n"
        "print(len(model.vector))"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(shown.stdout) == 4 * 64 + 64 + 64 * 3 + 3


def test_initial_weights_come_from_the_seed_alone():
    first, again, other = (
        create("neural", {"layers": CONVOLUTION, "seed": seed}).initial_model([PROFILE])
        for seed in (0, 0, 1)
    )
    assert first.vector.tobytes() == again.vector.tobytes() != other.vector.tobytes()
    assert len(first.vector) == size_of(first.layout)
    arrays = unflatten(first.vector, first.layout)
    assert np.abs(arrays["1.weight"]).max() == pytest.approx(1 / 3, rel=0.1)
    assert (arrays["2.weight"] == 1).all()
    assert (arrays["2.running_var"] == 1).all()
    assert not arrays["2.running_mean"].any()


def test_options_in_metadata_make_the_same_workload():
    workload = create("neural", {"layers": CONVOLUTION, "seed": 7, "optimizer": "adam"})
    model = workload.initial_model([PROFILE])
    rebuilt = from_metadata(model.metadata).initial_model([PROFILE], model.metadata)
    assert rebuilt.vector.tobytes() == model.vector.tobytes()
    assert (rebuilt.layout, rebuilt.metadata) == (model.layout, model.metadata)


@pytest.mark.parametrize(
    ("layers", "complaint"),
    [
        ([{"type": "lstm"}], r"layers\[0\]\.type is 'lstm'; choose one of: batchnorm1d, "),
        ([{}], r"layers\[0\]\.type is None"),
        (
            [{"type": "relu"}, {"type": "linear", "units": 3}],
            r"layers\[1\] \(linear\): unknown key 'units'; known: type, out_features, bias",
        ),
        ([{"type": "linear"}, {"type": "relu"}], r"layers\[0\] \(linear\): out_features is miss"),
        ([{"type": "linear", "out_features": 0}], r"\(linear\): out_features is 0; it must be at"),
        ([{"type": "linear", "out_features": 2.0}], "out_features is 2.0; it must be a whole"),
        ([{"type": "linear", "bias": 1}], "bias is 1; it must be true or false"),
        ([{"type": "dropout", "p": 1}], r"layers\[0\] \(dropout\): p is 1; it must be a number"),
        ([{"type": "conv2d", "out_channels": 3}], "kernel_size is missing"),
        ([{"type": "unflatten", "shape": 8}], "shape is 8; it must be a list of 1 to 3 sizes"),
        ("relu", "layers is 'relu'; it must be a list of tables"),
        (["relu"], r"layers is \['relu'\]; it must be a list of tables"),
    ],
)
def test_wrong_layers_are_named_by_number_and_key(layers, complaint):
    with pytest.raises(ValueError, match=complaint):
        create("neural", {"layers": layers})


@pytest.mark.parametrize(
    ("layers", "complaint"),
    [
        ([{"type": "relu"}], r"the last layer gives \(64\) for each row, and the model needs \(3"),
        (
            [{"type": "unflatten", "shape": [3, 8, 8]}, {"type": "linear"}],
            r"layers\[0\] \(unflatten\): shape is \[3, 8, 8\]; it gets \(64\) for each row",
        ),
        (
            [{"type": "unflatten", "shape": [1, 8, 8]}, {"type": "linear"}],
            r"layers\[1\] \(linear\): it gets \(1, 8, 8\) for each row; put a flatten before it",
        ),
        (
            [{"type": "conv2d", "out_channels": 2, "kernel_size": 3}, {"type": "linear"}],
            r"layers\[0\] \(conv2d\): it gets \(64\) .* put an unflatten before it",
        ),
        (
            [
                {"type": "unflatten", "shape": [1, 8, 8]},
                {"type": "maxpool2d", "kernel_size": 9},
                {"type": "linear"},
            ],
            r"layers\[1\] \(maxpool2d\): kernel_size is 9; the image is 8 by 8",
        ),
        (
            [{"type": "linear", "out_features": 100_000_000}, {"type": "linear"}],
            r"layers\[0\] \(linear\): more than 100000000 weights",
        ),
    ],
)
def test_layers_that_do_not_fit_the_data_are_named(layers, complaint):
    with pytest.raises(DataError, match=complaint):
        create("neural", {"layers": layers}).initial_model([PROFILE])


@pytest.mark.parametrize("mode", MODES)
def test_gradients_are_sent_in_float64(mode):
    model = create("neural", {"mode": mode}).initial_model([PROFILE])
    assert model.vector.dtype == ("float64" if mode == "gradient" else "float32")


@pytest.mark.parametrize("name", ["os.system", "os:", ":system", "os:path.join", "o s:x", "../a:b"])
def test_builders_have_a_module_and_a_function(name):
    with pytest.raises(ValueError, match="it must be"):
        require_name(name)
