"""What a refusal means for the one who is refused."""

from enum import Enum, auto

from xain_participant.events import RefusedBy
from xain_participant.values import Call


class Verdict(Enum):
    RETRY = auto()  # not now
    REJOIN = auto()  # rendezvous first
    OVER = auto()  # the round has all it needs
    INVALID = auto()  # this update will never be taken
    UNFIT = auto()  # nor will any other that we could make
    FATAL = auto()  # whatever we send, the answer stays the same


_BY_REASON = {
    "NOT_A_MEMBER": Verdict.REJOIN,
    "NOT_IN_ROUND": Verdict.RETRY,
    "NOT_SELECTED": Verdict.RETRY,
    "UPLOAD_MISSING": Verdict.RETRY,  # each attempt uploads anew
    "UNAVAILABLE": Verdict.RETRY,
    "ROUND_CLOSED": Verdict.OVER,
    "STALE_ROUND": Verdict.OVER,
    "DUPLICATE_UPDATE": Verdict.OVER,
    "INVALID_UPDATE": Verdict.INVALID,
    "TOO_LARGE": Verdict.UNFIT,
    "INVALID_NAME": Verdict.FATAL,
    "INVALID_TAGS": Verdict.FATAL,
    "UPLOAD_NAME_TAKEN": Verdict.FATAL,
    "PROFILE_MISMATCH": Verdict.FATAL,
}

# For what comes without a reason we know: from gRPC itself, a proxy, or a newer coordinator.
_BY_STATUS = {
    "PERMISSION_DENIED": Verdict.REJOIN,
    "ALREADY_EXISTS": Verdict.OVER,
    "INVALID_ARGUMENT": Verdict.INVALID,
    "UNAUTHENTICATED": Verdict.FATAL,
    "UNIMPLEMENTED": Verdict.FATAL,
}

_EXHAUSTED = "RESOURCE_EXHAUSTED"


def verdict_on(refused: RefusedBy) -> Verdict:
    verdict = _BY_REASON.get(refused.reason) or _BY_STATUS.get(refused.status, Verdict.RETRY)
    if refused.call is Call.RENDEZVOUS and verdict is Verdict.REJOIN:
        return Verdict.FATAL  # it is the rendezvous itself that is not permitted
    if refused.call is not Call.HAND_IN and verdict in (Verdict.INVALID, Verdict.UNFIT):
        return Verdict.FATAL  # there is no update that could be at fault
    if refused.call is Call.HAND_IN and not refused.reason and refused.status == _EXHAUSTED:
        return Verdict.UNFIT  # gRPC itself, or a proxy, finds the message too large
    return verdict
