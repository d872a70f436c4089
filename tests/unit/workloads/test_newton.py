"""Newton's method over sums, with a penalty: coefficients of scikit-learn on all rows, however they
are divided."""

from dataclasses import replace

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression, Ridge

from xain_workloads.ensembles.stacking import PENALTY, Linear, Shape, pack_sums, unpack_sums
from xain_workloads.errors import InvalidContent
from xain_workloads.linear.glm.families import sums
from xain_workloads.tables.data import load

NAMES = {"squared": "diabetes", "binomial": "breast_cancer", "multinomial": "wine"}


def table(name: str) -> tuple[np.ndarray, np.ndarray, Shape]:
    """Standardised columns, the target, and the linear model of them."""
    data = load(NAMES[name], task="regression") if name == "squared" else load(NAMES[name])
    rows = (data.features - data.features.mean(axis=0)) / data.features.std(axis=0)
    if name == "squared":
        return rows, (data.target - 100) / 80, Shape(0, 0, rows.shape[1])
    classes, codes = np.unique(data.target, return_inverse=True)
    return rows, codes.astype(float), Shape(0, len(classes), rows.shape[1])


def after(linear: Linear, name: str, parts: list[np.ndarray]) -> Linear:
    """The model after a round in which each site sends the sums of its rows."""
    rows, target, shape = table(name)
    sent = [pack_sums(sums(shape.family, linear.fit, rows[p], target[p])) for p in parts]
    return linear.stepped(shape.layout, [unpack_sums(one, shape) for one in sent])


def by_target(name: str, num_sites: int) -> list[np.ndarray]:
    return np.array_split(np.argsort(table(name)[1], kind="stable"), num_sites)


def fitted(name: str, num_sites: int, num_steps: int) -> np.ndarray:
    shape = table(name)[2]
    linear = Linear.start(shape)
    for _ in range(num_steps):
        linear = after(linear, name, by_target(name, num_sites))
        linear = Linear.of(linear.to_array(), shape)
    return linear.coefficients(shape.num_classes)


@pytest.mark.parametrize("num_sites", [1, 5])
def test_one_step_solves_a_ridge_regression(num_sites):
    rows, target, _ = table("squared")
    expected = Ridge(PENALTY).fit(rows, target)
    found = fitted("squared", num_sites, 1)[:, 0]
    np.testing.assert_allclose(found[:-1], expected.coef_, atol=1e-7)
    assert found[-1] == pytest.approx(expected.intercept_, abs=1e-7)


@pytest.mark.parametrize("name", ["binomial", "multinomial"])
def test_steps_over_sites_with_one_class_each_reach_the_model_of_all_rows(name):
    """The scores of several classes are those of scikit-learn, but for a number that is the same
    for all of them."""
    rows, target, _ = table(name)
    expected = LogisticRegression(C=1 / PENALTY, tol=1e-10, max_iter=10_000).fit(rows, target)
    found = fitted(name, 3, 12)
    found = found - found.mean(axis=1, keepdims=True) if found.shape[1] > 1 else found
    np.testing.assert_allclose(found[:-1].T, expected.coef_, atol=1e-5)


def test_step_after_which_the_deviance_is_larger_is_halved_with_the_same_rows_alone():
    """A site that is lost changes the deviance too; the fit goes on with the rows of the others."""
    sites = by_target("binomial", 2)
    first = after(Linear.start(table("binomial")[2]), "binomial", sites)
    far = replace(first, fit=replace(first.fit, point=40 * first.fit.point))
    back = after(far, "binomial", sites)
    np.testing.assert_allclose(back.fit.point, 20 * first.fit.point)
    assert back.fit.deviance == first.fit.deviance
    without = after(far, "binomial", sites[:1])
    assert without.fit.rows == len(sites[0])
    assert not without.fit.halvings
    for _ in range(20):
        back = after(back, "binomial", sites)
    expected = fitted("binomial", 1, 12)
    np.testing.assert_allclose(back.coefficients(2), expected, atol=1e-5)


def test_rounds_without_a_row_and_constant_features_change_nothing():
    rows = np.column_stack([np.arange(6.0), np.full(6, 3.0)])
    shape = Shape(0, 0, 2)
    start = Linear.start(shape)
    empty = pack_sums(sums(shape.family, start.fit, rows[:0], np.zeros(0)))
    nothing = start.stepped(shape.layout, [unpack_sums(empty, shape)])
    assert not nothing.fit.point.any()
    sent = [empty, pack_sums(sums(shape.family, start.fit, rows, 2 * np.arange(6.0)))]
    found = nothing.stepped(shape.layout, [unpack_sums(one, shape) for one in sent]).coefficients(0)
    assert abs(found[1, 0]) < 1e-12
    expected = Ridge(PENALTY * rows[:, 0].var()).fit(rows[:, :1], 2 * np.arange(6.0))
    assert found[[0, 2], 0] == pytest.approx([expected.coef_[0], expected.intercept_])


def test_bytes_that_are_no_sums_of_the_model_are_refused():
    rows, target, shape = table("squared")
    good = pack_sums(sums(shape.family, Linear.start(shape).fit, rows, target))
    for data, why in (
        (b"", "no sums"),
        (b"x" * 100, "no sums"),
        (good[:-8], "bytes, expected were"),
        (good[:-8] + np.array([np.nan]).tobytes(), "not finite"),
        (good[:8] + np.array([-1.0]).tobytes() + good[16:], "coefficients or steps"),
    ):
        with pytest.raises(InvalidContent, match=why):
            unpack_sums(data, shape)
    with pytest.raises(InvalidContent, match="bytes, expected were"):
        unpack_sums(good, Shape(0, 0, 12))
