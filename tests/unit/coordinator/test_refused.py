"""Participants that were refused at the rendezvous, as the log and the status tell of them."""

from support.logs import capture_logs
from xain_coordinator.core.errors import ProfileMismatch
from xain_coordinator.server.refused import (
    MAX_KEPT,
    MAX_LINES,
    MAX_WAITING,
    WAITING_LEASES,
    RefusedParticipants,
    WaitingParticipants,
)


def test_refusal_is_told_until_the_participant_is_accepted() -> None:
    """The last reason counts; the name stands in it once."""
    refused = RefusedParticipants()
    refused.note("a", ProfileMismatch("participant 'a': no column 'x'"))
    refused.note("b", ProfileMismatch("participant 'b': no column 'x'"))
    refused.note("a", ProfileMismatch("participant 'a': no column 'y'"))
    assert refused.warnings() == [
        "'b' was refused: no column 'x'",
        "'a' was refused: no column 'y'",
    ]
    refused.forget("b")
    assert refused.warnings() == ["'a' was refused: no column 'y'"]


def test_refusals_of_unregistered_clients_are_bounded() -> None:
    """However many there are, few lines are logged and few names kept: the latest."""
    refused = RefusedParticipants()
    with capture_logs() as lines:
        for number in range(10 * MAX_KEPT):
            refused.note(f"p{number}", ProfileMismatch("no"))
    assert len(lines) <= MAX_LINES
    assert len(refused.warnings()) == MAX_KEPT
    assert refused.warnings()[-1].startswith(f"'p{10 * MAX_KEPT - 1}'")


def test_waiting_participant_is_logged_once_and_counted_until_it_stays_away() -> None:
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


def test_waiting_unregistered_clients_are_bounded() -> None:
    """Names that are never used again are not kept for ever."""
    waiting = WaitingParticipants(lease_s=15.0)
    for number in range(2 * MAX_WAITING):
        waiting.note(f"p{number}", 0.0, 4)
    assert waiting.num(0.0) == MAX_WAITING
