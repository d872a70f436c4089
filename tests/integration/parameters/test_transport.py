"""Frames, channels, the listener and requests, over real sockets."""

import contextlib
import gc
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import numpy as np
import pytest

from support.fault_proxy import FaultProxy
from xain_parameters.errors import Evicted, Unavailable
from xain_parameters.messages import (
    Command,
    Done,
    Entry,
    Hello,
    Message,
    Pull,
    Push,
    Refused,
    Rows,
    Said,
    encode_head,
)
from xain_parameters.transport.channel import Channel, connect, hello
from xain_parameters.transport.connection import Broken, Connection
from xain_parameters.transport.frames import Buffers, pieces_of
from xain_parameters.transport.listener import Listener

PATIENCE_S = 30.0
N = 300_000


class Store:
    """A table of N float32 behind a listener; a Command is echoed."""

    def __init__(self) -> None:
        self.rows = np.zeros(N, np.float32)
        self.lock = threading.Lock()
        self.ended: list[Exception | None] = []
        self.held: list[Message] | None = None  # requests are kept here, unanswered
        self.listener = Listener("127.0.0.1:0", self.hear, self.end, on_hello=self.greet)
        self.address = f"127.0.0.1:{self.listener.port}"

    def greet(self, hello: Hello) -> Refused | None:
        return Refused(0, "evicted", "unknown") if hello.name == "stranger" else None

    def end(self, channel: Channel, why: Exception | None) -> None:
        self.ended.append(why)

    def hear(self, channel: Channel, message: Message) -> None:
        head = message.head
        if self.held is not None:
            self.held.append(message)
            return
        match head:
            case Push():
                with self.lock:
                    rows = np.asarray(message.values).view(np.float32)
                    if message.keys is None:
                        self.rows[head.start : head.stop] += rows
                    else:
                        self.rows[message.keys] += rows
                channel.send(Message(Done(head.request)))
            case Pull() if message.keys is not None:
                channel.send(Message(Rows(head.request), values=self.rows[message.keys]))
            case Pull():
                channel.send(Message(Rows(head.request), values=self.rows[head.start : head.stop]))
            case Command():
                channel.send(Message(Said(head.request, head.text)))
            case _:
                raise AssertionError(head)


@pytest.fixture
def store() -> Iterator[Store]:
    made = Store()
    yield made
    made.listener.close()


@contextlib.contextmanager
def connected(address: str, name: str = "w") -> Iterator[Connection]:
    connection = Connection(address, hello(name, "worker", 1))
    try:
        yield connection
    finally:
        connection.close()


def push(start: int = 0, stop: int = 0) -> Push:
    return Push(0, (0, 0), 1, 1, 0, 0, 0, False, start=start, stop=stop)


def pull(start: int = 0, stop: int = 0) -> Pull:
    return Pull(0, (0, 0), 1, 1, 0, start, stop)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)  # a poll: it ends when the condition holds


def threads() -> int:
    return threading.active_count()


def test_pushes_and_pulls_of_several_clients_add_up(store):
    """Each client keeps many requests open at once; large bodies and keys arrive as they were."""
    chance = np.random.default_rng(3)
    updates = [chance.integers(0, 100, N).astype(np.float32) for _ in range(4)]
    keys = np.sort(chance.choice(N, 5_000, replace=False)).astype(np.uint64)

    def work(update: np.ndarray) -> None:
        with connected(store.address) as server:
            answers = [server.ask(push(0, N), values=update) for _ in range(5)]
            answers += [server.ask(push(), keys, update[keys]) for _ in range(5)]
            for answer in answers:
                assert isinstance(answer.result(PATIENCE_S).head, Done)

    workers = [threading.Thread(target=work, args=(update,)) for update in updates]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(PATIENCE_S)
    expected = 5 * sum(updates)
    expected[keys] += 5 * sum(updates)[keys]
    with connected(store.address) as server:
        out = np.empty(N, np.float32)
        server.ask(pull(0, N), num_bytes=out.nbytes, out=out).result(PATIENCE_S)
        np.testing.assert_array_equal(out, expected)
        rows = server.ask(pull(), keys, num_bytes=4 * len(keys)).result(PATIENCE_S).values
        np.testing.assert_array_equal(rows.view(np.float32), expected[keys])


def test_received_arrays_stay_as_they_are_while_they_are_in_use(store):
    """A buffer of a connection takes another message only after the arrays in it are dropped."""
    store.held = []
    with connected(store.address) as server:
        for i in range(12):
            server.ask(push(0, N), values=np.full(N, i, np.float32))
        wait_until(lambda: len(store.held) == 12)
        for i, message in enumerate(store.held):
            assert (message.values.view(np.float32) == i).all()


