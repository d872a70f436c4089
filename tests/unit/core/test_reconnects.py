"""How the participants of a coordinator that was away come back, and who is among many."""

import pytest

from xain_coordinator.core.parts.membership import RECONNECTS_PER_S, reconnect_spread_s
from xain_coordinator.core.parts.round import Round
from xain_coordinator.core.vocabulary.values import Names

LEASE_S = 15.0


@pytest.mark.parametrize("num_connected", [0, 1, 8, 99])
def test_few_come_back_at_once(num_connected):
    assert reconnect_spread_s(num_connected, LEASE_S) == 0.0


@pytest.mark.parametrize("num_connected", [100, 500, 2000])
def test_reconnects_of_many_are_spread(num_connected):
    assert num_connected / reconnect_spread_s(num_connected, LEASE_S) == RECONNECTS_PER_S


@pytest.mark.parametrize("lease_s", [0.3, 15.0])
def test_a_spread_leaves_time_for_a_second_attempt(lease_s):
    """Two of them are over before the lease is."""
    assert 2 * reconnect_spread_s(1_000_000, lease_s) < lease_s


def test_a_round_knows_its_selection():
    """However it was made: from an event, or from a snapshot."""
    round_ = Round(0, ("a", "b"), target=2, epochs=1, opened_at=0.0, num_wanted=2)
    assert isinstance(round_.selected, Names)
    assert round_.owes("a")
    assert not round_.owes("c")
    assert not round_.all_in
