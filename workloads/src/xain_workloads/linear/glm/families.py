"""Families of generalised linear models: mean, score, information and deviance of rows.

Source: McCullagh and Nelder 1989, Generalized Linear Models, chapters 2 and 5.

The sums of the target ("totals"), from which likelihoods follow, are the rows of each class; of
numbers the sum and the sum of squares (linear); or the sums of y, y log y and log y! (Poisson).
"""

from collections.abc import Sequence
from math import lgamma, log, pi

import numpy as np
from numpy.typing import NDArray

from xain_workloads.linear.glm.options import LINEAR, LOGISTIC, POISSON
from xain_workloads.linear.newton import Fit

Array = NDArray[np.float64]

_LARGEST = 100.0  # linear predictor of counts, whose exponential is as good as infinite
_BLOCK_VALUES = 1 << 22  # of features that are weighted at a time


def num_totals(family: str, num_classes: int) -> int:
    """Length of the sums of the target."""
    return {LOGISTIC: num_classes, LINEAR: 2, POISSON: 3}[family]


def predictors(family: str, point: Array, features: Array) -> Array:
    """(n, k) linear predictors of rows. point: (k, p + 1)."""
    found: Array = features @ point[:, 1:].T + point[:, 0]
    return np.clip(found, -_LARGEST, _LARGEST, out=found) if family == POISSON else found


def means(family: str, eta: Array) -> Array:
    """(n, k) means by the linear predictors: numbers, rates, or probabilities of all classes but
    the first."""
    if family == LINEAR:
        return eta
    if family == POISSON:
        return np.asarray(np.exp(eta))
    largest = np.maximum(eta.max(axis=1, keepdims=True), 0.0)
    exponentials = np.exp(eta - largest)
    shares: Array = exponentials / (exponentials.sum(axis=1, keepdims=True) + np.exp(-largest))
    return shares


def sums(
    family: str,
    fit: Fit,
    features: Array,
    target: NDArray[np.float64],
    rows_weigh: Array | None = None,
) -> Fit:
    """Sum the score, information, totals and deviance of rows at the point of a fit.

    target: (n,), numbers, or positions of classes as float64. rows_weigh: (n,), None: 1 each.
    """
    k, width = fit.point.shape
    eta = predictors(family, fit.point, features)
    mean = means(family, eta)
    if family == LOGISTIC:
        wanted = (target[:, None] == np.arange(1, k + 1)).astype(np.float64)
    else:
        wanted = target[:, None]
    each = np.ones(len(features)) if rows_weigh is None else rows_weigh
    gaps = each[:, None] * (wanted - mean)
    score, information = np.zeros((k, width)), np.zeros((k, width, k, width))
    block = max(1, _BLOCK_VALUES // width)
    for first in range(0, len(features), block):
        part = slice(first, first + block)
        rows = np.concatenate([np.ones((len(features[part]), 1)), features[part]], axis=1)
        score += gaps[part].T @ rows
        for one in range(k):
            for other in range(one, k):
                weights = each[part] * _weights(family, mean[part], one, other)
                information[one, :, other] += rows.T @ (weights[:, None] * rows)
    for one in range(k):
        for other in range(one):
            information[one, :, other] = information[other, :, one].T
    m = k * width
    return Fit(
        np.zeros_like(fit.point),
        np.zeros_like(fit.point),
        score.ravel(),
        information.reshape(m, m),
        _totals(family, target, k),
        float(len(features)),
        deviance(family, eta, target, each),
    )


def _weights(family: str, mean: Array, one: int, other: int) -> Array:
    """(n,) second derivatives of the log likelihood by two linear predictors, negated."""
    if family == LINEAR:
        return np.ones(len(mean))
    if family == POISSON:
        return mean[:, 0]
    found: Array = mean[:, one] * ((one == other) - mean[:, other])
    return found


def deviance(
    family: str, eta: Array, target: NDArray[np.float64], rows_weigh: Array | float = 1.0
) -> float:
    """The deviance of rows: twice the log likelihood that is missing to a perfect fit; the sum of
    squares for the linear family."""
    if family == LINEAR:
        return float((rows_weigh * np.square(target - eta[:, 0])).sum())
    if family == POISSON:
        terms = _y_log_y(target) - target * eta[:, 0] - (target - np.exp(eta[:, 0]))
        return max(2 * float((rows_weigh * terms).sum()), 0.0)
    largest = np.maximum(eta.max(axis=1), 0.0)
    logarithms = largest + np.log(np.exp(eta - largest[:, None]).sum(axis=1) + np.exp(-largest))
    codes = target.astype(np.intp)
    own = np.where(codes > 0, eta[np.arange(len(eta)), np.maximum(codes - 1, 0)], 0.0)
    return 2 * float((rows_weigh * (logarithms - own)).sum())


def _totals(family: str, target: NDArray[np.float64], k: int) -> Array:
    """Counts by class, or sums of the target, from which null deviance and likelihood follow."""
    if family == LOGISTIC:
        return np.bincount(target.astype(np.intp), minlength=k + 1).astype(np.float64)
    if family == LINEAR:
        return np.array([target.sum(), np.square(target).sum()])
    values, counts = np.unique(target, return_counts=True)
    factorials = np.array([lgamma(value + 1) for value in values.tolist()])
    return np.array([target.sum(), _y_log_y(target).sum(), float(factorials @ counts)])


def _y_log_y(target: Array) -> Array:
    return np.asarray(target * np.log(np.where(target > 0, target, 1.0)))


def null_deviance(family: str, totals: Sequence[float], rows: float) -> float:
    """The deviance of a model of an intercept alone, from _totals() of the target."""
    if family == LOGISTIC:
        return -2 * sum(n * log(n / rows) for n in totals if n > 0)
    if family == LINEAR:
        return max(totals[1] - totals[0] ** 2 / rows, 0.0)
    if totals[0] <= 0:
        return 0.0
    return max(2 * (totals[1] - totals[0] * log(totals[0] / rows)), 0.0)


def log_likelihood(family: str, value: float, totals: Sequence[float], rows: float) -> float:
    """The log likelihood of a model with this deviance, in the unit that it was fitted in."""
    if family == LOGISTIC:
        return -value / 2
    if family == LINEAR:
        return -rows / 2 * (log(2 * pi * value / rows) + 1) if value > 0 else float("inf")
    return totals[1] - totals[0] - totals[2] - value / 2
