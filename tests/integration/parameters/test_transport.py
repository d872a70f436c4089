"""Frames, channels, the listener and requests, over real sockets."""

import contextlib
import gc
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from random import Random

import numpy as np
import pytest

from support.certificates import make_authority, write_folder
from support.fault_proxy import FaultProxy
from support.logs import capture_logs
from support.waiting import beside, wait_until
from xain_foundation.security.identity import Role
from xain_foundation.security.tls import Certificates
from xain_foundation.security.x509 import Authority
from xain_parameters.errors import Invalid, Unavailable
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
    Section,
    Several,
    encode_head,
    parts_of,
)
from xain_parameters.transport.channel import Channel, connect, hello
from xain_parameters.transport.connection import Connection
from xain_parameters.transport.frames import Buffers, Receiver, Unsent, pieces_of
from xain_parameters.transport.listener import Listener
from xain_parameters.transport.poller import Answer, Poller
from xain_parameters.transport.sections import Sections

PATIENCE_S = 60.0
N = 300_000
OURS, THEIRS = make_authority(), make_authority()


def certificates_of(
    folder: Path, role: Role, name: str, authority: Authority = OURS, lifetime_s: float = 3600.0
) -> Certificates:
    made = folder / f"{role}-{name}-{len(list(folder.iterdir()))}"
    return Certificates(write_folder(made, authority, role, name, hosts=(), lifetime_s=lifetime_s))


class Store:
    """A table of N float32 behind a listener; a Command is echoed."""

    def __init__(self, tls: Certificates | None = None) -> None:
        self.rows = np.zeros(N, np.float32)
        self.lock = threading.Lock()
        self.ended: list[Exception | None] = []
        self.held: list[Message] | None = None  # requests are kept here, unanswered
        self.listener = Listener("127.0.0.1:0", self.hear, self.end, tls=tls)
        self.address = f"127.0.0.1:{self.listener.port}"

    def end(self, channel: Channel, why: Exception | None) -> None:
        self.ended.append(why)

    def hear(self, channel: Channel, message: Message) -> None:
        head = message.head
        if self.held is not None:
            self.held.append(message)
            return
        if isinstance(head, Several):
            together = Sections(channel.send, head)
            for part in parts_of(message):
                self.answer(together, part)
        else:
            self.answer(channel.answered_by(message), message)

    def answer(self, reply: Channel | Sections, message: Message) -> None:
        head = message.head
        match head:
            case Push():
                with self.lock:
                    rows = np.asarray(message.values).view(np.float32)
                    if message.keys is None:
                        self.rows[head.start : head.stop] += rows
                    else:
                        self.rows[message.keys] += rows
                reply.send(Message(Done(head.request)))
            case Pull() if message.keys is not None:
                reply.send(Message(Rows(head.request), values=self.rows[message.keys]))
            case Pull():
                reply.send(Message(Rows(head.request), values=self.rows[head.start : head.stop]))
            case Command():
                reply.send(Message(Said(head.request, head.text)))
            case _:
                raise AssertionError(head)


@pytest.fixture
def store() -> Iterator[Store]:
    made = Store()
    yield made
    made.listener.close()


@contextlib.contextmanager
def connected(
    address: str, name: str = "w", tls: Certificates | None = None
) -> Iterator[Connection]:
    with closing(Connection(address, hello(name, "worker", 1), tls=tls)) as connection:
        yield connection


def push(start: int = 0, stop: int = 0) -> Push:
    return Push(0, (0, 0), 1, 1, 0, 0, 0, False, start=start, stop=stop)


def pull(start: int = 0, stop: int = 0) -> Pull:
    return Pull(0, (0, 0), 1, 1, 0, start, stop)


def wait_asking(answer: Answer, condition: Callable[[], bool]) -> None:
    """Requests are sent while a thread waits for an answer."""

    def has_come() -> bool:
        with contextlib.suppress(TimeoutError):
            answer.result(0.005)
        return condition()

    wait_until(has_come)


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

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, updates))
    expected = 5 * sum(updates)
    expected[keys] += 5 * sum(updates)[keys]
    with connected(store.address) as server:
        out = np.empty(N, np.float32)
        server.ask(pull(0, N), num_bytes=out.nbytes, out=[out]).result(PATIENCE_S)
        np.testing.assert_array_equal(out, expected)
        rows = server.ask(pull(), keys, num_bytes=4 * len(keys)).result(PATIENCE_S).values
        np.testing.assert_array_equal(rows.view(np.float32), expected[keys])


