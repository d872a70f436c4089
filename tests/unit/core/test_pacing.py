"""How many must be connected, how many are selected, when a round may start."""

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oracle import rounds as oracle
from xain_coordinator.core.rules.pacing import exact_fraction, num_required, num_wanted

fractions = st.fractions(min_value=Fraction(1, 200), max_value=1, max_denominator=400)


@settings(derandomize=True, deadline=None)
@given(min_participants=st.integers(1, 60), fraction=fractions)
def test_n_is_the_smallest_number_that_selects_enough(min_participants, fraction):
    """N is the smallest n with ceil(n · fraction) ≥ min_participants, as counting up finds it."""
    counted = oracle.num_required(min_participants, fraction)
    assert num_required(min_participants, fraction) == counted


@settings(derandomize=True, deadline=None)
@given(connected=st.integers(0, 500), fraction=fractions)
def test_k_is_the_fraction_rounded_up(connected, fraction):
    k = num_wanted(connected, fraction)
    assert k - 1 < connected * fraction <= k
    assert 0 <= k <= connected


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        (0.1, Fraction(1, 10)),
        ("0.1", Fraction(1, 10)),
        ("1/3", Fraction(1, 3)),
        (Fraction(2, 7), Fraction(2, 7)),
        (1, Fraction(1)),
        (1.0, Fraction(1)),
        (1e-7, Fraction(1, 10**7)),
    ],
)
def test_a_fraction_is_the_decimal_that_was_written(written, meant):
    assert exact_fraction(written) == meant


@pytest.mark.parametrize("value", [0, 0.0, -0.1, 1.0000001, 2, "nan", float("nan"), float("inf")])
def test_a_fraction_outside_zero_to_one_is_no_fraction(value):
    """No participant, or more than all, cannot be selected."""
    with pytest.raises(ValueError):  # noqa: PT011  # for NaN, Fraction's own words
        exact_fraction(value)
