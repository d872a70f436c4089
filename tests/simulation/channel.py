"""A participant's end of the network: its channel, as the generated stub uses it, and its calls."""

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

import grpc

from simulation.hub import Process
from simulation.network import Connection, Link, Metadata, Network
from simulation.threads import Thread, current, sleep

if TYPE_CHECKING:
    from simulation.server import ServerCall


STREAMS = ("Watch", "FollowScript")  # of answers, which nobody would read a second time
MESSAGE_S = 0.1  # the longest that a line takes for one of a stream


class Channel(grpc.Channel):
    """A participant's. Connects when it is used, and again after a connection has been lost.

    silence_s: before a ping, and after it until the connection is given up.
    """

    def __init__(
        self, network: Network, process: Process, link: Link, silence_s: tuple[float, float]
    ) -> None:
        self.silence_s = silence_s
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
                if call.status is not None:
                    break
                # Simulated time passes between two messages.
                sleep(MESSAGE_S * self.network.hub.chance.random())
            call.send(None, is_last=True)
            return call.answer(response_deserializer)

        return invoke

    def stream_stream(self, *args: Any, **kwargs: Any) -> Callable[..., NoReturn]:
        """A method that no participant of the simulation calls."""

        def invoke(*args: Any, **kwargs: Any) -> NoReturn:
            raise NotImplementedError

        return invoke

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
        call = self._channel.begin(self._method, timeout, metadata)
        call.send(self._serialize(request), is_last=True)
        return call.answer(self._deserialize)


class CallError(grpc.RpcError, grpc.Call):
    """An error as blocking calls raise it."""

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
        self._request = b""
        self._is_stalled = False
        hub = channel.network.hub
        if timeout_s is not None:
            self.deadline = hub.now + timeout_s / channel.process.clock_rate
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
        is_unary = is_last and data is not None and self.name not in STREAMS
        if is_unary and noise.duplicated and chance.random() < noise.duplicated:
            # A proxy thinks the message lost, and sends it again to the server that listens then.
            assert data is not None
            again = data
            delay_s = chance.random() * noise.slow_s
            network.hub.after(delay_s, None, lambda: self._arrive_again(again, delay_s))

    def _arrive(self, data: bytes | None, is_last: bool) -> None:
        connection = self.connection
        if self.served is None:
            if self.status is not None:
                return  # given up before it was there
            if not connection.server.is_serving:
                connection.tell_client_of_end()
                return
            self.served = connection.server.serve(self, connection)
        self.served.take(data, is_last)

    def _arrive_again(self, data: bytes, delay_s: float) -> None:
        """A call of a dead process comes no later than a heartbeat may: the coordinator takes a
        later one for a sign of life; see Contender.is_second."""
        network = self.channel.network
        if not self.channel.process.is_alive and delay_s > network.latest_of_dead_s:
            return
        server = network.server
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
