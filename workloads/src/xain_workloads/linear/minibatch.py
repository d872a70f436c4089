"""Training of networks by steps over mini-batches of rows, in NumPy. One layer is a linear model.

Shuffles, batches, penalty and optimisers are those of scikit-learn's MLPClassifier and
MLPRegressor, whose weights the same steps give up to rounding. For one layer, one row a step and no
momentum they are those of its SGDClassifier and SGDRegressor in that order of the rows.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from xain_workloads.measures.losses import Array
from xain_workloads.model import Vector
from xain_workloads.supervised import DIVERGED_SCORE, epoch_seed
from xain_workloads.time_limit import check_time

# (n, k) scores and (n,) targets to (n,) losses and (n, k) derivatives by the scores.
Loss = Callable[[Array, NDArray[Any]], tuple[Array, Array]]

# Chosen by benchmarks/learning.py. With 32 rows a step, seven sites with 57 rows each are 0.04
# behind centralised training on breast_cancer; with an eighth of the rows, seven sites with 180 are
# 0.013 behind on digits.
STEPS_OF_SMALL_SITES = 16
SMALLEST_BATCH, LARGEST_BATCH = 4, 32

_ADAM_BETAS, _ADAM_EPSILON = (0.9, 0.999), 1e-8  # defaults of scikit-learn


def batch_rows(num_rows: int) -> int:
    """Rows of a step at a site with this many rows, where the options do not say it: a sixteenth of
    the rows, from SMALLEST_BATCH to LARGEST_BATCH.

    So an epoch of a small site has several steps. In one step momentum does nothing, as it begins
    anew with each round.
    """
    return min(max(num_rows // STEPS_OF_SMALL_SITES, SMALLEST_BATCH), LARGEST_BATCH)


class Layer(NamedTuple):
    """Weights of a layer, or their gradient. coef: (inputs, outputs). intercept: (outputs,)."""

    coef: Array
    intercept: Array


# Views into a flat vector of all weights, one Layer each, the first one first. What is no view is
# not trained.
LayersOf = Callable[[Array], Sequence[Layer]]


@dataclass(frozen=True, slots=True)
class Penalty:
    """The penalty on the coefs, alpha * (l1_ratio * |w|_1 + (1 - l1_ratio) * |w|_2**2 / 2).

    is_divided: by the rows of the step, as that of scikit-learn's networks.
    """

    alpha: float = 0.0
    l1_ratio: float = 0.0
    is_divided: bool = False

    def decay(self, num_rows: int, step_size: float) -> float:
        """Factor of the coefs in the gradient. A step takes them to zero at most."""
        if self.is_divided:
            return self.alpha / num_rows
        return min((1 - self.l1_ratio) * self.alpha, 1 / step_size if step_size else np.inf)

    def threshold(self, step_size: float) -> float:
        """The amount that a step takes from the size of each coef, down to zero."""
        return self.l1_ratio * self.alpha * step_size


NO_PENALTY = Penalty()


class _Batch(NamedTuple):
    """Rows of a step. weights: (m,) of the rows in the loss; None: 1 each."""

    features: Array
    target: NDArray[Any]
    weights: Array | None


@dataclass(frozen=True, slots=True)
class Steps:
    """How weights are changed by a mini-batch.

    step_size: by the number of the step in this training, from 0, and the rows of the step.
    batch_rows: rows of a step; the last one of an epoch has fewer.
    activation: of the hidden layers: "relu", "tanh", "logistic" or "identity".
    solver: "sgd" with Nesterov's momentum, or "adam". Both begin without velocity or moments.
    penalty: by its subgradient, except for the L1 part, which is a soft threshold after the step.
    """

    loss: Loss
    step_size: Callable[[int, int], float]
    batch_rows: int
    activation: str = "identity"
    solver: str = "sgd"
    momentum: float = 0.0
    penalty: Penalty = NO_PENALTY


@dataclass(frozen=True, slots=True)
class Trained:
    """num_epochs: after which all weights were finite. path: see path_of(); of the solver "sgd"."""

    num_epochs: int
    path: float


# Changes a gradient in place. Both (d,): the weights, and their gradient.
Corrected = Callable[[Array, Array], None]


def train(
    steps: Steps,
    vector: Array,
    layers_of: LayersOf,
    features: Array,
    target: NDArray[Any],
    *,
    seeds: Sequence[int],
    weights: Array | None = None,
    corrected: Corrected | None = None,
) -> Trained:
    """Train the vector in place, one epoch per seed, which is that of the epoch's shuffle.

    vector: (d,) float64. features: (n, p). target: (n,), as the loss takes it.
    weights: (n,) of the rows in the loss; None: 1 each. corrected: changes each gradient.
    The first epoch after which not all weights are finite ends the training.
    """
    layers = layers_of(vector)
    gradient = np.zeros_like(vector)
    gradients = layers_of(gradient)
    step = _adam(vector) if steps.solver == "adam" else _nesterov(steps.momentum, vector)
    sizes: list[float] = []
    with np.errstate(over="ignore", invalid="ignore"):
        for num_finite, seed in enumerate(seeds):
            order = np.arange(len(target))
            np.random.RandomState(seed).shuffle(order)  # as sklearn.utils.shuffle does
            for start in range(0, len(target), steps.batch_rows):
                rows = order[start : start + steps.batch_rows]
                size = steps.step_size(len(sizes), len(rows))
                sizes.append(size)
                decay = steps.penalty.decay(len(rows), size)
                batch = _Batch(
                    features[rows], target[rows], None if weights is None else weights[rows]
                )
                _fill(steps, gradients, layers, batch, decay)
                if corrected is not None:
                    corrected(vector, gradient)
                step(gradient, size)
                if (threshold := steps.penalty.threshold(size)) > 0:
                    _shrink(layers, threshold)
                check_time()
            if not np.isfinite(vector).all():
                return Trained(num_finite, 0.0)
    return Trained(len(seeds), path_of(steps.momentum, sizes, is_nesterov=True))


def train_epochs(
    steps: Steps,
    vector: Array,
    layers_of: LayersOf,
    features: Array,
    target: NDArray[Any],
    *,
    epochs: range,
    seed: int,
    dtype: str,
    diverged: Callable[[int], Exception],
    weights: Array | None = None,
    corrected: Corrected | None = None,
) -> tuple[Vector, Array, float]:
    """Train the vector in place as train() does, by the epochs of these numbers.

    epochs: numbers since the first round. seed: of the participant. dtype: of the model.
    Returns the (d,) weights in this dtype, the (n, k) outputs for the rows, and Trained.path.
    Raises diverged(epoch) if weights or outputs run away.
    """
    seeds = [epoch_seed(seed, epoch) for epoch in epochs]
    done = train(
        *(steps, vector, layers_of, features, target),
        seeds=seeds,
        weights=weights,
        corrected=corrected,
    )
    if done.num_epochs < len(epochs):
        raise diverged(epochs[done.num_epochs])
    with np.errstate(over="ignore", invalid="ignore"):  # beyond float32: infinite, and told below
        trained: Vector = vector.astype(dtype)
        outputs = scores(steps.activation, layers_of(vector), features)
    if not (np.isfinite(trained).all() and np.abs(outputs).max() < DIVERGED_SCORE):
        raise diverged(epochs[-1])
    return trained, outputs, done.path


@dataclass(frozen=True, slots=True)
class Gradient:
    """vector: (d,) gradient. scores: (n, k) of the rows. loss: their mean, without the penalty."""

    vector: Array
    scores: Array
    loss: float


def gradient_of(
    steps: Steps,
    vector: Array,
    layers_of: LayersOf,
    features: Array,
    target: NDArray[Any],
    *,
    decay: float,
    weights: Array | None = None,
) -> Gradient:
    """The gradient of the mean loss of all these rows, plus decay * coefs. Arguments as of
    train()."""
    gradient = np.zeros_like(vector)
    batch = _Batch(features, target, weights)
    with np.errstate(over="ignore", invalid="ignore"):
        outputs, losses = _fill(steps, layers_of(gradient), layers_of(vector), batch, decay)
        loss = float(losses.mean() if weights is None else np.mean(losses * weights))
    return Gradient(gradient, outputs, loss)


def path_of(momentum: float, sizes: Sequence[float], *, is_nesterov: bool) -> float:
    """The length of all steps of these sizes down a gradient of 1, without velocity at first."""
    velocity = path = 0.0
    for size in sizes:
        velocity = momentum * velocity + size
        path += momentum * velocity + size if is_nesterov else velocity
    return path


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
    batch: _Batch,
    decay: float,
) -> tuple[Array, Array]:
    """Write the gradient of the mean loss of these rows, and decay * coefs, into `gradients`.

    Returns (n, k) scores and (n,) losses of the rows.
    """
    values = _forward(steps.activation, layers, batch.features)
    losses, deltas = steps.loss(values[-1], batch.target)
    if batch.weights is not None:
        deltas = deltas * batch.weights[:, np.newaxis]
    num_rows = len(batch.features)
    for index in reversed(range(len(layers))):
        coef, intercept = gradients[index]
        np.matmul(values[index].T, deltas, out=coef)
        coef /= num_rows
        coef += decay * layers[index].coef
        np.mean(deltas, axis=0, out=intercept)
        if index:
            deltas = deltas @ layers[index].coef.T
            _times_derivative(steps.activation, values[index], deltas)
    return values[-1], losses


def _shrink(layers: Sequence[Layer], threshold: float) -> None:
    """Take the threshold from the size of each coef, in place, but no coef beyond zero."""
    for coef, _ in layers:
        np.copyto(coef, np.sign(coef) * np.maximum(np.abs(coef) - threshold, 0.0))


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


# A function that takes a step of some size down a gradient.
_Step = Callable[[Array, float], None]


def _nesterov(momentum: float, vector: Array) -> _Step:
    """A function that moves the vector, in place, by a gradient step with Nesterov's momentum.

    Source: Sutskever et al. 2013, section 2; plain steps if the momentum is 0.
    """
    velocity = np.zeros_like(vector)

    def step(gradient: Array, size: float) -> None:
        change = size * gradient
        np.subtract(momentum * velocity, change, out=velocity)
        np.add(vector, momentum * velocity - change, out=vector)

    return step


def _adam(vector: Array) -> _Step:
    """A function that moves the vector, in place, by a step of Adam (Kingma and Ba 2015)."""
    first, second = np.zeros_like(vector), np.zeros_like(vector)
    beta1, beta2 = _ADAM_BETAS
    numbers = count(1)

    def step(gradient: Array, size: float) -> None:
        np.add(beta1 * first, (1 - beta1) * gradient, out=first)
        np.add(beta2 * second, (1 - beta2) * np.square(gradient), out=second)
        number = next(numbers)
        corrected = size * np.sqrt(1 - beta2**number) / (1 - beta1**number)
        np.subtract(vector, corrected * first / (np.sqrt(second) + _ADAM_EPSILON), out=vector)

    return step
