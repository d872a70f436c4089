"""The Access service: certificates for the sites and their operators."""

from typing import Any

import grpc

from xain_coordinator.server.guard import Guard
from xain_coordinator.server.identity import certified_caller
from xain_foundation.threads import run_to_end
from xain_wire.fl import access_pb2 as pb
from xain_wire.fl import access_pb2_grpc as pb_grpc

Context = grpc.aio.ServicerContext[Any, Any]


class AccessService(pb_grpc.AccessServicer):
    """guard: of this process."""

    def __init__(self, guard: Guard) -> None:
        self._guard = guard

    async def Join(self, request: pb.JoinRequest, context: Context) -> pb.JoinResponse:
        """Exchange a token for a certificate."""
        access, caller = self._guard.require_access(), certified_caller()
        certificate = await run_to_end(access.join, caller, request.request, context.peer())
        return pb.JoinResponse(certificate=certificate, authority=access.authority)

    async def Renew(self, request: pb.RenewRequest, context: Context) -> pb.RenewResponse:
        """Issue the caller's next certificate."""
        access, caller = self._guard.require_access(), certified_caller()
        certificate = await run_to_end(access.renew, caller, request.request)
        return pb.RenewResponse(certificate=certificate, authority=access.authority)
