"""What every Driver does."""

import errno
import itertools
import re
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial

import grpc
import numpy as np
import pytest
import zmq
from structlog.testing import capture_logs

from support.fault_proxy import FaultProxy
from support.messaging import DRIVERS, PATIENCE_S, driver_maker, until
from support.s3_servers import free_ports
from xain_messaging.codec import MAX_FRAMES, Frame
from xain_messaging.drivers import grpc_streams
from xain_messaging.drivers.grpc_streams import (
    FRAME_BYTES,
    METHOD,
    GrpcDriver,
    to_chunks,
)
from xain_messaging.drivers.zeromq import RETRY_S, ZmqDriver
from xain_messaging.errors import BodyError, Closed, UnknownPeer
from xain_messaging.links import DEFAULT_BOUNDS, TOLERANCE, Bounds, max_head_bytes
from xain_messaging.ports import Arrived, Driver, DriverEvent, Lost

NETWORKED = [kind for kind in DRIVERS if kind != "in-process"]


@pytest.fixture(params=DRIVERS)
def make(request: pytest.FixtureRequest) -> Iterator[Callable[[], Driver]]:
    """Drivers that are closed in the end."""
    yield from closing(request.param)


@pytest.fixture(params=NETWORKED)
def make_networked(request: pytest.FixtureRequest) -> Iterator[Callable[[], Driver]]:
    yield from closing(request.param)


def closing(kind: str) -> Iterator[Callable[[], Driver]]:
    make_one = driver_maker(kind)
    made: list[Driver] = []

    def make() -> Driver:
        made.append(make_one())
        return made[-1]

    yield make
    for driver in made:
        driver.close(0.0)


@contextmanager
def closing_all(*drivers: Driver) -> Iterator[None]:
    try:
        yield
    finally:
        for driver in drivers:
            driver.close(0.0)


def next_event(driver: Driver) -> DriverEvent:
    """The next; None comes of being woken."""
    give_up_at = time.monotonic() + PATIENCE_S
    while time.monotonic() < give_up_at:
        event = driver.receive(0.1)
        if event is not None:
            return event
    raise AssertionError(f"nothing has come for {PATIENCE_S:g} s")


def received(driver: Driver) -> list[bytes]:
    """The frames of the next packet."""
    event = next_event(driver)
    assert isinstance(event, Arrived), event
    return [bytes(frame) for frame in event.frames]


def test_packets_come_whole_and_in_order(make: Callable[[], Driver]) -> None:
    """Frame by frame as they were sent, the empty ones too."""
    here, there = make(), make()
    here.connect("there", there.address)
    packets: list[list[Frame]] = [
        [b"head"],
        [b"head", b""],
        [b"head", b"envelope", b"", b"\0" * 5000, memoryview(b"view")],
        [b"", b"x"],
        *([b"%d" % i] for i in range(500)),
    ]
    for packet in packets:
        here.send("there", packet)
    for packet in packets:
        assert received(there) == [bytes(frame) for frame in packet]


