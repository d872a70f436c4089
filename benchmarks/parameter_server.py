"""Pushes and pulls of the parameter server, beside the same bytes over bare transports.

    python benchmarks/parameter_server.py [--turns 30] [--seconds 5]

A scheduler and 1 or 2 servers are processes as `xain-parameter-server` starts them, without
replicas and log. The client is one worker in this process. With 1 and with 2 servers:

Dense: an array of 4 and of 100 MB is pushed, added up at the servers, and pulled. Beside it, in the
same run and in turns with it, the same bytes with the same addition over TCP sockets, pyzmq (REQ
and REP) and grpcio (streams of 2 MiB chunks), for two servers with a thread each. Median of the
turns.

Sparse: batches of sorted keys, pushed and pulled, of tables with a bound and with open keys.

Latency: a second process pulls 4 KiB while the client pushes and pulls 4 MB and sparse batches.

Prints tables; writes bench-results/parameter_server.json.
"""

import itertools
import multiprocessing as mp
import queue
import socket
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection as Pipe
from typing import Any, Protocol

import flags
import grpc
import numpy as np
import results
import zmq
from numpy.typing import NDArray
from parameter_group import Group, connected, group_of
from processes import PATIENCE_S

from xain_parameters.client.connecting import connect_sync
from xain_parameters.client.sync import Server
from xain_parameters.tables.rules import Adagrad, Add

SMALL = 1024  # values in 4 KiB
CHUNK_BYTES = 2 << 20
METHOD = "/bench.Bare/Exchange"
ADD, GIVE = b"a", b"g"

Array = NDArray[Any]


class Line(Protocol):
    """Pushes to an array at the servers, which add, and pulls of it."""

    def exchange(self, pushed: Array, out: Array) -> None: ...


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


# --- the parameter server -------------------------------------------------------------------------


class Ours:
    def __init__(self, server: Server, size: int) -> None:
        self._dense = server.dense(f"dense {size}", (size,))

    def exchange(self, pushed: Array, out: Array) -> None:
        self._dense.push(pushed)
        self._dense.pull(out=out)


# --- bare transports ------------------------------------------------------------------------------


