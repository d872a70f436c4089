"""Interceptor of every call: it bounds and parses requests, turns refusals into statuses, and turns
unexpected errors into INTERNAL.

A handler raises; this answers. The traceback of a defect stays in our own log.

A refused call must leave nothing behind but its counter. Its exception holds a traceback, that one
the frames of the handler, and those the request, which may have megabytes. Where a frame holds the
exception as well, only the garbage collector frees it all, and it comes seldom. So the traceback is
dropped here as soon as the status is known.
"""

import asyncio
import inspect
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import Any

import grpc

from xain_coordinator.core.vocabulary.errors import Reason, Refusal, Unavailable
from xain_coordinator.driver.outage import Outage
from xain_coordinator.ports import StoreError
from xain_coordinator.server.calls.admission_control import AdmissionControl, Call
from xain_coordinator.server.calls.requests import bounded
from xain_coordinator.server.guard import Guard
from xain_coordinator.server.identity import (
    CALLER,
    SENDER,
    WAITED_S,
    participant_of,
    sender_of,
    waited_s,
)
from xain_coordinator.server.statuses import status_of
from xain_coordinator.telemetry.log_files import LatencyFile
from xain_foundation.logs.logger import get_logger
from xain_foundation.logs.rate_limited_log import RateLimitedLog
from xain_wire.fl import coordinator_pb2 as pb

log = get_logger(__name__)

COORDINATOR = "/xain_proto.fl.Coordinator/"
_HEARTBEAT = f"{COORDINATOR}Heartbeat"
# The stream of a call that is cancelled ends in the same way, so that no line is logged for this.
_NO_REQUEST = "the call ended without a request"
# Tracebacks of defects in ten seconds. A client that has found one causes it as often as it likes.
MAX_FAILED_LINES = 5

Context = grpc.aio.ServicerContext[Any, Any]
Answer = Callable[[Any, Context], Awaitable[Any]]
Status = tuple[grpc.StatusCode, str, tuple[tuple[str, bytes], ...]]


