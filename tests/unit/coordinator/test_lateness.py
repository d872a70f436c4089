"""What the coordinator itself is late for."""

from xain_coordinator.lateness import MIN_LATE_S, NUM_WAITS, Lateness

LEASE_S = 15.0


def test_calls_that_waited_say_how_late_we_are():
    """The median of the last ones: neither one that says a lot nor many that say nothing."""
    lateness = Lateness(LEASE_S)
    assert lateness.at(0.0) == 0.0
    for number in range(NUM_WAITS):
        lateness.waited(100.0 + number / 10, 4.0)
    assert lateness.at(104.0) == 4.0
    for _ in range(NUM_WAITS // 2):
        lateness.waited(104.0, 1e9)
    assert lateness.at(104.0) == 4.0
    for _ in range(NUM_WAITS // 2 + 1):
        lateness.waited(105.0, 0.0)
    assert lateness.at(105.0) == 0.0


def test_senders_delay_an_end_by_one_lease_at_most():
    lateness = Lateness(LEASE_S)
    lateness.waited(0.0, 1e9)
    assert lateness.at(1.0) == LEASE_S
    assert lateness.at(LEASE_S + 0.1) == 0.0, "it is forgotten"


def test_a_time_that_we_missed_counts_for_a_lease():
    lateness = Lateness(LEASE_S)
    lateness.woke(160.0, 110.0, 100.0)
    assert lateness.at(160.0) == 60.0
    lateness.woke(160.6, 160.5, 160.0)
    assert lateness.at(174.9) == 60.0
    assert lateness.at(175.1) == 0.0
    lateness.woke(200.0, 197.0, 199.0)
    assert lateness.at(200.0) == 3.0


def test_what_any_event_loop_is_late_does_not_count():
    lateness = Lateness(LEASE_S)
    lateness.woke(10.0 + MIN_LATE_S / 2, 10.0, 1.0)
    lateness.waited(10.0, MIN_LATE_S / 2)
    assert lateness.at(10.0) == 0.0
