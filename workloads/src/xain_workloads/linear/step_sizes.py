"""Sizes of the steps of linear models over mini-batches of rows."""

from collections.abc import Callable, Mapping

import numpy as np

from xain_workloads.linear.sgd_options import SgdOptions
from xain_workloads.measures.losses import Array

# Largest second derivatives by the score. Of the losses with corners the first derivative is
# bounded, so that no step diverges; 1 makes steps as long as those of the squared loss.
_CURVATURES: Mapping[str, float] = {
    "log_loss": 0.25,
    "squared_hinge": 2.0,
    "modified_huber": 2.0,
    "hinge": 1.0,
    "perceptron": 1.0,
    "squared_error": 1.0,
    "huber": 1.0,
    "epsilon_insensitive": 1.0,
    "squared_epsilon_insensitive": 2.0,
}
_SOFTMAX_CURVATURE = 0.5  # Boehning 1992, "Multinomial logistic regression algorithm"
# Share of the best constant step for rows without noise; four times as long is where squared
# losses begin to diverge. On seven real tables a half loses less to noise than the
# whole, and little speed.
SAFETY = 0.5
_POWER_STEPS = 10
_POWER_ROWS = 1024  # of a site, evenly taken, from which the eigenvalue is estimated


def safe_step(
    curvature: float,
    features: Array,
    batch_rows: int,
    decay: float = 0.0,
    weights: Array | None = None,
) -> float:
    """A constant step with which steps over batches of so many rows come near to the minimum, and
    do not diverge, for a loss whose second derivative by the score is at most `curvature`.

    features: (n, p), n > 0; an intercept counts as a column of ones. decay: of the penalty.
    weights: (n,) of the rows in the loss; None: 1 each.
    Source: Ma, Bassily and Belkin 2018, "The Power of Interpolation", theorem 3.
    """
    squares = np.einsum("ij,ij->i", features, features) + 1.0
    largest = float((squares if weights is None else squares * weights).max())
    rows = min(batch_rows, len(features))
    whole = largest
    if rows > 1:
        whole = largest + (rows - 1) * min(_largest_eigenvalue(features, weights), largest)
    return SAFETY / (curvature * whole / rows + decay)


def _largest_eigenvalue(features: Array, weights: Array | None) -> float:
    """The largest eigenvalue of the mean of w * x @ x.T over rows x of weight w, with an intercept;
    estimated by power iteration."""
    every = -(-len(features) // _POWER_ROWS)
    taken = features[::every]
    vector: Array = np.random.default_rng(0).standard_normal((taken.shape[1],))
    intercept = 1.0
    size = 0.0
    for _ in range(_POWER_STEPS):
        size = float(np.sqrt(vector @ vector + intercept**2))
        if size == 0:
            return 0.0
        scores = taken @ (vector / size) + intercept / size
        if weights is not None:
            scores = scores * weights[::every]
        vector = scores @ taken / len(taken)
        intercept = float(scores.mean())
    return float(np.sqrt(vector @ vector + intercept**2))


def curvature_of(options: SgdOptions, num_scores: int) -> float:
    """The largest second derivative of the loss by the scores."""
    if options.is_softmax and num_scores > 1:
        return _SOFTMAX_CURVATURE
    return _CURVATURES[options.loss]


def schedule(
    options: SgdOptions, eta0: float, batch_rows: int, first: int
) -> Callable[[int, int], float]:
    """Make the function that gives the size of a step by its number and rows.

    eta0: of the options, or what is safe. first: number of the first step, from 0: the steps of
    the rounds before. A batch of fewer rows takes a shorter step in proportion, so that each row
    counts alike: with the whole step a last batch of one row could diverge.
    """
    alpha, power_t = options.alpha, options.power_t

    def size(number: int) -> float:
        """Size of a step on a whole batch, by its number in this training."""
        match options.learning_rate:
            case "invscaling":
                return float(eta0 / (first + number + 1) ** power_t)
            case "optimal":
                return float(1.0 / (alpha * (alpha**-0.75 + first + number)))
        return eta0

    return lambda number, rows: size(number) * rows / batch_rows
