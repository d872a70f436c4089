"""Conditions that complete a round before its deadline: quorum, over-selection."""

from fractions import Fraction

import pytest
from tests.unit.core.bench import closing, counted, timed_round

from xain_coordinator.core.rules.pacing import num_selected
from xain_coordinator.core.vocabulary import events as e

# --- quorum ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("quorum", "number"),
    [
        ("participant:update:80%", 4),
        ("participant:update:81%", 5),
        ("participant:update:1%", 1),
        ("participant:update:100%", 5),
        ("participant:update:3", 3),
        ("*:update:2", 2),
        ("participant:*:2", 2),
        ("*:*:60%", 3),
        ("d:update:1", 4),
        ("d:update:100%", 4),
        (("participant:update:2", "d:update:1", "AND"), 4),
        (("participant:update:5", "d:update:1", "AND"), 5),
        (("participant:update:2", "d:update:1", "OR"), 2),
        (("b:update:1", "c:update:1", "AND"), 3),
        ((("b:update:1", "c:update:1", "AND"), "e:update:1", "OR"), 3),
        (("unregistered:update:1", "participant:update:4", "OR"), 4),
        ("unregistered:update:1", 5),
        ("unregistered:update:50%", 5),
    ],
)
def test_a_round_closes_with_its_quorum(quorum, number):
    """Percentages of the selected are rounded up; without a quorum all have to answer."""
    bench = timed_round(*"abcde", quorum=quorum)
    brought = 0
    while not bench.happened(e.RoundClosed):
        bench.end("abcde"[brought], f"{brought}@0")
        brought += 1
    assert closing(bench) == (0.0, "complete")
    assert "".join(counted(bench)) == "abcde"[:number]


# --- over-selection -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("connected", "fraction", "excess", "number"),
    [
        (10, "0.5", "0", 5),
        (10, "0.5", "0.3", 7),
        (10, "0.5", "0.2", 6),
        (10, "0.5", "1/3", 7),
        (10, "0.5", "1", 10),
        (10, "0.5", "9", 10),
        (100, "0.1", "0.3", 13),
        (3, "0.5", "0.1", 3),
    ],
)
def test_more_are_selected_than_are_wanted(connected, fraction, excess, number):
    """ceil(k · (1 + over_selection)), in exact arithmetic, and no participant twice."""
    assert num_selected(connected, Fraction(fraction), Fraction(excess)) == number
