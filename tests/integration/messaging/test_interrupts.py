"""A KeyboardInterrupt, wherever it comes while somebody receives."""

import pytest

from support.lossy import JoinLossy, tags
from support.messaging import PATIENCE_S, until
from xain_messaging.endpoint import Endpoint
from xain_messaging.messages import Message
from xain_messaging.ports import Arrived, DriverEvent
from xain_messaging.proxy import Proxy


class Interrupted:
    """The lock of an endpoint, of which a wait is interrupted, once.

    was_receiving: whether nobody else might receive at that time.
    """

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._lock = endpoint.lock
        self.is_armed = False
        self.was_receiving = False

    def acquire(self) -> bool:
        if self.is_armed:
            self.was_receiving = self._endpoint._is_receiving
            self.is_armed = False
            raise KeyboardInterrupt
        return self._lock.acquire()

    def release(self) -> None:
        self._lock.release()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


def interrupted(b: Proxy) -> Interrupted:
    """The lock of this one, in which an interrupt comes once it is armed."""
    lock = Interrupted(b.endpoint)
    b.endpoint.lock = lock
    return lock


def test_an_interrupt_leaves_a_proxy_that_works(lossy: JoinLossy) -> None:
    """Wherever it comes: here while a thread that has received waits for the lock."""
    (a, _), (b, line) = lossy("a"), lossy("b")
    until(lambda: "peer" in a.peers, "b")
    lock = interrupted(b)
    receive = line.receive

    def arm(timeout_s: float | None) -> DriverEvent | None:
        lock.is_armed = timeout_s != 0
        return receive(timeout_s)

    line.receive = arm
    with pytest.raises(KeyboardInterrupt):
        b.receive_once(0.01)
    line.receive = receive
    assert lock.was_receiving  # until it has the lock: a driver is for one at a time
    assert not b.endpoint._is_receiving
    a.isend(Message("1", "a", "b"))
    assert tags(b, 1) == ["1"]


def test_an_interrupt_loses_nothing_that_has_come(lossy: JoinLossy) -> None:
    """It waits for the lock then, and nothing follows on it that would show the gap."""
    (a, _), (b, line) = lossy("a"), lossy("b")
    until(lambda: "peer" in a.peers, "b")
    lock = interrupted(b)
    receive = line.receive

    def arm(timeout_s: float | None) -> DriverEvent | None:
        if timeout_s == 0:
            return None
        a.isend(Message("1", "a", "b"))
        event = receive(timeout_s)
        while event is None:  # it was woken
            event = receive(timeout_s)
        lock.is_armed = True
        return event

    line.receive = arm
    with pytest.raises(KeyboardInterrupt):
        b.receive_once(PATIENCE_S)
    line.receive = receive
    line.lost.add("a")  # so it cannot have asked for it
    assert tags(b, 1) == ["1"]


@pytest.mark.parametrize("has_come_before", [True, False])
def test_what_an_interrupt_has_lost_is_asked_for(lossy: JoinLossy, has_come_before: bool) -> None:
    """It came within the driver, where nobody else has the message; also if it was the first of its
    sender."""
    (a, _), (b, line) = lossy("a"), lossy("b")
    until(lambda: "peer" in a.peers and "peer" in b.peers, "each other")
    if has_come_before:
        a.isend(Message("before", "a", "b"))
        assert tags(b, 1) == ["before"]
    receive = line.receive

    def lose(timeout_s: float | None) -> DriverEvent | None:
        a.isend(Message("lost", "a", "b"))
        until(lambda: isinstance(receive(0.0), Arrived), "what is lost now")
        raise KeyboardInterrupt

    line.receive = lose
    with pytest.raises(KeyboardInterrupt):
        b.receive_once(PATIENCE_S)
    line.receive = receive
    found: list[str] = []

    def has_come() -> bool:
        found.extend(message.tag for message in b.receive(0.02))
        a.receive_by_id("none", 0.02)
        return bool(found)

    until(has_come, "what was lost")
    assert found == ["lost"]
