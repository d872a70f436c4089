"""Training of multi-layer perceptrons by PyTorch, on a GPU with CUDA where there is one.

The steps are those of scikit-learn's MLPClassifier and MLPRegressor: the same shuffles, batches,
losses, penalty and optimisers, in float64. The weights are the same up to rounding.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from xain_workloads.mlp_options import MlpOptions
from xain_workloads.supervised import Array

_ADAM_BETAS, _ADAM_EPSILON = (0.9, 0.999), 1e-8  # defaults of scikit-learn

_ACTIVATIONS: Mapping[str, Callable[[Any], Any]] = {
    "relu": torch.relu,
    "tanh": torch.tanh,
    "logistic": torch.sigmoid,
    "identity": lambda values: values,
}


def train(
    options: MlpOptions,
    layers: Sequence[tuple[Array, Array]],
    features: Array,
    target: NDArray[Any],
    *,
    batch_rows: int,
    seeds: Sequence[int],
) -> int:
    """Train the layers in place, one epoch per seed.

    layers: (coef, intercept) of each layer, float64.
    target: (n,) positions of classes, int64, or float64 for regression.
    seeds: of the shuffle of each epoch.
    Returns the number of epochs after which all weights were finite; the first other one ends the
    training.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    # On the CPU the tensors share the memory of the arrays.
    network = [
        [torch.from_numpy(array).to(device).requires_grad_() for array in layer] for layer in layers
    ]
    inputs = torch.from_numpy(features).to(device)
    expected = torch.from_numpy(target).to(device)
    optimizer = _optimizer(options, network)
    num_steps = 0
    num_finite = 0
    for seed in seeds:
        shuffled = np.arange(len(target))
        np.random.RandomState(seed).shuffle(shuffled)  # as sklearn.utils.shuffle does
        order = torch.from_numpy(shuffled).to(device)
        for start in range(0, len(target), batch_rows):
            rows = order[start : start + batch_rows]
            num_steps += 1
            _set_up_step(optimizer, options, num_steps, len(rows))
            optimizer.zero_grad()
            scores = _scores(network, inputs[rows], _ACTIVATIONS[options.activation])
            _loss(options.task, scores, expected[rows]).backward()
            optimizer.step()
        if not all(tensor.isfinite().all() for layer in network for tensor in layer):
            break
        num_finite += 1
    for layer, tensors in zip(layers, network, strict=True):
        for array, tensor in zip(layer, tensors, strict=True):
            array[...] = tensor.detach().cpu().numpy()
    return num_finite


def _scores(network: Sequence[Sequence[Any]], inputs: Any, activation: Callable[[Any], Any]) -> Any:
    """(n, k) outputs before softmax or logistic function."""
    values = inputs
    for coef, intercept in network[:-1]:
        values = activation(torch.addmm(intercept, values, coef))
    coef, intercept = network[-1]
    return torch.addmm(intercept, values, coef)


def _loss(task: str, scores: Any, target: Any) -> Any:
    """The mean over rows, without the penalty. scores: (n, k). target: as train() takes it."""
    if task == "regression":
        return functional.mse_loss(scores[:, 0], target) / 2
    if scores.shape[1] == 1:
        return functional.binary_cross_entropy_with_logits(scores[:, 0], target.to(scores.dtype))
    return functional.cross_entropy(scores, target)


def _optimizer(options: MlpOptions, network: Sequence[Sequence[Any]]) -> torch.optim.Optimizer:
    """A fresh optimiser. Its first group of parameters are the coefs, which have a penalty."""
    groups = [{"params": list(tensors)} for tensors in zip(*network, strict=True)]
    # fused: one pass over the weights a step, which halves the time of a step of large networks.
    if options.solver == "adam":
        return torch.optim.Adam(
            groups, lr=options.learning_rate_init, betas=_ADAM_BETAS, fused=True
        )
    return torch.optim.SGD(
        groups,
        lr=options.learning_rate_init,
        momentum=options.momentum,
        nesterov=options.momentum > 0,
        fused=True,
    )


def _set_up_step(
    optimizer: torch.optim.Optimizer, options: MlpOptions, step: int, num_rows: int
) -> None:
    """Set what scikit-learn does otherwise than PyTorch. step: from 1 on."""
    coefs, _ = optimizer.param_groups
    # scikit-learn divides the penalty, too, by the rows of the batch.
    coefs["weight_decay"] = options.alpha / num_rows
    if options.solver == "adam":
        # scikit-learn adds epsilon before it corrects the bias of the second moment, PyTorch after.
        for group in optimizer.param_groups:
            group["eps"] = _ADAM_EPSILON / (1 - _ADAM_BETAS[1] ** step) ** 0.5
