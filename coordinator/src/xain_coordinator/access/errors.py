"""Refusals of access control, and what ends its start."""

from xain_wire.fl.refusals_pb2 import RefusalReason
from xain_wire.refusal import Refusal


class AccessError(Exception):
    """The folder of access control cannot be used; the message names the file and what to do."""


class Unauthenticated(Refusal, reason=RefusalReason.UNAUTHENTICATED):
    """No certificate says who calls, or the call says somebody else, or the certificate is
    revoked or has expired."""


class NotPermitted(Refusal, reason=RefusalReason.NOT_PERMITTED):
    """The role of the caller may not call the method, or not for another name than its own."""


class TokenUsed(Refusal, reason=RefusalReason.TOKEN_USED):
    """The token was exchanged for the certificate of another key."""


class InvalidCertificateRequest(Refusal, reason=RefusalReason.INVALID_CERTIFICATE_REQUEST):
    """No certificate request, a broken signature, a key that is too weak, or a name, role or
    lifetime that nothing is issued for."""


class UnknownCertificate(Refusal, reason=RefusalReason.UNKNOWN_CERTIFICATE):
    """Nothing was issued for this name, or with this serial number."""


class NoAuthority(Refusal, reason=RefusalReason.NO_AUTHORITY):
    """The key of the authority is not here, or its certificate has expired: nothing is signed."""


class NotRecorded(Refusal, reason=RefusalReason.NOT_RECORDED):
    """The audit log cannot be written, so nothing was done."""