def test_buffers_are_used_again_and_bounded():
    buffers = Buffers()
    first = buffers.take(1 << 20)
    address = first.ctypes.data
    part = first[10:20].view(np.uint8)
    del first
    second = buffers.take(1 << 20)
    assert second.ctypes.data != address  # `part` is in use
    del part
    again = buffers.take(1 << 19)
    assert again.ctypes.data == address
    num_held = Buffers.NUM_KEPT + 10
    held = [buffers.take(1 << 16) for _ in range(num_held)]
    assert len({each.ctypes.data for each in held}) == num_held
    assert len(buffers._kept) == Buffers.NUM_KEPT


def test_buffer_that_was_used_last_is_used_first():
    buffers = Buffers()
    first, second = buffers.take(1 << 20), buffers.take(1 << 20)
    address = second.ctypes.data
    del first, second
    for _ in range(3):
        assert buffers.take(1 << 20).ctypes.data == address


def test_stranger_is_refused_with_the_reason(store):
    with pytest.raises(Evicted, match="unknown"):
        Connection(store.address, hello("stranger", "worker", 1))
    with pytest.raises(Unavailable, match="version 99"):
        Connection(store.address, Hello(99, "worker", "w", 1))


def test_address_without_a_server_is_unavailable():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(Unavailable, match="cannot be reached"):
        Connection(f"127.0.0.1:{port}", hello("w", "worker", 1))


def test_broken_connection_fails_its_open_requests(store):
    """Those made later fail as well, at once."""
    store.held = []
    with FaultProxy(store.listener.port) as proxy, connected(f"127.0.0.1:{proxy.port}") as server:
        answers = [server.ask(Command(0, 1, "x")) for _ in range(10)]
        wait_until(lambda: len(store.held) == 10)
        proxy.cut()
        for answer in answers:
            with pytest.raises(Broken, match="has ended"):
                answer.result(PATIENCE_S)
        with pytest.raises(Broken):
            server.ask(Command(0, 1, "x")).result(PATIENCE_S)
        assert server.is_broken
    wait_until(lambda: store.listener.num_connections == 0)


def test_abandoned_request_leaves_its_array_alone(store):
    store.held = []
    with connected(store.address) as server:
        out = np.full(N, 7, np.float32)
        answer = server.ask(pull(0, N), num_bytes=out.nbytes, out=out)
        wait_until(lambda: len(store.held) == 1)
        server.abandon(answer)
        message, store.held = store.held[0], None
        channel = next(iter(store.listener._channels))
        channel.send(Message(Rows(message.head.request), values=np.zeros(N, np.float32)))
        answer.result(PATIENCE_S)
        assert (out == 7).all()


def test_two_nodes_that_flood_each_other_do_not_block():
    """Both send 40 MB before either reads: what the kernel does not take waits in the queue."""
    arrived = {"here": 0, "there": 0}
    has_all = threading.Event()
    entry = np.zeros(1_000_000, np.uint8)

    def count(side: str) -> None:
        arrived[side] += 1
        if min(arrived.values()) == 40:
            has_all.set()

    def flood(channel: Channel) -> None:
        for i in range(40):
            assert channel.send(Message(Entry(1, 1, i, "push"), values=entry))

    flooded: list[Channel] = []

    def hear_there(channel: Channel, message: Message) -> None:
        if not flooded:
            flooded.append(channel)
            flood(channel)
        count("there")

    listener = Listener("127.0.0.1:0", hear_there, lambda channel, why: None)
    here = connect(
        f"127.0.0.1:{listener.port}",
        hello("s1", "server", 1),
        lambda channel, message: count("here"),
        lambda channel, why: None,
    )
    flood(here)
    here.start()
    assert has_all.wait(PATIENCE_S)
    here.close()
    assert here.join()
    listener.close()


def test_connection_that_takes_nothing_is_not_read_either(store):
    """Answers to a worker that does not read them stay within a bound."""
    with socket.create_connection(("127.0.0.1", store.listener.port)) as silent:
        silent.sendall(b"".join(pieces_of(Message(hello("w", "worker", 1)))))
        request = b"".join(pieces_of(Message(pull(0, N))))
        silent.sendall(request * 1_000)  # 1.2 GB of answers
        wait_until(lambda: any(c.queued_bytes > 64 << 20 for c in store.listener._channels))
        [channel] = store.listener._channels
        assert channel.queued_bytes < (64 << 20) + 5 * N
    wait_until(lambda: store.listener.num_connections == 0)


