"""Networks as a list of layers in a configuration.

    layers = [
        { type = "unflatten", shape = [1, 8, 8] },
        { type = "conv2d", out_channels = 16, kernel_size = 3, padding = 1 },
        { type = "relu" },
        { type = "maxpool2d", kernel_size = 2 },
        { type = "flatten" },
        { type = "linear" },
    ]

Names and defaults are those of torch.nn. Sizes of inputs are inferred from layer to layer; the last
layer, a "linear" without out_features, has as many outputs as the model needs. The coordinator,
which has no torch, computes layout and initial weights from the list alone.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod, sqrt
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from xain_workloads.chance import random_state
from xain_workloads.errors import DataError
from xain_workloads.model import Layout, TensorSpec
from xain_workloads.options import require_range

MAX_LAYERS = 1000
MAX_WEIGHTS = 100_000_000
Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor of a layer.

    bound: initial values are uniform in [-bound, bound], or all `fill` if the bound is 0.
    """

    name: str
    shape: Shape
    bound: float = 0.0
    fill: float = 0.0
    kind: Literal["weight", "statistic"] = "weight"


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer whose sizes are known.

    module: name of a class of torch.nn. arguments: of that class.
    shape: of one row after the layer. tensors: in the order of state_dict(), without counters.
    """

    module: str
    arguments: Mapping[str, Any]
    shape: Shape
    tensors: tuple[Tensor, ...] = ()


@dataclass(frozen=True, slots=True)
class _Kind:
    """A type of layer. required, optional: its keys, with a check of the value and the default."""

    plan: Callable[[dict[str, Any], Shape], Layer]
    required: Mapping[str, Callable[[str, Any], None]] = field(default_factory=dict)
    optional: Mapping[str, tuple[Callable[[str, Any], None], Any]] = field(default_factory=dict)


def require_layers(layers: Sequence[Mapping[str, Any]]) -> None:
    """Check names and settings of layers. Raises ValueError that names layer and key."""
    if len(layers) > MAX_LAYERS:
        raise ValueError(f"layers has {len(layers)} entries; at most {MAX_LAYERS} are allowed")
    for number, given in enumerate(layers):
        _settings(number, given, is_last=number == len(layers) - 1)


def plan(
    layers: Sequence[Mapping[str, Any]], num_features: int, num_outputs: int
) -> tuple[Layer, ...]:
    """Compute the sizes of a network's layers. Raises DataError that names the layer if one does
    not fit what comes before it, or the last does not have num_outputs outputs."""
    shape: Shape = (num_features,)
    planned: list[Layer] = []
    num_weights = 0
    for number, given in enumerate(layers):
        is_last = number == len(layers) - 1
        name, settings = _settings(number, given, is_last=is_last)
        if name == "linear" and is_last and settings["out_features"] is None:
            settings["out_features"] = num_outputs
        try:
            layer = _KINDS[name].plan(settings, shape)
        except DataError as error:
            raise DataError(f"{_where(number, name)}: {error}") from None
        num_weights += sum(prod(tensor.shape) for tensor in layer.tensors)
        if num_weights > MAX_WEIGHTS:
            raise DataError(f"{_where(number, name)}: more than {MAX_WEIGHTS} weights up to here")
        planned.append(layer)
        shape = layer.shape
    if shape != (num_outputs,):
        raise DataError(
            f"layers[{len(layers) - 1}]: the last layer gives {_shown(shape)} for each row, and the"
            f" model needs ({num_outputs}); end with a linear layer without out_features"
        )
    return tuple(planned)


def layout_of_layers(layers: Sequence[Layer], dtype: str) -> Layout:
    """Tensors in the order of the network, named as torch.nn.Sequential names them."""
    return tuple(
        TensorSpec(f"{number}.{tensor.name}", tensor.shape, dtype, tensor.kind)
        for number, layer in enumerate(layers)
        for tensor in layer.tensors
    )


def initial_tensors(layers: Sequence[Layer], seed: int) -> dict[str, NDArray[Any]]:
    """Draw initial values by name, float64, from the distributions that torch.nn draws from."""
    chance = random_state(seed)
    return {
        f"{number}.{tensor.name}": chance.uniform(-tensor.bound, tensor.bound, tensor.shape)
        if tensor.bound
        else np.full(tensor.shape, tensor.fill)
        for number, layer in enumerate(layers)
        for tensor in layer.tensors
    }


def build(layers: Sequence[Layer]) -> Any:
    """A torch.nn.Sequential of these layers; its weights are still to be set."""
    from torch import nn

    return nn.Sequential(*(getattr(nn, layer.module)(**layer.arguments) for layer in layers))


# --- checks of values ---


def _whole(at_least: int) -> Callable[[str, Any], None]:
    """Make a check that refuses any value but a whole number in these bounds."""

    def check(key: str, value: Any) -> None:
        if type(value) is not int:
            raise ValueError(f"{key} is {value!r}; it must be a whole number")
        require_range(key, value, at_least=at_least, at_most=MAX_WEIGHTS)

    return check


def _share(key: str, value: Any) -> None:
    if type(value) not in (int, float) or not 0 <= value < 1:
        raise ValueError(f"{key} is {value!r}; it must be a number from 0 to below 1")


def _positive(key: str, value: Any) -> None:
    if type(value) not in (int, float):
        raise ValueError(f"{key} is {value!r}; it must be a number")
    require_range(key, value, above=0, at_most=1)


def _switch(key: str, value: Any) -> None:
    if type(value) is not bool:
        raise ValueError(f"{key} is {value!r}; it must be true or false")


def _sizes(key: str, value: Any) -> None:
    """Raise ValueError unless the value is a list of 1 to 3 sizes."""
    if not isinstance(value, list | tuple) or not value or len(value) > 3:
        raise ValueError(f"{key} is {value!r}; it must be a list of 1 to 3 sizes")
    for size in value:
        _whole(1)(key, size)


def _settings(
    number: int, given: Mapping[str, Any], *, is_last: bool
) -> tuple[str, dict[str, Any]]:
    """Check the keys of a layer: (type, settings with defaults). Raises ValueError."""
    name = given.get("type")
    if not isinstance(name, str) or name not in _KINDS:
        raise ValueError(
            f"layers[{number}].type is {name!r}; choose one of: {', '.join(sorted(_KINDS))}"
        )
    kind = _KINDS[name]
    known = {**kind.required, **{key: check for key, (check, _) in kind.optional.items()}}
    settings = {key: default for key, (_, default) in kind.optional.items()}
    for key, value in given.items():
        if key == "type":
            continue
        if key not in known:
            raise ValueError(
                f"{_where(number, name)}: unknown key {key!r}; known: {', '.join(['type', *known])}"
            )
        try:
            known[key](key, value)
        except ValueError as error:
            raise ValueError(f"{_where(number, name)}: {error}") from None
        settings[key] = value
    for key in kind.required:
        if key not in settings and not (key == "out_features" and is_last):
            raise ValueError(f"{_where(number, name)}: {key} is missing")
        settings.setdefault(key, None)
    return name, settings


def _where(number: int, name: str) -> str:
    return f"layers[{number}] ({name})"


def _shown(shape: Shape) -> str:
    return f"({', '.join(map(str, shape))})"


# --- types of layers ---


def _plan_linear(settings: dict[str, Any], shape: Shape) -> Layer:
    if len(shape) != 1:
        raise DataError(f"it gets {_shown(shape)} for each row; put a flatten before it")
    (width,), units = shape, settings["out_features"]
    arguments = {"in_features": width, "out_features": units, "bias": settings["bias"]}
    return Layer("Linear", arguments, (units,), _affine((units, width), settings["bias"]))


def _plan_conv2d(settings: dict[str, Any], shape: Shape) -> Layer:
    channels, *sizes = _require_image(shape)
    kernel, out = settings["kernel_size"], settings["out_channels"]
    tensors = _affine((out, channels, kernel, kernel), settings["bias"])
    return Layer(
        "Conv2d", {"in_channels": channels, **settings}, (out, *_slid(settings, sizes)), tensors
    )


def _plan_maxpool2d(settings: dict[str, Any], shape: Shape) -> Layer:
    channels, *sizes = _require_image(shape)
    settings = {**settings, "stride": settings["stride"] or settings["kernel_size"]}
    if settings["padding"] > settings["kernel_size"] // 2:
        raise DataError("padding must be at most half of kernel_size")
    return Layer("MaxPool2d", settings, (channels, *_slid(settings, sizes)))


def _flatten(settings: dict[str, Any], shape: Shape) -> Layer:
    return Layer("Flatten", {}, (prod(shape),))


def _plan_unflatten(settings: dict[str, Any], shape: Shape) -> Layer:
    sizes = tuple(settings["shape"])
    if len(shape) != 1 or prod(sizes) != shape[0]:
        raise DataError(f"shape is {list(sizes)}; it gets {_shown(shape)} for each row")
    return Layer("Unflatten", {"dim": 1, "unflattened_size": sizes}, sizes)


def _batchnorm1d(settings: dict[str, Any], shape: Shape) -> Layer:
    if len(shape) > 2:
        raise DataError(f"it gets {_shown(shape)} for each row; take batchnorm2d")
    return _plan_batchnorm("BatchNorm1d", settings, shape)


def _batchnorm2d(settings: dict[str, Any], shape: Shape) -> Layer:
    return _plan_batchnorm("BatchNorm2d", settings, _require_image(shape))


def _plan_batchnorm(module: str, settings: dict[str, Any], shape: Shape) -> Layer:
    size = (shape[0],)
    tensors = (
        Tensor("weight", size, fill=1.0),
        Tensor("bias", size),
        Tensor("running_mean", size, kind="statistic"),
        Tensor("running_var", size, fill=1.0, kind="statistic"),
    )
    return Layer(module, {"num_features": shape[0], **settings}, shape, tensors)


def _layernorm(settings: dict[str, Any], shape: Shape) -> Layer:
    tensors = (Tensor("weight", shape, fill=1.0), Tensor("bias", shape))
    return Layer("LayerNorm", {"normalized_shape": shape, **settings}, shape, tensors)


def _plain(module: str) -> Callable[[dict[str, Any], Shape], Layer]:
    return lambda settings, shape: Layer(module, settings, shape)


def _affine(shape: Shape, has_bias: bool) -> tuple[Tensor, ...]:
    """Weight and bias, as torch draws them: uniform, by the inputs of one output."""
    bound = 1 / sqrt(prod(shape[1:]))
    weight, bias = Tensor("weight", shape, bound), Tensor("bias", shape[:1], bound)
    return (weight, bias) if has_bias else (weight,)


def _require_image(shape: Shape) -> Shape:
    if len(shape) != 3:
        raise DataError(
            f"it gets {_shown(shape)} for each row and needs (channels, height, width); put an"
            " unflatten before it"
        )
    return shape


def _slid(settings: Mapping[str, Any], sizes: Sequence[int]) -> Shape:
    """Height and width after a kernel has slid over an image. Raises DataError if it is larger."""
    kernel, stride, padding = (settings[key] for key in ("kernel_size", "stride", "padding"))
    after = tuple((size + 2 * padding - kernel) // stride + 1 for size in sizes)
    if min(after) < 1:
        raise DataError(f"kernel_size is {kernel}; the image is {sizes[0]} by {sizes[1]}")
    return after


_BATCHNORM = {"momentum": (_positive, 0.1), "eps": (_positive, 1e-5)}
_KINDS: Mapping[str, _Kind] = {
    "batchnorm1d": _Kind(_batchnorm1d, optional=_BATCHNORM),
    "batchnorm2d": _Kind(_batchnorm2d, optional=_BATCHNORM),
    "conv2d": _Kind(
        _plan_conv2d,
        required={"out_channels": _whole(1), "kernel_size": _whole(1)},
        optional={
            "stride": (_whole(1), 1),
            "padding": (_whole(0), 0),
            "bias": (_switch, True),
        },
    ),
    "dropout": _Kind(_plain("Dropout"), optional={"p": (_share, 0.5)}),
    "flatten": _Kind(_flatten),
    "layernorm": _Kind(_layernorm, optional={"eps": (_positive, 1e-5)}),
    "linear": _Kind(
        _plan_linear, required={"out_features": _whole(1)}, optional={"bias": (_switch, True)}
    ),
    "maxpool2d": _Kind(
        _plan_maxpool2d,
        required={"kernel_size": _whole(1)},
        optional={"stride": (_whole(1), None), "padding": (_whole(0), 0)},
    ),
    "relu": _Kind(_plain("ReLU")),
    "sigmoid": _Kind(_plain("Sigmoid")),
    "tanh": _Kind(_plain("Tanh")),
    "unflatten": _Kind(_plan_unflatten, required={"shape": _sizes}),
}
