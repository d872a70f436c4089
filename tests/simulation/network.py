"""gRPC on virtual time: a participant's channel, its connection, and the server at the other end.

Messages travel as bytes, through the generated stub on one side and the generated handlers on the
other. Those of one call keep their order, those of different calls need not: between the two ends
there may be proxies with several connections. As on a TCP connection, nothing is lost from the
middle of a stream: it goes on, it stalls for ever, or it breaks.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import grpc

from simulation.hub import Hub, Killed, Process
from simulation.loop import VirtualLoop
from simulation.threads import Thread, current

IDENTITY_KEY = "xain-participant-id"

CONNECT_TIMEOUT_S = 5.0
# When a side gives up a connection on which nothing comes back: for what it has sent, where nobody
# acknowledges it, and by its keepalive, where somebody does.
USER_TIMEOUT_S = 20.0
CLIENT_KEEPALIVE_S = 320.0
SERVER_KEEPALIVE_S = 50.0

Metadata = Sequence[tuple[str, str | bytes]]


@dataclass(slots=True)
class Noise:
    """What may happen to any message, with which probability. Of unary calls only, but for `slow`.

    slow_s: the longest that a slow message takes.
    """

    lost: float = 0.0
    duplicated: float = 0.0
    slow: float = 0.0
    slow_s: float = 0.0


@dataclass(slots=True)
class Link:
    """The way between one participant and the coordinator.

    held_until: a partition. What is sent comes when it is over, if nobody gives up before.
    """

    name: str
    held_until: float = 0.0
    channels: list["Channel"] = field(default_factory=list)


class Network:
    """Who listens, and all that is on the way.

    heard: told what arrives at a participant: its name, the method, request and answer as bytes.
    """

    def __init__(self, hub: Hub, noise: Noise) -> None:
        self.hub = hub
        self.noise = noise
        self.server: Server | None = None
        self.is_host_down = False  # connecting is not even refused
        self.heard: Callable[[str, str, bytes, bytes], None] = lambda *_: None
        self.links: dict[str, Link] = {}

    def latency_s(self) -> float:
        chance = self.hub.chance
        latency_s = 0.001 + 0.01 * chance.random()
        if self.noise.slow and chance.random() < self.noise.slow:
            latency_s += chance.random() * self.noise.slow_s
        return latency_s

    def connections(self) -> Iterator["Connection"]:
        for link in self.links.values():
            for channel in link.channels:
                if channel.connection is not None:
                    yield channel.connection

    def hang_up(self, server: "Server", *, host_down: bool) -> None:
        """The server's process is no more."""
        if self.server is server:
            self.server = None
        self.is_host_down = host_down
        for connection in list(self.connections()):
            if connection.server is server:
                if host_down:
                    connection.silence(acknowledged=False)
                else:
                    connection.tell_client_of_end()

    def cut_off(self, server: "Server") -> None:
        """No participant reaches it any more, nor it any of them. Nothing that was on the way
        arrives."""
        self.server = None
        for connection in list(self.connections()):
            if connection.server is server:
                connection.break_for_client()

    def listen(self, server: "Server") -> None:
        self.server = server
        self.is_host_down = False
        for connection in list(self.connections()):
            if connection.server is not server:
                # The host answers again, and knows nothing of it.
                delay_s = self.hub.chance.random() * 3.0
                process = connection.channel.process
                self.hub.after(delay_s, process, connection.break_for_client)


