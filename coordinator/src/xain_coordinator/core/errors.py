"""Every refusal, each with a stable code.

The core knows no gRPC: server/statuses.py maps these to statuses, chosen by what the caller should
do next. A message names the thing, the value and the limit, and what to do.
"""

from collections.abc import Mapping
from typing import ClassVar

from xain_foundation.names import shortened


class Refusal(Exception):
    """A command that was not carried out. It changed nothing.

    retry_after_s: when the sender is asked to come again; None leaves that to it.
    """

    code: ClassVar[str]
    retry_after_s: float | None = None


class InvalidRequest(Refusal):
    """The request cannot be read: it is malformed, or missing."""

    code = "INVALID_REQUEST"


class UnusableUpdate(Refusal):
    """The update itself is wrong, which is held against its sender."""


class InvalidUpdate(UnusableUpdate):
    """The update cannot be aggregated: wrong shape, dtype or sample count, or not finite."""

    code = "INVALID_UPDATE"


class InvalidName(Refusal):
    """A participant or upload name that cannot be part of a key."""

    code = "INVALID_NAME"

    def __init__(self, name: str, why: str) -> None:
        super().__init__(f"name {shortened(name)!r} cannot be used: {why}")


class UploadNameTaken(Refusal):
    """The upload's name belongs to another participant, or the sender already uses another one."""

    code = "UPLOAD_NAME_TAKEN"


class InvalidTags(Refusal):
    """Tags that are too many or too long, or cannot be printed."""

    code = "INVALID_TAGS"


class ProfileMismatch(Refusal):
    """The participant's data does not fit the session's."""

    code = "PROFILE_MISMATCH"


class DuplicateInstance(Refusal):
    """Another process is connected under the sender's participant id.

    retry_after_s: None if that process has been heard since the sender asked first, so that the
        sender need not wait for the end of its lease.
    """

    code = "DUPLICATE_INSTANCE"

    def __init__(self, message: str, retry_after_s: float | None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class NotAMember(Refusal):
    """No rendezvous, or the lease has run out."""

    code = "NOT_A_MEMBER"

    def __init__(self, participant_id: str) -> None:
        super().__init__(
            f"Unknown participant {shortened(participant_id)}. "
            "Please try to rendezvous with the coordinator before making a request."
        )


class NotInRound(Refusal):
    """No round is open for training now. Keep a finished result: the round may go on.

    is_for_next: the next round takes the update, once the model that is being made is there.
    """

    code = "NOT_IN_ROUND"

    def __init__(self, message: str, *, is_for_next: bool = False) -> None:
        super().__init__(message)
        self.is_for_next = is_for_next


class LateUpdate(Refusal):
    """The update comes too late to count, or its sender asks too late for its work."""


class RoundAlreadyClosed(LateUpdate):
    """The round has all it needs, or is over: its update is no longer wanted."""

    code = "ROUND_CLOSED"


class StaleRound(LateUpdate):
    """The update belongs to another round than the one that its sender trains."""

    code = "STALE_ROUND"

    def __init__(self, sent: int, current: int) -> None:
        super().__init__(
            f"the update is for round {sent}, but its sender is to train round {current}; drop it"
        )


class StaleAttempt(LateUpdate):
    """The slice was trained in an attempt that is over."""

    code = "STALE_ATTEMPT"

    def __init__(self, round_: int, sent: int, current: int) -> None:
        super().__init__(
            f"the slice is of attempt {sent} at round {round_}, and attempt {current} goes on; "
            "drop it"
        )


class SliceMismatch(Refusal):
    """The slice does not fit the slices of the other members, which ends the attempt. Which member
    has cut the model wrongly is not known."""

    code = "SLICE_MISMATCH"


class NotSelected(Refusal):
    """The participant is not selected for the open round."""

    code = "NOT_SELECTED"

    def __init__(self, participant_id: str, round_: int) -> None:
        super().__init__(
            f"{participant_id} is not selected for round {round_}; "
            "wait for a heartbeat that says ROUND"
        )


class DuplicateUpdate(Refusal):
    """A second, different update for the same round."""

    code = "DUPLICATE_UPDATE"

    def __init__(self, participant_id: str, round_: int) -> None:
        super().__init__(
            f"Participant {participant_id} already submitted another update for round {round_}."
        )


class StaleModel(Refusal):
    """A model for a round that is not being aggregated. The sender is out of date."""

    code = "STALE_MODEL"


class UploadMissing(Refusal):
    """The weights of the update are not in the store, or others than were announced."""

    code = "UPLOAD_MISSING"


class TooLarge(UnusableUpdate):
    """More bytes than the coordinator takes."""

    code = "TOO_LARGE"


class UnknownModel(Refusal):
    """No such global model has been published."""

    code = "UNKNOWN_MODEL"


class AlreadyFitting(Refusal):
    """The fit of this session has been requested before."""

    code = "ALREADY_FITTING"


class NotFitted(Refusal):
    """No model has been fitted, so no participant can be asked for predictions."""

    code = "NOT_FITTED"


class NobodyAnswered(Refusal):
    """No participant answered a question for predictions. missing: why, by participant."""

    code = "NOBODY_ANSWERED"

    def __init__(self, missing: Mapping[str, str]) -> None:
        told = "; ".join(f"{name}: {why}" for name, why in missing.items())
        super().__init__(f"no participant answered: {told}")
        self.missing = missing


class NotFitting(Refusal):
    """No fit is under way that could be cancelled."""

    code = "NOT_FITTING"


class Unavailable(Refusal):
    """The coordinator starts or stops, or its store is away. Ask again."""

    code = "UNAVAILABLE"


class TooManyCalls(Refusal):
    """The sender, or strangers together, have as many calls open as are admitted."""

    code = "TOO_MANY_CALLS"
    retry_after_s = 1.0


class RequestMissing(Refusal):
    """The headers of a call came, and its first message did not."""

    code = "REQUEST_MISSING"
