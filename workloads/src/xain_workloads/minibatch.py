"""Training of networks by steps over mini-batches of rows, in NumPy. One layer is a linear model.

Shuffles, batches, penalty and optimisers are those of scikit-learn's MLPClassifier and
MLPRegressor, whose weights the same steps give up to rounding.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from xain_workloads.losses import Array

# (n, k) scores and (n,) targets to (n,) losses and (n, k) derivatives by the scores.
Loss = Callable[[Array, NDArray[Any]], tuple[Array, Array]]

_ADAM_BETAS, _ADAM_EPSILON = (0.9, 0.999), 1e-8  # defaults of scikit-learn


class Layer(NamedTuple):
    """Weights of a layer, or their gradient. coef: (inputs, outputs). intercept: (outputs,)."""

    coef: Array
    intercept: Array


# Views into a flat vector of all weights, one Layer each, the first one first.
LayersOf = Callable[[Array], Sequence[Layer]]


@dataclass(frozen=True, slots=True)
class Steps:
    """How weights are changed by a mini-batch.

    batch_rows: rows of a step; the last one of an epoch has fewer.
    activation: of the hidden layers: "relu", "tanh", "logistic" or "identity".
    solver: "sgd" with Nesterov's momentum, or "adam". Both begin without velocity or moments.
    alpha: weight of the L2 penalty of the coefs; scikit-learn divides it by the rows of the step.
    """

    loss: Loss
    batch_rows: int
    activation: str = "identity"
    solver: str = "sgd"
    learning_rate: float = 0.01
    momentum: float = 0.9
    alpha: float = 0.0


def train(
    steps: Steps,
    vector: Array,
    layers_of: LayersOf,
    features: Array,
    target: NDArray[Any],
    *,
    seeds: Sequence[int],
) -> int:
    """Train the vector in place, one epoch per seed, which is that of the epoch's shuffle.

    vector: (d,) float64. features: (n, p). target: (n,), as the loss takes it.
    Returns the number of epochs after which all weights were finite; the first other one ends the
    training.
    """
    layers = layers_of(vector)
    gradient = np.zeros_like(vector)
    gradients = layers_of(gradient)
    step = _adam(steps, vector) if steps.solver == "adam" else _nesterov(steps, vector)
    with np.errstate(over="ignore", invalid="ignore"):
        for num_finite, seed in enumerate(seeds):
            order = np.arange(len(target))
            np.random.RandomState(seed).shuffle(order)  # as sklearn.utils.shuffle does
            for start in range(0, len(target), steps.batch_rows):
                rows = order[start : start + steps.batch_rows]
                _fill(steps, gradients, layers, features[rows], target[rows])
                step(gradient)
            if not np.isfinite(vector).all():
                return num_finite
    return len(seeds)


def scores(activation: str, layers: Sequence[Layer], features: Array) -> Array:
    """(n, p) features to (n, k) outputs of the last layer."""
    return _forward(activation, layers, features)[-1]


def _forward(activation: str, layers: Sequence[Layer], features: Array) -> list[Array]:
    """The features, the activated outputs of each hidden layer, and the outputs of the last one."""
    values = [features]
    for layer in layers[:-1]:
        values.append(_activate(activation, values[-1] @ layer.coef + layer.intercept))
    values.append(values[-1] @ layers[-1].coef + layers[-1].intercept)
    return values


def _fill(
    steps: Steps,
    gradients: Sequence[Layer],
    layers: Sequence[Layer],
    features: Array,
    target: NDArray[Any],
) -> None:
    """Write the gradient of the mean loss of these rows, with the penalty, into `gradients`."""
    values = _forward(steps.activation, layers, features)
    _, deltas = steps.loss(values[-1], target)
    num_rows = len(features)
    for index in reversed(range(len(layers))):
        coef, intercept = gradients[index]
        np.matmul(values[index].T, deltas, out=coef)
        coef += steps.alpha * layers[index].coef
        coef /= num_rows
        np.mean(deltas, axis=0, out=intercept)
        if index:
            deltas = deltas @ layers[index].coef.T
            _times_derivative(steps.activation, values[index], deltas)


def _activate(activation: str, values: Array) -> Array:
    match activation:
        case "relu":
            return np.maximum(values, 0.0)
        case "tanh":
            return np.tanh(values)
        case "logistic":
            return np.asarray(1.0 / (1.0 + np.exp(-values)))
    return values


def _times_derivative(activation: str, activated: Array, deltas: Array) -> None:
    """Multiply deltas, in place, by the activation's derivative where it gave these values."""
    match activation:
        case "relu":
            deltas[activated == 0] = 0.0
        case "tanh":
            deltas *= 1 - np.square(activated)
        case "logistic":
            deltas *= activated * (1 - activated)


def _nesterov(steps: Steps, vector: Array) -> Callable[[Array], None]:
    """A function that takes a step down a gradient; Sutskever et al. 2013, section 2."""
    velocity = np.zeros_like(vector)

    def step(gradient: Array) -> None:
        change = steps.learning_rate * gradient
        np.subtract(steps.momentum * velocity, change, out=velocity)
        np.add(vector, steps.momentum * velocity - change, out=vector)

    return step


def _adam(steps: Steps, vector: Array) -> Callable[[Array], None]:
    """A function that takes a step down a gradient; Kingma and Ba 2015, Algorithm 1."""
    first, second = np.zeros_like(vector), np.zeros_like(vector)
    beta1, beta2 = _ADAM_BETAS
    numbers = count(1)

    def step(gradient: Array) -> None:
        np.add(beta1 * first, (1 - beta1) * gradient, out=first)
        np.add(beta2 * second, (1 - beta2) * np.square(gradient), out=second)
        number = next(numbers)
        size = steps.learning_rate * np.sqrt(1 - beta2**number) / (1 - beta1**number)
        np.subtract(vector, size * first / (np.sqrt(second) + _ADAM_EPSILON), out=vector)

    return step
