"""What only the driver of ZeroMQ does."""

import errno
import socket
import threading
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import zmq

from support.drivers import closing_all, next_event, received
from support.fault_proxy import FaultProxy
from support.messaging import PATIENCE_S, until
from support.s3_servers import free_ports
from xain_messaging.codec import Frame
from xain_messaging.drivers.zeromq import RETRY_S, ZmqDriver
from xain_messaging.links import Bounds
from xain_messaging.ports import Lost


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


class Interrupting:
    """A lock of a driver. Who is to have it for this time is interrupted, counted from 1 on."""

    def __init__(self, lock: Any, time: int) -> None:
        self._lock = lock
        self._num_left = time

    def __enter__(self) -> None:
        self._num_left -= 1
        if self._num_left == 0:
            raise KeyboardInterrupt
        self._lock.__enter__()

    def __exit__(self, *given: Any) -> None:
        self._lock.__exit__(*given)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lock, name)


@pytest.mark.parametrize("time", [1, 2])
def test_an_interrupt_in_receive_does_not_hold_up_close(time: int) -> None:
    """It comes while the driver waits for its lock, before it polls or after."""
    driver = ZmqDriver()
    lock = driver._lock
    driver._lock = Interrupting(lock, time)  # type: ignore[assignment]  # all that it uses
    with pytest.raises(KeyboardInterrupt):
        driver.receive(0.01)
    driver._lock = lock
    closing = threading.Thread(target=driver.close, args=(0.0,), daemon=True)
    closing.start()
    closing.join(PATIENCE_S)
    assert not closing.is_alive()


def test_a_close_that_is_interrupted_can_be_called_again() -> None:
    """While it waits for who receives; it is all closed then."""
    driver = ZmqDriver()
    receiving = driver._receiving
    driver._receiving = Interrupting(receiving, 1)  # type: ignore[assignment]  # all that it uses
    with pytest.raises(KeyboardInterrupt):
        driver.close(0.0)
    assert driver.receive(None) is None
    driver.close(0.0)
    assert driver._context.closed


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