def test_sections_of_a_request_have_one_answer(store):
    """Keys and values of each section, small and large, and rows of all in their order."""
    keys = np.array([3, 5, 70], np.uint64)
    tens = np.full(3, 10, np.float32)
    ones = np.ones(N - 100, np.float32)
    pushes = Several(0, push(), (Section(1, 0, 0, 3, 12), Section(2, 100, N, 0, ones.nbytes)))
    pulls = Several(0, pull(), (Section(2, 100, N, 0, 0), Section(1, 0, 0, 3, 0)))
    many = np.empty(N - 100, np.float32)
    few = np.empty(3, np.float32)
    with connected(store.address) as server:
        for _ in range(3):
            pushed = server.ask(pushes, bodies=[(keys, tens), (None, ones)])
            assert isinstance(pushed.result(PATIENCE_S).head, Done)
        pulled = server.ask(
            pulls,
            bodies=[(None, None), (keys, None)],
            num_bytes=many.nbytes + few.nbytes,
            out=[many, few],
        )
        assert isinstance(pulled.result(PATIENCE_S).head, Rows)
    assert (many == 3).all()
    assert (few == 30).all()


def test_refused_section_refuses_the_request():
    """An error of the caller rather than a range that has moved, which is asked for again."""
    sent = []
    several = Several(9, push(), (Section(1, 0, 0, 0, 0),) * 3)
    sections = Sections(lambda message: sent.append(message) is None, several)
    sections.send(Message(Refused(2, "invalid", "no such key")))
    sections.send(Message(Done(1)))
    assert not sent
    sections.send(Message(Refused(0, "moved", "elsewhere", (1, 4))))
    assert [message.head for message in sent] == [Refused(9, "invalid", "no such key")]


def test_received_arrays_stay_as_they_are_while_they_are_in_use(store):
    """A buffer of a connection takes another message only after the arrays in it are dropped."""
    store.held = []
    with connected(store.address) as server:
        answers = [server.ask(push(0, N), values=np.full(N, i, np.float32)) for i in range(12)]
        wait_asking(answers[-1], lambda: len(store.held) == 12)
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


def test_other_version_of_the_protocol_is_refused_with_the_reason(store):
    with pytest.raises(Invalid, match="version 99"):
        Connection(store.address, Hello(99, "worker", "w", 1))


def test_address_without_a_server_is_unavailable():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(Unavailable, match="cannot be reached"):
        Connection(f"127.0.0.1:{port}", hello("w", "worker", 1))


def test_broken_connection_fails_its_open_requests(store):
    """Requests that are made later fail as well, at once."""
    store.held = []
    with FaultProxy(store.listener.port) as proxy, connected(f"127.0.0.1:{proxy.port}") as server:
        answers = [server.ask(Command(0, 1, "x")) for _ in range(10)]
        wait_asking(answers[0], lambda: len(store.held) == 10)
        proxy.cut()
        for answer in answers:
            with pytest.raises(ConnectionError, match="has ended"):
                answer.result(PATIENCE_S)
        with pytest.raises(ConnectionError):
            server.ask(Command(0, 1, "x")).result(PATIENCE_S)
        assert server.is_broken
    wait_until(lambda: store.listener.num_connections == 0)


