"""Participants that wait for a free slot of the session, as the log and the status tell of them."""

from support.logs import capture_logs
from xain_coordinator.server.calls.waiting import MAX_WAITING, WAITING_LEASES, WaitingParticipants


def test_waiting_participant_is_logged_once_and_counted_until_it_stays_away():
    """A participant that comes again after each lease waits; one that gives up does not."""
    waiting = WaitingParticipants(lease_s=15.0)
    with capture_logs() as lines:
        for now in (0.0, 15.0, 30.0):
            waiting.note("a", now, 4)
        waiting.note("b", 30.0, 4)
    assert [(line["event"], line["participant"]) for line in lines] == [
        ("session_full", "a"),
        ("session_full", "b"),
    ]
    assert waiting.num(30.0) == 2
    waiting.forget("b")
    assert waiting.num(30.0 + WAITING_LEASES * 15.0) == 1
    assert waiting.num(31.0 + WAITING_LEASES * 15.0) == 0


def test_waiting_unregistered_clients_are_bounded():
    """Names that are never used again are not kept for ever."""
    waiting = WaitingParticipants(lease_s=15.0)
    for number in range(2 * MAX_WAITING):
        waiting.note(f"p{number}", 0.0, 4)
    assert waiting.num(0.0) == MAX_WAITING
