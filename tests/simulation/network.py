"""gRPC on virtual time: what lies between a participant's channel and the server at the other end.

Messages travel as bytes, through the generated stub on one side and the generated handlers on the
other. Those of one call keep their order, those of different calls need not: between the two ends
there may be proxies with several connections. As on a TCP connection, nothing is lost from the
middle of a stream: it goes on, it stalls for ever, or it breaks.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import grpc

from simulation.hub import Hub

if TYPE_CHECKING:
    from simulation.channel import Channel, ClientCall
    from simulation.server import Server, ServerCall

CONNECT_TIMEOUT_S = 5.0
# When the server gives up a connection on which nothing comes back.
SERVER_KEEPALIVE_S = 50.0

Metadata = Sequence[tuple[str, str | bytes]]


@dataclass(slots=True)
class Noise:
    """Probabilities of faults of a message. All are of unary calls only, but for `slow`.

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
    """The server, and all messages on their way.

    heard: told what arrives at a participant: its name, the method, request and answer as bytes.
    latest_of_dead_s: the longest that a doubled call of a dead process takes.
    """

    def __init__(self, hub: Hub, noise: Noise, latest_of_dead_s: float) -> None:
        self.hub = hub
        self.noise = noise
        self.latest_of_dead_s = latest_of_dead_s
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
    """The connection of a channel to a server's process."""

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
        """Let nothing through from now on, and tell neither side.

        acknowledged: something on the way still acknowledges what is sent.
        """
        if self.is_silent or self.is_over:
            return
        self.is_silent = True
        self._is_acknowledged = acknowledged
        hub = self.network.hub
        hub.after(sum(self.channel.silence_s), self.channel.process, self.break_for_client)
        if self.server is not None:
            hub.after(SERVER_KEEPALIVE_S, self.server.process, self.end_served)

    def send_up(self, call: "ClientCall", deliver: Callable[[], None]) -> None:
        """Send from the participant to the server."""
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
        """Send from the server to the participant."""
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
        """Seconds until a message arrives; None: never."""
        hub, link = self.network.hub, self.channel.link
        delay_s = self.network.latency_s()
        held_s = link.held_until - hub.now
        gives_up = self.is_silent and not self._is_acknowledged
        # The kernel gives up unacknowledged data after the same time as gRPC its ping.
        _, timeout_s = self.channel.silence_s
        if give_up is not None and (gives_up or held_s > timeout_s):
            hub.after(timeout_s, self.channel.process, give_up)
        return None if self.is_silent else delay_s + max(0.0, held_s)

    def tell_client_of_end(self) -> None:
        """The server's side is closed, and its machine says so."""
        delay_s = self._delay_s(None)
        if delay_s is not None:
            self.network.hub.after(delay_s, self.channel.process, self.break_for_client)

    def break_for_client(self, code: grpc.StatusCode = grpc.StatusCode.UNAVAILABLE) -> None:
        """End the connection for the participant, which hears so in all its calls."""
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
        """The server has noticed that its answers are not waited for."""
        served, self.served = self.served, []
        for call in served:
            call.end()
