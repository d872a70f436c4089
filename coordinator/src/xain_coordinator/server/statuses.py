"""Table from refusals to gRPC statuses, chosen by what the caller should do next."""

from collections.abc import Mapping

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage
from google.rpc.error_details_pb2 import ErrorInfo, RetryInfo
from google.rpc.status_pb2 import Status

from xain_foundation.names import shortened
from xain_wire.fl.refusals_pb2 import RefusalReason as Reason
from xain_wire.metadata import ERROR_DOMAIN
from xain_wire.refusal import Refusal

# Characters of a message. A client takes 8 KiB of metadata, and the message is in there twice.
MAX_MESSAGE = 1000

STATUSES: Mapping[Reason.ValueType, grpc.StatusCode] = {
    # Mend the request; sending it again as it is cannot help.
    Reason.INVALID_REQUEST: grpc.StatusCode.INVALID_ARGUMENT,
    Reason.INVALID_UPDATE: grpc.StatusCode.INVALID_ARGUMENT,
    Reason.INVALID_NAME: grpc.StatusCode.INVALID_ARGUMENT,
    Reason.UPLOAD_NAME_TAKEN: grpc.StatusCode.INVALID_ARGUMENT,
    Reason.INVALID_TAGS: grpc.StatusCode.INVALID_ARGUMENT,
    Reason.PROFILE_MISMATCH: grpc.StatusCode.INVALID_ARGUMENT,
    # Rendezvous first.
    Reason.NOT_A_MEMBER: grpc.StatusCode.PERMISSION_DENIED,
    Reason.REMOVED_BY_OPERATOR: grpc.StatusCode.PERMISSION_DENIED,
    # Wait until the other process has gone, or take another participant id.
    Reason.DUPLICATE_INSTANCE: grpc.StatusCode.FAILED_PRECONDITION,
    # Wait for another state.
    Reason.NOT_IN_ROUND: grpc.StatusCode.FAILED_PRECONDITION,
    Reason.NOT_SELECTED: grpc.StatusCode.FAILED_PRECONDITION,
    Reason.ROUND_CLOSED: grpc.StatusCode.FAILED_PRECONDITION,
    Reason.STALE_ROUND: grpc.StatusCode.FAILED_PRECONDITION,
    Reason.STALE_ATTEMPT: grpc.StatusCode.FAILED_PRECONDITION,
    Reason.SLICE_MISMATCH: grpc.StatusCode.FAILED_PRECONDITION,
    Reason.UPLOAD_MISSING: grpc.StatusCode.FAILED_PRECONDITION,
    Reason.STALE_MODEL: grpc.StatusCode.FAILED_PRECONDITION,
    Reason.ALREADY_FITTING: grpc.StatusCode.FAILED_PRECONDITION,
    Reason.NOT_FITTING: grpc.StatusCode.FAILED_PRECONDITION,
    Reason.NOT_FITTED: grpc.StatusCode.FAILED_PRECONDITION,
    # The update counts already.
    Reason.DUPLICATE_UPDATE: grpc.StatusCode.ALREADY_EXISTS,
    Reason.DECIDED_OTHERWISE: grpc.StatusCode.ALREADY_EXISTS,
    # Send less.
    Reason.TOO_LARGE: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Reason.UNKNOWN_MODEL: grpc.StatusCode.NOT_FOUND,
    # Leave room for the calls of others, and ask again later.
    Reason.TOO_MANY_CALLS: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Reason.REQUEST_MISSING: grpc.StatusCode.DEADLINE_EXCEEDED,
    # Ask again later.
    Reason.NOBODY_ANSWERED: grpc.StatusCode.UNAVAILABLE,
    Reason.UNAVAILABLE: grpc.StatusCode.UNAVAILABLE,
    # Come with a certificate that is valid, and with its name.
    Reason.UNAUTHENTICATED: grpc.StatusCode.UNAUTHENTICATED,
    Reason.TOKEN_USED: grpc.StatusCode.UNAUTHENTICATED,
    Reason.NOT_PERMITTED: grpc.StatusCode.PERMISSION_DENIED,
    Reason.INVALID_CERTIFICATE_REQUEST: grpc.StatusCode.INVALID_ARGUMENT,
    Reason.UNKNOWN_CERTIFICATE: grpc.StatusCode.NOT_FOUND,
    Reason.NO_AUTHORITY: grpc.StatusCode.FAILED_PRECONDITION,
    Reason.NOT_RECORDED: grpc.StatusCode.UNAVAILABLE,
}


def message_of(refusal: Refusal) -> str:
    """Message of the gRPC status of a refusal."""
    return shortened(str(refusal), MAX_MESSAGE)


def status_of(
    refusal: Refusal,
) -> tuple[grpc.StatusCode, str, tuple[tuple[str, bytes], ...]]:
    """gRPC status of a refusal, with message and trailing metadata, as context.abort() takes
    them."""
    details = (("grpc-status-details-bin", _status_details(refusal)),)
    return STATUSES[Reason.Value(refusal.code)], message_of(refusal), details


def _status_details(refusal: Refusal) -> bytes:
    """The rich status that travels beside code and message: google.rpc.Status with an ErrorInfo
    whose reason is the refusal's code, and a RetryInfo if the caller is told when to come again."""
    info = AnyMessage()
    info.Pack(ErrorInfo(reason=refusal.code, domain=ERROR_DOMAIN))
    details = [info]
    if refusal.retry_after_s is not None:
        retry = RetryInfo()
        retry.retry_delay.FromNanoseconds(round(1e9 * refusal.retry_after_s))
        details.append(AnyMessage())
        details[-1].Pack(retry)
    code: int = STATUSES[Reason.Value(refusal.code)].value[0]
    status: bytes = Status(
        code=code, message=message_of(refusal), details=details
    ).SerializeToString()
    return status