class RefusalInterceptor(grpc.aio.ServerInterceptor):
    """guard: says who calls. counters: how often each refusal was given, by its code. outage: told
    of calls that find the store away. latencies: told how long each call took."""

    def __init__(
        self,
        counters: Counter[str],
        admission: AdmissionControl,
        outage: Outage | None = None,
        latencies: LatencyFile | None = None,
        guard: Guard | None = None,
    ) -> None:
        self._guard = guard if guard is not None else Guard()
        self._latencies = latencies
        self._outage = outage if outage is not None else Outage()
        self._admission = admission
        self._counters = counters
        # Handlers by method, so that a call costs a look-up. Methods that do not exist are not
        # kept, however many a client asks for.
        self._handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {}
        self._invalid = RateLimitedLog(log.warning, "invalid_requests")
        self._failed = RateLimitedLog(log.error, "call_failed", burst=MAX_FAILED_LINES)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """The handler of a method, with admission, bounds and refusals around it; kept by method.
        None for a method that is not implemented."""
        method: str = handler_call_details.method
        known = self._handlers.get(method)
        if known is not None:
            return known
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        behaviour = getattr(
            handler, _BEHAVIOUR[handler.request_streaming, handler.response_streaming]
        )
        if not _is_async(behaviour):
            return None  # generated code has a plain function for a method that is not implemented
        # To gRPC each method is one with a stream of requests: so the only request of a call is
        # read, and refused, here. On the wire there is no difference.
        make = (
            grpc.stream_stream_rpc_method_handler
            if handler.response_streaming
            else grpc.stream_unary_rpc_method_handler
        )
        answer = self._answering(method, behaviour, reads_itself=handler.request_streaming)
        if self._latencies is not None:
            answer = _timed(method, answer, self._latencies)
        self._handlers[method] = make(
            answer,
            request_deserializer=bounded(method, handler.request_deserializer),
            response_serializer=handler.response_serializer,
        )
        return self._handlers[method]

    def _answering(
        self, method: str, behaviour: Callable[..., Any], *, reads_itself: bool
    ) -> Answer:
        """A handler that admits a call, carries it out, and ends it with a status if it is refused
        or fails.

        behaviour: the service's method. reads_itself: whether that takes a stream of requests.
        """
        yields = inspect.isasyncgenfunction(behaviour)

        async def serve(call: Call, context: Context) -> Any:
            """Carry an admitted call out. Returns its reply; None after a stream of replies."""
            if reads_itself:
                request = self._admission.requests(method, call)
            else:
                request = await self._admission.read(call)
                if request is grpc.aio.EOF:
                    raise Refusal(Reason.INVALID_REQUEST, _NO_REQUEST)
                self._admission.note_first_message(method, call, request)
            if not yields:
                reply = await behaviour(request, context)
                self._admission.note_answered(method, call)
                return reply
            async with aclosing(behaviour(request, context)) as messages:
                async for message in messages:
                    async with call.sending:
                        await context.write(message)
            return None

        async def answer(requests: Any, context: Context) -> Any:
            """Admit a call and carry it out; an error ends it with its status."""
            call = None
            try:
                try:
                    if method == _HEARTBEAT:
                        WAITED_S.set(waited_s(context))
                    SENDER.set(sender_of(context))
                    CALLER.set(self._guard.admit(method, context))
                    call = self._admission.admit(method, context)
                    reply = await serve(call, context)
                    # On a disk that is full the first parts of an upload may have room.
                    is_part = isinstance(reply, pb.PutWeightsResponse) and reply.offset
                    if self._outage.is_under_way and not is_part:
                        self._outage.note_success(method)
                    return reply
                except (grpc.aio.AbortError, grpc.aio.InternalError):
                    raise
                except Exception as error:  # a defect too: the client hears INTERNAL
                    if call is not None and call.is_ended:
                        # A call is ended in one place: admission control sends the status of
                        # this one, and then cancels this task.
                        forget_traceback(error)
                        await asyncio.Event().wait()
                    status = self._status(method, context, error)
                if call is None and self._guard.is_closed:
                    await self._admission.hold_back(CALLER.get())
                await context.abort(*status)
            except grpc.aio.AbortError as aborted:  # the status is sent
                # gRPC keeps the exception with the call, so this frame must not hold the call.
                del requests, context, call
                forget_traceback(aborted)
                raise aborted from None
            except grpc.aio.InternalError:  # gRPC could not send: the caller has gone away
                raise asyncio.CancelledError from None
            raise AssertionError("abort() raises")

        return answer

    def _status(self, method: str, context: Context, error: Exception) -> Status:
        """Status of an error that ended a call. Counts and logs it: refusals by code, a defect with
        its traceback, a store that is away as an outage."""
        if not isinstance(error, Refusal | StoreError):
            self._failed(method=method, exc_info=error)
            code = grpc.StatusCode.INTERNAL
            return code, "internal error; the coordinator's log has the details", ()
        forget_traceback(error)
        if isinstance(error, StoreError):
            # A published model that is not there is a store that is not, or not the right one.
            # Where it lies is the operator's business, not the participant's.
            self._outage.note_failure(method, error, method=method)
            error = Unavailable("the weights store is away; try again in a moment")
        self._counters[error.code] += 1
        status = status_of(error)
        reason = status[1]
        log.debug("refused", method=method, code=error.code, reason=reason)
        if error.code in ("UNAUTHENTICATED", "NOT_PERMITTED"):
            self._guard.note_refused(context.peer(), reason)
        if error.code == "INVALID_REQUEST" and str(error) != _NO_REQUEST:
            self._invalid(method=method, peer=context.peer(), reason=reason)
        return status


def _timed(method: str, answer: Answer, latencies: LatencyFile) -> Answer:
    """Wrap a handler so that each call writes a line to the latency stream."""
    # Calls of other services, such as health checks, come from new ports all the time.
    names_participant = method.startswith(COORDINATOR)

    async def timed(requests: Any, context: Context) -> Any:
        """Handle a call, and write its line when it has ended."""
        began = time.perf_counter()
        SENDER.set(sender_of(context))
        participant_id = participant_of(context) if names_participant else ""
        status = "OK"
        try:
            return await answer(requests, context)
        except BaseException:
            # A call that was not aborted has no code: the caller has gone, or does not wait longer.
            status = getattr(context.code(), "name", "CANCELLED")
            del requests, context  # as in `answer`
            raise
        finally:
            caller = CALLER.get()
            if names_participant and caller is not None:
                participant_id = caller.identity.name
            latencies.call(method, participant_id, status, time.perf_counter() - began)

    return timed


def _is_async(behaviour: Callable[..., Any]) -> bool:
    """Whether a method of a service is a coroutine or an asynchronous generator."""
    return inspect.iscoroutinefunction(behaviour) or inspect.isasyncgenfunction(behaviour)


def forget_traceback(error: BaseException) -> None:
    """Drop the tracebacks of an exception and of those that led to it, and with them the frames."""
    link: BaseException | None = error
    while link is not None:
        link.__traceback__ = None
        link = link.__cause__ or link.__context__


# (request streaming, response streaming): where the handler keeps its function.
_BEHAVIOUR = {
    (False, False): "unary_unary",
    (False, True): "unary_stream",
    (True, False): "stream_unary",
    (True, True): "stream_stream",
}
