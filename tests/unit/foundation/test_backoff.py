"""Waits between tries."""

from random import Random

from xain_foundation.net.backoff import Backoff


def test_waits_double_up_to_the_longest():
    """A million tries overflow nothing; a success begins anew."""
    backoff = Backoff(0.5, 3.0)
    assert [backoff.next_s() for _ in range(5)] == [0.5, 1.0, 2.0, 3.0, 3.0]
    assert {backoff.next_s() for _ in range(10_000)} == {3.0}
    assert backoff.has_failed
    backoff.reset()
    assert not backoff.has_failed
    assert backoff.next_s() == 0.5


def test_chance_spreads_the_whole_wait():
    waits = [Backoff(8.0, 8.0, Random(seed)).next_s() for seed in range(1000)]
    assert 0.0 <= min(waits) < 0.5
    assert 7.5 < max(waits) <= 8.0