class Connection:
    """Of a channel to a server's process."""

    def __init__(self, network: Network, channel: "Channel", server: "Server | None") -> None:
        self.network = network
        self.channel = channel
        self.server = server
        self.is_silent = False
        self.is_over = False
        self.calls: list[ClientCall] = []
        self.served: list[ServerCall] = []
        self._is_established = False
        self._is_acknowledged = True
        hub = network.hub
        hub.after(CONNECT_TIMEOUT_S, channel.process, self._give_up_connecting)

    def _give_up_connecting(self) -> None:
        if not self._is_established:
            self.break_for_client()

    def silence(self, *, acknowledged: bool) -> None:
        """From now on nothing comes through any more, and nobody is told.

        acknowledged: something on the way still acknowledges what is sent.
        """
        if self.is_silent or self.is_over:
            return
        self.is_silent = True
        self._is_acknowledged = acknowledged
        hub = self.network.hub
        hub.after(CLIENT_KEEPALIVE_S, self.channel.process, self.break_for_client)
        if self.server is not None:
            hub.after(SERVER_KEEPALIVE_S, self.server.process, self.end_served)

    def send_up(self, call: "ClientCall", deliver: Callable[[], None]) -> None:
        """From the participant to the server."""
        if self.is_over:
            return
        delay_s = self._delay_s(self.break_for_client)
        if delay_s is None:
            return

        def arrive() -> None:
            if self.is_over or self.is_silent:
                return
            if self.server is None or not self.server.process.is_alive:
                self.tell_client_of_end()
                return
            self._is_established = True
            deliver()

        hub = self.network.hub
        call.up_at = max(call.up_at, hub.now + delay_s)
        hub.at(call.up_at, None, arrive)

    def send_down(self, call: "ClientCall", deliver: Callable[[], None]) -> None:
        """From the server to the participant."""
        if self.is_over:
            return
        delay_s = self._delay_s(None)
        if delay_s is None:
            return

        def arrive() -> None:
            if not self.is_over and not self.is_silent:
                deliver()

        hub = self.network.hub
        call.down_at = max(call.down_at, hub.now + delay_s)
        hub.at(call.down_at, self.channel.process, arrive)

    def _delay_s(self, give_up: Callable[[], None] | None) -> float | None:
        """None: it never comes."""
        hub, link = self.network.hub, self.channel.link
        delay_s = self.network.latency_s()
        held_s = link.held_until - hub.now
        gives_up = self.is_silent and not self._is_acknowledged
        if give_up is not None and (gives_up or held_s > USER_TIMEOUT_S):
            hub.after(USER_TIMEOUT_S, self.channel.process, give_up)
        return None if self.is_silent else delay_s + max(0.0, held_s)

    def tell_client_of_end(self) -> None:
        """The server's side is closed, and its machine says so."""
        delay_s = self._delay_s(None)
        if delay_s is not None:
            self.network.hub.after(delay_s, self.channel.process, self.break_for_client)

    def break_for_client(self, code: grpc.StatusCode = grpc.StatusCode.UNAVAILABLE) -> None:
        """It is over for the participant, which hears so in all its calls."""
        if self.is_over:
            return
        self.is_over = True
        if self.channel.connection is self:
            self.channel.connection = None
        calls, self.calls = self.calls, []
        for call in calls:
            call.finish(code, "the connection is lost")
        delay_s = self._delay_s(None)
        if delay_s is not None and self.server is not None:
            self.network.hub.after(delay_s, self.server.process, self.end_served)

    def end_served(self) -> None:
        """The server has noticed: nobody waits for its answers."""
        served, self.served = self.served, []
        for call in served:
            call.end()


