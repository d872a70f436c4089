"""Participants that wait for a free slot of the session, for the log and the status."""

from xain_foundation.logs.logger import get_logger
from xain_foundation.logs.rate_limited_log import RateLimitedLog
from xain_foundation.names import shortened

log = get_logger(__name__)

# Anybody can be asked to wait, so both the lines in 10 s and the names that are kept are bounded.
MAX_LINES = 20

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
        self._line = RateLimitedLog(log.warning, "session_full", burst=MAX_LINES)

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
        """Number of participants that wait, without those that have not asked for long."""
        earliest = now - self._kept_s
        self._asked_at = {name: at for name, at in self._asked_at.items() if at >= earliest}
        return len(self._asked_at)
