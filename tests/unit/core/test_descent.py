"""Learning rates of the rule "gradient", and when it stops."""

from typing import Any

import numpy as np
import pytest
from sklearn.linear_model import SGDRegressor

from xain_coordinator.aggregation.averages import Gradient
from xain_coordinator.aggregation.options import options_of
from xain_coordinator.core.descent import NOT_BEGUN, after_step, learning_rate


def options(**given: Any) -> Any:
    return options_of(Gradient(**given), {})


@pytest.mark.parametrize("schedule", ["constant", "invscaling", "optimal"])
def test_rates_are_those_of_scikit_learn(schedule: str) -> None:
    """With one row of target 1 and weights of 0 the gradient by the intercept is -1, so that the
    intercept after the third update of SGDRegressor is the rate of the third step."""
    chosen = options(learning_rate=schedule, eta0=0.1, power_t=0.4, alpha=0.01)
    rate = learning_rate(chosen, 2, NOT_BEGUN)
    estimator = SGDRegressor(learning_rate=schedule, eta0=0.1, power_t=0.4, alpha=0.01)
    estimator.coef_, estimator.intercept_, estimator.t_ = np.zeros(1), np.zeros(1), 3.0
    estimator.partial_fit([[0.0]], [1.0])
    assert rate == pytest.approx(float(estimator.intercept_[0]))


def test_adaptive_rate_is_divided_by_five_when_the_loss_does_not_fall() -> None:
    chosen = options(learning_rate="adaptive", eta0=0.5, tol=0.1, n_iter_no_change=2)
    descent = NOT_BEGUN
    rates = []
    for loss in (3.0, 2.0, 1.95, 1.91, 1.5, 1.45, 1.45):
        descent = after_step(chosen, descent, loss)
        rates.append(learning_rate(chosen, 7, descent))
    assert rates == pytest.approx([0.5, 0.5, 0.5, 0.1, 0.1, 0.1, 0.02])
    assert descent.ended_because == ""


def test_adaptive_descent_ends_when_the_rate_is_tiny() -> None:
    chosen = options(learning_rate="adaptive", eta0=1e-3, n_iter_no_change=1)
    descent = NOT_BEGUN
    num_steps = 0
    while not descent.ended_because:
        descent = after_step(chosen, descent, 1.0)
        num_steps += 1
        assert num_steps < 100
    assert num_steps == 1 + 5  # 1e-3 / 5**5 is below 1e-6


def test_tolerance_ends_a_descent() -> None:
    chosen = options(tol=0.01, n_iter_no_change=3)
    descent = NOT_BEGUN
    for loss in (1.0, 0.5, 0.495, 0.494, 0.46, 0.459, 0.458):
        descent = after_step(chosen, descent, loss)
        assert descent.ended_because == ""
    descent = after_step(chosen, descent, 0.457)
    assert descent.ended_because == "converged: the loss has not fallen by 0.01 in 3 steps"


def test_without_tolerance_or_loss_nothing_ends() -> None:
    assert after_step(options(), NOT_BEGUN, 1.0) == NOT_BEGUN
    assert after_step(options(tol=1.0), NOT_BEGUN, None) == NOT_BEGUN