def test_end_of_file_where_a_message_is_handled_is_a_defect():
    """Log the error and end the connection with it, unlike that of a peer that hangs up."""
    ended: SimpleQueue[Exception | None] = SimpleQueue()

    def hear(channel: Channel, message: Message) -> None:
        raise EOFError("a defect")

    listener = Listener("127.0.0.1:0", hear, lambda channel, why: ended.put(why))
    with contextlib.closing(listener), capture_logs() as logs:
        with (
            connected(f"127.0.0.1:{listener.port}") as server,
            pytest.raises(ConnectionError, match="has ended"),
        ):
            server.ask(Command(0, 1, "x")).result(PATIENCE_S)
        assert isinstance(ended.get(timeout=PATIENCE_S), EOFError)
        with connected(f"127.0.0.1:{listener.port}"):
            pass
        assert ended.get(timeout=PATIENCE_S) is None
    assert [line["event"] for line in logs if line["log_level"] == "error"] == ["message_failed"]


def test_abandoned_request_leaves_its_array_alone(store):
    store.held = []
    with connected(store.address) as server:
        out = np.full(N, 7, np.float32)
        answer = server.ask(pull(0, N), num_bytes=out.nbytes, out=[out])
        wait_asking(answer, lambda: len(store.held) == 1)
        server.abandon(answer)
        message, store.held = store.held[0], None
        channel = next(iter(store.listener._channels))
        channel.send(Message(Rows(message.head.request), values=np.zeros(N, np.float32)))
        answer.result(PATIENCE_S)
        assert (out == 7).all()


def test_abandoned_request_that_is_not_sent_whole_ends_its_connection(store):
    """The request's array may change from then on, and half of the old values are at the server."""
    with store.lock, connected(store.address) as server:
        answers = [server.ask(push(0, N), values=np.ones(N, np.float32)) for _ in range(100)]
        with pytest.raises(TimeoutError):  # the kernel does not take 120 MB
            answers[0].result(0.05)
        server.abandon(answers[-1])
        with pytest.raises(ConnectionError):
            answers[0].result(PATIENCE_S)


def test_threads_that_wait_at_one_connection_get_their_answers_in_any_order(store):
    """One of them receives for all, and another goes on when its own answer has come."""
    store.held = []
    with connected(store.address) as server:
        answers = [server.ask(Command(0, i, str(i))) for i in range(8)]
        said = {}

        def wait(number: int) -> None:
            said[number] = answers[number].result(PATIENCE_S).head.text

        waiting = [threading.Thread(target=wait, args=(number,)) for number in range(8)]
        for thread in waiting:
            thread.start()
        wait_until(lambda: len(store.held) == 8)
        [channel] = store.listener._channels
        for number in (3, 0, 7, 1, 6, 2, 5, 4):
            head = store.held[number].head
            channel.send(Message(Said(head.request, head.text)))
            waiting[number].join(PATIENCE_S)
            assert said[number] == str(number)


def test_thread_that_waits_is_woken_when_another_closes_the_connection(store):
    store.held = []
    server = Connection(store.address, hello("w", "worker", 1))
    answers = [server.ask(Command(0, i, "x")) for i in range(2)]
    broken = []

    def wait(answer: Answer) -> None:
        with pytest.raises(ConnectionError):
            answer.result(PATIENCE_S)
        broken.append(answer)

    with beside(*[partial(wait, answer) for answer in answers]):
        wait_until(lambda: len(store.held) == 2)
        server.close()
    assert len(broken) == 2


def test_connection_that_is_made_while_the_client_closes_is_closed(store):
    poller = Poller()
    poller.close()
    with pytest.raises(Unavailable, match="the client was closed"):
        Connection(store.address, hello("w", "worker", 1), poller=poller)
    wait_until(lambda: store.listener.num_connections == 0)


def test_answers_to_many_threads_come_without_a_timeout(store):
    """A thread that falls asleep while its answer is handed out is woken as well."""
    with connected(store.address) as server:

        def work(_: int) -> float:
            slowest = 0.0
            for i in range(300):
                begin = time.monotonic()
                server.ask(Command(0, i, "x")).result(PATIENCE_S)
                slowest = max(slowest, time.monotonic() - begin)
            return slowest

        with ThreadPoolExecutor(6) as threads:
            assert max(threads.map(work, range(6))) < PATIENCE_S


