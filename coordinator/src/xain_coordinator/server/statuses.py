"""Table from refusals to gRPC statuses, chosen by what the caller should do next."""

from collections.abc import Mapping

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage
from google.rpc.error_details_pb2 import ErrorInfo, RetryInfo
from google.rpc.status_pb2 import Status

from xain_coordinator.access import errors as access
from xain_coordinator.core.vocabulary import errors
from xain_foundation.names import shortened
from xain_wire.metadata import ERROR_DOMAIN

# Characters of a message. A client takes 8 KiB of metadata, and the message is in there twice.
MAX_MESSAGE = 1000

STATUSES: Mapping[type[errors.Refusal], grpc.StatusCode] = {
    # Mend the request; sending it again as it is cannot help.
    errors.InvalidRequest: grpc.StatusCode.INVALID_ARGUMENT,
    errors.NoRequest: grpc.StatusCode.INVALID_ARGUMENT,
    errors.InvalidUpdate: grpc.StatusCode.INVALID_ARGUMENT,
    errors.InvalidName: grpc.StatusCode.INVALID_ARGUMENT,
    errors.UploadTaken: grpc.StatusCode.INVALID_ARGUMENT,
    errors.InvalidTags: grpc.StatusCode.INVALID_ARGUMENT,
    errors.ProfileMismatch: grpc.StatusCode.INVALID_ARGUMENT,
    # Rendezvous first.
    errors.NotAMember: grpc.StatusCode.PERMISSION_DENIED,
    errors.Removed: grpc.StatusCode.PERMISSION_DENIED,
    # Wait until the other process has gone, or take another participant id.
    errors.DuplicateInstance: grpc.StatusCode.FAILED_PRECONDITION,
    # Wait for another state.
    errors.NotInRound: grpc.StatusCode.FAILED_PRECONDITION,
    errors.NotSelected: grpc.StatusCode.FAILED_PRECONDITION,
    errors.RoundAlreadyClosed: grpc.StatusCode.FAILED_PRECONDITION,
    errors.StaleRound: grpc.StatusCode.FAILED_PRECONDITION,
    errors.StaleAttempt: grpc.StatusCode.FAILED_PRECONDITION,
    errors.SliceMismatch: grpc.StatusCode.FAILED_PRECONDITION,
    errors.UploadMissing: grpc.StatusCode.FAILED_PRECONDITION,
    errors.StaleModel: grpc.StatusCode.FAILED_PRECONDITION,
    errors.AlreadyFitting: grpc.StatusCode.FAILED_PRECONDITION,
    errors.NotFitting: grpc.StatusCode.FAILED_PRECONDITION,
    errors.NotFitted: grpc.StatusCode.FAILED_PRECONDITION,
    # The update counts already.
    errors.DuplicateUpdate: grpc.StatusCode.ALREADY_EXISTS,
    errors.DecidedOtherwise: grpc.StatusCode.ALREADY_EXISTS,
    # Send less.
    errors.TooLarge: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.UnknownModel: grpc.StatusCode.NOT_FOUND,
    # Leave room for the calls of others, and ask again later.
    errors.TooManyCalls: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.RequestMissing: grpc.StatusCode.DEADLINE_EXCEEDED,
    # Ask again later.
    errors.NobodyAnswered: grpc.StatusCode.UNAVAILABLE,
    errors.Unavailable: grpc.StatusCode.UNAVAILABLE,
    # Come with a certificate that is valid, and with its name.
    access.Unauthenticated: grpc.StatusCode.UNAUTHENTICATED,
    access.TokenUsed: grpc.StatusCode.UNAUTHENTICATED,
    access.NotPermitted: grpc.StatusCode.PERMISSION_DENIED,
    access.InvalidCertificateRequest: grpc.StatusCode.INVALID_ARGUMENT,
    access.UnknownCertificate: grpc.StatusCode.NOT_FOUND,
    access.NoAuthority: grpc.StatusCode.FAILED_PRECONDITION,
    access.NotRecorded: grpc.StatusCode.UNAVAILABLE,
}


def message_of(refusal: errors.Refusal) -> str:
    """Message of the gRPC status of a refusal."""
    return shortened(str(refusal), MAX_MESSAGE)


def status_of(
    refusal: errors.Refusal,
) -> tuple[grpc.StatusCode, str, tuple[tuple[str, bytes], ...]]:
    """gRPC status of a refusal, with message and trailing metadata, as context.abort() takes
    them."""
    details = (("grpc-status-details-bin", _status_details(refusal)),)
    return STATUSES[type(refusal)], message_of(refusal), details


def _status_details(refusal: errors.Refusal) -> bytes:
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
    code: int = STATUSES[type(refusal)].value[0]
    status: bytes = Status(
        code=code, message=message_of(refusal), details=details
    ).SerializeToString()
    return status
