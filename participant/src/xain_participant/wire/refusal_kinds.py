"""Kinds of refusals: what a participant does after a refused call.

Only a reason of the coordinator itself ends a participant or drops an update. gRPC, a proxy or a
load balancer answers instead of a coordinator that is away, overloaded or wrongly configured; a
call that was refused without a reason is tried again, however long it takes.
"""

from enum import Enum, auto

from xain_participant.sdk.events import RefusedBy
from xain_participant.sdk.values import Call
from xain_wire.fl.refusals_pb2 import RefusalReason


class RefusalKind(Enum):
    RETRY = auto()  # send the same again later
    REJOIN = auto()  # rendezvous first
    OVER = auto()  # drop the update: its round needs no more
    INVALID = auto()  # drop the update: it will never be accepted
    UNFIT = auto()  # drop the update: no other that this participant makes would be accepted
    FATAL = auto()  # end: no call of this participant would be accepted


_KINDS = {
    RefusalReason.NOT_A_MEMBER: RefusalKind.REJOIN,
    # Another process is alive under our participant id.
    RefusalReason.DUPLICATE_INSTANCE: RefusalKind.FATAL,
    RefusalReason.NOT_IN_ROUND: RefusalKind.RETRY,
    RefusalReason.NOT_SELECTED: RefusalKind.RETRY,
    RefusalReason.UPLOAD_MISSING: RefusalKind.RETRY,  # each attempt uploads anew
    RefusalReason.UNAVAILABLE: RefusalKind.RETRY,
    RefusalReason.TOO_MANY_CALLS: RefusalKind.RETRY,
    RefusalReason.REQUEST_MISSING: RefusalKind.RETRY,
    RefusalReason.ROUND_CLOSED: RefusalKind.OVER,
    RefusalReason.STALE_ROUND: RefusalKind.OVER,
    RefusalReason.STALE_ATTEMPT: RefusalKind.OVER,
    RefusalReason.SLICE_MISMATCH: RefusalKind.OVER,
    RefusalReason.DUPLICATE_UPDATE: RefusalKind.OVER,
    RefusalReason.INVALID_UPDATE: RefusalKind.INVALID,
    RefusalReason.TOO_LARGE: RefusalKind.UNFIT,
    RefusalReason.INVALID_NAME: RefusalKind.FATAL,
    RefusalReason.INVALID_TAGS: RefusalKind.FATAL,
    RefusalReason.UPLOAD_NAME_TAKEN: RefusalKind.FATAL,
    RefusalReason.PROFILE_MISMATCH: RefusalKind.FATAL,
    RefusalReason.UNAUTHENTICATED: RefusalKind.FATAL,
    RefusalReason.NOT_PERMITTED: RefusalKind.FATAL,
    RefusalReason.TOKEN_USED: RefusalKind.FATAL,
    RefusalReason.INVALID_CERTIFICATE_REQUEST: RefusalKind.FATAL,
    RefusalReason.UNKNOWN_CERTIFICATE: RefusalKind.FATAL,
    RefusalReason.NO_AUTHORITY: RefusalKind.FATAL,
    RefusalReason.NOT_RECORDED: RefusalKind.RETRY,
    RefusalReason.REMOVED_BY_OPERATOR: RefusalKind.FATAL,
}
_BY_REASON = {RefusalReason.Name(reason): kind for reason, kind in _KINDS.items()}
_DUPLICATE_INSTANCE = RefusalReason.Name(RefusalReason.DUPLICATE_INSTANCE)

# For a reason that this version does not know, from a newer coordinator.
_BY_STATUS = {
    "PERMISSION_DENIED": RefusalKind.REJOIN,
    "ALREADY_EXISTS": RefusalKind.OVER,
    "INVALID_ARGUMENT": RefusalKind.INVALID,
    "UNAUTHENTICATED": RefusalKind.FATAL,
    "UNIMPLEMENTED": RefusalKind.FATAL,
}


def kind_of(refused: RefusedBy) -> RefusalKind:
    """Kind of a refusal, by its reason, its status and the call that was refused."""
    if not refused.reason:
        # A proxy may have cut the reason off. Rendezvous again costs nothing and mends a lost
        # membership.
        is_denied = refused.status == "PERMISSION_DENIED" and refused.call is not Call.RENDEZVOUS
        return RefusalKind.REJOIN if is_denied else RefusalKind.RETRY
    if refused.reason == _DUPLICATE_INSTANCE and refused.retry_after_s:
        return RefusalKind.RETRY  # the other process may have died: its lease tells
    kind = _BY_REASON.get(refused.reason) or _BY_STATUS.get(refused.status, RefusalKind.RETRY)
    if refused.call is Call.RENDEZVOUS and kind is RefusalKind.REJOIN:
        return RefusalKind.FATAL  # it is the rendezvous itself that is not permitted
    if refused.call is not Call.HAND_IN and kind in (RefusalKind.INVALID, RefusalKind.UNFIT):
        return RefusalKind.FATAL  # there is no update that could be at fault
    return kind