def test_interrupt_while_an_answer_is_received_breaks_the_connection(store, monkeypatch):
    """A part of the message may be lost, so nothing more is read from it; others go on."""
    real = Receiver.receive
    interrupts = iter([True])

    def receive(self: Receiver) -> Message:
        message = real(self)
        if isinstance(message.head, Said) and next(interrupts, False):
            raise KeyboardInterrupt
        return message

    monkeypatch.setattr(Receiver, "receive", receive)
    with connected(store.address) as server:
        answers = [server.ask(Command(0, i, "x")) for i in range(2)]
        with pytest.raises(KeyboardInterrupt):
            answers[0].result(PATIENCE_S)
        for answer in answers:
            with pytest.raises(ConnectionError):
                answer.result(PATIENCE_S)
    with connected(store.address) as server:
        assert server.ask(Command(0, 1, "again")).result(PATIENCE_S).head.text == "again"


def test_small_answers_to_requests_that_came_together_go_together(store, monkeypatch):
    """One call of the system for each would cost most of their time."""
    num_sent = []
    real = Unsent.send

    def send(self: Unsent, *arguments: object) -> None:
        num_sent.append(len(self._pieces))
        real(self, *arguments)

    with connected(store.address) as server:
        server.ask(Command(0, 0, "x")).result(PATIENCE_S)
        monkeypatch.setattr(Unsent, "send", send)
        answers = [server.ask(Command(0, i, "x")) for i in range(20)]
        for answer in answers:
            answer.result(PATIENCE_S)
    # The requests in one call, and the answers, but for a head that the server read before.
    assert num_sent[0] == 20
    assert len(num_sent) <= 4


def test_connections_with_tls_carry_the_same_in_both_directions(tmp_path):
    """A client with a certificate of another authority, or without TLS, is not connected."""
    here = certificates_of(tmp_path, Role.PARTICIPANT, "w")
    store = Store(certificates_of(tmp_path, Role.NODE, "s0"))
    values = np.arange(N, dtype=np.float32)
    keys = np.arange(0, N, 7, dtype=np.uint64)
    with connected(store.address, tls=here) as server:
        answers = [server.ask(push(0, N), values=values) for _ in range(5)]
        out = np.empty((3, N), np.float32)
        for answer in answers:
            assert isinstance(answer.result(PATIENCE_S).head, Done)
        pulls = [server.ask(pull(0, N), num_bytes=4 * N, out=[row]) for row in out]
        few = server.ask(pull(), keys, num_bytes=4 * len(keys))
        for answer in pulls:
            answer.result(PATIENCE_S)
        np.testing.assert_array_equal(out, np.stack([5 * values] * 3))
        rows = few.result(PATIENCE_S).values
        np.testing.assert_array_equal(rows.view(np.float32), 5 * values[keys])
    theirs = certificates_of(tmp_path, Role.PARTICIPANT, "w", THEIRS)
    for other in (theirs, None):
        with pytest.raises(Unavailable):
            Connection(store.address, hello("w", "worker", 1), tls=other)
    store.listener.close()


def test_close_ends_a_tls_handshake(tmp_path):
    """The client has said its Hello of TLS, and sends nothing more."""
    store = Store(certificates_of(tmp_path, Role.NODE, "s0"))
    certificates = certificates_of(tmp_path, Role.PARTICIPANT, "w")
    received, sent = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = certificates.connects.wrap_bio(received, sent, server_hostname="127.0.0.1")
    with pytest.raises(ssl.SSLWantReadError):
        client.do_handshake()
    with socket.create_connection(("127.0.0.1", store.listener.port)) as silent:
        silent.sendall(sent.read())
        assert silent.recv(1)  # the server is in its handshake
        [greet] = [each for each in threading.enumerate() if each.name == "greet"]
        store.listener.close()
        assert not greet.is_alive()
    assert store.listener.num_connections == 0


def test_failed_tls_handshake_is_logged_once_in_a_while(tmp_path):
    theirs = certificates_of(tmp_path, Role.PARTICIPANT, "w", THEIRS)
    store = Store(certificates_of(tmp_path, Role.NODE, "s0"))
    with capture_logs() as logs:
        for _ in range(5):
            with pytest.raises(Unavailable):
                Connection(store.address, hello("w", "worker", 1), tls=theirs)
        store.listener.close()
    failed = [each for each in logs if each["event"] == "tls_handshake_failed"]
    assert [(each["log_level"], each["num"], each["host"]) for each in failed] == [
        ("warning", 1, "127.0.0.1")
    ]
    assert "unknown ca" in failed[0]["error"].lower().replace("_", " ")


