"""The meaning of a refused call for the participant that made it.

Only a reason that the coordinator itself has given ends anything or is a verdict on an update.
gRPC, a proxy or a load balancer answers in the coordinator's place while it is away, overloaded or
wrongly configured; a call that was refused like that is tried again, however long it takes.
"""

from enum import Enum, auto

from xain_participant.events import RefusedBy
from xain_participant.values import Call
from xain_proto.fl.refusals_pb2 import RefusalReason


class Verdict(Enum):
    RETRY = auto()  # not now
    REJOIN = auto()  # rendezvous first
    OVER = auto()  # the round has all it needs
    INVALID = auto()  # this update will never be taken
    UNFIT = auto()  # nor will any other that we could make
    FATAL = auto()  # whatever we send, the answer stays the same


_VERDICTS = {
    RefusalReason.NOT_A_MEMBER: Verdict.REJOIN,
    # Another process is alive under our participant id.
    RefusalReason.DUPLICATE_INSTANCE: Verdict.FATAL,
    RefusalReason.NOT_IN_ROUND: Verdict.RETRY,
    RefusalReason.NOT_SELECTED: Verdict.RETRY,
    RefusalReason.UPLOAD_MISSING: Verdict.RETRY,  # each attempt uploads anew
    RefusalReason.UNAVAILABLE: Verdict.RETRY,
    RefusalReason.TOO_MANY_CALLS: Verdict.RETRY,
    RefusalReason.REQUEST_MISSING: Verdict.RETRY,
    RefusalReason.ROUND_CLOSED: Verdict.OVER,
    RefusalReason.STALE_ROUND: Verdict.OVER,
    RefusalReason.STALE_ATTEMPT: Verdict.OVER,
    RefusalReason.SLICE_MISMATCH: Verdict.OVER,
    RefusalReason.DUPLICATE_UPDATE: Verdict.OVER,
    RefusalReason.INVALID_UPDATE: Verdict.INVALID,
    RefusalReason.TOO_LARGE: Verdict.UNFIT,
    RefusalReason.INVALID_NAME: Verdict.FATAL,
    RefusalReason.INVALID_TAGS: Verdict.FATAL,
    RefusalReason.UPLOAD_NAME_TAKEN: Verdict.FATAL,
    RefusalReason.PROFILE_MISMATCH: Verdict.FATAL,
}
_BY_REASON = {RefusalReason.Name(reason): verdict for reason, verdict in _VERDICTS.items()}
_DUPLICATE_INSTANCE = RefusalReason.Name(RefusalReason.DUPLICATE_INSTANCE)

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
    if refused.reason == _DUPLICATE_INSTANCE and refused.retry_after_s:
        return Verdict.RETRY  # the other process may have died: its lease tells
    verdict = _BY_REASON.get(refused.reason) or _BY_STATUS.get(refused.status, Verdict.RETRY)
    if refused.call is Call.RENDEZVOUS and verdict is Verdict.REJOIN:
        return Verdict.FATAL  # it is the rendezvous itself that is not permitted
    if refused.call is not Call.HAND_IN and verdict in (Verdict.INVALID, Verdict.UNFIT):
        return Verdict.FATAL  # there is no update that could be at fault
    return verdict
