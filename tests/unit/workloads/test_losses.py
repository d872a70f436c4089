"""Losses of linear models against scikit-learn's, and derivatives against differences."""

import numpy as np
import pytest
from scipy.optimize import approx_fprime
from sklearn.metrics import log_loss

from xain_workloads.measures.losses import margin_loss, multinomial_loss, penalty

# Not at the points where a derivative jumps.
POINTS = np.array([-30.0, -2.3, -1.1, -0.4, -0.05, 0.03, 0.2, 0.7, 1.6, 25.0])


def test_log_loss_of_margins_is_that_of_scikit_learn():
    target = np.array([1, 0, 1, 0, 1, 1, 0, 0, 1, 0])
    probabilities = 1 / (1 + np.exp(-np.clip(POINTS, -5, 5)))
    margins = np.where(target == 1, 1, -1) * np.clip(POINTS, -5, 5)
    assert margin_loss("log_loss", margins)[0].mean() == pytest.approx(
        log_loss(target, probabilities)
    )


def test_multinomial_loss_and_its_derivatives():
    chance = np.random.default_rng(3)
    scores, target = chance.normal(size=(6, 4)), np.array([0, 3, 1, 2, 2, 0])
    values, derivatives = multinomial_loss(scores, target)
    softmax = np.exp(scores) / np.exp(scores).sum(axis=1, keepdims=True)
    assert values.mean() == pytest.approx(log_loss(target, softmax, labels=range(4)))

    def total(flat):
        return float(multinomial_loss(flat.reshape(6, 4), target)[0].sum())

    differences = approx_fprime(scores.ravel(), total, 1e-7)
    np.testing.assert_allclose(derivatives.ravel(), differences, atol=1e-5)


def test_losses_of_huge_scores_are_finite():
    huge = np.array([-1e6, 1e6])
    assert np.isfinite(np.array(margin_loss("log_loss", huge))).all()
    values, derivatives = multinomial_loss(np.array([[1e6, -1e6]]), np.array([1]))
    assert values == pytest.approx([2e6])
    assert np.isfinite(derivatives).all()


@pytest.mark.parametrize("kind", ["l1", "l2", "elasticnet", "none"])
def test_gradients_of_penalties(kind):
    weights = np.array([[0.5, -2.0, 3.0]])
    value, gradient = penalty(kind, 0.3, weights)
    differences = approx_fprime(weights[0], lambda w: penalty(kind, 0.3, w)[0], 1e-7)
    np.testing.assert_allclose(gradient[0], differences, atol=1e-5)
    expected = {"l1": 5.5, "l2": 6.625, "elasticnet": 0.3 * 5.5 + 0.7 * 6.625, "none": 0}
    assert value == pytest.approx(expected[kind])
