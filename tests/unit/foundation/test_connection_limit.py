"""Which connections of a port are ended, on plain sockets and on a gRPC server."""

import select
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import grpc
import pytest

from support.messaging import until
from xain_foundation.net.channels import open_channel
from xain_foundation.net.connection_limit import ConnectionLimit, _descriptors, _held

MAX_UNREGISTERED = 4


@pytest.fixture
def at_end() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


class Port:
    """A port that accepts and says nothing."""

    def __init__(self, at_end: ExitStack) -> None:
        self._at_end = at_end
        self._listening = at_end.enter_context(socket.create_server(("127.0.0.1", 0)))
        self.number: int = self._listening.getsockname()[1]

    def limit(self, *, num_newcomers: int = 0) -> ConnectionLimit:
        limit = ConnectionLimit(
            self.number,
            max_owners=2,
            per_owner=2,
            num_newcomers=num_newcomers,
            max_unregistered=MAX_UNREGISTERED,
        )
        self._at_end.callback(limit.stop)
        return limit

    def connect(self, number: int) -> list[socket.socket]:
        """Open connections one after another, as the clients have them."""
        opened = []
        for _ in range(number):
            opened.append(socket.create_connection(("127.0.0.1", self.number)))
            self._at_end.enter_context(opened[-1])
            self._at_end.enter_context(self._listening.accept()[0])
        return opened


def num_open(connections: list[socket.socket]) -> int:
    """The server says nothing, so what can be read is the end."""
    return len(connections) - len(select.select(connections, [], [], 0)[0])


def peer(connection: socket.socket) -> str:
    return f"ipv4:127.0.0.1:{connection.getsockname()[1]}"


def test_oldest_unregistered_connections_are_ended(at_end):
    port = Port(at_end)
    limit = port.limit()
    old = port.connect(MAX_UNREGISTERED)

    def are_seen():
        return {peer(one) for one in old} <= {seen.peer for seen in list(limit._seen.values())}

    until(are_seen, "the look at the first ones")
    new = port.connect(2)
    until(lambda: num_open(old) == MAX_UNREGISTERED - 2, "the end of two")
    assert num_open(new) == 2


def test_latest_connections_of_the_latest_owners_are_kept(at_end):
    """So an owner cannot keep any number."""
    port = Port(at_end)
    connections = port.connect(3 + 1 + 1)
    limit = port.limit()
    of_a, (of_b, of_c) = connections[:3], connections[3:]
    limit.keep(peer(of_b), "b")
    for connection in of_a:
        limit.keep(peer(connection), "a")
    limit.keep(peer(of_c), "c")  # b has called longest ago, and is an owner no more
    port.connect(MAX_UNREGISTERED)
    until(lambda: num_open(connections) == 3, "the end of two")
    assert num_open([*of_a[1:], of_c]) == 3


def test_newcomers_have_room_also_when_they_come_again(at_end):
    """The connections of a whole fleet may break at once."""
    port = Port(at_end)
    limit = port.limit(num_newcomers=MAX_UNREGISTERED + 1)
    for owner in ("a", "b"):
        limit.keep("ipv4:127.0.0.1:1", owner)  # of before
    connections = port.connect(MAX_UNREGISTERED + 2)
    until(lambda: num_open(connections) == MAX_UNREGISTERED + 1, "the end of one alone")


def test_descriptor_that_has_become_a_file_is_left_alone(tmp_path):
    with (tmp_path / "file").open("w") as file:
        num_open = len(_descriptors())
        with _held(file.fileno()) as held:
            assert held is None
        assert len(_descriptors()) == num_open


@pytest.mark.skipif(not socket.has_ipv6, reason="this machine has no IPv6")
@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
def test_connection_is_kept_by_the_name_that_grpc_gives_its_peer(at_end, host):
    """The server listens for IPv4 and IPv6 at one socket."""
    peers = []

    def note(request, context):
        peers.append(context.peer())
        return b""

    handlers = {"Note": grpc.unary_unary_rpc_method_handler(note)}
    server = grpc.server(
        ThreadPoolExecutor(1), [grpc.method_handlers_generic_handler("test.Test", handlers)]
    )
    port = server.add_insecure_port("[::]:0")
    server.start()
    at_end.callback(lambda: server.stop(0).wait())
    channel = at_end.enter_context(open_channel(f"{host}:{port}"))
    call = channel.unary_unary("/test.Test/Note")
    call(b"", timeout=30)
    limit = ConnectionLimit(port, max_owners=1, per_owner=1, max_unregistered=MAX_UNREGISTERED)
    at_end.callback(limit.stop)
    limit.keep(peers[0], "owner")
    connections = [
        at_end.enter_context(socket.create_connection(("127.0.0.1", port)))
        for _ in range(MAX_UNREGISTERED + 2)
    ]
    # gRPC greets with its settings, so there is something to be read on each.
    for connection in connections:
        connection.recv(1 << 16)

    def num_kept():
        for connection in connections:
            connection.setblocking(False)
        return sum(_is_open(connection) for connection in connections)

    until(lambda: num_kept() <= MAX_UNREGISTERED, "the end of two")
    call(b"", timeout=30)
    assert peers[1:] == peers[:1], "the connection was ended"


def _is_open(connection: socket.socket) -> bool:
    try:
        return connection.recv(1 << 16) != b""
    except BlockingIOError:
        return True
    except ConnectionError:
        return False
