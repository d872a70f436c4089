"""torch modules and the flat vector: make a module, set its tensors, read tensors and gradients.

torch is imported in functions, because the coordinator has none.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xain_workloads.errors import DataError
from xain_workloads.model import Layout, Model, TensorSpec, Vector, flatten, unflatten
from xain_workloads.nets.neural_builders import load_builder
from xain_workloads.nets.neural_layers import build, plan
from xain_workloads.nets.neural_options import NeuralOptions
from xain_workloads.nets.threads import threads_in_use

ROWS_AT_A_TIME = 4096  # of a forward pass without gradients

# torch's global random numbers, of which dropout draws, belong to one training at a time.
_GLOBAL_RANDOM = Lock()


def import_torch() -> Any:
    """Import torch, and set its threads. Raises ModuleNotFoundError that says how to install it."""
    try:
        torch = import_module("torch")
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "this training needs PyTorch, which is not installed: pip install torch",
            name="torch",
        ) from error
    num_threads = threads_in_use()
    if num_threads is not None and torch.get_num_threads() != num_threads:
        torch.set_num_threads(num_threads)
    return torch


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed torch's global random numbers within the block, and leave them as they were."""
    torch = import_torch()
    devices = range(torch.cuda.device_count())
    repeatable = torch.backends.cudnn.flags(enabled=True, deterministic=True)
    with _GLOBAL_RANDOM, torch.random.fork_rng(devices), repeatable:
        # torch.manual_seed() does the same, and imports torch's compiler, which takes seconds.
        torch.default_generator.manual_seed(seed)
        if devices:
            torch.cuda.manual_seed_all(seed)
        yield


def device_of(options: NeuralOptions) -> Any:
    """The device to train on. Raises DataError if the options want a GPU and there is none."""
    torch = import_torch()
    has_gpu = torch.cuda.is_available()
    if options.device == "cuda" and not has_gpu:
        raise DataError('device is "cuda", and torch finds no GPU here; set it to "auto"')
    return torch.device("cuda" if has_gpu and options.device != "cpu" else "cpu")


def make_module(options: NeuralOptions, num_features: int, num_outputs: int) -> Any:
    """Make the network on the CPU. A layer list has arbitrary weights; a builder's are drawn from
    the seed, which makes tensors that do not travel alike at all participants.

    Raises DataError if the builder is not allowed, fails or makes no module.
    """
    torch = import_torch()
    builder = load_builder(options.builder) if options.builder else None
    with seeded(options.seed):
        if builder is None:
            module = build(plan(options.layers, num_features, num_outputs))
        else:
            try:
                module = builder(num_features, num_outputs)
            except Exception as error:  # its code may raise anything
                raise DataError(
                    f"the builder {options.builder!r} fails for {num_features} features and"
                    f" {num_outputs} outputs: {type(error).__name__}: {error}"
                ) from error
    if not isinstance(module, torch.nn.Module):
        raise DataError(
            f"the builder {options.builder!r} returned {type(module).__name__}, no torch module"
        )
    return module.to(getattr(torch, options.dtype))


def layout_of(module: Any, dtype: str) -> Layout:
    """The tensors that travel, in the order of state_dict(): trainable parameters, and buffers of
    floating point as statistics. A tied parameter is listed under its first name only.

    Raises DataError for a module without trainable parameters.
    """
    weights = {name for name, weight in module.named_parameters() if weight.requires_grad}
    statistics = {name for name, values in module.named_buffers() if values.is_floating_point()}
    layout = tuple(
        TensorSpec(name, tuple(values.shape), dtype, "weight" if name in weights else "statistic")
        for name, values in module.state_dict().items()
        if name in weights or name in statistics
    )
    if not weights:
        raise DataError("the network has no parameter that requires a gradient: nothing to train")
    return layout


def load_model(module: Any, model: Model) -> None:
    """Copy a model's tensors into a module. Raises ValueError if they are not the module's."""
    torch = import_torch()
    ours = {spec.name: spec.shape for spec in layout_of(module, "float32")}
    theirs = {spec.name: spec.shape for spec in model.layout}
    if ours != theirs:
        name = next(name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name))
        raise ValueError(
            f"tensor {name!r} has shape {theirs.get(name)} in the model and {ours.get(name)} in the"
            " network"
        )
    arrays = unflatten(model.vector, model.layout)
    state = {name: torch.from_numpy(np.array(array)) for name, array in arrays.items()}
    module.load_state_dict(state, strict=False)  # without counters and what is frozen


def vector_of(module: Any, layout: Layout) -> Vector:
    """The tensors of a module as one vector."""
    state = module.state_dict()
    return flatten({spec.name: state[spec.name].cpu().numpy() for spec in layout}, layout)


