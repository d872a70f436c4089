"""Asking a coordinator for a certificate: by a token, or by the certificate that is to be renewed.

The same key may be sent any number of times, and gets the same certificate.
"""

from dataclasses import dataclass
from typing import Any

import grpc

from xain_participant.wire.client import CALL_TIMEOUT_S, Refused, open_channel, refused_by
from xain_wire.fl import access_pb2 as pb
from xain_wire.fl.access_pb2_grpc import AccessStub

# The answer waits for the coordinator's disk.
ASK_S = 4 * CALL_TIMEOUT_S


@dataclass(frozen=True, slots=True)
class Signed:
    """certificate, authority: PEM."""

    certificate: bytes
    authority: bytes


def ask_to_join(address: str, credentials: grpc.ChannelCredentials, request: bytes) -> Signed:
    """Exchange the token that the credentials are made of. request: PKCS#10 in PEM. Raises
    Refused."""
    return _ask(address, credentials, "Join", pb.JoinRequest(request=request))


def ask_to_renew(address: str, credentials: grpc.ChannelCredentials, request: bytes) -> Signed:
    """A new certificate in the place of the one that the credentials are made of. Raises
    Refused."""
    return _ask(address, credentials, "Renew", pb.RenewRequest(request=request))


def _ask(address: str, credentials: grpc.ChannelCredentials, method: str, request: Any) -> Signed:
    """Call a method of the Access service. Raises Refused."""
    with open_channel(address, credentials=credentials) as channel:
        try:
            answer = getattr(AccessStub(channel), method)(request, timeout=ASK_S)
        except grpc.RpcError as error:
            raise refused_by(error) from None
    return Signed(answer.certificate, answer.authority)


__all__ = ["ASK_S", "Refused", "Signed", "ask_to_join", "ask_to_renew"]
