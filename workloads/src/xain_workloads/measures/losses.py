"""Losses of linear models and networks, and their derivatives by the scores.

Sources: scikit-learn's user guide, section 1.5, "Mathematical formulation" of stochastic gradient
descent, for the losses of one score; Bishop 2006, Pattern Recognition and Machine Learning, section
4.3.4, for the multinomial one.
"""

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def margin_loss(loss: str, margins: Array) -> tuple[Array, Array]:
    """Losses of margins, and derivatives by the margin; all of the shape of `margins`.

    margins: scores times +1 for rows of the class, times -1 for the others.
    """
    match loss:
        case "log_loss":
            # 1 / (1 + exp(margin)), without overflow.
            return np.logaddexp(0.0, -margins), -np.exp(-np.logaddexp(0.0, margins))
        case "hinge":
            return np.maximum(0.0, 1 - margins), np.where(margins <= 1, -1.0, 0.0)
        case "squared_hinge":
            gaps = np.maximum(0.0, 1 - margins)
            return np.square(gaps), -2 * gaps
        case "perceptron":
            # At 0, too: a model of zeros would learn nothing else.
            return np.maximum(0.0, -margins), np.where(margins <= 0, -1.0, 0.0)
        case "modified_huber":
            gaps = np.maximum(0.0, 1 - margins)
            is_square = margins >= -1
            values = np.where(is_square, np.square(gaps), -4 * margins)
            return values, np.where(is_square, -2 * gaps, -4.0)
    raise ValueError(f"no formula for loss {loss!r}")


def residual_loss(loss: str, residuals: Array, epsilon: float) -> tuple[Array, Array]:
    """Losses of residuals, which are predictions minus targets, and derivatives by them; all of
    the shape of `residuals`.

    epsilon: where "huber" becomes linear, and the zone of the others that costs nothing.
    """
    sizes = np.abs(residuals)
    signs = np.sign(residuals)
    beyond = np.maximum(0.0, sizes - epsilon)
    match loss:
        case "squared_error":
            return np.square(residuals) / 2, residuals
        case "huber":
            is_square = sizes <= epsilon
            values = np.where(is_square, np.square(residuals) / 2, epsilon * (sizes - epsilon / 2))
            return values, np.where(is_square, residuals, epsilon * signs)
        case "epsilon_insensitive":
            return beyond, np.where(beyond > 0, signs, 0.0)
        case "squared_epsilon_insensitive":
            return np.square(beyond), 2 * beyond * signs
    raise ValueError(f"no formula for loss {loss!r}")


def squared_loss(scores: Array, target: NDArray[np.float64]) -> tuple[Array, Array]:
    """Halves of squared errors, (n,), and derivatives by the scores, (n, 1). scores: (n, 1)."""
    residuals = scores - target[:, np.newaxis]
    return np.square(residuals[:, 0]) / 2, residuals


def binomial_loss(scores: Array, target: NDArray[np.intp]) -> tuple[Array, Array]:
    """Cross-entropies of the logistic function, (n,), and derivatives by the scores, (n, 1).

    scores: (n, 1). target: (n,), 1 for rows of the second class, 0 for the others.
    """
    signs = np.where(target == 1, 1.0, -1.0)[:, np.newaxis]
    losses, derivatives = margin_loss("log_loss", signs * scores)
    return losses[:, 0], derivatives * signs


def multinomial_loss(scores: Array, target: NDArray[np.intp]) -> tuple[Array, Array]:
    """Cross-entropies of the softmax, (n,), and derivatives by the scores, (n, k).

    scores: (n, k). target: (n,) positions of classes.
    """
    rows = np.arange(len(scores))
    shifted = scores - scores.max(axis=1, keepdims=True)
    exponentials = np.exp(shifted)
    totals = exponentials.sum(axis=1, keepdims=True)
    derivatives = exponentials / totals
    derivatives[rows, target] -= 1
    return np.log(totals[:, 0]) - shifted[rows, target], derivatives


def penalty(kind: str, l1_ratio: float, weights: Array) -> tuple[float, Array]:
    """The regulariser as scikit-learn's SGD has it, and a subgradient of the shape of `weights`.

    kind: "l2" is the half of the sum of squares, "l1" the sum of absolute values, "elasticnet"
    their mixture, "none" nothing.
    """
    share = {"l2": 0.0, "l1": 1.0, "elasticnet": l1_ratio}.get(kind)
    if share is None:
        return 0.0, np.zeros_like(weights)
    value = share * np.abs(weights).sum() + (1 - share) * np.square(weights).sum() / 2
    return float(value), share * np.sign(weights) + (1 - share) * weights
