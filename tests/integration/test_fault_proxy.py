"""The network that misbehaves does so as it is told."""

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from support.fault_proxy import FaultProxy

PATIENCE_S = 60.0
A_MOMENT_S = 0.2  # nothing comes for this long: enough to see what would come at once


class Server:
    """Answers every piece that comes with `name` and the piece; hangs up when its client does."""

    def __init__(self, name: bytes) -> None:
        self.name = name
        self.resets = threading.Semaphore(0)  # one for each connection that was reset
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                self._threads.append(threading.Thread(target=self._answer, args=(connection,)))
                self._threads[-1].start()

    def _answer(self, connection: socket.socket) -> None:
        with connection:
            try:
                while data := connection.recv(1 << 16):
                    connection.sendall(self.name + data)
            except ConnectionError:
                self.resets.release()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join(PATIENCE_S)
            assert not thread.is_alive()


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server(b"1:")
    yield server
    server.close()


@pytest.fixture
def proxy(server: Server) -> Iterator[FaultProxy]:
    with FaultProxy(server.port) as proxy:
        yield proxy


def connect(proxy: FaultProxy) -> socket.socket:
    return socket.create_connection(("127.0.0.1", proxy.port), PATIENCE_S)


def read(client: socket.socket, number: int) -> bytes:
    data = b""
    while len(data) < number and (more := client.recv(number - len(data))):
        data += more
    return data


def ask(client: socket.socket, what: bytes = b"hi") -> bytes:
    client.sendall(what)
    return read(client, len(what) + 2)


def wait_until(happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.01)  # a poll, not a race: it ends when it has


def is_silent(client: socket.socket) -> bool:
    client.settimeout(A_MOMENT_S)
    try:
        client.recv(1)
    except TimeoutError:
        return True
    finally:
        client.settimeout(PATIENCE_S)
    return False


def test_everything_passes_and_an_end_too(proxy):
    """Each direction ends by itself: what is on its way back still comes."""
    with connect(proxy) as client:
        client.sendall(b"x" * 1_000_000)
        client.shutdown(socket.SHUT_WR)
        came = b""
        while more := client.recv(1 << 16):
            came += more
        assert came.count(b"x") == 1_000_000
        wait_until(lambda: proxy.num_open == 0)


def test_a_cut_resets_both_sides(proxy, server):
    """New connections are served afterwards."""
    with connect(proxy) as client:
        assert ask(client) == b"1:hi"
        proxy.cut()
        assert proxy.num_open == 0
        with pytest.raises(ConnectionResetError):
            client.recv(1)
        assert server.resets.acquire(timeout=PATIENCE_S)
    with connect(proxy) as client:
        assert ask(client) == b"1:hi"


def test_refused_as_if_no_process_listened(proxy):
    """Open connections stay, and the port is the same afterwards."""
    with connect(proxy) as client:
        assert ask(client) == b"1:hi"
        proxy.refuse()
        with pytest.raises(ConnectionRefusedError):
            connect(proxy)
        assert ask(client) == b"1:hi"
    proxy.heal()
    with connect(proxy) as client:
        assert ask(client) == b"1:hi"


def test_half_open_connections_are_silent_and_new_ones_served(proxy):
    """Bytes that were held back come when the network is healed: none are lost."""
    with connect(proxy) as client:
        assert ask(client) == b"1:hi"
        proxy.blackhole(new=False)
        client.sendall(b"ho")
        assert is_silent(client)
        with connect(proxy) as other:
            assert ask(other) == b"1:hi"
        proxy.heal()
        assert read(client, 4) == b"1:ho"


def test_a_delay_delays_and_healing_ends_it(proxy):
    with connect(proxy) as client:
        proxy.delay(0.1)
        began = time.monotonic()
        assert ask(client) == b"1:hi"
        assert time.monotonic() - began >= 0.2  # there, and back
        proxy.delay(10 * PATIENCE_S)
        client.sendall(b"ho")
        assert is_silent(client)
        proxy.heal()
        assert read(client, 4) == b"1:ho"


def test_a_throttle_is_the_rate_of_bytes(proxy):
    began = time.monotonic()
    with connect(proxy) as client:
        proxy.throttle(50_000)
        client.sendall(b"x" * 20_000)
        came = b""
        while came.count(b"x") < 20_000:
            came += client.recv(20_000)
        assert time.monotonic() - began >= 0.4


def test_a_storm_comes_from_its_seed(server):
    """The same seed, the same faults; afterwards all is well."""
    told = []
    for seed in (7, 7, 8):
        with FaultProxy(server.port) as proxy:
            proxy.storm(seed, fault_s=0.02, pause_s=0.02)
            wait_until(lambda proxy=proxy: len(proxy.told) >= 12)
            proxy.calm()
            with connect(proxy) as client:
                assert ask(client) == b"1:hi"
            told.append(proxy.told[:12])
    assert told[0] == told[1] != told[2]
