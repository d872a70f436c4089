"""The meaning of a refused call for the participant that made it.

Only a reason that the coordinator itself has given ends anything or is a verdict on an update.
gRPC, a proxy or a load balancer answers in the coordinator's place while it is away, overloaded or
wrongly configured; a call that was refused like that is tried again, however long it takes.
"""

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
    "DUPLICATE_INSTANCE": Verdict.FATAL,  # another process is alive under our participant id
    "NOT_IN_ROUND": Verdict.RETRY,
    "NOT_SELECTED": Verdict.RETRY,
    "UPLOAD_MISSING": Verdict.RETRY,  # each attempt uploads anew
    "UNAVAILABLE": Verdict.RETRY,
    "TOO_MANY_CALLS": Verdict.RETRY,
    "REQUEST_MISSING": Verdict.RETRY,
    "ROUND_CLOSED": Verdict.OVER,
    "STALE_ROUND": Verdict.OVER,
    "STALE_ATTEMPT": Verdict.OVER,
    "SLICE_MISMATCH": Verdict.OVER,
    "DUPLICATE_UPDATE": Verdict.OVER,
    "INVALID_UPDATE": Verdict.INVALID,
    "TOO_LARGE": Verdict.UNFIT,
    "INVALID_NAME": Verdict.FATAL,
    "INVALID_TAGS": Verdict.FATAL,
    "UPLOAD_NAME_TAKEN": Verdict.FATAL,
    "PROFILE_MISMATCH": Verdict.FATAL,
}

# The verdict on a reason that this version does not know, from a newer coordinator.
_BY_STATUS = {
    "PERMISSION_DENIED": Verdict.REJOIN,
    "ALREADY_EXISTS": Verdict.OVER,
    "INVALID_ARGUMENT": Verdict.INVALID,
    "UNAUTHENTICATED": Verdict.FATAL,
    "UNIMPLEMENTED": Verdict.FATAL,
}


def verdict_on(refused: RefusedBy) -> Verdict:
    if not refused.reason:
        # A proxy may have cut the reason off. Rendezvous again costs nothing and mends a lost
        # membership.
        is_denied = refused.status == "PERMISSION_DENIED" and refused.call is not Call.RENDEZVOUS
        return Verdict.REJOIN if is_denied else Verdict.RETRY
    if refused.reason == "DUPLICATE_INSTANCE" and refused.retry_after_s:
        return Verdict.RETRY  # the other process may have died: its lease tells
    verdict = _BY_REASON.get(refused.reason) or _BY_STATUS.get(refused.status, Verdict.RETRY)
    if refused.call is Call.RENDEZVOUS and verdict is Verdict.REJOIN:
        return Verdict.FATAL  # it is the rendezvous itself that is not permitted
    if refused.call is not Call.HAND_IN and verdict in (Verdict.INVALID, Verdict.UNFIT):
        return Verdict.FATAL  # there is no update that could be at fault
    return verdict
