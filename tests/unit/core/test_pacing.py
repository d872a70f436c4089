"""How many must be connected, how many are selected, when a round may start."""

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.core.bench import START_TIMEOUT_S, Bench, make_rules

from oracle import rounds as oracle
from xain_coordinator.core.machine.decider import next_deadline
from xain_coordinator.core.rules.pacing import exact_fraction, num_required, num_wanted
from xain_coordinator.core.vocabulary.values import Phase

fractions = st.fractions(min_value=Fraction(1, 200), max_value=1, max_denominator=400)


@settings(derandomize=True, deadline=None)
@given(min_participants=st.integers(1, 60), fraction=fractions)
def test_n_is_the_smallest_number_that_selects_enough(
    min_participants: int, fraction: Fraction
) -> None:
    """N is the smallest n with ceil(n · fraction) ≥ min_participants, as counting up finds it."""
    counted = oracle.num_required(min_participants, fraction)
    assert num_required(min_participants, fraction) == counted


@settings(derandomize=True, deadline=None)
@given(connected=st.integers(0, 500), fraction=fractions)
def test_k_is_the_fraction_rounded_up(connected: int, fraction: Fraction) -> None:
    """k is the smallest whole number of participants that is at least the fraction of them."""
    k = num_wanted(connected, fraction)
    assert k - 1 < connected * fraction <= k
    assert 0 <= k <= connected


@pytest.mark.parametrize(
    ("min_participants", "fraction", "n"),
    [
        (1, 1.0, 1),
        (1, 0.5, 1),
        (2, 0.6, 2),
        (3, 0.75, 3),
        (10, 0.3, 31),
        (6, 0.3, 17),
        (7, 0.7, 9),
        (1, 0.2, 1),
        (1, 0.1, 1),
        (10, 0.1, 91),
        (11, 0.1, 101),
        (2, 0.1, 11),
        (8, 0.28, 26),
    ],
)
def test_n_of_decimal_fractions(min_participants: int, fraction: float, n: int) -> None:
    """0.1 means a tenth, not the binary float beside it."""
    assert num_required(min_participants, exact_fraction(fraction)) == n


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
def test_a_fraction_is_the_decimal_that_was_written(
    written: float | str | Fraction, meant: Fraction
) -> None:
    """Floats, strings and fractions are read as what a person means by them."""
    assert exact_fraction(written) == meant


@pytest.mark.parametrize("value", [0, 0.0, -0.1, 1.0000001, 2, "nan", float("nan"), float("inf")])
def test_a_fraction_outside_zero_to_one_is_no_fraction(value: float | str) -> None:
    """No participant, or more than all, cannot be selected."""
    with pytest.raises(ValueError):  # noqa: PT011  # for NaN, Fraction's own words
        exact_fraction(value)


def test_as_many_are_selected_as_were_asked_for() -> None:
    """Floats would select 8 of 25 where 7 are wanted. The number is exact for every pair."""
    for pool in range(1, 120):
        for k in range(1, pool + 1):
            fraction = exact_fraction(f"{k}/{pool}")
            assert num_wanted(pool, fraction) == k
            assert num_required(k, fraction) <= pool


def test_the_first_round_opens_when_those_expected_are_there() -> None:
    """Without start_participants of them, N are not enough before the start timeout."""
    bench = Bench(make_rules(min_participants=2, start_participants=4))
    bench.join("a", "b", "c")
    assert bench.phase is Phase.STANDBY
    bench.join("d")
    assert bench.phase is Phase.COLLECTING
    assert bench.selected == ("a", "b", "c", "d")


def test_after_the_start_timeout_n_are_enough() -> None:
    """The timeout counts from the first arrival, and the Tick at exactly next_deadline ends it."""
    bench = Bench(make_rules(min_participants=2, start_participants=4))
    bench.join("a", at=100.0)
    bench.join("b", at=101.0)
    for at in (110.0, 120.0, 130.0, 140.0, 150.0, 159.0):
        bench.heartbeat("a", "b", at=at)
    assert next_deadline(bench.session) == 100.0 + START_TIMEOUT_S
    bench.tick(at=159.9)
    assert bench.phase is Phase.STANDBY
    bench.tick(at=160.0)
    assert bench.phase is Phase.COLLECTING
    assert bench.selected == ("a", "b")
    assert next_deadline(bench.session) == 174.0, "the start is no longer waited for"
