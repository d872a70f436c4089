"""Every refusal, each with its reason on the wire.

The core knows no gRPC: server/statuses.py maps these to statuses, chosen by what the caller should
do next. A message names the thing, the value and the limit, and what to do.
"""

from xain_foundation.names import shortened
from xain_wire.fl.refusals_pb2 import RefusalReason
from xain_wire.refusal import CaughtRefusal
from xain_wire.refusal import Refusal as Refusal

Reason = RefusalReason


class InvalidUpdate(CaughtRefusal, reason=Reason.INVALID_UPDATE):
    """The update itself is wrong, which is held against its sender: wrong shape, dtype or sample
    count, or not finite. why: another reason, such as TOO_LARGE."""

    def __init__(self, message: str, why: "RefusalReason.ValueType | None" = None) -> None:
        super().__init__(message)
        self.code = self.code if why is None else Reason.Name(why)


class ProfileMismatch(CaughtRefusal, reason=Reason.PROFILE_MISMATCH):
    """The participant's data does not fit the session's.

    is_unlike_others: it fits the settings, and not the data of the participants that came before,
        which decide what the settings leave open.
    """

    def __init__(self, message: str, *, is_unlike_others: bool = False) -> None:
        super().__init__(message)
        self.is_unlike_others = is_unlike_others


class NotAMember(CaughtRefusal, reason=Reason.NOT_A_MEMBER):
    """The participant is no member: no rendezvous, or its lease has run out."""

    def __init__(self, participant_id: str) -> None:
        super().__init__(
            f"Unknown participant {shortened(participant_id)}. "
            "Please try to rendezvous with the coordinator before making a request."
        )


class LateUpdate(Refusal):
    """The update comes too late to count, or its sender asks too late for its work."""


class StaleModel(CaughtRefusal, reason=Reason.STALE_MODEL):
    """A model for a round that is not being aggregated. The sender is out of date."""


class Unavailable(CaughtRefusal, reason=Reason.UNAVAILABLE):
    """The coordinator starts or stops, or its store is away. Ask again."""


def invalid_request(message: str) -> Refusal:
    """The refusal of a malformed request."""
    return Refusal(Reason.INVALID_REQUEST, message)


def duplicate_update(participant_id: str, round_: int) -> Refusal:
    """The refusal of a second, different update for the same round."""
    return Refusal(
        Reason.DUPLICATE_UPDATE,
        f"Participant {participant_id} already submitted another update for round {round_}.",
    )
