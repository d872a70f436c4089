"""Messages between two processes: round trips of 1 kB, and arrays of 100 MB.

    python benchmarks/messaging.py [--trips 2000] [--size 25000000] [--repeats 5] [--incast 500]

Proxies on the gRPC and on the ZeroMQ driver, and beside them, in the same run, what is under them:
loopback TCP, pyzmq's sockets (REQ and REP, as one would write round trips with them, and PUSH and
PULL) and grpcio's streams, with nothing done to the bytes. All alternate.

A round trip is a request that is answered with as many bytes. Each transport makes them in short
slices that alternate with those of the others. `round_trips_per_s` is the median of the slices,
`fastest` the fastest one; their ratios are to the faster of the raw ones. A trip is mostly threads
that wake each other: in the fastest slices they alternate on one core, so that a trip lasts as long
as the processor time of both ends, and in the others they wake each other on two cores.
`trip_cpu_ms` is that processor time.

Arrays are shown by the median of the repeats. An array is made anew for each,
and arrives in memory of the receiver's own; the raw ones too, except for grpcio, whose chunks are
counted and dropped. Four arrays are sent at once; a proxy has two of 100 MB on their way, since it
keeps no more than 256 MiB for a peer. `fixed`: the array is read-only, so that the proxy need not
copy it to let its owner go on. Before what is counted all have sent arrays of both sorts.

Incast: 32 peers in four processes send messages of 1 kB to one peer, which receives them all;
`messages_per_s` is of the fastest repeat. The raw ones are PUSH and PULL sockets, and one stream
for each peer.

Prints a table; writes bench-results/messaging.json.
"""

import multiprocessing as mp
import queue
import socket
import statistics
import struct
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, Protocol

import flags
import grpc
import numpy as np
import results
import zmq
from numpy.typing import NDArray
from processes import processor_time

from xain_membership.ports import Member, Roster
from xain_messaging import MembershipServer, Message, Proxy, SessionMessage
from xain_messaging.drivers import open_driver

SMALL = b"x" * 1000
AT_A_TIME = 4
SLICES = 10  # of the round trips of a repeat
PEERS = 8  # of each process that sends
CHUNK_BYTES = 2 << 20  # as the gRPC driver has; of 512 KiB to 4 MiB none is better for grpcio
METHOD = "/bench.Bare/Exchange"
PATIENCE_S = 120.0


class Transport(Protocol):
    """Messages to and from the other process. A received message is given as its size."""

    def send(self, data: bytes | NDArray[Any]) -> None: ...

    def receive(self) -> int: ...


# --- raw ones -------------------------------------------------------------------------------------


class Tcp:
    """A size, and as many bytes."""

    def __init__(self, pipe: Connection, *, is_first: bool) -> None:
        if is_first:
            with socket.create_server(("127.0.0.1", 0)) as listener:
                pipe.send(listener.getsockname()[1])
                self._socket, _ = listener.accept()
        else:
            self._socket = socket.create_connection(("127.0.0.1", pipe.recv()))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, data: bytes | NDArray[Any]) -> None:
        view = memoryview(data).cast("B")
        size = struct.pack("<Q", view.nbytes)
        if view.nbytes > CHUNK_BYTES:
            self._socket.sendall(size)
            self._socket.sendall(view)
        else:
            self._socket.sendall(size + view)

    def receive(self) -> int:
        (size,) = struct.unpack("<Q", self._exactly(8))
        return len(self._exactly(size))

    def _exactly(self, size: int) -> bytearray:
        data = bytearray(size)
        view = memoryview(data)
        while view.nbytes:
            view = view[self._socket.recv_into(view) :]
        return data


