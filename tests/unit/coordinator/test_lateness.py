"""Lateness of the coordinator itself."""

import pytest

from xain_coordinator.driver.lateness import MIN_LATE_S, MIN_SENDERS, NUM_SENDERS, Lateness

LEASE_S = 15.0
INTERVAL_S = 10.0


def late() -> Lateness:
    return Lateness(LEASE_S, INTERVAL_S)


def test_calls_that_waited_say_how_late_we_are():
    """The median of the last senders, each by its latest call."""
    lateness = late()
    assert lateness.at(0.0) == 0.0
    for number in range(2 * NUM_SENDERS):
        lateness.note_wait(f"p{number}", 100.0 + number / 100, 4.0)
    assert lateness.at(104.0) == 4.0
    for _ in range(10 * NUM_SENDERS):  # however often a single one calls
        lateness.note_wait("liar", 104.0, 1e9)
    assert lateness.at(104.0) == 4.0
    for _ in range(10 * NUM_SENDERS):
        lateness.note_wait("liar", 104.0, 0.0)
    assert lateness.at(104.0) == 4.0
    for number in range(NUM_SENDERS // 2 + 1):
        lateness.note_wait(f"p{number}", 105.0, 0.0)
    assert lateness.at(105.0) == 0.0


def test_senders_delay_an_end_by_one_lease_at_most():
    lateness = late()
    for sender in range(MIN_SENDERS):
        lateness.note_wait(f"p{sender}", 0.0, 1e9)
    assert lateness.at(1.0) == LEASE_S
    assert lateness.at(LEASE_S + 0.1) == 0.0, "it is forgotten"


@pytest.mark.parametrize("num_honest", range(5))
def test_no_single_sender_says_how_late_we_are(num_honest):
    """However few the others are, and if they have not been heard lately."""
    lateness = late()
    for sender in range(num_honest):
        lateness.note_wait(f"p{sender}", 0.0, 1.0)
    lateness.note_wait("liar", 1.0, 1e9)
    assert lateness.at(1.0) == (1.0 if num_honest + 1 >= MIN_SENDERS else 0.0)
    assert lateness.at(LEASE_S + 0.5) == 0.0
    lateness.note_stall(2.0, 1.5, 1.4)  # what we see ourselves needs no sender
    assert lateness.at(2.0) > 0.0


def test_a_time_that_we_missed_counts_for_a_lease():
    lateness = late()
    lateness.note_stall(160.0, 110.0, 105.0)  # we may have stood still since 105
    assert lateness.at(160.0) == 55.0
    lateness.note_stall(160.6, 160.4, 160.0)
    assert lateness.at(174.9) == 55.0
    assert lateness.at(175.1) == pytest.approx(0.6), "the shorter one counts for a lease, too"
    assert lateness.at(175.7) == 0.0
    lateness.note_stall(200.0, 197.0, 199.0)
    assert lateness.at(200.0) == 3.0


def test_usual_delay_of_an_event_loop_does_not_count():
    lateness = late()
    lateness.note_stall(10.0 + MIN_LATE_S / 2, 10.0, 1.0)
    for sender in range(MIN_SENDERS):
        lateness.note_wait(f"p{sender}", 10.0, MIN_LATE_S / 2)
    assert lateness.at(10.0) == 0.0
