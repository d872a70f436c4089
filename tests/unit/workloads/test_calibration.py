"""Calibration intercept and slope from tallies, against a fit to the rows themselves."""

import numpy as np
import pytest
from scipy.optimize import minimize

from xain_workloads.measures.calibration import NAMES, calibration_figures
from xain_workloads.measures.tallies import Tallies, add, tally_classes

ROWS = 600


def rows(factor: float, shift: float) -> tuple[np.ndarray, np.ndarray]:
    """(outcome, predicted log odds) of a model whose log odds are `factor` times too large and
    `shift` too high."""
    chance = np.random.default_rng(5)
    true = chance.normal(0.0, 1.5, ROWS)
    outcome = (chance.random(ROWS) < 1 / (1 + np.exp(-true))).astype(int)
    return outcome, factor * true + shift


def tallied(outcome: np.ndarray, odds: np.ndarray) -> Tallies:
    p = 1 / (1 + np.exp(-odds))
    return tally_classes(2, outcome, (p > 0.5).astype(int), np.column_stack([1 - p, p]))


def by_rows(outcome: np.ndarray, odds: np.ndarray) -> tuple[float, float]:
    """Intercept with slope 1, and slope, of the rows themselves."""

    def loss(eta: np.ndarray) -> float:
        return float((np.logaddexp(0, eta) - outcome * eta).sum())

    intercept = minimize(lambda a: loss(a[0] + odds), [0.0]).x[0]
    return intercept, minimize(lambda b: loss(b[0] + b[1] * odds), [0.0, 1.0]).x[1]


@pytest.mark.parametrize(("factor", "shift"), [(1.0, 0.0), (2.0, 0.0), (0.5, 0.7)])
def test_intercept_and_slope_are_those_of_the_rows_at_whatever_site(factor, shift):
    """The sums of three sites give what a fit to all rows gives; the intervals hold the truth."""
    outcome, odds = rows(factor, shift)
    parts = [tallied(outcome[k::3], odds[k::3]) for k in range(3)]
    found = calibration_figures(add(parts))
    intercept, slope = by_rows(outcome, odds)
    assert tuple(found) == NAMES
    assert found["calibration_intercept"].value == pytest.approx(intercept, abs=0.01)
    assert found["calibration_slope"].value == pytest.approx(slope, abs=0.01)
    low, high = found["calibration_slope"].low, found["calibration_slope"].high
    assert low < 1 / factor < high
    expected = float((1 / (1 + np.exp(-odds))).sum())
    assert found["observed_expected"].value == pytest.approx(outcome.sum() / expected, abs=0.01)


def test_interval_is_as_wide_as_the_spread_of_estimates():
    """The standard error of the slope is that over tables drawn anew."""
    slopes, reaches = [], []
    for seed in range(200):
        chance = np.random.default_rng(seed)
        odds = chance.normal(0.0, 1.5, 300)
        outcome = (chance.random(300) < 1 / (1 + np.exp(-odds))).astype(int)
        one = calibration_figures(tallied(outcome, odds))["calibration_slope"]
        assert one.high is not None
        slopes.append(one.value)
        reaches.append((one.high - one.value) / 1.96)
    assert np.mean(reaches) == pytest.approx(np.std(slopes), rel=0.15)


@pytest.mark.parametrize(
    ("outcome", "odds", "known"),
    [
        ([0, 0, 1, 1], [-2.0, -1.0, 1.0, 2.0], NAMES[:2]),
        ([0, 1, 0, 1], [0.3, 0.3, 0.3, 0.3], NAMES[:2]),
        ([1, 1, 1, 1], [-2.0, -1.0, 1.0, 2.0], ()),
    ],
    ids=["separated", "one score for all", "one class alone"],
)
def test_figure_without_a_finite_estimate_is_left_out(outcome, odds, known):
    assert tuple(calibration_figures(tallied(np.array(outcome), np.array(odds)))) == known


def test_more_classes_and_numbers_have_none():
    target = np.arange(6) % 3
    assert calibration_figures(tally_classes(3, target, target, np.full((6, 3), 1 / 3))) == {}
    assert calibration_figures(None) == {}
