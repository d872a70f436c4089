"""Participants that were refused at the rendezvous, as the log and the status tell of them."""

from support.logs import capture_logs
from xain_coordinator.core.errors import ProfileMismatch
from xain_coordinator.server.refused import MAX_KEPT, MAX_LINES, RefusedParticipants


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


def test_refusals_of_strangers_are_bounded() -> None:
    """However many there are, few lines are logged and few names kept: the latest."""
    refused = RefusedParticipants()
    with capture_logs() as lines:
        for number in range(10 * MAX_KEPT):
            refused.note(f"p{number}", ProfileMismatch("no"))
    assert len(lines) <= MAX_LINES
    assert len(refused.warnings()) == MAX_KEPT
    assert refused.warnings()[-1].startswith(f"'p{10 * MAX_KEPT - 1}'")
