"""The report on a regression: what a statistician needs, in words that others understand."""

import re
from dataclasses import replace
from html import unescape

import numpy as np

from unit.workloads.test_glm import by_target, fitted, options_of, study_of
from xain_coordinator.cli.report.effects import effects
from xain_workloads.linear.glm.coefficients import coefficients_of
from xain_workloads.tables.table import Table


def told(name: str, data: Table) -> str:
    model, rounds = fitted(options_of(name), by_target(data, 2))
    html = re.sub(r"</(td|th|p|h3|tr)>", "\n", effects(coefficients_of(model), rounds))
    return unescape(re.sub(r"<[^>]+>", "", html))


def test_references_rows_and_steps_are_named():
    text = told("logistic", study_of("logistic"))
    assert "of 240 rows" in text
    assert "\nill (147 rows), against well (93 rows)\n" in text
    assert "\nsex = m, against f\n" in text
    assert "\nward = C, against B\n" in text
    assert "The odds ratio is the exponential of the coefficient: above 1 odds of the class" in text
    assert "After 5 steps the fit converged" in text
    assert "Missing numbers" not in text
    linear = told("linear", study_of("linear"))
    assert "R² 0.4694, residual standard error 4.963. After 2 steps the fit converged" in linear


def test_filled_numbers_and_overdispersed_counts_are_warned_of():
    """Missing numbers that were filled, and counts that vary more than those of a Poisson model."""
    data = study_of("poisson")
    assert "quasi-Poisson" not in told("poisson", data)
    age = data.values["age"].copy()
    age[:60] = np.nan
    spoilt = replace(data, values={**data.values, "age": age}, target=np.square(data.target))
    text = told("poisson", spoilt)
    assert "Missing numbers count as one number for all rows (age 25 %), which makes" in text
    assert re.search(r"The deviance is \d\.\d+ for each degree of freedom.* quasi-Poisson", text)
    assert "above 1 counts are higher" in text
    assert "\n1.0025 to 1.0046\n" in text, "limits near 1 have four decimals"
