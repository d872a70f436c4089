"""Newton's method over sums: coefficients of scikit-learn on all rows, however they are divided."""

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression, Ridge

from xain_workloads import newton
from xain_workloads.data import load
from xain_workloads.newton import Fit, InvalidSums, Sums, num_numbers, stepped, sums_of

PENALTY = 10.0


def table(loss: newton.Loss) -> tuple[np.ndarray, np.ndarray]:
    """Standardised columns with a constant, and the target."""
    name = {"squared": "diabetes", "binomial": "breast_cancer", "multinomial": "wine"}[loss]
    data = load(name, task="regression") if loss == "squared" else load(name)
    rows = (data.features - data.features.mean(axis=0)) / data.features.std(axis=0)
    columns = np.column_stack([rows, np.ones(len(rows))])
    if loss == "squared":
        return columns, (data.target - 100) / 80
    return columns, np.unique(data.target, return_inverse=True)[1]


def fitted(loss: newton.Loss, num_sites: int, num_steps: int) -> np.ndarray:
    rows, target = table(loss)
    num_scores = 3 if loss == "multinomial" else 1
    shape = rows.shape[1], num_scores
    fit = Fit.start(shape)
    parts = np.array_split(np.argsort(target, kind="stable"), num_sites)
    for _ in range(num_steps):
        sent = [sums_of(loss, rows[p], target[p], fit.coefficients).to_bytes() for p in parts]
        assert len(sent[0]) == 24 + 8 * num_numbers(shape)
        fit = stepped(fit, (Sums.parse(one, shape) for one in sent), PENALTY)
    return fit.coefficients


@pytest.mark.parametrize("num_sites", [1, 5])
def test_one_step_solves_a_ridge_regression(num_sites):
    rows, target = table("squared")
    expected = Ridge(PENALTY * 1.0).fit(rows[:, :-1], target)
    found = fitted("squared", num_sites, 1)[:, 0]
    np.testing.assert_allclose(found[:-1], expected.coef_, atol=1e-7)
    assert found[-1] == pytest.approx(expected.intercept_, abs=1e-7)


@pytest.mark.parametrize("loss", ["binomial", "multinomial"])
def test_steps_over_sites_with_one_class_each_reach_the_model_of_all_rows(loss):
    rows, target = table(loss)
    expected = LogisticRegression(C=1 / PENALTY, tol=1e-10, max_iter=10_000)
    expected.fit(rows[:, :-1], target)
    found = fitted(loss, 3, 12)
    np.testing.assert_allclose(found[:-1].T, expected.coef_, atol=1e-5)


def test_step_after_which_the_objective_is_larger_is_halved():
    rows, target = table("binomial")
    start = Fit(np.zeros((31, 1)), np.zeros((31, 1)))
    fit = stepped(start, [sums_of("binomial", rows, target, start.coefficients)], PENALTY)
    far = Fit(40 * fit.step, 40 * fit.step, fit.objective)
    back = stepped(far, [sums_of("binomial", rows, target, far.coefficients)], PENALTY)
    np.testing.assert_allclose(back.coefficients, 20 * fit.step)
    assert back.objective == fit.objective


def test_rounds_without_a_row_and_constant_features_change_nothing():
    rows = np.column_stack([np.arange(6.0), np.full(6, 3.0), np.ones(6)])
    empty = sums_of("squared", rows[:0], np.zeros(0), np.zeros((3, 1)))
    start = Fit.start((3, 1))
    assert not stepped(start, [empty], PENALTY).coefficients.any()
    sums = sums_of("squared", rows, 2 * np.arange(6.0), start.coefficients)
    fit = stepped(start, [empty, sums], 1e-9)
    assert rows @ fit.coefficients[:, 0] == pytest.approx(2 * np.arange(6.0), abs=1e-5)


def test_bytes_that_are_no_sums_of_the_model_are_refused():
    rows, target = table("squared")
    sums = sums_of("squared", rows, target, np.zeros((11, 1)))
    good = sums.to_bytes()
    for data, why in (
        (b"", "no sums"),
        (b"x" * 100, "no sums"),
        (good[:-8], "bytes, expected were"),
        (good[:-8] + np.array([np.nan]).tobytes(), "not all finite"),
        (good[:24] + np.array([-1.0]).tobytes() + good[32:], "is negative"),
    ):
        with pytest.raises(InvalidSums, match=why):
            Sums.parse(data, (11, 1))
    with pytest.raises(InvalidSums, match="the model has 12 and 1"):
        Sums.parse(good, (12, 1))