class Channel(grpc.Channel):
    """A participant's. Connects when it is used, and again after a connection has been lost."""

    def __init__(self, network: Network, process: Process, link: Link) -> None:
        self.network = network
        self.process = process
        self.link = link
        self.connection: Connection | None = None
        self._is_closed = False
        link.channels.append(self)

    def begin(self, method: str, timeout_s: float | None, metadata: Metadata) -> "ClientCall":
        """A new call, on its way."""
        if self._is_closed:
            raise ValueError("Cannot invoke RPC on closed channel!")
        self.process.touch()
        network = self.network
        call = ClientCall(self, method, timeout_s, metadata)
        if self.connection is None:
            if network.server is None and not network.is_host_down:
                network.hub.after(
                    network.latency_s(),
                    self.process,
                    lambda: call.finish(grpc.StatusCode.UNAVAILABLE, "connection refused"),
                )
                return call
            self.connection = Connection(network, self, network.server)
            if network.server is None:
                self.connection.is_silent = True
        call.connection = self.connection
        self.connection.calls.append(call)
        return call

    def close(self) -> None:
        if self._is_closed or not self.process.is_alive:
            return
        self._is_closed = True
        self.hang_up()

    def hang_up(self) -> None:
        """No more of it, because it is closed or because its process is dead."""
        if self.connection is not None:
            self.connection.break_for_client(grpc.StatusCode.CANCELLED)
        self.link.channels.remove(self)

    def unary_unary(
        self, method: str, request_serializer: Any, response_deserializer: Any, **_: Any
    ) -> "Unary":
        return Unary(self, method, request_serializer, response_deserializer)

    def unary_stream(
        self, method: str, request_serializer: Any, response_deserializer: Any, **_: Any
    ) -> Callable[..., Any]:
        def invoke(request: Any, timeout: float | None = None, metadata: Metadata = ()) -> Any:
            call = self.begin(method, timeout, metadata)
            call.send(request_serializer(request), is_last=True)
            return Stream(call, response_deserializer)

        return invoke

    def stream_unary(
        self, method: str, request_serializer: Any, response_deserializer: Any, **_: Any
    ) -> Callable[..., Any]:
        def invoke(requests: Any, timeout: float | None = None, metadata: Metadata = ()) -> Any:
            call = self.begin(method, timeout, metadata)
            for request in requests:
                call.send(request_serializer(request))
            call.send(None, is_last=True)
            return call.answer(response_deserializer)

        return invoke

    def stream_stream(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError

    def subscribe(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError

    def unsubscribe(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError

    def __enter__(self) -> "Channel":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Unary:
    """A method with one request and one answer."""

    def __init__(
        self, channel: Channel, method: str, request_serializer: Any, response_deserializer: Any
    ) -> None:
        self._channel = channel
        self._method = method
        self._serialize = request_serializer
        self._deserialize = response_deserializer

    def __call__(self, request: Any, timeout: float | None = None, metadata: Metadata = ()) -> Any:
        return self.future(request, timeout, metadata).result()

    def future(
        self, request: Any, timeout: float | None = None, metadata: Metadata = ()
    ) -> "Future":
        call = self._channel.begin(self._method, timeout, metadata)
        call.send(self._serialize(request), is_last=True)
        return Future(call, self._deserialize)


class Future:
    """The answer of a call that nobody need wait for."""

    def __init__(self, call: "ClientCall", deserialize: Callable[[bytes], Any]) -> None:
        self._call = call
        self._deserialize = deserialize

    def done(self) -> bool:
        return self._call.status is not None

    def code(self) -> grpc.StatusCode:
        """Only of one that is done."""
        assert self._call.status is not None
        return self._call.status.code()

    def result(self) -> Any:
        return self._call.answer(self._deserialize)

    def cancel(self) -> None:
        self._call.give_up(grpc.StatusCode.CANCELLED)

    def add_done_callback(self, callback: "Callable[[Future], None]") -> None:
        self._call.when_done(lambda: callback(self))


class CallError(grpc.RpcError, grpc.Call):
    """As blocking calls raise it."""

    def __init__(self, code: grpc.StatusCode, details: str, trailing: Metadata) -> None:
        super().__init__(code, details)
        self._code, self._details, self._trailing = code, details, trailing

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return self._details

    def trailing_metadata(self) -> Metadata:
        return self._trailing

    def initial_metadata(self) -> Metadata:
        return ()

    def is_active(self) -> bool:
        return False

    def time_remaining(self) -> float | None:
        return None

    def cancel(self) -> None:
        pass

    def add_callback(self, callback: Callable[[], None]) -> bool:
        return False


class ClientCall:
    """A participant's side of a call."""

    def __init__(
        self, channel: Channel, method: str, timeout_s: float | None, metadata: Metadata
    ) -> None:
        self.channel = channel
        self.method = method
        self.metadata = metadata
        self.deadline: float | None = None
        self.connection: Connection | None = None
        self.served: ServerCall | None = None
        self.up_at = self.down_at = 0.0  # when the latest message arrives
        self.status: CallError | None = None  # when it is over
        self._inbox: deque[bytes] = deque()
        self._waiting: Thread | None = None
        self._when_done: list[Callable[[], None]] = []
        self._request = b""
        self._is_stalled = False
        hub = channel.network.hub
        if timeout_s is not None:
            self.deadline = hub.now + timeout_s
            hub.at(self.deadline, channel.process, self._expire)

    @property
    def name(self) -> str:
        return self.method.rpartition("/")[2]

    def send(self, data: bytes | None, *, is_last: bool = False) -> None:
        """data: None at the end of a stream of requests that has been sent."""
        connection, network = self.connection, self.channel.network
        if connection is None or self.status is not None:
            return
        first = not self._request
        if data is not None and first:
            self._request = data
        noise, chance = network.noise, network.hub.chance
        if noise.lost and chance.random() < noise.lost:
            self._is_stalled = True
        if self._is_stalled:
            return
        connection.send_up(self, lambda: self._arrive(data, is_last))
        is_unary = is_last and data is not None and self.name != "Watch"
        if is_unary and noise.duplicated and chance.random() < noise.duplicated:
            # By some proxy that thinks it lost, to whoever listens then.
            assert data is not None
            again = data
            delay_s = chance.random() * noise.slow_s
            network.hub.after(delay_s, None, lambda: self._arrive_again(again))

    def _arrive(self, data: bytes | None, is_last: bool) -> None:
        connection = self.connection
        assert connection is not None
        assert connection.server is not None
        if self.served is None:
            if self.status is not None:
                return  # given up before it was there
            if not connection.server.is_serving:
                connection.tell_client_of_end()
                return
            self.served = connection.server.serve(self, connection)
        self.served.take(data, is_last)

    def _arrive_again(self, data: bytes) -> None:
        server = self.channel.network.server
        if server is not None and server.is_serving:
            served = server.serve(self, None)
            served.take(data, True)

    def arrive(self, data: bytes) -> None:
        """An answer, or one of a stream of them."""
        if self.status is None:
            self._inbox.append(data)
            link = self.channel.link
            self.channel.network.heard(link.name, self.name, self._request, data)
            self._wake()

    def finish(self, code: grpc.StatusCode, details: str = "", trailing: Metadata = ()) -> None:
        if self.status is not None:
            return
        self.status = CallError(code, details, trailing)
        if code is not grpc.StatusCode.OK:
            hub = self.channel.network.hub
            hub.note(self.channel.link.name, f"{self.name}: {code.name} {details}")
        if self.connection is not None and self in self.connection.calls:
            self.connection.calls.remove(self)
        self._wake()
        for callback in self._when_done:
            callback()

    def when_done(self, callback: Callable[[], None]) -> None:
        if self.status is None:
            self._when_done.append(callback)
        else:
            callback()

    def _expire(self) -> None:
        self.give_up(grpc.StatusCode.DEADLINE_EXCEEDED)

    def give_up(self, code: grpc.StatusCode) -> None:
        """The participant does not wait any longer, and says so."""
        if self.status is None:
            self.finish(code)
            if self.connection is not None:
                self.connection.send_up(self, self._end_served)

    def _end_served(self) -> None:
        if self.served is not None:
            self.served.end()

    def _wake(self) -> None:
        if self._waiting is not None:
            self._waiting.unpark()

    def answer(self, deserialize: Callable[[bytes], Any]) -> Any:
        """Wait for the one answer. Raises CallError."""
        while self.status is None:
            self._park()
        if self.status.code() is not grpc.StatusCode.OK:
            raise self.status
        return deserialize(self._inbox.popleft())

    def next(self, deserialize: Callable[[bytes], Any]) -> Any:
        """Wait for the next of many. Raises StopIteration and CallError."""
        while not self._inbox and self.status is None:
            self._park()
        # What was not read yet is not shown any more once a call has been cancelled.
        if self._inbox and not (
            self.status is not None and self.status.code() is grpc.StatusCode.CANCELLED
        ):
            return deserialize(self._inbox.popleft())
        assert self.status is not None
        if self.status.code() is grpc.StatusCode.OK:
            raise StopIteration
        raise self.status

    def _park(self) -> None:
        self._waiting = current()
        try:
            self._waiting.park()
        finally:
            self._waiting = None


class Stream:
    """The answers of a call, one after the other."""

    def __init__(self, call: ClientCall, deserialize: Callable[[bytes], Any]) -> None:
        self._call = call
        self._deserialize = deserialize

    def __iter__(self) -> "Stream":
        return self

    def __next__(self) -> Any:
        return self._call.next(self._deserialize)

    def cancel(self) -> None:
        self._call.give_up(grpc.StatusCode.CANCELLED)


# --- the server's side ----------------------------------------------------------------------------


class Server:
    """What a coordinator's process serves; the part of grpc.aio.Server that generated code uses."""

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
        """A call that has arrived. connection: None, if nobody waits for the answers."""
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
        """Nobody waits for it any more."""
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
            serialize = handler.response_serializer
            request: Any = self
            if not handler.request_streaming:
                data = self._requests.popleft()
                assert data is not None
                request = handler.request_deserializer(data)
            else:
                self._deserialize = handler.request_deserializer
            if handler.response_streaming:
                self._serialize = serialize
                async for message in handler.unary_stream(request, self):
                    await self.write(message)
            elif handler.request_streaming:
                self._answer(serialize(await handler.stream_unary(request, self)))
            else:
                self._answer(serialize(await handler.unary_unary(request, self)))
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
        await asyncio.sleep(0.0001)

    def invocation_metadata(self) -> Metadata:
        return self._call.metadata

    def peer(self) -> str:
        return f"simulated:{self._call.channel.link.name}"

    async def abort(
        self, code: grpc.StatusCode, details: str = "", trailing_metadata: Metadata = ()
    ) -> NoReturn:
        self.refuse(code, details, trailing_metadata)
        raise grpc.aio.AbortError
