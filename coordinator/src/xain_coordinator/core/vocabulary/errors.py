"""Every refusal, each with its reason on the wire.

The core knows no gRPC: server/statuses.py maps these to statuses, chosen by what the caller should
do next. A message names the thing, the value and the limit, and what to do.
"""

from collections.abc import Mapping

from xain_foundation.names import shortened
from xain_wire.fl.refusals_pb2 import RefusalReason
from xain_wire.refusal import Refusal as Refusal


class InvalidRequest(Refusal, reason=RefusalReason.INVALID_REQUEST):
    """The request cannot be read: it is malformed."""


class NoRequest(Refusal, reason=RefusalReason.INVALID_REQUEST):
    """The call has ended without its request; mostly its caller has gone away."""


class UnusableUpdate(Refusal):
    """The update itself is wrong, which is held against its sender."""


class InvalidUpdate(UnusableUpdate, reason=RefusalReason.INVALID_UPDATE):
    """The update cannot be aggregated: wrong shape, dtype or sample count, or not finite."""


class InvalidName(Refusal, reason=RefusalReason.INVALID_NAME):
    """A name that cannot be part of a key."""

    def __init__(self, name: str, why: str) -> None:
        super().__init__(f"name {shortened(name)!r} cannot be used: {why}")


class UploadTaken(Refusal, reason=RefusalReason.UPLOAD_NAME_TAKEN):
    """The upload counts already as the update of another participant."""


class InvalidTags(Refusal, reason=RefusalReason.INVALID_TAGS):
    """Tags that are too many or too long, or cannot be printed."""


class ProfileMismatch(Refusal, reason=RefusalReason.PROFILE_MISMATCH):
    """The participant's data does not fit the session's.

    is_unlike_others: it fits the settings, and not the data of the participants that came before,
        which decide what the settings leave open.
    """

    def __init__(self, message: str, *, is_unlike_others: bool = False) -> None:
        super().__init__(message)
        self.is_unlike_others = is_unlike_others


class DuplicateInstance(Refusal, reason=RefusalReason.DUPLICATE_INSTANCE):
    """Another process is connected under the sender's participant id.

    retry_after_s: None if that process has been heard since the sender asked first, so that the
        sender need not wait for the end of its lease.
    """

    def __init__(self, message: str, retry_after_s: float | None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Removed(Refusal, reason=RefusalReason.REMOVED_BY_OPERATOR):
    """An operator has removed the participant from the session."""


class NotAMember(Refusal, reason=RefusalReason.NOT_A_MEMBER):
    """The participant is no member: no rendezvous, or its lease has run out."""

    def __init__(self, participant_id: str) -> None:
        super().__init__(
            f"Unknown participant {shortened(participant_id)}. "
            "Please try to rendezvous with the coordinator before making a request."
        )


class NotInRound(Refusal, reason=RefusalReason.NOT_IN_ROUND):
    """No round is open for training now. Keep a finished result: the round may go on."""

    def __init__(self, message: str, *, waits: bool = False) -> None:
        super().__init__(message)
        self.waits = waits


class LateUpdate(Refusal):
    """The update comes too late to count, or its sender asks too late for its work."""


class RoundAlreadyClosed(LateUpdate, reason=RefusalReason.ROUND_CLOSED):
    """The round has all its updates, or is over: the update is no longer needed."""


class StaleRound(LateUpdate, reason=RefusalReason.STALE_ROUND):
    """The update belongs to another round than the one that its sender trains."""

    def __init__(self, sent: int, current: int) -> None:
        super().__init__(
            f"the update is for round {sent}, but its sender is to train round {current}; drop it"
        )


class StaleAttempt(LateUpdate, reason=RefusalReason.STALE_ATTEMPT):
    """The slice was trained in an attempt that is over."""

    def __init__(self, round_: int, sent: int, current: int) -> None:
        super().__init__(
            f"the slice is of attempt {sent} at round {round_}, and attempt {current} goes on; "
            "drop it"
        )


class SliceMismatch(Refusal, reason=RefusalReason.SLICE_MISMATCH):
    """The slice does not fit the slices of the other members, which ends the attempt. Which member
    has cut the model wrongly is not known."""


class NotSelected(Refusal, reason=RefusalReason.NOT_SELECTED):
    """The participant is not selected for the open round."""

    def __init__(self, participant_id: str, round_: int) -> None:
        super().__init__(
            f"{participant_id} is not selected for round {round_}; "
            "wait for a heartbeat that says ROUND"
        )


class DuplicateUpdate(Refusal, reason=RefusalReason.DUPLICATE_UPDATE):
    """A second, different update for the same round."""

    def __init__(self, participant_id: str, round_: int) -> None:
        super().__init__(
            f"Participant {participant_id} already submitted another update for round {round_}."
        )


class StaleModel(Refusal, reason=RefusalReason.STALE_MODEL):
    """A model for a round that is not being aggregated. The sender is out of date."""


class UploadMissing(Refusal, reason=RefusalReason.UPLOAD_MISSING):
    """The weights of the update are not in the store, or others than were announced."""


class TooLarge(UnusableUpdate, reason=RefusalReason.TOO_LARGE):
    """More bytes than the coordinator takes."""


class UnknownModel(Refusal, reason=RefusalReason.UNKNOWN_MODEL):
    """No such global model has been published."""


class AlreadyFitting(Refusal, reason=RefusalReason.ALREADY_FITTING):
    """The fit of this session has been requested before."""


class NotFitted(Refusal, reason=RefusalReason.NOT_FITTED):
    """No model has been fitted, so no participant can be asked for predictions."""


class NobodyAnswered(Refusal, reason=RefusalReason.NOBODY_ANSWERED):
    """No participant answered a question for predictions. missing: why, by participant."""

    def __init__(self, missing: Mapping[str, str]) -> None:
        told = "; ".join(f"{name}: {why}" for name, why in missing.items())
        super().__init__(f"no participant answered: {told}")
        self.missing = missing


class DecidedOtherwise(Refusal, reason=RefusalReason.DECIDED_OTHERWISE):
    """A script has decided this before, in another way."""


class NotFitting(Refusal, reason=RefusalReason.NOT_FITTING):
    """No fit is under way that could be cancelled."""


class Unavailable(Refusal, reason=RefusalReason.UNAVAILABLE):
    """The coordinator starts or stops, or its store is away. Ask again."""


class TooManyCalls(Refusal, reason=RefusalReason.TOO_MANY_CALLS):
    """The sender, or all unregistered clients together, have as many open calls as are admitted."""

    retry_after_s = 1.0


class RequestMissing(Refusal, reason=RefusalReason.REQUEST_MISSING):
    """The headers of a call have come without its first message."""
