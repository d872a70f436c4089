"""An array that servers add to, over bare transports: TCP sockets, pyzmq and grpcio."""

import itertools
import multiprocessing as mp
import queue
import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection as Pipe
from typing import Any, Protocol

import grpc
import numpy as np
import zmq
from numpy.typing import NDArray
from processes import PATIENCE_S

CHUNK_BYTES = 2 << 20
METHOD = "/bench.Bare/Exchange"
ADD, GIVE = b"a", b"g"

Array = NDArray[Any]


class Connection(Protocol):
    """A bare connection to one server, which adds what is pushed to an array."""

    def push(self, values: Array) -> None:
        """Send values; does not wait until they are added."""

    def end_push(self) -> None:
        """Wait until they are added."""

    def ask(self) -> None:
        """Ask for the array."""

    def pull(self, out: Array) -> None:
        """Receive the array that was asked for."""


@contextmanager
def served(serve: Callable[..., None], num_servers: int, *arguments: Any) -> Iterator[list[int]]:
    """Ports of server processes."""
    context = mp.get_context("spawn")
    pipes, processes = [], []
    try:
        for index in range(num_servers):
            here, there = context.Pipe()
            process = context.Process(target=serve, args=(there, index, *arguments), daemon=True)
            process.start()
            pipes.append(here)
            processes.append(process)
        for pipe in pipes:
            if not pipe.poll(PATIENCE_S):
                raise SystemExit("a server did not begin")
        yield [pipe.recv() for pipe in pipes]
    finally:
        for process in processes:
            process.kill()
            process.join()


class Bare:
    """Connections to several servers, each with its part of the array."""

    def __init__(self, connections: Sequence[Connection], size: int) -> None:
        edges = [size * i // len(connections) for i in range(len(connections) + 1)]
        parts = [slice(*pair) for pair in itertools.pairwise(edges)]
        self._connections = list(zip(connections, parts, strict=True))

    def exchange(self, pushed: Array, out: Array) -> None:
        for connection, part in self._connections:
            connection.push(pushed[part])
        for connection, _ in self._connections:
            connection.end_push()
        for connection, _ in self._connections:
            connection.ask()
        for connection, part in self._connections:
            connection.pull(out[part])


def receive(connection: socket.socket, array: Array) -> bool:
    view = memoryview(array).cast("B")
    while view.nbytes:
        count = connection.recv_into(view)
        if not count:
            return False
        view = view[count:]
    return True


def tune(connection: socket.socket, congestion: bytes) -> None:
    """congestion: the congestion control; b"": the default."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if congestion and hasattr(socket, "TCP_CONGESTION"):  # Linux
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, congestion)


def serve_tcp(pipe: Pipe, index: int, size: int, congestion: bytes = b"") -> None:
    total, buffer = np.zeros(size, np.float32), np.empty(size, np.float32)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        pipe.send(listener.getsockname()[1])
        connection, _ = listener.accept()
    tune(connection, congestion)
    while command := connection.recv(1):
        if command == ADD:
            if not receive(connection, buffer):
                return
            total += buffer
            connection.sendall(ADD)
        else:
            connection.sendall(total)


class Tcp:
    def __init__(self, port: int, congestion: bytes = b"") -> None:
        self._socket = socket.create_connection(("127.0.0.1", port))
        tune(self._socket, congestion)

    def push(self, values: Array) -> None:
        self._socket.sendall(ADD)
        self._socket.sendall(values)

    def end_push(self) -> None:
        self._socket.recv(1)

    def ask(self) -> None:
        self._socket.sendall(GIVE)

    def pull(self, out: Array) -> None:
        receive(self._socket, out)


def serve_zmq(pipe: Pipe, index: int, size: int) -> None:
    total = np.zeros(size, np.float32)
    with zmq.Context() as context, context.socket(zmq.REP) as server:
        pipe.send(server.bind_to_random_port("tcp://127.0.0.1"))
        while True:
            frame = server.recv(copy=False)
            if len(frame) > 1:
                total += np.frombuffer(frame, np.float32)
                server.send(ADD)
            else:
                server.send(total, copy=False)


class Zmq:
    def __init__(self, port: int) -> None:
        self._socket = zmq.Context().socket(zmq.REQ)
        self._socket.connect(f"tcp://127.0.0.1:{port}")

    def push(self, values: Array) -> None:
        self._socket.send(values, copy=False)

    def end_push(self) -> None:
        self._socket.recv()

    def ask(self) -> None:
        self._socket.send(GIVE)

    def pull(self, out: Array) -> None:
        out[:] = np.frombuffer(self._socket.recv(copy=False), np.float32)


def chunks_of(array: Array) -> Iterator[bytes]:
    view = memoryview(array).cast("B")
    for start in range(0, view.nbytes, CHUNK_BYTES):
        yield bytes(view[start : start + CHUNK_BYTES])


def serve_grpc(pipe: Pipe, index: int, size: int) -> None:
    total = np.zeros(size, np.float32)

    def exchange(chunks: Iterator[bytes], context: object) -> Iterator[bytes]:
        offset = 0
        for chunk in chunks:
            if chunk == GIVE:
                yield from chunks_of(total)
                continue
            values = np.frombuffer(chunk, np.float32)
            total[offset : offset + len(values)] += values
            offset += len(values)
            if offset == size:
                offset = 0
                yield ADD

    handler: Any = grpc.stream_stream_rpc_method_handler(exchange)
    service, _, method = METHOD[1:].partition("/")
    server = grpc.server(
        ThreadPoolExecutor(2),
        handlers=[grpc.method_handlers_generic_handler(service, {method: handler})],
        options=[("grpc.max_receive_message_length", 2 * CHUNK_BYTES)],
    )
    pipe.send(server.add_insecure_port("127.0.0.1:0"))
    server.start()
    server.wait_for_termination()


class Grpc:
    def __init__(self, port: int) -> None:
        options = [("grpc.max_receive_message_length", 2 * CHUNK_BYTES)]
        self._channel = grpc.insecure_channel(f"127.0.0.1:{port}", options)
        self._out: queue.SimpleQueue[Iterable[bytes]] = queue.SimpleQueue()
        call: Any = self._channel.stream_stream(METHOD)
        self._in = call(self._requests())

    def _requests(self) -> Iterator[bytes]:
        while True:
            yield from self._out.get()

    def push(self, values: Array) -> None:
        self._out.put(chunks_of(values))

    def end_push(self) -> None:
        assert next(self._in) == ADD

    def ask(self) -> None:
        self._out.put([GIVE])

    def pull(self, out: Array) -> None:
        offset = 0
        while offset < len(out):
            values = np.frombuffer(next(self._in), np.float32)
            out[offset : offset + len(values)] = values
            offset += len(values)


BARE: dict[str, tuple[Callable[..., None], Callable[[int], Connection]]] = {
    "tcp": (serve_tcp, Tcp),
    "tcp_reno": (partial(serve_tcp, congestion=b"reno"), partial(Tcp, congestion=b"reno")),
    "pyzmq": (serve_zmq, Zmq),
    "grpcio": (serve_grpc, Grpc),
}