@pytest.mark.parametrize("size", [(2 << 20) - 100, 2 << 20, (2 << 20) + 1, 9_000_001])
def test_large_frames_come_as_they_were(make: Callable[[], Driver], size: int) -> None:
    """Larger than any piece that a driver cuts, with others before and after."""
    here, there = make(), make()
    here.connect("there", there.address)
    array = np.random.default_rng(size).integers(0, 256, size, np.uint8)
    here.send("there", [b"head", b"envelope", array.data, b"", array[: size // 2].copy().data])
    here.send("there", [b"next"])
    head, envelope, first, empty, second = received(there)
    assert (head, envelope, empty) == (b"head", b"envelope", b"")
    assert first == array.tobytes()
    assert second == array[: size // 2].tobytes()
    assert received(there) == [b"next"]


def test_what_has_come_is_the_receivers_own(make: Callable[[], Driver]) -> None:
    """Arrays lie in the frames after the second: they can be written to, and the sender does not
    see it."""
    here, there = make(), make()
    here.connect("there", there.address)
    for size in (10, 200_000):
        sent = np.zeros(size, np.uint8)
        here.send("there", [b"head", b"envelope", sent.data])
        event = next_event(there)
        assert isinstance(event, Arrived)
        array = np.frombuffer(event.frames[2], np.uint8)
        array += 1
        assert array.sum() == size
        assert not sent.any()


def test_many_send_to_one(make: Callable[[], Driver]) -> None:
    """Nothing is lost or mixed up, and of each sender all is in order."""
    there = make()
    senders = [make() for _ in range(4)]

    def send(number: int) -> None:
        senders[number].connect("there", there.address)
        for i in range(100):
            senders[number].send("there", [b"%d" % number, b"%d" % i, b"x" * (i * 100)])

    threads = [threading.Thread(target=send, args=(i,)) for i in range(len(senders))]
    for thread in threads:
        thread.start()
    seen: dict[bytes, int] = {}
    for _ in range(100 * len(senders)):
        name, number, data = received(there)
        assert int(number) == seen.get(name, 0)
        assert len(data) == 100 * int(number)
        seen[name] = int(number) + 1
    for thread in threads:
        thread.join()


def test_who_is_not_connected_is_unknown(make: Callable[[], Driver]) -> None:
    """Before connect() and after disconnect(); to disconnect a stranger is nothing."""
    here, there = make(), make()
    with pytest.raises(UnknownPeer, match="there"):
        here.send("there", [b"x"])
    here.connect("there", there.address)
    here.disconnect("there")
    here.disconnect("there")
    with pytest.raises(UnknownPeer, match="there"):
        here.send("there", [b"x"])


def test_receive_ends_in_time_and_when_woken(make: Callable[[], Driver]) -> None:
    """None after the timeout, at once with 0, and when somebody wakes it, now or before."""
    driver = make()
    assert driver.receive(0) is None
    assert driver.receive(0.01) is None
    driver.wake()
    assert driver.receive(None) is None
    threading.Timer(0.05, driver.wake).start()
    assert driver.receive(None) is None


def test_after_close_nothing_goes(make: Callable[[], Driver]) -> None:
    """It may be closed again; receive() returns at once."""
    here, there = make(), make()
    here.connect("there", there.address)
    here.close(0.0)
    here.close(0.0)
    assert here.receive(None) is None
    with pytest.raises(Closed):
        here.send("there", [b"x"])
    with pytest.raises(Closed):
        here.connect("there", there.address)


def test_close_ends_a_receive_that_waits(make: Callable[[], Driver]) -> None:
    """In another thread."""
    driver = make()
    results: list[DriverEvent | None] = [Lost("nobody")]
    thread = threading.Thread(target=lambda: results.append(driver.receive(None)))
    thread.start()
    driver.close(0.0)
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
    assert results[1:] == [None]


def test_close_lets_what_waits_go_out(make: Callable[[], Driver]) -> None:
    """As long as it may linger."""
    here, there = make(), make()
    here.connect("there", there.address)
    large = bytes(3_000_000)
    for _ in range(5):
        here.send("there", [b"head", b"envelope", large])
    here.send("there", [b"last"])
    here.close(PATIENCE_S)
    for _ in range(5):
        assert received(there)[2] == large
    assert received(there) == [b"last"]


def test_a_peer_may_move(make: Callable[[], Driver]) -> None:
    """connect() with another address; the old one gets nothing more."""
    here, old, new = make(), make(), make()
    here.connect("there", old.address)
    here.send("there", [b"1"])
    assert received(old) == [b"1"]
    here.connect("there", new.address)
    here.send("there", [b"2"])
    assert received(new) == [b"2"]
    assert old.receive(0.05) is None


def test_a_peer_may_come_later(make_networked: Callable[[], Driver]) -> None:
    """What is sent before anybody listens comes when somebody does, or its sender is told that it
    was lost; then what it sends again comes."""
    here, there = make_networked(), make_networked()
    host, _, port = there.address.rpartition(":")
    with FaultProxy(int(port)) as proxy:
        proxy.refuse()
        here.connect("there", f"{host}:{proxy.port}")
        here.send("there", [b"1"])
        num_sent = 1
        give_up_at = time.monotonic() + PATIENCE_S
        event = here.receive(0.2)
        proxy.heal()
        while (arrived := there.receive(0.05)) is None:
            assert time.monotonic() < give_up_at, "neither has it come nor is it said to be lost"
            if event == Lost("there"):
                num_sent += 1
                here.send("there", [b"%d" % num_sent])
            event = here.receive(0.05)
        assert isinstance(arrived, Arrived)
        assert 1 <= int(bytes(arrived.frames[0])) <= num_sent


def test_a_broken_connection_is_told_and_made_again(make_networked: Callable[[], Driver]) -> None:
    """When the peer dies its senders hear Lost; what they send from then on reaches whoever comes
    to the same address."""
    here, there = make_networked(), make_networked()
    here.connect("there", there.address)
    here.send("there", [b"1"])
    assert received(there) == [b"1"]
    there.close(0.0)
    assert next_event(here) == Lost("there")
    here.send("there", [b"2"])  # waits, or is lost with a word: either is right
    other = make_networked()
    here.connect("there", other.address)
    here.send("there", [b"3"])
    until(lambda: received(other) == [b"3"], "the third")


def test_a_large_message_is_let_go(make_networked: Callable[[], Driver]) -> None:
    """When the peer has it, its sender's memory is free; and when that has dropped it, its own:
    though nothing follows on the line."""
    here, there = make_networked(), make_networked()
    here.connect("there", there.address)
    array = np.zeros(3 << 20, np.uint8)
    sent = weakref.ref(array)
    here.send("there", [b"head", b"envelope", array.data])
    del array
    event = next_event(there)
    assert isinstance(event, Arrived)
    assert isinstance(event.frames[2], memoryview)
    came = weakref.ref(event.frames[2])
    until(lambda: sent() is None, "the sender to let it go")
    del event
    until(lambda: came() is None, "the receiver to let it go")


def test_close_in_a_pause_lets_what_waits_go_out(make_networked: Callable[[], Driver]) -> None:
    """The line has broken, and its next attempt is to come: it comes at once."""
    here, there = make_networked(), make_networked()
    host, _, port = there.address.rpartition(":")
    with FaultProxy(int(port)) as proxy:
        here.connect("there", f"{host}:{proxy.port}")
        here.send("there", [b"1"])
        assert received(there) == [b"1"]
        proxy.cut()
        assert next_event(here) == Lost("there")
        here.send("there", [b"2"])
        here.close(PATIENCE_S)
        assert received(there) == [b"2"]


def test_who_is_hung_up_on_waits_before_it_tries_again() -> None:
    """Longer each time; so one that nobody wants keeps nobody busy."""
    here = ZmqDriver()
    with closing_all(here), FaultProxy(free_ports(1)[0]) as nobody:
        here.connect("there", f"tcp://127.0.0.1:{nobody.port}")
        assert next_event(here) == Lost("there")
        begun_at = time.monotonic()
        here.send("there", [b"x"])
        for _ in range(2):
            assert next_event(here) == Lost("there")
        took_s = time.monotonic() - begun_at
        assert took_s >= 2 * RETRY_S + 4 * RETRY_S
        # Where nobody looks for so long, ZeroMQ itself tries again.
        assert 3 <= nobody.num_accepted <= 3 + took_s / RETRY_S


class Threads:
    """num_missing: so many threads are not started when they are to be, since the system has none.

    by: only those that a thread of this name starts.
    of: only those of this name.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, by: str = "", of: str = "") -> None:
        self.num_missing = 0
        start = threading.Thread.start

        def start_if_any(thread: threading.Thread) -> None:
            is_meant = by in ("", threading.current_thread().name) and of in ("", thread.name)
            if self.num_missing and is_meant:
                self.num_missing -= 1
                raise RuntimeError("can't start new thread")
            start(thread)

        monkeypatch.setattr(threading.Thread, "start", start_if_any)


def test_a_send_without_a_thread_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """And leaves nothing that waits; the next one goes."""
    threads = Threads(monkeypatch)
    here, there = GrpcDriver(), GrpcDriver()
    with closing_all(here, there):
        here.connect("there", there.address)
        threads.num_missing = 1
        with pytest.raises(RuntimeError, match="thread"):
            here.send("there", [b"1"])
        here.send("there", [b"2"])
        assert received(there) == [b"2"]
        assert here.receive(0.0) is None


def test_a_stream_without_a_thread_is_a_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """gRPC needs one that sends. What is sent after the word goes over a connection that works, and
    nothing hangs in the end."""
    threads = Threads(monkeypatch, by="messages-out")
    here, there = GrpcDriver(), GrpcDriver()
    with closing_all(here, there):
        here.connect("there", there.address)
        threads.num_missing = 2
        for i in range(2):
            here.send("there", [b"lost"])
            assert next_event(here) == Lost("there"), i
        here.send("there", [b"x"])
        assert received(there) == [b"x"]
        threads.num_missing = 1000
        here.send("there", [b"y"])
        assert received(there) == [b"y"]
        here.close(PATIENCE_S)


def test_a_line_that_breaks_without_a_thread_is_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """There is none for the pause, nor for the next attempts: what is sent meanwhile is lost with a
    word, or comes."""
    threads = Threads(monkeypatch)
    here, there = GrpcDriver(), GrpcDriver()
    port = int(there.address.rpartition(":")[2])
    with closing_all(here, there), FaultProxy(port) as proxy:
        here.connect("there", f"127.0.0.1:{proxy.port}")
        here.send("there", [b"1"])
        assert received(there) == [b"1"]
        threads.num_missing = 1
        proxy.cut()
        assert next_event(here) == Lost("there")
        here.send("there", [b"2"])
        until(partial(has_come_or_goes_again, here, there, b"2"), "the second")
        assert threads.num_missing == 0


def test_what_waits_for_an_idle_end_is_lost_with_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is no thread for the stream after it."""
    monkeypatch.setattr(grpc_streams, "IDLE_S", 0.1)
    threads = Threads(monkeypatch)
    here, there = GrpcDriver(), GrpcDriver(bounds=Bounds(max_messages=1))
    with closing_all(here, there):
        here.connect("there", there.address)
        for _ in range(TOLERANCE + 1):  # the last one waits for room, and its stream for its end
            here.send("there", [b"1"])
        until(lambda: here._lines["there"]._is_ending, "the end")
        here.send("there", [b"2"])
        threads.num_missing = 1
        for _ in range(TOLERANCE + 1):
            assert received(there) == [b"1"]
        assert next_event(here) == Lost("there")
        here.send("there", [b"2"])
        assert received(there) == [b"2"]


def test_a_stream_that_comes_waits_for_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is none for the moment; the streams after it are heard too, and nothing hangs in
    the end, also where there is none then."""
    threads = Threads(monkeypatch, of="messages")
    first, second, there = GrpcDriver(), GrpcDriver(), GrpcDriver()
    with closing_all(first, second, there):
        for driver in (first, second):
            driver.connect("there", there.address)
        threads.num_missing = 2
        first.send("there", [b"1"])
        assert received(there) == [b"1"]
        assert threads.num_missing == 0
        threads.num_missing = many = 1 << 30
        second.send("there", [b"2"])
        until(lambda: threads.num_missing < many, "the attempt")
        there.close(0.0)


def test_a_driver_that_cannot_listen_leaves_no_thread() -> None:
    """Its port is taken."""
    there = GrpcDriver()
    with closing_all(there):
        before = {thread for thread in threading.enumerate() if thread.name == "messages-late"}
        with pytest.raises(RuntimeError, match="bind"):
            GrpcDriver(there.address)
        after = {thread for thread in threading.enumerate() if thread.name == "messages-late"}
        assert after <= before


def test_close_goes_on_where_a_step_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody is served then, and what is closed again has nothing left to do. Nor does it wait
    without end for gRPC, whatever that waits for."""
    monkeypatch.setattr(grpc_streams, "STOP_S", 0.1)
    here, there, other = GrpcDriver(), GrpcDriver(), GrpcDriver()
    ended = threading.Event()
    with closing_all(here, there, other):
        here.connect("there", there.address)
        here.connect("other", other.address)

        def fail() -> None:
            raise MemoryError

        monkeypatch.setattr(here._lines["there"], "finish", fail)
        with pytest.raises(MemoryError):
            here.close(0.0)
        assert here.receive(None) is None
        host, _, port = here.address.rpartition(":")
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((host, int(port))).close()
        stop = there._server.stop
        monkeypatch.setattr(there._server, "stop", lambda _: ended.wait(PATIENCE_S))
        begun_at = time.monotonic()
        there.close(0.0)
        assert time.monotonic() - begun_at < PATIENCE_S / 2
        ended.set()
        stop(None)


def test_a_silent_stream_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where its place is needed. What it brings later is lost with a word to its sender. One that
    has to wait for room is not silent."""
    monkeypatch.setattr(grpc_streams, "IDLE_S", 0.2)
    there, here = GrpcDriver(max_peers=2, bounds=Bounds(max_messages=1)), GrpcDriver()
    with closing_all(there, here), grpc.insecure_channel(there.address) as channel:
        held = flood(there, itertools.repeat(b"".join(to_chunks([b"held"])), TOLERANCE + 1))
        until(partial(has_waiting, there, TOLERANCE), "as much as may wait")
        goes_on = threading.Event()

        def chunks() -> Iterator[bytes]:
            goes_on.wait(PATIENCE_S)
            yield from to_chunks([b"late"])

        silent = channel.stream_unary(METHOD).future(chunks())
        assert silent.code() is grpc.StatusCode.CANCELLED
        goes_on.set()
        here.connect("there", there.address)
        here.send("there", [b"x"])
        until(partial(has_come_or_goes_again, here, there, b"x"), "the one that talks")
        assert held.result(PATIENCE_S) == b""


def test_a_silent_stream_stays_where_there_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody needs its place."""
    monkeypatch.setattr(grpc_streams, "IDLE_S", 0.2)
    there = GrpcDriver(max_peers=2)
    looked: list[None] = []
    end_silent = there._threads._every_idle_s
    there._threads._every_idle_s = lambda: (looked.append(None), end_silent())[1]
    with closing_all(there), grpc.insecure_channel(there.address) as channel:
        goes_on = threading.Event()

        def chunks() -> Iterator[bytes]:
            goes_on.wait(PATIENCE_S)
            yield from to_chunks([b"late"])

        silent = channel.stream_unary(METHOD).future(chunks())
        until(lambda: bool(there._streams), "the stream")
        until(lambda: len(looked) > 10, "some looks")
        goes_on.set()
        assert received(there) == [b"late"]
        assert silent.result(PATIENCE_S) == b""


def has_tried(driver: ZmqDriver, attempts: list["zmq.Socket[bytes]"], times: int) -> bool:
    return driver.receive(0.05) is None and len(attempts) > times


def test_what_cannot_be_opened_again_hurts_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """A ZeroMQ line has broken, and the system has no room for its next attempt: the others are
    received, what waits for it goes out when there is room, and nothing hangs in the end."""
    here, there, other = ZmqDriver(), ZmqDriver(), ZmqDriver()
    with (
        closing_all(here, there, other),
        FaultProxy(int(there.address.rpartition(":")[2])) as proxy,
    ):
        here.connect("there", f"tcp://127.0.0.1:{proxy.port}")
        other.connect("here", here.address)
        here.send("there", [b"1"])
        assert received(there) == [b"1"]
        proxy.cut()
        assert next_event(here) == Lost("there")
        here.send("there", [b"2"])
        attempts: list[zmq.Socket[bytes]] = []

        def no_room(push: "zmq.Socket[bytes]", _: int) -> None:
            attempts.append(push)
            raise zmq.ZMQError(errno.EMFILE)

        with monkeypatch.context() as patched:
            patched.setattr(zmq.Socket, "get_monitor_socket", no_room)
            for i in range(3):
                until(partial(has_tried, here, attempts, i), "an attempt")
                other.send("here", [b"%d" % i])
                assert received(here) == [b"%d" % i]
            assert all(push.closed for push in attempts)
        until(lambda: here.receive(0.05) is None and not here._broken, "the next attempt")
        assert received(there) == [b"2"]
        proxy.cut()
        assert next_event(here) == Lost("there")
        monkeypatch.setattr(zmq.Socket, "get_monitor_socket", no_room)
        here.send("there", [b"3"])
        here.close(PATIENCE_S)


def test_an_interrupted_send_spoils_no_other() -> None:
    """Half a message has gone out: its line counts as broken, and what follows is no part of it."""

    class Interrupted(list[Frame]):
        def __iter__(self) -> Iterator[Frame]:
            yield self[0]
            raise KeyboardInterrupt

    here, there = ZmqDriver(), ZmqDriver()
    with closing_all(here, there):
        here.connect("there", there.address)
        with pytest.raises(KeyboardInterrupt):
            here.send("there", Interrupted([b"head", b"rest"]))
        assert next_event(here) == Lost("there")
        here.send("there", [b"whole"])
        until(lambda: here.receive(0.05) is None and not here._broken, "the next attempt")
        assert received(there) == [b"whole"]


def test_a_driver_that_is_woken_in_between_is_woken_once() -> None:
    """Somebody receives just when it is: no later wait ends early for that."""
    driver = ZmqDriver()

    class Between:
        def __init__(self, inner: socket.socket) -> None:
            self.inner = inner

        def send(self, data: bytes) -> int:
            driver.receive(0.01)
            return self.inner.send(data)

        def close(self) -> None:
            self.inner.close()

    with closing_all(driver):
        driver._waker = Between(driver._waker)  # type: ignore[assignment]  # all that it uses
        driver.wake()
        assert driver.receive(None) is None
        begun_at = time.monotonic()
        assert driver.receive(0.2) is None
        assert time.monotonic() - begun_at >= 0.2


# --- bounds ---------------------------------------------------------------------------------------


def flood(there: GrpcDriver, packets: Iterable[bytes]) -> "grpc.Future[bytes]":
    """From a peer that waits for no ack. The future ends when all has been read."""
    channel = grpc.insecure_channel(there.address)
    future = channel.stream_unary(METHOD).future(iter(packets), timeout=PATIENCE_S)
    future.add_done_callback(lambda _: channel.close())
    return future


@pytest.mark.parametrize(
    ("bounds", "most"),
    [
        (Bounds(max_messages=2), 2 * TOLERANCE),
        (Bounds(max_bytes=5 * (1000 + FRAME_BYTES)), 5 * TOLERANCE),
        (Bounds(max_messages_in_all=3), 3 * TOLERANCE),
        (Bounds(max_bytes_in_all=2 * (1000 + FRAME_BYTES)), 2 * TOLERANCE),
        (Bounds(max_bytes=1), 1),
        (Bounds(max_bytes_in_all=1), 1),
    ],
)
def test_who_sends_too_much_over_grpc_waits(bounds: Bounds, most: int) -> None:
    """No more waits here than may, and one that is larger than that alone; all of it comes, and
    nobody is hung up on."""
    there = GrpcDriver(bounds=bounds)
    with closing_all(there):
        packets = [b"".join(to_chunks([b"%d" % i + bytes(998 + (i < 10))])) for i in range(50)]
        future = flood(there, packets)
        for i in range(50):
            if i + most <= 50:
                until(lambda: there._waiting.num_packets == most, "as much as may wait")
            assert there._waiting.num_packets <= most
            assert received(there)[0].rstrip(b"\0") == b"%d" % i
        assert future.result(PATIENCE_S) == b""
        assert (there._waiting.num_bytes, there.num_refused) == (0, 0)


def test_empty_frames_count() -> None:
    """Each takes some hundred bytes where it waits."""
    there = GrpcDriver(bounds=Bounds(max_bytes=1 << 20))
    with closing_all(there):
        packet = b"".join(to_chunks([b""] * MAX_FRAMES))
        flood(there, [packet] * 5)
        until(lambda: there._waiting.num_packets == 2, "two")
        for _ in range(5):
            assert there._waiting.num_bytes == there._waiting.num_packets * (2 << 20)
            assert there._waiting.num_packets <= 2
            assert received(there) == [b""] * MAX_FRAMES


def test_a_large_message_has_its_turn() -> None:
    """Among small ones of others, which do not overtake it without end."""
    there = GrpcDriver(bounds=Bounds(max_bytes_in_all=4000))
    with closing_all(there):
        small, large = [b"".join(to_chunks([bytes(size)])) for size in (1000, 20_000)]
        stop = threading.Event()
        flood(there, itertools.takewhile(lambda _: not stop.is_set(), itertools.repeat(small)))
        assert received(there) == [bytes(1000)]
        flood(there, [large])
        until(lambda: received(there) == [bytes(20_000)], "the large one")
        stop.set()
        while there.receive(0.2) is not None:
            pass


def test_a_stream_that_breaks_while_it_waits_leaves_nothing() -> None:
    """Its peer sends all of it again; what waited for room would stay for as long as nobody
    receives, and more with each attempt."""
    there = GrpcDriver(bounds=Bounds(max_messages=1))
    with closing_all(there):
        packet = b"".join(to_chunks([b"x"]))
        for number in (TOLERANCE, 2 * TOLERANCE, 3 * TOLERANCE):
            future = flood(there, itertools.repeat(packet))
            until(partial(has_waiting, there, number), "as much as may wait")
            future.cancel()
        until(lambda: not any(t.name == "messages" for t in threading.enumerate()), "the threads")
        assert has_waiting(there, 3 * TOLERANCE)


def has_waiting(driver: GrpcDriver, num_packets: int) -> bool:
    return driver._waiting.num_packets == num_packets


def test_a_stream_that_is_none_of_ours_is_ended() -> None:
    """Its peer hears why; what has come before is received, and the others are served."""
    there, friend = GrpcDriver(max_message_bytes=1000), GrpcDriver()
    with closing_all(there, friend), grpc.insecure_channel(there.address) as channel:
        friend.connect("there", there.address)
        friend.send("there", [b"before"])
        assert received(there) == [b"before"]
        deliver = channel.stream_unary(METHOD)
        too_large = next(to_chunks([bytes(1_000_000)]))
        for i, chunk in enumerate([b"?", too_large, b"".join(to_chunks([b"x"])) + b"y"]):
            chunks = iter([b"".join(to_chunks([b"good"])), chunk])
            with pytest.raises(grpc.RpcError) as caught:
                deliver(chunks, timeout=PATIENCE_S)
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert there.num_refused == i + 1
            assert received(there) == [b"good"]
        friend.send("there", [b"after"])
        assert received(there) == [b"after"]


@pytest.mark.parametrize("make_one", [
    lambda: GrpcDriver(max_message_bytes=1000), lambda: ZmqDriver(max_frame_bytes=1000)
])  # fmt: skip
def test_what_a_driver_does_not_carry_is_refused_where_it_is_sent(
    make_one: Callable[[], Driver],
) -> None:
    """What it does carry arrives, whatever a head adds to it."""
    here, there = make_one(), make_one()
    with closing_all(here, there):
        here.check("there", [bytes(1000)])
        with pytest.raises(BodyError, match="1001 bytes"):
            here.check("there", [bytes(1001)])
        here.connect("there", there.address)
        head = bytes(1000 + max_head_bytes(DEFAULT_BOUNDS))
        here.send("there", [head])
        assert received(there) == [head]


@pytest.mark.parametrize(("make_one", "limited"), [
    (GrpcDriver, lambda: GrpcDriver(max_message_bytes=1000)),
    (ZmqDriver, lambda: ZmqDriver(max_frame_bytes=1000)),
])  # fmt: skip
def test_what_a_peer_does_not_take_is_refused_where_it_is_sent(
    make_one: Callable[[], Driver], limited: Callable[[], Driver]
) -> None:
    """Its address tells how much that is. One whose address tells nothing takes all; and where the
    limits are the same nothing is told of them but that."""
    here, there, other = make_one(), limited(), make_one()
    with closing_all(here, there, other):
        assert there.address.endswith("?max=1000")
        assert "?" not in other.address
        here.connect("there", there.address)
        here.connect("other", other.address)
        here.check("there", [bytes(1000)])
        here.check("other", [bytes(1001)])
        with pytest.raises(BodyError, match=r"1001 bytes; 'there' takes 1000"):
            here.check("there", [bytes(1001)])
        for name, driver in (("there", there), ("other", other)):
            here.send(name, [bytes(1000)])
            assert received(driver) == [bytes(1000)]
        here.connect("there", other.address)
        here.check("there", [bytes(1001)])
        with pytest.raises(ValueError, match="no number"):
            here.connect("there", other.address + "?max=many")


@pytest.mark.parametrize("host", ["0.0.0.0", "", "[::]", "*", "[0:0::0]"])
def test_a_host_that_nobody_can_reach_is_not_told(host: str) -> None:
    """Who listens everywhere says where the others find it."""
    for make_one in (lambda **told: GrpcDriver(f"{host}:0", **told), partial(ZmqDriver, host)):
        with pytest.raises(ValueError, match=r"pass.*advertise='10\.1\.2\.3'"):
            make_one()
    if host == "0.0.0.0":  # every machine has it
        here, there = GrpcDriver(), GrpcDriver(f"{host}:0", advertise="127.0.0.1")
        with closing_all(here, there):
            here.connect("there", there.address)
            here.send("there", [b"x"])
            assert received(there) == [b"x"]


def test_others_are_told_what_is_advertised() -> None:
    """And reach it there, whatever it listens on."""
    pairs: list[tuple[Driver, Driver, str]] = [
        (GrpcDriver(), GrpcDriver("127.0.0.1:0", advertise="localhost"), r"localhost:\d+"),
        (ZmqDriver(), ZmqDriver("localhost", advertise="127.0.0.1"), r"tcp://127\.0\.0\.1:\d+"),
    ]
    for here, there, address in pairs:
        with closing_all(here, there):
            assert re.fullmatch(address, there.address)
            here.connect("there", there.address)
            here.send("there", [b"x"])
            assert received(there) == [b"x"]


def test_a_frame_that_is_too_large_for_zeromq_is_hung_up_on() -> None:
    """If somebody sends it all the same; the others are served."""
    there, here, friend = ZmqDriver(max_frame_bytes=1000), ZmqDriver(), ZmqDriver()
    with closing_all(there, here, friend):
        here.connect("there", there.address)
        here.send("there", [bytes(1 << 20)])
        assert next_event(here) == Lost("there")
        friend.connect("there", there.address)
        friend.send("there", [b"x"])
        assert received(there) == [b"x"]


def test_so_many_peers_are_served_at_a_time() -> None:
    """One more tries again until another has gone."""
    there = GrpcDriver(max_peers=2)
    drivers = [GrpcDriver() for _ in range(3)]
    with closing_all(there, *drivers):
        for driver in drivers[:2]:
            driver.connect("there", there.address)
            driver.send("there", [b"x"])
            assert received(there) == [b"x"]
        drivers[2].connect("there", there.address)
        drivers[2].send("there", [b"third"])
        assert next_event(drivers[2]) == Lost("there")
        drivers[0].close(0.0)
        drivers[2].send("there", [b"third"])
        give_up_at = time.monotonic() + PATIENCE_S
        while (event := there.receive(0.05)) is None:
            assert time.monotonic() < give_up_at, "the third has not been let in"
            if isinstance(drivers[2].receive(0.05), Lost):
                drivers[2].send("there", [b"third"])
        assert isinstance(event, Arrived)
        assert bytes(event.frames[0]) == b"third"


def test_who_sends_nothing_takes_no_place() -> None:
    """However many peers know each other: a stream is for those who talk."""
    there = GrpcDriver(max_peers=1)
    drivers = [GrpcDriver() for _ in range(3)]
    with closing_all(there, *drivers):
        for driver in drivers:
            driver.connect("there", there.address)
        drivers[2].send("there", [b"x"])
        assert received(there) == [b"x"]


def test_who_has_been_idle_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """For others; what it sends later comes, as if its line had always been there. Those that find
    no place say so, once and not at each attempt."""
    monkeypatch.setattr(grpc_streams, "IDLE_S", 0.5)
    there = GrpcDriver(max_peers=1)
    first, second = GrpcDriver(), GrpcDriver()
    with closing_all(there, first, second), capture_logs() as logs:
        for driver in (first, second):
            driver.connect("there", there.address)
        first.send("there", [b"1"])
        assert received(there) == [b"1"]
        second.send("there", [b"2"])
        num_lost = 0
        give_up_at = time.monotonic() + PATIENCE_S
        while (event := there.receive(0.05)) is None:
            assert time.monotonic() < give_up_at, "the second has not been let in"
            if second.receive(0.0) == Lost("there"):
                num_lost += 1
                second.send("there", [b"2"])
        assert isinstance(event, Arrived)
        assert bytes(event.frames[0]) == b"2"
        assert first.receive(0.0) is None, "to be idle is no loss"
        warned = [line for line in logs if line["event"] == "peer_has_no_room"]
        assert len(warned) == num_lost
        levels = [line["log_level"] for line in warned]
        assert levels == ["warning", *["debug"] * num_lost][:num_lost]
        assert all("max_peers" in line["why"] for line in warned)
        second.close(0.0)
        first.send("there", [b"3"])
        until(partial(has_come_or_goes_again, first, there, b"3"), "the third")


def has_come_or_goes_again(here: Driver, there: Driver, frame: bytes) -> bool:
    if here.receive(0.0) == Lost("there"):
        here.send("there", [frame])
    event = there.receive(0.05)
    return isinstance(event, Arrived) and bytes(event.frames[0]) == frame


@pytest.mark.parametrize("idle_s", [0.0, 0.001, 0.01])
def test_nothing_is_lost_to_a_stream_that_ends(
    monkeypatch: pytest.MonkeyPatch, idle_s: float
) -> None:
    """Because it was idle: all that is sent just then comes, in its order, also when its sender is
    closed."""
    monkeypatch.setattr(grpc_streams, "IDLE_S", idle_s)
    rng = np.random.default_rng(0)
    here, there = GrpcDriver(), GrpcDriver()
    with closing_all(here, there):
        here.connect("there", there.address)
        for i in range(300):
            here.send("there", [b"%d" % i])
            time.sleep(rng.choice([0.0, 0.0, idle_s, 2 * idle_s]))  # so that some meet an end
        assert here.receive(0.0) is None
        here.close(PATIENCE_S)
        assert [received(there)[0] for _ in range(300)] == [b"%d" % i for i in range(300)]


def test_who_sends_too_much_over_zeromq_waits() -> None:
    """Until some of it has been received; what waits does so at the sender, and in order."""
    there, here = ZmqDriver(bounds=Bounds(max_messages=2)), ZmqDriver()
    with closing_all(there, here):
        here.connect("there", there.address)
        for i in range(100):  # far more than the buffers of a connection hold
            here.send("there", [b"%d" % i, bytes(1 << 20)])
        assert [received(there)[0] for _ in range(50)] == [b"%d" % i for i in range(50)]
        here.close(0.5)
        rest = list(iter(lambda: there.receive(0.5), None))
        assert len(rest) < 50
