"""The coordinator's end of the network: what its process serves, and the calls that have come."""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import grpc

from simulation.channel import ClientCall
from simulation.hub import Killed, Process
from simulation.loop import VirtualLoop
from simulation.network import Connection, Metadata, Network


class Server:
    """The server of a coordinator: the part of grpc.aio.Server that generated code uses."""

    def __init__(
        self,
        network: Network,
        process: Process,
        loop: VirtualLoop,
        interceptor: grpc.aio.ServerInterceptor,
    ) -> None:
        self.network = network
        self.process = process
        self.loop = loop
        self.is_serving = False
        self.answered: Callable[[str, str, float], None] = lambda *_: None
        self.calls: list[ServerCall] = []
        self._interceptor = interceptor
        self._handlers: dict[str, Any] = {}

    def add_generic_rpc_handlers(self, handlers: Sequence[Any]) -> None:
        pass  # the same ones

    def add_registered_method_handlers(self, service: str, handlers: dict[str, Any]) -> None:
        for name, handler in handlers.items():
            self._handlers[f"/{service}/{name}"] = handler

    def start(self) -> None:
        """Raises Killed: a coroutine that is being buried may come this far."""
        if not self.process.is_alive:
            raise Killed
        self.is_serving = True
        self.network.listen(self)

    async def stop(self, grace_s: float) -> None:
        """Nothing new; what is under way may end within the grace, then it is cancelled."""
        self.is_serving = False
        if self.network.server is self:
            self.network.server = None
        tasks = [call.task for call in self.calls if call.task is not None]
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=grace_s)
            for call in list(self.calls):
                call.refuse(grpc.StatusCode.UNAVAILABLE, "the server is shutting down")
                call.end()
            if late:
                await asyncio.wait(late)

    def serve(self, call: ClientCall, connection: Connection | None) -> "ServerCall":
        """A call that has arrived. connection: None, if the answers are not waited for."""
        served = ServerCall(self, call, connection)
        self.calls.append(served)
        if connection is not None:
            connection.served.append(served)
        return served

    async def handler(self, method: str) -> Any:
        async def continuation(details: Any) -> Any:
            return self._handlers[method]

        return await self._interceptor.intercept_service(continuation, _Details(method))


@dataclass(frozen=True, slots=True)
class _Details:
    method: str


class ServerCall:
    """The server's side of a call."""

    def __init__(self, server: Server, call: ClientCall, connection: Connection | None) -> None:
        self.task: asyncio.Task[None] | None = None
        self._server = server
        self._call = call
        self._connection = connection
        self._requests: deque[bytes | None] = deque()
        self._arrived = asyncio.Event()
        self._arrived_at = server.network.hub.now
        self._is_ended = False
        self._is_stalled = False
        if call.deadline is not None and connection is not None:
            # Both sides have a clock.
            server.network.hub.at(call.deadline, server.process, self.end)

    def take(self, data: bytes | None, is_last: bool) -> None:
        """A request has arrived, or the end of them."""
        self._requests.append(data)
        if is_last and data is not None:
            self._requests.append(None)
        self._arrived.set()
        if self.task is None and not self._is_ended:
            self.task = self._server.loop.create_task(self._run())

    def end(self) -> None:
        """End the call for its client, which waits no more."""
        if not self._is_ended:
            self._is_ended = True
            self._requests.append(None)
            self._arrived.set()
            if self.task is not None:
                self.task.cancel()
            else:
                self._forget()

    def _forget(self) -> None:
        if self in self._server.calls:
            self._server.calls.remove(self)
        if self._connection is not None and self in self._connection.served:
            self._connection.served.remove(self)

    async def _run(self) -> None:
        try:
            handler = await self._server.handler(self._call.method)
            # The interceptor makes every method one with a stream of requests.
            self._deserialize = handler.request_deserializer
            self._serialize = handler.response_serializer
            if handler.response_streaming:
                await handler.stream_stream(self, self)
            else:
                self._answer(self._serialize(await handler.stream_unary(self, self)))
            self.refuse(grpc.StatusCode.OK)
        except grpc.aio.AbortError:
            pass  # the status is on its way
        except asyncio.CancelledError:
            if not self._is_ended:
                self._fail("was cancelled by itself")
            raise
        except Exception as error:  # whatever the code under test does
            self._fail(f"raised {error!r}")
        finally:
            self._forget()

    def _answer(self, data: bytes) -> None:
        network, call = self._server.network, self._call
        noise, chance = network.noise, network.hub.chance
        if self._server.process.is_alive:
            self._server.answered(call.channel.link.name, call.name, self._arrived_at)
        if noise.lost and chance.random() < noise.lost:
            self._is_stalled = True
        if self._connection is not None and self._is_heard:
            self._connection.send_down(call, lambda: call.arrive(data))

    @property
    def _is_heard(self) -> bool:
        return self._server.process.is_alive and not self._is_stalled

    def _fail(self, text: str) -> None:
        if self._server.process.is_alive:
            name = f"{self._server.process.name}: {self._call.name}"
            self._server.network.hub.fail(f"{name} {text}")

    def refuse(self, code: grpc.StatusCode, details: str = "", trailing: Metadata = ()) -> None:
        """The status, which may be that all is well."""
        call = self._call
        if code in (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN):
            self._fail(f"was answered with {code.name}: {details}")
        if self._connection is not None and self._is_heard:
            self._connection.send_down(call, lambda: call.finish(code, details, trailing))

    # --- the stream of requests, as handlers read it ---

    def __aiter__(self) -> "ServerCall":
        return self

    async def __anext__(self) -> Any:
        while not self._requests:
            self._arrived.clear()
            await self._arrived.wait()
        data = self._requests.popleft()
        if data is None:
            self._requests.append(None)
            raise StopAsyncIteration
        return self._deserialize(data)

    # --- the context ---

    async def read(self) -> Any:
        return await anext(self, grpc.aio.EOF)

    async def write(self, message: Any) -> None:
        self._answer(self._serialize(message))
        await asyncio.sleep(0.0001)  # in virtual time: others have their turn

    def time_remaining(self) -> float | None:
        """Calls are taken up as they arrive: none waits for that."""
        return None

    def invocation_metadata(self) -> Metadata:
        return self._call.metadata

    def peer(self) -> str:
        name = self._call.channel.link.name
        return f"unix:{name}" if name == "script" else f"simulated:{name}"

    async def abort(
        self, code: grpc.StatusCode, details: str = "", trailing_metadata: Metadata = ()
    ) -> NoReturn:
        self.refuse(code, details, trailing_metadata)
        raise grpc.aio.AbortError