def test_connections_beyond_the_limit_are_closed():
    listener = Listener(
        "127.0.0.1:0", lambda channel, message: None, lambda channel, why: None, max_connections=2
    )
    address = f"127.0.0.1:{listener.port}"
    with connected(address), connected(address), pytest.raises(Unavailable):
        Connection(address, hello("w", "worker", 1))
    wait_until(lambda: listener.num_connections == 0)
    with connected(address):
        pass
    listener.close()


def test_close_ends_all_connections_and_threads():
    before = threads()
    store = Store()
    silent = socket.create_connection(("127.0.0.1", store.listener.port))  # never says Hello
    servers = [Connection(store.address, hello(f"w{i}", "worker", 1)) for i in range(5)]
    store.listener.close()
    assert store.listener.num_connections == 0
    for server in servers:
        wait_until(lambda server=server: server.is_broken)
        server.close()
    assert silent.recv(1) == b""
    silent.close()
    wait_until(lambda: threads() <= before)


# --- hostile frames ---


def frame(head: bytes, num_keys: int, num_bytes: int, body: bytes = b"") -> bytes:
    return struct.pack("<IIQ", len(head), num_keys, num_bytes) + head + body


def malformed(chance: Random) -> bytes:
    """A frame that no node sends, or a half of one that it does."""
    good = [
        encode_head(Pull(1, (1, 1), 1, 1, 0)),
        encode_head(push(0, 4)),
        encode_head(Command(1, 2, "text")),
        encode_head(Entry(1, 2, 3, "open", ended={"w": 1})),
    ]
    head = bytearray(chance.choice(good))
    match chance.randrange(7):
        case 0:  # any bytes
            return chance.randbytes(chance.randrange(1, 200))
        case 1:  # sizes beyond all limits
            return struct.pack("<IIQ", chance.getrandbits(32), 2**32 - 1, 2**64 - 1)
        case 2:  # a head with other bytes in it
            for _ in range(chance.randrange(1, 4)):
                head[chance.randrange(len(head))] = chance.getrandbits(8)
            return frame(bytes(head), 0, 0)
        case 3:  # half of it
            whole = frame(bytes(head), 3, 100, bytes(124))
            return whole[: chance.randrange(len(whole))]
        case 4:  # a body where there is none
            return frame(encode_head(Command(1, 2, "x")), 3, 24, bytes(48))
        case 5:  # nested beyond measure
            return frame(b"\x91" * chance.randrange(1, 60_000), 0, 0)
        case _:  # an answer, to a server
            return frame(encode_head(Rows(1)), 0, 8, bytes(8))


@pytest.mark.parametrize("seed", range(4))
def test_malformed_frames_end_their_connection_and_nothing_else(store, seed):
    """500 of each seed; a good client works beside them, and nothing is left behind."""
    chance = Random(seed)
    before = threads(), num_descriptors()
    with connected(store.address) as server:
        for _ in range(500):
            with socket.create_connection(("127.0.0.1", store.listener.port)) as hostile:
                if chance.random() < 0.8:
                    hostile.sendall(b"".join(pieces_of(Message(hello("w", "worker", 1)))))
                with contextlib.suppress(ConnectionError):
                    hostile.sendall(malformed(chance))
        said = server.ask(Command(0, 1, "still here")).result(PATIENCE_S)
        assert said.head.text == "still here"
    wait_until(lambda: store.listener.num_connections == 0)
    gc.collect()
    wait_until(lambda: threads() <= before[0] and num_descriptors() <= before[1])


def num_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.parametrize(
    "answer",
    [
        frame(encode_head(Rows(77)), 0, 0),  # to a request that was not made
        frame(encode_head(Rows(1)), 0, 1 << 30),  # far more rows than were asked for
        frame(encode_head(Rows(1)), 0, 4),  # fewer
        frame(encode_head(Entry(1, 2, 3, "open")), 0, 0),  # no answer
    ],
)
def test_malformed_answers_break_the_connection(answer):
    """The array that rows were asked for is not written beyond its end."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        connections = []

        def serve() -> None:
            connection, _ = listener.accept()
            connections.append(connection)
            connection.sendall(b"".join(pieces_of(Message(Done(0)))))
            connection.recv(1 << 16)
            time.sleep(0.05)  # the request may come in a second piece
            connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        with connected(f"127.0.0.1:{listener.getsockname()[1]}") as server:
            out = np.zeros(2, np.float32)
            answered = server.ask(pull(0, 2), num_bytes=8, out=out)
            with pytest.raises(Broken):
                answered.result(PATIENCE_S)
            assert (out == 0).all()
        thread.join()
        for connection in connections:
            connection.close()