class Zmq:
    """A PUSH and a PULL socket at each end; large ones are handed over, not copied."""

    def __init__(self, pipe: Connection, *, is_first: bool) -> None:
        context = zmq.Context()
        self._pull = context.socket(zmq.PULL)
        port = self._pull.bind_to_random_port("tcp://127.0.0.1")
        pipe.send(port)
        self._push = context.socket(zmq.PUSH)
        self._push.connect(f"tcp://127.0.0.1:{pipe.recv()}")

    def send(self, data: bytes | NDArray[Any]) -> None:
        self._push.send(data, copy=len(data) == len(SMALL))

    def receive(self) -> int:
        return len(self._pull.recv(copy=False))


class ZmqRequests:
    """A REQ and a REP socket, for round trips only."""

    def __init__(self, pipe: Connection, *, is_first: bool) -> None:
        self._socket = zmq.Context().socket(zmq.REP if is_first else zmq.REQ)
        if is_first:
            pipe.send(self._socket.bind_to_random_port("tcp://127.0.0.1"))
        else:
            self._socket.connect(f"tcp://127.0.0.1:{pipe.recv()}")

    def send(self, data: bytes | NDArray[Any]) -> None:
        self._socket.send(data)

    def receive(self) -> int:
        return len(self._socket.recv())


class Grpc:
    """One stream with messages both ways; large ones in chunks, each made when it is sent."""

    def __init__(self, pipe: Connection, *, is_first: bool) -> None:
        self._out: queue.SimpleQueue[memoryview] = queue.SimpleQueue()
        self._in: Iterator[bytes]
        options = [("grpc.max_receive_message_length", 2 * CHUNK_BYTES)]
        if is_first:
            come: queue.SimpleQueue[Iterator[bytes]] = queue.SimpleQueue()

            def exchange(chunks: Iterator[bytes], context: object) -> Iterator[bytes]:
                come.put(chunks)
                return self._chunks()

            handler: Any = grpc.stream_stream_rpc_method_handler(exchange)
            service, _, method = METHOD[1:].partition("/")
            self._server = grpc.server(
                ThreadPoolExecutor(2),
                handlers=[grpc.method_handlers_generic_handler(service, {method: handler})],
                options=options,
            )
            pipe.send(self._server.add_insecure_port("127.0.0.1:0"))
            self._server.start()
            self._in = come.get()
        else:
            self._channel = grpc.insecure_channel(f"127.0.0.1:{pipe.recv()}", options)
            call: Any = self._channel.stream_stream(METHOD)
            self._in = call(self._chunks())

    def send(self, data: bytes | NDArray[Any]) -> None:
        self._out.put(memoryview(data).cast("B"))

    def _chunks(self) -> Iterator[bytes]:
        while True:
            view = self._out.get()
            yield struct.pack("<Q", view.nbytes) + view[: CHUNK_BYTES - 8]
            for start in range(CHUNK_BYTES - 8, view.nbytes, CHUNK_BYTES):
                yield bytes(view[start : start + CHUNK_BYTES])

    def receive(self) -> int:
        first = next(self._in)
        (size,) = struct.unpack_from("<Q", first)
        left = size - (len(first) - 8)
        while left:
            left -= len(next(self._in))
        return int(size)


# --- ours -----------------------------------------------------------------------------------------


class Pair:
    """A discovery of two, who tell each other through a pipe."""

    def __init__(self, pipe: Connection, *, is_first: bool) -> None:
        self._pipe = pipe
        self._is_first = is_first

    def join(
        self,
        group: str,
        role: str,
        name: str,
        address: str,
        *,
        timeout_s: float,
        on_change: Callable[[Roster], None],
        on_lost: Callable[[Exception], None],
    ) -> "Pair":
        self._pipe.send(address)
        other = self._pipe.recv()
        here, there = ("first", "second") if self._is_first else ("second", "first")
        self.member = Member(here, role, 0, address, 1)
        on_change({here: self.member, there: Member(there, role, 1, other, 1)})
        return self

    def barrier(self, name: str, num_members: int, timeout_s: float) -> None:
        raise NotImplementedError

    def leave(self) -> None:
        """Nothing to do: the other process needs no goodbye."""


