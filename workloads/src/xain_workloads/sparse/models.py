"""Logistic regression and factorisation machines on sparse rows: scores, losses and gradients.

A model is a table of rows by key. Logistic regression has rows (w,), a factorisation machine rows
(w, v_1, ..., v_k); the key BIAS has the intercept in its first column. All functions take the rows
of the keys that occur in a batch, and give gradients of the same shape.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_matrix

BIAS = np.uint64(2**64 - 1)  # beyond the keys of any file

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """Result of a batch.

    gradient: (m, dim) of the mean loss at the rows of its keys. bias: of the intercept.
    loss: mean log loss, before the step. num_right: rows whose class was predicted.
    """

    gradient: Array
    bias: float
    loss: float
    num_right: int


@dataclass(frozen=True, slots=True)
class LogisticRegression:
    """l2: of the penalty l2 / 2 * |w|^2 on the rows of a batch, for each time they are used."""

    l2: float = 0.0

    @property
    def dim(self) -> int:
        """Values in a row of the table."""
        return 1

    def scores(self, features: csr_matrix, rows: Array, bias: float) -> Array:
        """Log-odds of class 1, (n,). rows: (m, dim), of the columns of features (n, m)."""
        scores: Array = features @ rows[:, 0] + bias
        return scores

    def step(self, features: csr_matrix, classes: Array, rows: Array, bias: float) -> Step:
        """Compute loss and gradient of a batch. classes: (n,) of 0 and 1. rows: weights of keys."""
        errors, loss, num_right = _errors(self.scores(features, rows, bias), classes)
        gradient = (features.T @ errors)[:, None] + self.l2 * rows
        return Step(gradient, float(errors.sum()), loss, num_right)


@dataclass(frozen=True, slots=True)
class FactorisationMachine:
    """Factorisation machine of degree two.

    score = b + sum_i w_i x_i + sum_{i<j} <v_i, v_j> x_i x_j
    num_factors: k. l2: as in LogisticRegression, on w and v.
    Source: Rendle 2010, Factorization Machines, equations 1 and 5.
    """

    num_factors: int = 8
    l2: float = 0.0

    @property
    def dim(self) -> int:
        return 1 + self.num_factors

    def scores(self, features: csr_matrix, rows: Array, bias: float) -> Array:
        """(n,) scores of a batch. rows: (m, 1 + k), weight and factors of its keys."""
        sums = features @ rows[:, 1:]  # (n, k)
        squares = features.multiply(features) @ rows[:, 1:] ** 2
        scores: Array = features @ rows[:, 0] + bias + 0.5 * (sums**2 - squares).sum(axis=1)
        return scores

    def step(self, features: csr_matrix, classes: Array, rows: Array, bias: float) -> Step:
        """Compute loss and gradient of a batch. classes: (n,) of 0 and 1."""
        factors = rows[:, 1:]
        errors, loss, num_right = _errors(self.scores(features, rows, bias), classes)
        sums = features @ factors
        squared = features.multiply(features).T.tocsr()
        gradient = np.empty_like(rows)
        gradient[:, 0] = features.T @ errors
        gradient[:, 1:] = features.T @ (errors[:, None] * sums)
        gradient[:, 1:] -= (squared @ errors)[:, None] * factors
        gradient += self.l2 * rows
        return Step(gradient, float(errors.sum()), loss, num_right)


def classes_of(targets: Array) -> Array:
    """0 or 1 for targets of two kinds: 0 and 1, or -1 and 1. Greater than 0 is class 1."""
    return (targets > 0).astype(np.float64)


def _errors(scores: Array, classes: Array) -> tuple[Array, float, int]:
    """Derivative of the mean log loss by the scores (n,), the loss, and how many were right."""
    loss = log_losses(scores, classes).mean()
    probabilities = 0.5 * (1.0 + np.tanh(0.5 * scores))
    errors = (probabilities - classes) / len(scores)
    return errors, float(loss), int(((scores > 0) == (classes > 0)).sum())


def log_losses(scores: Array, classes: Array) -> Array:
    """The log loss of each row, (n,). scores: log-odds of class 1."""
    # log(1 + exp(-s)) without overflow, for s with the sign of the class.
    losses: Array = np.logaddexp(0.0, np.where(classes > 0, -scores, scores))
    return losses


def area_under_curve(scores: Array, classes: Array) -> float:
    """The share of pairs of a row of class 1 and one of class 0 that the scores put in this order.

    Pairs with equal scores count half. nan: one of the classes has no rows.
    """
    _, values, counts = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[values]
    is_one = classes > 0
    num_ones = int(is_one.sum())
    num_pairs = num_ones * (len(classes) - num_ones)
    if not num_pairs:
        return float("nan")
    return float((ranks[is_one].sum() - num_ones * (num_ones + 1) / 2) / num_pairs)
