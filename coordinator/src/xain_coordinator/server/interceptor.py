"""Around every call: refusals become statuses, and whatever was not foreseen becomes INTERNAL.

A handler raises; this answers. The traceback of a defect stays in our own log.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NoReturn

import grpc
import structlog

from xain_coordinator.core.errors import Refusal, Unavailable
from xain_coordinator.ports import StoreError
from xain_coordinator.server.statuses import STATUSES, status_details

log = structlog.get_logger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]


class RefusalInterceptor(grpc.aio.ServerInterceptor):
    """counters: how often each refusal was given, by its code."""

    def __init__(self, counters: Counter[str]) -> None:
        self._counters = counters
        # By method, so that a call costs a look-up. Of methods that there are: what a stranger asks
        # for in vain is not kept.
        self._handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {}

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        method: str = handler_call_details.method
        known = self._handlers.get(method)
        if known is not None:
            return known
        handler = await continuation(handler_call_details)
        if handler is None or not method.startswith("/xain_proto."):
            return handler  # health and reflection answer for themselves
        kind = (handler.request_streaming, handler.response_streaming)
        attribute, make = _KINDS[kind]
        behaviour = getattr(handler, attribute)
        streaming = handler.response_streaming
        self._handlers[method] = make(
            self._stream(method, behaviour) if streaming else self._unary(method, behaviour),
            request_deserializer=handler.request_deserializer,
            response_serializer=handler.response_serializer,
        )
        return self._handlers[method]

    def _unary(self, method: str, behaviour: Callable[..., Awaitable[Any]]) -> Callable[..., Any]:
        async def answer(request: Any, context: Context) -> Any:
            try:
                return await behaviour(request, context)
            except Exception as error:  # a defect too: the client hears INTERNAL
                await self._abort(method, context, error)

        return answer

    def _stream(
        self, method: str, behaviour: Callable[..., AsyncIterator[Any]]
    ) -> Callable[..., Any]:
        async def answer(request: Any, context: Context) -> AsyncIterator[Any]:
            try:
                async for message in behaviour(request, context):
                    yield message
            except Exception as error:  # a defect too: the client hears INTERNAL
                await self._abort(method, context, error)

        return answer

    async def _abort(self, method: str, context: Context, error: Exception) -> NoReturn:
        if isinstance(error, grpc.aio.AbortError):
            raise error
        if isinstance(error, StoreError):
            # A published model that is not there is a store that is not, or not the right one.
            # Where it lies is the operator's business, not the participant's.
            log.warning("store_unavailable", method=method, error=str(error))
            error = Unavailable("the weights store is away; try again in a moment")
        if isinstance(error, Refusal):
            self._counters[error.code] += 1
            log.debug("refused", method=method, code=error.code, reason=str(error))
            await context.abort(
                STATUSES[type(error)],
                str(error),
                (("grpc-status-details-bin", status_details(error)),),
            )
        log.error("call_failed", method=method, exc_info=error)
        await context.abort(
            grpc.StatusCode.INTERNAL, "internal error; the coordinator's log has the details"
        )
        raise asyncio.CancelledError  # abort always raises; this tells the type checker


# (request streaming, response streaming): where the handler keeps its function, and its maker.
_KINDS = {
    (False, False): ("unary_unary", grpc.unary_unary_rpc_method_handler),
    (False, True): ("unary_stream", grpc.unary_stream_rpc_method_handler),
    (True, False): ("stream_unary", grpc.stream_unary_rpc_method_handler),
    (True, True): ("stream_stream", grpc.stream_stream_rpc_method_handler),
}