class OverProxy:
    """Tasks of one to the other, and their answers."""

    def __init__(self, driver: str, pipe: Connection, *, is_first: bool) -> None:
        here, self._other = ("first", "second") if is_first else ("second", "first")
        self._proxy = Proxy(
            "bench",
            "peer",
            name=here,
            discovery=Pair(pipe, is_first=is_first),
            driver=open_driver(driver),
            timeout_s=PATIENCE_S,
        )
        self._asked: list[str] = []
        self._to_answer: list[Message] = []

    def send(self, data: bytes | NDArray[Any]) -> None:
        if self._to_answer:
            self._proxy.reply(self._to_answer.pop(0), body=data)
        else:
            message = SessionMessage("x", self._proxy.name, self._other, data)
            self._asked += self._proxy.isend(message)

    def receive(self) -> int:
        if self._asked:
            (reply,) = self._proxy.receive_by_id(self._asked.pop(0)).complete()
            return len(reply.body)
        message = self._proxy.receive_once(1e9)
        assert message is not None
        self._to_answer.append(message)
        body = message.body
        return body.nbytes if isinstance(body, np.ndarray) else len(body)


KINDS: dict[str, Callable[..., Transport]] = {
    "tcp": Tcp,
    "pyzmq, REQ and REP": ZmqRequests,
    "pyzmq": Zmq,
    "grpcio": Grpc,
    "proxy, zmq": lambda pipe, **end: OverProxy("zmq", pipe, **end),
    "proxy, grpc": lambda pipe, **end: OverProxy("grpc", pipe, **end),
}
# Libraries below a proxy. Arrays are compared with the last one.
RAW = {"proxy, zmq": ("pyzmq, REQ and REP", "pyzmq"), "proxy, grpc": ("grpcio",)}
TRIPS_ONLY = ("pyzmq, REQ and REP",)


def answer(kind: str, pipe: Connection) -> None:
    """Loop of the other process: answer few bytes with as many, and many bytes with a few."""
    transport = KINDS[kind](pipe, is_first=True)
    while True:
        size = transport.receive()
        transport.send(SMALL if size <= len(SMALL) else b".")


def trips_per_s(transport: Transport, number: int) -> float:
    begin = time.perf_counter()
    for _ in range(number):
        transport.send(SMALL)
        transport.receive()
    return number / (time.perf_counter() - begin)


def gb_per_s(transport: Transport, size: int, *, is_fixed: bool) -> float:
    arrays = [np.full(size, i, np.float32) for i in range(AT_A_TIME)]
    for array in arrays:
        array.setflags(write=not is_fixed)
    begin = time.perf_counter()
    for array in arrays:
        transport.send(array)
    for _ in arrays:
        transport.receive()
    return AT_A_TIME * 4 * size / (time.perf_counter() - begin) / 1e9


@dataclass
class Found:
    """Figures of one transport. trips_per_s: by slice. gb_per_s, fixed_gb_per_s: by repeat."""

    trips_per_s: list[float] = field(default_factory=list)
    trip_cpu_s: list[float] = field(default_factory=list)
    gb_per_s: list[float] = field(default_factory=list)
    fixed_gb_per_s: list[float] = field(default_factory=list)


