"""Refusals of access control, and what ends its start."""

from xain_wire.fl.refusals_pb2 import RefusalReason
from xain_wire.refusal import CaughtRefusal
from xain_wire.refusal import Refusal as Refusal

Reason = RefusalReason


class AccessError(Exception):
    """The folder of access control cannot be used; the message names the file and what to do."""


class Unauthenticated(CaughtRefusal, reason=Reason.UNAUTHENTICATED):
    """No certificate says who calls, or the call says somebody else, or the certificate is
    revoked or has expired."""


def not_permitted(message: str) -> Refusal:
    """The refusal of a caller whose role may not call the method, or not for another name."""
    return Refusal(Reason.NOT_PERMITTED, message)
