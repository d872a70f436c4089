"""The contract of every driver."""

import math
import threading
from functools import partial

import numpy as np
import pytest

from support.drivers import Arrived, Lost, next_event, received
from support.messaging import PATIENCE_S
from support.waiting import beside
from xain_membership.errors import Closed
from xain_messaging.errors import PeersMissing


def test_packets_come_whole_and_in_order(make):
    """Frame by frame as they were sent, the empty ones too."""
    here, there = make(), make()
    here.connect("there", there.address)
    packets = [
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
def test_large_frames_come_as_they_were(make, size):
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


def test_received_arrays_can_be_written_to_by_their_receiver(make):
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


def test_many_send_to_one(make):
    """All packets arrive, and those of each sender in order."""
    there = make()
    senders = [make() for _ in range(4)]

    def send(number: int) -> None:
        senders[number].connect("there", there.address)
        for i in range(100):
            senders[number].send("there", [b"%d" % number, b"%d" % i, b"x" * (i * 100)])

    with beside(*[partial(send, i) for i in range(len(senders))]):
        seen = {}
        for _ in range(100 * len(senders)):
            name, number, data = received(there)
            assert int(number) == seen.get(name, 0)
            assert len(data) == 100 * int(number)
            seen[name] = int(number) + 1


def test_sending_to_a_peer_that_is_not_connected_is_refused(make):
    """Before connect() and after disconnect(); to disconnect a stranger is nothing."""
    here, there = make(), make()
    with pytest.raises(PeersMissing, match="there"):
        here.send("there", [b"x"])
    here.connect("there", there.address)
    here.disconnect("there")
    here.disconnect("there")
    with pytest.raises(PeersMissing, match="there"):
        here.send("there", [b"x"])


def test_receive_ends_in_time_and_when_woken(make):
    """The result is None after the timeout, at once with 0, and on wake(), now or before."""
    driver = make()
    assert driver.receive(0) is None
    assert driver.receive(0.01) is None
    driver.wake()
    assert driver.receive(None) is None
    threading.Timer(0.05, driver.wake).start()
    assert driver.receive(None) is None


def test_after_close_nothing_goes(make):
    """A closed driver may be closed again; receive() returns at once."""
    here, there = make(), make()
    here.connect("there", there.address)
    here.close(0.0)
    here.close(0.0)
    assert here.receive(None) is None
    with pytest.raises(Closed):
        here.send("there", [b"x"])
    with pytest.raises(Closed):
        here.connect("there", there.address)


def test_close_ends_a_receive_that_waits(make):
    """In another thread."""
    driver = make()
    results = [Lost("nobody")]
    with beside(lambda: results.append(driver.receive(None))):
        driver.close(0.0)
    assert results[1:] == [None]


def test_close_lets_waiting_packets_go_out(make):
    """The wait is as long as the linger time."""
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


def test_a_time_without_end_is_one(make):
    """receive() waits until it is woken, close() until all has come, and no longer; for years as
    well, of which a system has no timers."""
    here, there = make(), make()
    here.connect("there", there.address)
    for time_s in (1e12, math.inf):
        threading.Timer(0.05, here.wake).start()
        assert here.receive(time_s) is None
    here.send("there", [b"1"])
    assert received(there) == [b"1"]
    here.send("there", [b"2"])
    with beside(partial(here.close, math.inf)):
        assert received(there) == [b"2"]


def test_a_peer_may_move(make):
    """connect() with another address; the old one gets nothing more."""
    here, old, new = make(), make(), make()
    here.connect("there", old.address)
    here.send("there", [b"1"])
    assert received(old) == [b"1"]
    here.connect("there", new.address)
    here.send("there", [b"2"])
    assert received(new) == [b"2"]
    assert old.receive(0.05) is None
