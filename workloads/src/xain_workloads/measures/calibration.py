"""Calibration of the probabilities of a model of two classes, from tallies.

The calibration intercept and slope are those of a logistic regression of the outcome on the log
odds that the model predicts (Cox 1958; Van Calster et al. 2019): the intercept with a slope of 1,
the slope with an intercept of its own. Rows of one bin count as rows of its middle, which is at
most half a bin away: 1/512 of log odds where a site has no more than 256 different scores.
"""

from collections.abc import Iterator
from math import sqrt

import numpy as np
from numpy.typing import NDArray

from xain_workloads.measures.figures import Figure, share_of
from xain_workloads.measures.tallies import Tallies, log_odds_at, records

NAMES = ("observed_expected", "calibration_intercept", "calibration_slope")

_Z = 1.959963984540054  # of a 95 % interval
_MAX_STEPS = 50
_TOLERANCE = 1e-8  # of a step, in the unit of a coefficient
_MAX_CONDITION = 1e12  # of the information; beyond it the rows do not tell the coefficients

Array = NDArray[np.float64]


def calibration_figures(tallies: Tallies | None) -> dict[str, Figure]:
    """Figures of calibration by name, in the order of NAMES.

    observed_expected: rows of the second class over the sum of their probabilities, by Wilson's
    limits of the rows; 1 is right. calibration_intercept: 0 is right, above it the probabilities
    are too small. calibration_slope: 1 is right, below it they are too far from each other. Both
    have Wald's limits. Empty unless there are two classes with rows and scores of each; a figure
    without a finite estimate is left out.
    """
    if tallies is None or tallies.num_classes != 2 or not tallies.scores:
        return {}
    bins = np.array(list(records(tallies.scores[1], 3)), np.float64).reshape(-1, 3)
    odds = np.array([log_odds_at(at + 0.5, tallies.level) for at in bins[:, 0]])
    of_class, rows = bins[:, 1], bins[:, 1] + bins[:, 2]
    num_of_class, num_rows = int(of_class.sum()), int(rows.sum())
    if not 0 < num_of_class < num_rows:
        return {}
    found = dict(_ratio(odds, rows, num_of_class, num_rows))
    ones = np.ones((len(odds), 1))
    for name, columns, offset in (
        (NAMES[1], ones, odds),
        (NAMES[2], np.column_stack([odds, ones]), np.zeros(len(odds))),
    ):
        if (figure := _first(columns, offset, of_class, rows)) is not None:
            found[name] = figure
    return found


def _ratio(
    odds: Array, rows: Array, num_of_class: int, num_rows: int
) -> Iterator[tuple[str, Figure]]:
    """Yield observed_expected with its interval, unless no row of the second class is expected."""
    expected = float((rows * _probabilities(odds)).sum()) / num_rows
    if expected > 0:
        share = share_of(num_of_class, num_rows)
        low, high = (None if edge is None else edge / expected for edge in (share.low, share.high))
        yield NAMES[0], Figure(share.value / expected, low, high)


def _first(columns: Array, offset: Array, of_class: Array, rows: Array) -> Figure | None:
    """Fit a logistic regression, and return its first coefficient with its interval; None if the
    likelihood has no maximum. Newton's steps are halved while they lower the likelihood.

    columns: (bins, k). offset: (bins,), added to the linear predictor. of_class, rows: (bins,).
    """
    at = np.zeros(columns.shape[1])
    value = _likelihood(columns @ at + offset, of_class, rows)
    for _ in range(_MAX_STEPS):
        p = _probabilities(columns @ at + offset)
        information = columns.T @ (columns * (rows * p * (1 - p))[:, None])
        if not np.linalg.cond(information) < _MAX_CONDITION:
            return None
        covariance = np.linalg.inv(information)
        step = covariance @ (columns.T @ (of_class - rows * p))
        if np.abs(step).max() < _TOLERANCE:
            reach = _Z * sqrt(float(covariance[0, 0]))
            return Figure(float(at[0]), float(at[0]) - reach, float(at[0]) + reach)
        for _ in range(_MAX_STEPS):
            reached = _likelihood(columns @ (at + step) + offset, of_class, rows)
            if reached >= value:
                break
            step /= 2
        at, value = at + step, reached
    return None


def _probabilities(odds: Array) -> Array:
    """Probabilities of log odds, without overflow."""
    return np.exp(-np.logaddexp(0.0, -odds))


def _likelihood(odds: Array, of_class: Array, rows: Array) -> float:
    return float((of_class * odds - rows * np.logaddexp(0.0, odds)).sum())
