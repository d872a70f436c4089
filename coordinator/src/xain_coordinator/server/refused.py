"""Participants that were refused at the rendezvous, for the log and the status."""

import structlog

from xain_coordinator.core.errors import Refusal
from xain_coordinator.server.rare_lines import RareLine
from xain_coordinator.server.statuses import message_of
from xain_messaging.names import shortened

log = structlog.get_logger(__name__)

# Strangers can cause refusals, so both the lines in 10 s and what is kept are bounded.
MAX_LINES = 20
MAX_KEPT = 20


class RefusedParticipants:
    """The latest refusals, by participant."""

    def __init__(self) -> None:
        self._reasons: dict[str, str] = {}
        self._line = RareLine(log.warning, "rendezvous_refused", burst=MAX_LINES)

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
        """One sentence for each participant that is refused."""
        return [f"{name!r} was refused: {reason}" for name, reason in self._reasons.items()]