def test_probe_of_the_port_is_no_failed_handshake(tmp_path):
    store = Store(certificates_of(tmp_path, Role.NODE, "s0"))
    with capture_logs() as logs:
        socket.create_connection(("127.0.0.1", store.listener.port)).close()
        while not logs:
            time.sleep(0.01)  # a poll: it ends when the listener has seen the connection
    assert [each["event"] for each in logs] == ["connection_gone"]
    store.listener.close()


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

    flooded = []

    def hear_there(channel: Channel, message: Message) -> None:
        if not flooded:
            flooded.append(channel)
            flood(channel)
        count("there")

    listener = Listener("127.0.0.1:0", hear_there)
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


def test_peers_that_say_no_hello_are_logged_once_in_a_while(store):
    with capture_logs() as logs:
        for _ in range(5):
            with socket.create_connection(("127.0.0.1", store.listener.port)) as peer:
                peer.sendall(b"\xff" * 64)
                with contextlib.suppress(ConnectionError):
                    assert peer.recv(1) == b"", "the listener ends the connection"
    malformed = [each for each in logs if each["event"] == "malformed_message"]
    assert [(each["log_level"], each["num"]) for each in malformed] == [("warning", 1)]


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


@pytest.mark.parametrize("is_secure", [False, True])
def test_connections_that_say_nothing_keep_no_worker_out(tmp_path, is_secure):
    """The oldest one is closed for the next that comes; those that have said Hello stay."""
    tls = certificates_of(tmp_path, Role.NODE, "s0") if is_secure else None
    listener = Listener(
        "127.0.0.1:0",
        lambda channel, message: None,
        lambda channel, why: None,
        tls=tls,
        max_connections=3,
    )
    address = ("127.0.0.1", listener.port)
    own = {
        name: certificates_of(tmp_path, Role.PARTICIPANT, name) if is_secure else None
        for name in ("v", "w")
    }
    with contextlib.ExitStack() as stack:
        silent = [stack.enter_context(socket.create_connection(address)) for _ in range(3)]
        wait_until(lambda: listener.num_connections == 3)
        for name in ("v", "w"):
            stack.enter_context(connected(f"127.0.0.1:{listener.port}", name, own[name]))
        wait_until(lambda: {channel.peer.name for channel in listener._channels} == {"v", "w"})
        silent.append(stack.enter_context(socket.create_connection(address)))
        for each in silent[:3]:
            each.settimeout(PATIENCE_S)
            assert each.recv(1) == b""
        assert listener.num_connections == 3
    wait_until(lambda: listener.num_connections == 0)
    listener.close()


def test_close_ends_all_connections_and_threads():
    before = threads()
    store = Store()
    silent = socket.create_connection(("127.0.0.1", store.listener.port))  # never says Hello
    servers = [Connection(store.address, hello(f"w{i}", "worker", 1)) for i in range(5)]
    store.listener.close()
    assert store.listener.num_connections == 0
    for server in servers:
        with pytest.raises(ConnectionError):
            server.ask(Command(0, 1, "x")).result(PATIENCE_S)
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
    match chance.randrange(8):
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
        case 5:  # sections that are more, or less, than the body
            sections = (Section(1, 0, 2, chance.randrange(-1, 1), 8), Section(2, 2, 4, 0, 4))
            several = Several(1, push(), sections[: chance.randrange(3)])
            return frame(encode_head(several), 0, 16, bytes(16))
        case 6:  # nested beyond measure
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

        with beside(serve), connected(f"127.0.0.1:{listener.getsockname()[1]}") as server:
            out = np.zeros(2, np.float32)
            answered = server.ask(pull(0, 2), num_bytes=8, out=[out])
            with pytest.raises(ConnectionError):
                answered.result(PATIENCE_S)
            assert (out == 0).all()
        for connection in connections:
            connection.close()
