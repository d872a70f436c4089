"""What every Driver does."""

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import grpc
import numpy as np
import pytest

from support.fault_proxy import FaultProxy
from support.messaging import DRIVERS, PATIENCE_S, driver_maker, until
from xain_messaging.codec import Frame
from xain_messaging.drivers.grpc_streams import METHOD, GrpcDriver, to_chunks
from xain_messaging.drivers.zeromq import ZmqDriver
from xain_messaging.errors import Closed, UnknownPeer
from xain_messaging.links import TOLERANCE, Bounds
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


@pytest.mark.parametrize("bounds", [Bounds(max_messages=2), Bounds(max_bytes=2000)])
def test_a_stream_that_keeps_to_no_bounds_is_ended(bounds: Bounds) -> None:
    """One of gRPC, whose peer waits for no ack: it hears why, what waits of it is dropped, and the
    others are served."""
    there, friend = GrpcDriver(bounds=bounds), GrpcDriver()
    with closing_all(there, friend), grpc.insecure_channel(there.address) as channel:
        friend.connect("there", there.address)
        friend.send("there", [b"before"])
        assert received(there) == [b"before"]
        packet = b"".join(to_chunks([bytes(1000)]))
        deliver = channel.stream_unary(METHOD)
        with pytest.raises(grpc.RpcError, match="see Bounds") as caught:
            deliver(itertools.repeat(packet), timeout=PATIENCE_S)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert there.num_refused == 1
        friend.send("there", [b"after"])
        assert received(there) == [b"after"]


def test_all_that_waits_at_grpc_has_a_bound() -> None:
    """However many streams it came on, and though they have ended as they should."""
    bounds = Bounds(max_bytes_in_all=2000)
    there = GrpcDriver(bounds=bounds)
    packets = [b"".join(to_chunks([bytes(1000)]))] * 2
    with closing_all(there), grpc.insecure_channel(there.address) as channel:
        deliver = channel.stream_unary(METHOD)
        for _ in range(TOLERANCE):
            deliver(iter(packets), timeout=PATIENCE_S)
        with pytest.raises(grpc.RpcError, match="of all") as caught:
            deliver(iter(packets), timeout=PATIENCE_S)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        for _ in range(2 * TOLERANCE):
            assert received(there) == [bytes(1000)]
        deliver(iter(packets), timeout=PATIENCE_S)
        assert received(there) == [bytes(1000)]


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
