"""Permissions: which roles may call which methods of a gRPC server with certificates."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing
from typing import Any, Final, TypeAlias, cast

import grpc

from xain_foundation.logs.logger import get_logger
from xain_foundation.logs.rate_limited_log import RateLimitedLog
from xain_foundation.security.callers import Caller
from xain_foundation.security.identity import NoIdentity, Role
from xain_foundation.security.tls import Certificates

log = get_logger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]
Roles: TypeAlias = Mapping[str, frozenset[Role]]

# Roles of members of groups.
MEMBERS: Final = frozenset((Role.PARTICIPANT, Role.NODE, Role.COORDINATOR, Role.OPERATOR))
OF_MEMBERSHIP: Final[Roles] = {
    f"/xain_proto.messaging.Membership/{method}": MEMBERS
    for method in ("Join", "Renew", "Watch", "Leave", "Barrier")
}


def names_of(tls: Certificates | None) -> Callable[[Context], str | None]:
    """Make the `name_of` of a MembershipService, which returns the only name that a caller may
    speak for; None for an operator, a coordinator, and without certificates."""
    if tls is None:
        return lambda context: None
    callers = tls.callers

    def name_of(context: Context) -> str | None:
        identity = callers.of_call(context).identity
        # The coordinator has a node of the parameter server in its process.
        speaks_for_any = identity.role in (Role.OPERATOR, Role.COORDINATOR)
        return None if speaks_for_any else identity.name

    return name_of


class Permissions(grpc.aio.ServerInterceptor):
    """Refuses calls of strangers, and of callers whose roles are not in the table.

    roles: by method; what is not in it is refused.
    """

    # A stream on which nothing is sent ends so soon when its caller's certificate counts no more.
    look_s = 1.0

    def __init__(self, tls: Certificates, roles: Roles) -> None:
        self._tls = tls
        self._callers = tls.callers
        self._roles = roles
        self._refused = RateLimitedLog(log.warning, "caller_refused")  # anybody can cause it

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        details: grpc.HandlerCallDetails,
    ) -> Any:
        """Let a call through if the certificate of its caller allows it; a stream ends when the
        certificate does."""
        handler: Any = await continuation(details)
        if handler is None:
            return handler
        method = str(details.method)
        if handler.unary_unary is not None:
            answer = handler.unary_unary

            async def unary(request: Any, context: Context) -> Any:
                await self._require_caller(method, context)
                return await answer(request, context)

            return grpc.unary_unary_rpc_method_handler(
                unary, handler.request_deserializer, handler.response_serializer
            )
        assert handler.unary_stream is not None, "these services have no other methods"
        tell = handler.unary_stream

        async def stream(request: Any, context: Context) -> AsyncIterator[Any]:
            caller = await self._require_caller(method, context)
            ended = ""  # why, by check_caller()
            timer: asyncio.TimerHandle

            def check_caller() -> None:
                nonlocal ended, timer
                self._tls.look()
                try:
                    self._callers.require(caller)
                except NoIdentity as error:
                    ended = str(error)
                    task.cancel()
                else:
                    timer = task.get_loop().call_later(self.look_s, check_caller)

            task = cast(asyncio.Task[Any], asyncio.current_task())
            timer = task.get_loop().call_later(self.look_s, check_caller)
            try:
                async with aclosing(tell(request, context)) as responses:
                    async for response in responses:
                        self._callers.require(caller)
                        yield response
            except NoIdentity as error:
                await context.abort(grpc.StatusCode.UNAUTHENTICATED, str(error))
            except asyncio.CancelledError:
                if not ended:
                    raise
                await context.abort(grpc.StatusCode.UNAUTHENTICATED, ended)
            finally:
                timer.cancel()

        return grpc.unary_stream_rpc_method_handler(
            stream, handler.request_deserializer, handler.response_serializer
        )

    async def _require_caller(self, method: str, context: Context) -> Caller:
        """Return the caller; end the call of one without identity or permission."""
        try:
            caller = self._callers.of_call(context)
        except NoIdentity as error:
            code, why = grpc.StatusCode.UNAUTHENTICATED, str(error)
        else:
            if caller.identity.role in self._roles.get(method, ()):
                return caller
            code = grpc.StatusCode.PERMISSION_DENIED
            why = f"{caller.identity} may not call {method.removeprefix('/')}"
        self._refused(peer=context.peer(), reason=why)
        await context.abort(code, why)
        raise AssertionError("abort() raises")