def gradient_of(module: Any, layout: Layout) -> Vector:
    """The gradients of a module's parameters as one vector; statistics are as they are, since the
    rule "gradient" averages them. A parameter that took no part has a gradient of 0."""
    state, weights = module.state_dict(), dict(module.named_parameters())
    arrays = {}
    for spec in layout:
        if spec.kind == "statistic":
            arrays[spec.name] = state[spec.name].cpu().numpy()
        else:
            found = weights[spec.name].grad
            arrays[spec.name] = (
                np.zeros(spec.shape) if found is None else found.detach().cpu().numpy()
            )
    return flatten(arrays, layout)


@dataclass(frozen=True, slots=True)
class Network:
    """A module on a device, and arrays in and out of it.

    dtype: of torch. num_outputs: columns that its outputs must have.
    """

    module: Any
    device: Any
    dtype: Any
    num_outputs: int

    def inputs(self, features: NDArray[np.float64]) -> Any:
        """(n, p) rows as a tensor."""
        return import_torch().as_tensor(features, dtype=self.dtype, device=self.device)

    def targets(self, target: NDArray[Any]) -> Any:
        """(n,) targets as loss_of() takes them: positions of classes stay whole numbers."""
        torch = import_torch()
        dtype = torch.int64 if target.dtype.kind == "i" else self.dtype
        return torch.as_tensor(target, dtype=dtype, device=self.device)

    def outputs(self, inputs: Any) -> Any:
        """(n, num_outputs) of a batch. Raises DataError if a builder's module gives others."""
        outputs = self.module(inputs)
        expected = (len(inputs), self.num_outputs)
        if tuple(outputs.shape) != expected:
            raise DataError(
                f"the network gives outputs of shape {tuple(outputs.shape)} for {len(inputs)} rows;"
                f" it must give {expected}"
            )
        return outputs

    def scores(self, features: NDArray[np.float64]) -> NDArray[np.float64]:
        """(n, num_outputs) float64, in evaluation mode and without gradients."""
        # Switches dropout and batch normalisation to evaluation mode; runs no text as code.
        self.module.train(False)
        parts = [np.empty((0, self.num_outputs))]
        with import_torch().no_grad():
            for start in range(0, len(features), ROWS_AT_A_TIME):
                inputs = self.inputs(features[start : start + ROWS_AT_A_TIME])
                parts.append(self.outputs(inputs).cpu().double().numpy())
        return np.concatenate(parts)


def open_network(
    options: NeuralOptions, model: Model, num_features: int, num_outputs: int
) -> Network:
    """The network with the weights of a model, on the device of the options.

    Raises ValueError if the model's tensors are not the network's, and DataError as make_module()
    and device_of() do.
    """
    module = make_module(options, num_features, num_outputs)
    load_model(module, model)
    device = device_of(options)
    return Network(module.to(device), device, getattr(import_torch(), options.dtype), num_outputs)


def loss_of(outputs: Any, target: Any, weights: Any = None) -> Any:
    """The mean loss. outputs: (n, k). target: (n,), positions of classes (int64) for the
    cross-entropy, or numbers of the outputs' type for the mean squared error. weights: (n,) of the
    rows of classes; None: 1 each."""
    functional = import_torch().nn.functional
    if target.is_floating_point():
        return functional.mse_loss(outputs[:, 0], target)
    if weights is None:
        return functional.cross_entropy(outputs, target)
    return (functional.cross_entropy(outputs, target, reduction="none") * weights).mean()


def corrector_of(
    module: Any, layout: Layout, options: NeuralOptions, correction: NDArray[np.float64] | None
) -> Callable[[], None]:
    """Make the function that adds the remedy's term to the gradients of a module, in place.

    correction: of the control variates, as a vector of this layout; None without them.
    Source of the proximal term: Li et al. 2020, "Federated Optimization in Heterogeneous Networks",
    equation 2.
    """
    torch = import_torch()
    weights = {name: one for name, one in module.named_parameters() if one.requires_grad}
    if correction is not None:
        arrays = unflatten(correction, layout)
        added = {name: torch.as_tensor(arrays[name]).to(one) for name, one in weights.items()}
    mu = options.proximal_mu if options.remedy == "proximal" else 0.0
    starts = {name: one.detach().clone() for name, one in weights.items()} if mu else {}

    def correct() -> None:
        """Add the correction, or the proximal term, to all gradients, in place."""
        with torch.no_grad():
            for name, weight in weights.items():
                if weight.grad is None and (starts or correction is not None):
                    weight.grad = torch.zeros_like(weight)
                if correction is not None:
                    weight.grad.add_(added[name])
                elif starts:
                    weight.grad.add_(weight - starts[name], alpha=mu)

    return correct


def optimizer_of(module: Any, options: NeuralOptions) -> Any:
    """A fresh optimiser of the module's trainable parameters."""
    optim = import_torch().optim
    weights = [weight for weight in module.parameters() if weight.requires_grad]
    if options.optimizer == "adam":
        return optim.Adam(weights, options.learning_rate, weight_decay=options.weight_decay)
    return optim.SGD(
        weights,
        options.learning_rate,
        momentum=options.momentum,
        weight_decay=options.weight_decay,
    )
