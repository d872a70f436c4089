"""Participants that were refused at the rendezvous, for the log and the status."""

import structlog

from xain_coordinator.core.errors import Refusal
from xain_coordinator.server.statuses import message_of
from xain_foundation.names import shortened
from xain_foundation.rate_limited_log import RateLimitedLog

log = structlog.get_logger(__name__)

# Unregistered clients can cause refusals, so both the lines in 10 s and what is kept are bounded.
MAX_LINES = 20
MAX_KEPT = 20


# A participant that is asked to wait comes again after a lease, give or take its jitter.
WAITING_LEASES = 3
MAX_WAITING = 1000


class WaitingParticipants:
    """Participants that were asked to come again later, since the session has no free slot for
    them.

    lease_s: after which they are asked to come again.
    """

    def __init__(self, lease_s: float) -> None:
        self._kept_s = WAITING_LEASES * lease_s
        self._asked_at: dict[str, float] = {}  # by name, the latest at the end
        self._line = RateLimitedLog(log.info, "session_full", burst=MAX_LINES)

    def note(self, participant_id: str, now: float, max_participants: int) -> None:
        """Log the first time that a participant is asked to wait, and keep the latest."""
        name = shortened(participant_id)
        if self._asked_at.pop(name, None) is None:
            self._line(participant=name, max_participants=max_participants)
        self._asked_at[name] = now
        if len(self._asked_at) > MAX_WAITING:
            del self._asked_at[next(iter(self._asked_at))]

    def forget(self, participant_id: str) -> None:
        """Drop a participant that has been let in."""
        self._asked_at.pop(shortened(participant_id), None)

    def num(self, now: float) -> int:
        """Participants that wait; those that have not come again for long are dropped."""
        earliest = now - self._kept_s
        self._asked_at = {name: at for name, at in self._asked_at.items() if at >= earliest}
        return len(self._asked_at)


class RefusedParticipants:
    """The latest refused rendezvous, by participant."""

    def __init__(self) -> None:
        self._reasons: dict[str, str] = {}
        self._line = RateLimitedLog(log.warning, "rendezvous_refused", burst=MAX_LINES)

    def note(self, participant_id: str, refusal: Refusal) -> None:
        """Log a refusal and keep it for the status."""
        name, reason = shortened(participant_id), message_of(refusal)
        self._line(participant=name, code=refusal.code, reason=reason)
        self._reasons.pop(name, None)
        self._reasons[name] = reason.removeprefix(f"participant {name!r}: ")
        if len(self._reasons) > MAX_KEPT:
            del self._reasons[next(iter(self._reasons))]

    def forget(self, participant_id: str) -> None:
        """Drop the refusal of a participant that has been accepted since."""
        self._reasons.pop(participant_id, None)

    def warnings(self) -> list[str]:
        """Warnings about refused participants, one sentence each."""
        return [f"{name!r} was refused: {reason}" for name, reason in self._reasons.items()]