def measure(trips: int, size: int, repeats: int) -> list[dict[str, Any]]:
    context = mp.get_context("spawn")
    transports: dict[str, Transport] = {}
    processes: dict[str, Any] = {}
    try:
        for kind, make in KINDS.items():
            here, there = context.Pipe()
            process = context.Process(target=answer, args=(kind, there), daemon=True)
            process.start()
            processes[kind] = process
            transports[kind] = make(here, is_first=False)
        found = {kind: Found() for kind in KINDS}
        for kind, transport in transports.items():
            trips_per_s(transport, max(1, trips // 10))
            for is_fixed in (True, False):
                if kind not in TRIPS_ONLY:
                    gb_per_s(transport, size, is_fixed=is_fixed)
        for _ in range(repeats):
            for _ in range(SLICES):
                for kind, transport in transports.items():
                    begin = cpu_s(processes[kind].pid)
                    number = max(1, trips // SLICES)
                    found[kind].trips_per_s.append(trips_per_s(transport, number))
                    found[kind].trip_cpu_s.append((cpu_s(processes[kind].pid) - begin) / number)
            for kind, transport in transports.items():
                if kind in RAW:
                    found[kind].fixed_gb_per_s.append(gb_per_s(transport, size, is_fixed=True))
                if kind not in TRIPS_ONLY:
                    found[kind].gb_per_s.append(gb_per_s(transport, size, is_fixed=False))
    finally:
        for process in processes.values():
            process.kill()
            process.join()
    return [row(kind, found) for kind in KINDS]


# --- incast ---------------------------------------------------------------------------------------


def push_zmq(address: str, messages: int) -> Callable[[], None]:
    context = zmq.Context()
    sockets = [context.socket(zmq.PUSH) for _ in range(PEERS)]
    for one in sockets:
        one.connect(address)

    def go() -> None:
        for _ in range(messages):
            for one in sockets:
                one.send(SMALL)

    return go


def push_grpc(address: str, messages: int) -> Callable[[], None]:
    options = [("grpc.use_local_subchannel_pool", 1)]
    channels = [grpc.insecure_channel(address, options) for _ in range(PEERS)]
    for channel in channels:
        grpc.channel_ready_future(channel).result(PATIENCE_S)

    def go() -> None:
        calls: list[Any] = [channel.stream_unary(METHOD) for channel in channels]
        futures = [call.future(iter([SMALL] * messages)) for call in calls]
        for future in futures:
            future.result(PATIENCE_S)

    return go


def push_proxies(driver: str, address: str, messages: int) -> Callable[[], None]:
    options: dict[str, Any] = {"discovery": address, "driver": driver, "timeout_s": PATIENCE_S}
    proxies = [Proxy("incast", "sender", {"sink": 1}, **options) for _ in range(PEERS)]

    def go() -> None:
        for _ in range(messages):
            for proxy in proxies:
                proxy.isend(Message("x", proxy.name, "sink", SMALL))

    return go


PUSHES: dict[str, Callable[[str, int], Callable[[], None]]] = {
    "pyzmq": push_zmq,
    "grpcio": push_grpc,
    "proxy, zmq": partial(push_proxies, "zmq"),
    "proxy, grpc": partial(push_proxies, "grpc"),
}


def push(kind: str, address: str, messages: int, pipe: Connection) -> None:
    """Program of a process that sends, as often as it is told to."""
    go = PUSHES[kind](address, messages)
    pipe.send("ready")
    while pipe.recv():
        go()


@contextmanager
def sink(kind: str, num_peers: int) -> Iterator[tuple[str, Callable[[int], None]]]:
    """The peer that receives: its address, and what receives so many messages."""
    if kind == "pyzmq":
        socket_in = zmq.Context().socket(zmq.PULL)
        port = socket_in.bind_to_random_port("tcp://127.0.0.1")

        def receive_raw(number: int) -> None:
            for _ in range(number):
                socket_in.recv()

        yield f"tcp://127.0.0.1:{port}", receive_raw
        return
    if kind == "grpcio":
        come: queue.SimpleQueue[bytes] = queue.SimpleQueue()

        def deliver(chunks: Iterator[bytes], context: object) -> bytes:
            for chunk in chunks:
                come.put(chunk)
            return b""

        handler: Any = grpc.stream_unary_rpc_method_handler(deliver)
        service, _, method = METHOD[1:].partition("/")
        handlers = [grpc.method_handlers_generic_handler(service, {method: handler})]
        server = grpc.server(ThreadPoolExecutor(num_peers), handlers=handlers)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()

        def receive_chunks(number: int) -> None:
            for _ in range(number):
                come.get()

        yield f"127.0.0.1:{port}", receive_chunks
        server.stop(None)
        return
    driver = kind.removeprefix("proxy, ")
    with (
        MembershipServer(settle_s=0.0) as members,
        Proxy("incast", "sink", name="sink", discovery=members.target, driver=driver) as proxy,
    ):

        def receive(number: int) -> None:
            for _ in range(number):
                assert proxy.receive_once(PATIENCE_S) is not None

        yield members.target, receive


def incast(messages: int, repeats: int, senders: int) -> list[dict[str, Any]]:
    """Messages each second that one peer receives of all others. senders: processes."""
    num_peers = PEERS * senders
    context = mp.get_context("spawn")
    found: dict[str, float] = {}
    for kind in PUSHES:
        with ExitStack() as stack:
            address, receive = stack.enter_context(sink(kind, num_peers))
            pipes = []
            for _ in range(senders):
                here, there = context.Pipe()
                process = context.Process(
                    target=push, args=(kind, address, messages, there), daemon=True
                )
                process.start()
                stack.callback(process.join)
                stack.callback(process.kill)
                pipes.append(here)
            for pipe in pipes:
                assert pipe.poll(PATIENCE_S), f"a sender of {kind} does not begin"
                pipe.recv()
            for _ in range(repeats):
                begin = time.perf_counter()
                for pipe in pipes:
                    pipe.send(True)
                receive(num_peers * messages)
                rate = num_peers * messages / (time.perf_counter() - begin)
                found[kind] = max(found.get(kind, 0.0), rate)
    return [
        {
            "peers": kind,
            "messages_per_s": round(rate),
            "ratio": round(rate / found[RAW[kind][-1]], 2) if kind in RAW else None,
        }
        for kind, rate in found.items()
    ]


def cpu_s(other: int) -> float:
    """Processor time of this process and of the other one until now."""
    there = processor_time(other)
    return time.process_time() + (there.user_s + there.system_s if there is not None else 0.0)


def row(kind: str, found: Mapping[str, Found]) -> dict[str, Any]:
    mine = found[kind]
    made: dict[str, Any] = {
        "transport": kind,
        "round_trips_per_s": round(statistics.median(mine.trips_per_s)),
        "fastest": round(max(mine.trips_per_s)),
        "trip_cpu_ms": round(1000 * statistics.mean(mine.trip_cpu_s), 3),
        "gb_per_s": round(statistics.median(mine.gb_per_s), 3) if mine.gb_per_s else None,
    }
    if kind in RAW:
        under = RAW[kind]
        usual = max(statistics.median(found[raw].trips_per_s) for raw in under)
        fastest = max(max(found[raw].trips_per_s) for raw in under)
        raw_gb_per_s = statistics.median(found[under[-1]].gb_per_s)
        fixed = statistics.median(mine.fixed_gb_per_s)
        made["fixed_gb_per_s"] = round(fixed, 3)
        made["round_trips_ratio"] = round(statistics.median(mine.trips_per_s) / usual, 2)
        made["fastest_ratio"] = round(max(mine.trips_per_s) / fastest, 2)
        made["gb_ratio"] = round(statistics.median(mine.gb_per_s) / raw_gb_per_s, 2)
        made["fixed_gb_ratio"] = round(fixed / raw_gb_per_s, 2)
    return made


def main() -> None:
    parser = flags.parser(__doc__)
    parser.add_argument("--trips", type=int, default=2000, help="round trips in a repeat")
    parser.add_argument("--size", type=int, default=25_000_000, help="of an array, in float32")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--incast", type=int, default=500, help="messages of each of 32 peers")
    given = parser.parse_args()
    senders = 4
    if given.quick:
        given.trips, given.size, given.repeats, given.incast = 50, 300_000, 1, 20
        senders = 1
    results.begin(quick=given.quick, any_load=given.any_load)
    transports = measure(given.trips, given.size, given.repeats)
    results.report(
        "messaging",
        {
            "repeats": given.repeats,
            "array_mb": round(4 * given.size / 1e6, 1),
            "transports": transports,
            "incast": incast(given.incast, given.repeats, senders),
        },
    )


if __name__ == "__main__":
    main()
