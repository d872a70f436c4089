"""The Membership service on a port of its own, for programs without a coordinator."""

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from types import TracebackType
from typing import Any, Self

import grpc
from google.protobuf.message import DecodeError

from xain_messaging.discovery.registry import LEASE_S, SETTLE_S
from xain_messaging.discovery.service import KEEPALIVE, MembershipService
from xain_proto.messaging.membership_pb2_grpc import add_MembershipServicer_to_server

START_S = 30.0
STOP_S = 1.0


class MembershipServer:
    """In a thread, from start() to stop(). Started again it knows nobody, and is told by all.

    listen: "HOST:PORT", port 0 for one that is free; see target.
    lease_s, settle_s: see MembershipService. Where nobody can have been before, newcomers need not
        wait: 0.
    credentials: of the port; without them it goes in the clear.
    Raises OSError from start() if nobody can listen there.
    """

    def __init__(
        self,
        listen: str = "127.0.0.1:0",
        lease_s: float = LEASE_S,
        settle_s: float = SETTLE_S,
        credentials: grpc.ServerCredentials | None = None,
    ) -> None:
        self._host, _, port = listen.rpartition(":")
        self._port = int(port)
        self._lease_s = lease_s
        self.settle_s = settle_s
        self._credentials = credentials
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._server: grpc.aio.Server | None = None
        self._service: MembershipService | None = None

    @property
    def target(self) -> str:
        """What CoordinatorDiscovery asks for."""
        return f"{self._host}:{self._port}"

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Returns when it serves."""
        loop = self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=_run, args=(loop,), name="membership-server", daemon=True
        )
        self._thread.start()
        try:
            asyncio.run_coroutine_threadsafe(self._serve(), loop).result(START_S)
        except RuntimeError as error:  # of gRPC: the port is taken, or the host is not ours
            self.stop()
            raise OSError(f"cannot listen on {self.target}: {error}") from None

    async def _serve(self) -> None:
        self._server = grpc.aio.server(
            interceptors=[_MalformedRequests()],
            options=[("grpc.so_reuseport", 0), *KEEPALIVE.items()],
        )
        self._service = MembershipService(self._lease_s, self.settle_s)
        add_MembershipServicer_to_server(self._service, self._server)
        if self._credentials is None:
            self._port = self._server.add_insecure_port(self.target)
        else:
            self._port = self._server.add_secure_port(self.target, self._credentials)
        await self._server.start()

    def stop(self) -> None:
        """Returns when no member is served any more, after STOP_S at most. May be called again."""
        loop, thread = self._loop, self._thread
        if self._server is None or self._service is None or loop is None or thread is None:
            return
        # First the calls that wait: gRPC reports an error to those it ends, and they print it.
        loop.call_soon_threadsafe(self._service.end)
        asyncio.run_coroutine_threadsafe(self._server.stop(STOP_S), loop).result(START_S)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(START_S)
        self._server = None  # not before: gRPC takes from the loop what it reads with


def _run(loop: asyncio.AbstractEventLoop) -> None:
    loop.run_forever()
    loop.close()


class _MalformedRequests(grpc.aio.ServerInterceptor):
    """Refuses malformed requests. gRPC would answer UNKNOWN and log a traceback for each."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None:
            return None

        def parse(data: bytes) -> Any:
            try:
                return handler.request_deserializer(data)
            except DecodeError:
                return None

        async def answer(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
            await _check(request, context)
            return await handler.unary_unary(request, context)

        async def answers(
            request: Any, context: grpc.aio.ServicerContext[Any, Any]
        ) -> AsyncIterator[Any]:
            await _check(request, context)
            async with aclosing(handler.unary_stream(request, context)) as messages:
                async for message in messages:
                    yield message

        if handler.response_streaming:
            return grpc.unary_stream_rpc_method_handler(answers, parse, handler.response_serializer)
        return grpc.unary_unary_rpc_method_handler(answer, parse, handler.response_serializer)


async def _check(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
    if request is None:
        await context.abort(
            grpc.StatusCode.INVALID_ARGUMENT,
            "the request is not a protobuf message of its method",
        )