class Halves:
    """Several lines, each with its part of the array, side by side."""

    def __init__(self, lines: Sequence[Line]) -> None:
        self._lines = lines
        self._threads = ThreadPoolExecutor(len(lines))

    def exchange(self, pushed: Array, out: Array) -> None:
        if len(self._lines) == 1:
            self._lines[0].exchange(pushed, out)
            return
        num = len(self._lines)
        edges = [len(pushed) * i // num for i in range(num + 1)]
        parts = [slice(*pair) for pair in itertools.pairwise(edges)]
        work = [
            self._threads.submit(line.exchange, pushed[part], out[part])
            for line, part in zip(self._lines, parts, strict=True)
        ]
        for each in work:
            each.result()


def _receive(connection: socket.socket, array: Array) -> bool:
    view = memoryview(array).cast("B")
    while view.nbytes:
        count = connection.recv_into(view)
        if not count:
            return False
        view = view[count:]
    return True


def serve_tcp(pipe: Pipe, index: int, size: int) -> None:
    total, buffer = np.zeros(size, np.float32), np.empty(size, np.float32)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        pipe.send(listener.getsockname()[1])
        connection, _ = listener.accept()
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    while command := connection.recv(1):
        if command == ADD:
            if not _receive(connection, buffer):
                return
            total += buffer
            connection.sendall(ADD)
        else:
            connection.sendall(total)


class Tcp:
    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def exchange(self, pushed: Array, out: Array) -> None:
        self._socket.sendall(ADD)
        self._socket.sendall(pushed)
        self._socket.recv(1)
        self._socket.sendall(GIVE)
        _receive(self._socket, out)


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

    def exchange(self, pushed: Array, out: Array) -> None:
        self._socket.send(pushed, copy=False)
        self._socket.recv()
        self._socket.send(GIVE)
        out[:] = np.frombuffer(self._socket.recv(copy=False), np.float32)


def _chunks(array: Array) -> Iterator[bytes]:
    view = memoryview(array).cast("B")
    for start in range(0, view.nbytes, CHUNK_BYTES):
        yield bytes(view[start : start + CHUNK_BYTES])


def serve_grpc(pipe: Pipe, index: int, size: int) -> None:
    total = np.zeros(size, np.float32)

    def exchange(chunks: Iterator[bytes], context: object) -> Iterator[bytes]:
        place = 0
        for chunk in chunks:
            values = np.frombuffer(chunk, np.float32)
            total[place : place + len(values)] += values
            place += len(values)
            if place == size:
                place = 0
                yield ADD
                yield from _chunks(total)

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
    """The pull follows the push by itself: fewer trips than the others."""

    def __init__(self, port: int) -> None:
        options = [("grpc.max_receive_message_length", 2 * CHUNK_BYTES)]
        self._channel = grpc.insecure_channel(f"127.0.0.1:{port}", options)
        self._out: queue.SimpleQueue[Array] = queue.SimpleQueue()
        call: Any = self._channel.stream_stream(METHOD)
        self._in = call(self._requests())

    def _requests(self) -> Iterator[bytes]:
        while True:
            yield from _chunks(self._out.get())

    def exchange(self, pushed: Array, out: Array) -> None:
        self._out.put(pushed)
        assert next(self._in) == ADD
        place = 0
        while place < len(out):
            values = np.frombuffer(next(self._in), np.float32)
            out[place : place + len(values)] = values
            place += len(values)


BARE: dict[str, tuple[Callable[..., None], Callable[[int], Line]]] = {
    "tcp": (serve_tcp, Tcp),
    "pyzmq": (serve_zmq, Zmq),
    "grpcio": (serve_grpc, Grpc),
}


# --- what is measured -----------------------------------------------------------------------------


def dense(server: Server, size: int, turns: int) -> dict[str, Any]:
    """GB pushed and pulled a second, by the median of the turns."""
    pushed, out = np.ones(size, np.float32), np.empty(size, np.float32)
    num_servers = len(server.servers)
    with ExitStack() as stack:
        lines: dict[str, Line] = {"parameter_server": Ours(server, size)}
        for name, (serve, connect) in BARE.items():
            ports = stack.enter_context(served(serve, num_servers, size // num_servers))
            lines[name] = Halves([connect(port) for port in ports])
        taken: dict[str, list[float]] = {name: [] for name in lines}
        for turn in range(turns + 1):
            for name, line in lines.items():
                begin = time.perf_counter()
                line.exchange(pushed, out)
                if turn:  # the first one warms up
                    taken[name].append(time.perf_counter() - begin)
                assert out[0] == out[-1] == turn + 1, name
    speed = {
        name: 2 * pushed.nbytes / statistics.median(seconds) / 1e9
        for name, seconds in taken.items()
    }
    own = speed.pop("parameter_server")
    return {
        "servers": num_servers,
        "mb": round(pushed.nbytes / 1e6, 1),
        "gb_per_s": round(own, 2),
        **{f"{name}_gb_per_s": round(each, 2) for name, each in speed.items()},
        "ratio_to_tcp": round(own / speed["tcp"], 2),
        "ratio_to_grpcio": round(own / speed["grpcio"], 2),
    }


def keys_of(rows: int, *, is_open: bool) -> Array:
    keys = np.arange(rows, dtype=np.uint64)
    # An odd factor is a bijection of 64-bit numbers.
    return np.sort(keys * np.uint64(0x9E3779B97F4A7C15)) if is_open else keys


def sparse(
    server: Server, dim: int, rows: int, batch: int, turns: int, *, is_open: bool
) -> dict[str, Any]:
    """Million keys a second, by the median of the turns."""
    update = Adagrad(0.05) if dim == 64 else Add()
    keys_are = "open" if is_open else "bounded"
    table = server.table(
        f"{keys_are} {dim} {rows}", dim, update=update, bound=None if is_open else rows
    )
    chance = np.random.default_rng(5)
    every = keys_of(rows, is_open=is_open)
    values = np.ones((batch, dim), np.float32)
    taken: dict[str, list[float]] = {"push": [], "pull": []}
    for start in range(0, rows, batch):  # all rows are there
        keys = every[start : start + batch]
        table.push(keys, values[: len(keys)])
    for _ in range(turns):
        keys = np.sort(chance.choice(every, batch, replace=False, shuffle=False))
        begin = time.perf_counter()
        table.push(keys, values)
        middle = time.perf_counter()
        table.pull(keys)
        end = time.perf_counter()
        taken["push"].append(middle - begin)
        taken["pull"].append(end - middle)
    push, pull = (statistics.median(seconds) for seconds in taken.values())
    return {
        "servers": len(server.servers),
        "dim": dim,
        "keys": keys_are,
        "update": update.name,
        "rows": rows,
        "push_mkeys_per_s": round(batch / push / 1e6, 2),
        "pull_mkeys_per_s": round(batch / pull / 1e6, 2),
        "both_mkeys_per_s": round(2 * batch / (push + pull) / 1e6, 2),
    }


def pull_small(pipe: Pipe, index: int, target: str, seconds: float) -> None:
    with connect_sync(target, worker="small") as server:
        small = server.dense("small", (SMALL,))
        out = np.empty(SMALL, np.float32)
        small.pull(out=out)
        pipe.send(0)
        taken = []
        deadline = time.perf_counter() + seconds
        while (begin := time.perf_counter()) < deadline:
            small.pull(out=out)
            taken.append(time.perf_counter() - begin)
            time.sleep(0.001)
        pipe.send(np.percentile(taken, [50, 99]).tolist())
        threading.Event().wait()


def latency(group: Group, server: Server, size: int, batch: int, seconds: float) -> dict[str, Any]:
    """Pulls of 4 KiB by another process, while this one pushes and pulls."""
    w, table = server.dense(f"dense {size}", (size,)), server.table("t", 16)
    pushed, out = np.ones(size, np.float32), np.empty(size, np.float32)
    keys, values = keys_of(batch, is_open=True), np.ones((batch, 16), np.float32)
    context = mp.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(
        target=pull_small, args=(there, 0, group.target, seconds), daemon=True
    )
    process.start()
    try:
        here.recv()
        while not here.poll():
            w.push(pushed)
            w.pull(out=out)
            table.push(keys, values)
            table.pull(keys)
        median, p99 = here.recv()
    finally:
        process.kill()
        process.join()
    return {
        "servers": len(server.servers),
        "pull_4_kib_p50_ms": round(1000 * median, 2),
        "pull_4_kib_p99_ms": round(1000 * p99, 2),
    }


def main() -> None:
    parser = flags.parser(__doc__)
    parser.add_argument("--turns", type=int, default=30)
    parser.add_argument("--seconds", type=float, default=5.0, help="of the latency under load")
    given = parser.parse_args()
    results.begin(quick=given.quick, any_load=given.any_load)
    sizes, batch, rows = [1 << 20, 25_000_000], 1_000_000, {1: 4_000_000, 16: 2_000_000}
    if given.quick:
        given.turns, given.seconds = 3, 0.3
        sizes, batch, rows = [10_000], 1_000, {1: 4_000, 16: 2_000}
    figures: dict[str, list[dict[str, Any]]] = {"dense": [], "sparse": [], "latency": []}
    for num_servers in (1, 2):
        with group_of(num_servers) as group, connected(group) as server:
            figures["dense"] += [
                dense(server, size, max(3, given.turns // 3) if size > 1 << 22 else given.turns)
                for size in sizes
            ]
            figures["sparse"] += [
                sparse(
                    *(server, dim, rows.get(dim, batch), batch, max(3, given.turns // 3)),
                    is_open=is_open,
                )
                for dim in (1, 16, 64)
                for is_open in (False, True)
            ]
            figures["latency"].append(latency(group, server, sizes[0], batch // 10, given.seconds))
    results.report("parameter_server", {"turns": given.turns, "batch": batch, **figures})


if __name__ == "__main__":
    main()
