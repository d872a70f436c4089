"""Lines that break, peers that cannot be reached, and memberships that are lost."""

import errno
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from structlog.testing import capture_logs

from support.fault_proxy import FaultProxy
from support.messaging import PATIENCE_S, until
from xain_messaging import endpoint as endpoint_module
from xain_messaging.codec import Frames, encode
from xain_messaging.discovery.in_process import InProcessDiscovery
from xain_messaging.drivers.grpc_streams import GrpcDriver
from xain_messaging.drivers.in_process import InProcessDriver, Switchboard
from xain_messaging.drivers.zeromq import ZmqDriver
from xain_messaging.endpoint import Endpoint
from xain_messaging.errors import CollectiveFailed, MembershipLost
from xain_messaging.links import MESSAGE, Bounds, Link, read_head
from xain_messaging.messages import Message, SessionMessage
from xain_messaging.ports import Arrived, DriverEvent, Member, Membership
from xain_messaging.proxy import Proxy


class LossyDriver(InProcessDriver):
    """Loses what is sent to some, until their lines are mended."""

    def __init__(self, switchboard: Switchboard) -> None:
        super().__init__(switchboard)
        self.lost: set[str] = set()

    def send(self, peer: str, frames: Frames) -> None:
        if peer not in self.lost:
            super().send(peer, frames)

    def mend(self, peer: str) -> None:
        """There is a new connection; who sends is told that it may have lost something."""
        self.lost.discard(peer)
        self.break_connection(peer)


@pytest.fixture
def join() -> Iterator[Callable[..., tuple[Proxy, LossyDriver]]]:
    discovery, switchboard = InProcessDiscovery(), Switchboard()
    made: list[Proxy] = []

    def join_one(name: str, bounds: Bounds | None = None) -> tuple[Proxy, LossyDriver]:
        driver = LossyDriver(switchboard)
        proxy = Proxy(
            "g",
            "peer",
            name=name,
            discovery=discovery,
            driver=driver,
            bounds=bounds,
            timeout_s=PATIENCE_S,
        )
        made.append(proxy)
        return proxy, driver

    yield join_one
    for proxy in made:
        proxy.close(0.0)


def tags(proxy: Proxy, number: int) -> list[str]:
    messages = proxy.receive(PATIENCE_S)
    return [message.tag for _, message in zip(range(number), messages, strict=False)]


def test_what_a_line_has_lost_comes_over_the_next(join) -> None:
    """Once and in order, also if the sender never waits for anything."""
    (a, line), (b, _) = join("a"), join("b")
    a.isend(Message("1", "a", "b"))
    line.lost.add("b")
    for tag in ("2", "3"):
        a.isend(Message(tag, "a", "b"))
    assert tags(b, 1) == ["1"]
    line.mend("b")
    for tag in ("4", "5"):
        a.isend(Message(tag, "a", "b"))
    assert tags(b, 4) == ["2", "3", "4", "5"]
    assert b.receive_once(0.05) is None


def test_a_lost_word_of_what_is_taken_is_said_again(join) -> None:
    """Its sender could send nothing any more."""
    (a, _), (b, line) = join("a", Bounds(max_messages=1)), join("b")
    a.isend(Message("1", "a", "b"))
    line.lost.add("a")
    assert tags(b, 1) == ["1"]
    assert b.receive_once(0.05) is None  # it has time to say so, in vain
    line.mend("a")
    assert b.receive_once(0.05) is None
    a.isend(Message("2", "a", "b"))
    assert tags(b, 1) == ["2"]


def test_a_late_answer_that_nobody_takes_holds_up_no_other(join) -> None:
    """It stays where it is, and the line goes on."""
    (a, _), (b, _) = join("a"), join("b", Bounds(max_messages=8))
    late = a.isend(SessionMessage("ask", "a", "b"))
    assert a.receive_by_id(late, 0.05).missing == ("b",)
    asked = b.receive_once()
    assert asked is not None
    b.reply(asked)
    for _ in range(20):
        session = a.isend(SessionMessage("ask", "a", "b"))
        asked = b.receive_once()
        assert asked is not None
        b.reply(asked)
        a.receive_by_id(session).complete()
    assert len(a.receive_by_id(late)) == 1


def test_one_who_sends_more_than_another_hears_is_heard_later(join) -> None:
    """Their bounds differ: what is not heard comes when there is room, on the line that stands."""
    (a, _), (b, _) = join("a", Bounds(max_messages=100)), join("b", Bounds(max_messages=2))
    for i in range(50):
        a.isend(Message(str(i), "a", "b"))
    assert b.receive_by_id("none", 0.02).missing  # all has come, and most was not heard
    found: list[str] = []

    def all_has_come() -> bool:
        found.extend(message.tag for message in b.receive(0.03))
        a.receive_by_id("none", 0.03)
        return len(found) >= 50

    until(all_has_come, "all")
    a.isend(Message("last", "a", "b"))
    assert [*found, *tags(b, 1)] == [*map(str, range(50)), "last"]


def test_who_comes_back_after_it_was_forgotten_hears_what_is_new(join, monkeypatch) -> None:
    """The same process: it has heard of what was before, and drops that."""
    (a, _), (b, _) = join("a"), join("b")
    until(lambda: "peer" in a.peers, "b")
    for tag in "123":
        a.isend(Message(tag, "a", "b"))
    assert tags(b, 3) == ["1", "2", "3"]
    endpoint = a.endpoint
    asked = SessionMessage("ask", "a", "b")
    endpoint.sessions.send(asked)
    with_b = endpoint.roster
    monkeypatch.setattr(endpoint_module, "FORGET_S", -1.0)
    endpoint._on_change({name: member for name, member in with_b.items() if name != "b"})
    assert "b" not in endpoint._links
    assert not endpoint.sessions.received(asked.reply())
    endpoint._on_change(with_b)
    for tag in "456":
        a.isend(Message(tag, "a", "b"))
    assert tags(b, 3) == ["4", "5", "6"]
    # What the other has sent meanwhile comes too, though the first of it is not its first.
    b.isend(Message("answer", "b", "a"))
    assert tags(a, 1) == ["answer"]


def test_what_is_taken_late_does_not_come_twice(join, monkeypatch) -> None:
    """Its sender was forgotten meanwhile, and is back."""
    (a, _), (b, line) = join("a"), join("b")
    until(lambda: "peer" in a.peers and "peer" in b.peers, "each other")
    b.isend(Message("1", "b", "a"))
    assert a.receive_by_id("none", 0.05).missing  # it waits
    with_b = a.endpoint.roster
    monkeypatch.setattr(endpoint_module, "FORGET_S", -1.0)
    a.endpoint._on_change({name: member for name, member in with_b.items() if name != "b"})
    a.endpoint._on_change(with_b)
    line.break_connection("a")
    b.isend(Message("2", "b", "a"))
    assert tags(a, 2) == ["1", "2"]
    assert a.receive_once(0.05) is None


def strangers(join, number: int) -> tuple[Proxy, InProcessDriver, list[Link]]:
    """A peer, and as many who are in no group and have written to it, all from one driver."""
    a, line = join("a", Bounds(max_bytes_in_all=10_000))
    driver = InProcessDriver(line._switchboard)
    driver.connect("a", line.address)
    links = [Link(f"stranger-{i}", 1, "a") for i in range(number)]
    for link in links:
        link.connected()
        packet = link.send(MESSAGE, encode(Message("hello", link.own_name, "a")))
        driver.send("a", packet or [])
    return a, driver, links


def test_strangers_are_forgotten(join, monkeypatch) -> None:
    """They and what was kept for them, though nobody comes or goes."""
    a, _, _ = strangers(join, 20)
    for message in a.receive(0.2):
        a.reply(message, body=b"x" * 300)
    outbox = a.endpoint._outbox
    assert (len(a.endpoint._links), outbox.num_messages) == (20, 20)
    monkeypatch.setattr(endpoint_module, "FORGET_S", -1.0)
    a.endpoint._forget_at = 0.0
    assert a.receive_once(0.0) is None
    assert (len(a.endpoint._links), outbox.num_messages, outbox.num_bytes) == (0, 0, 0)


def test_who_uses_the_name_of_another_does_not_keep_it_away(join) -> None:
    """With a number that no process will ever have; and while that has only just come back."""
    (a, line), (b, _) = join("a"), join("b")
    until(lambda: "peer" in a.peers, "b")
    b.isend(Message("1", "b", "a"))
    assert tags(a, 1) == ["1"]
    driver = InProcessDriver(line._switchboard)
    driver.connect("a", line.address)
    for incarnation in (10**9, 10**18):
        link = Link("b", incarnation, "a")
        link.connected()
        for tag in ("x", "y"):
            packet = link.send(MESSAGE, encode(Message(tag, "b", "a")))
            driver.send("a", packet or [])
    with capture_logs() as logs:
        assert a.receive_by_id("none", 0.02).missing
    assert [entry["event"] for entry in logs if entry["log_level"] == "warning"] == [
        "malformed_message"
    ] * 2
    b.isend(Message("2", "b", "a"))
    assert tags(a, 1) == ["2"]
    b.close()
    back, _ = join("b")
    back.isend(Message("3", "b", "a"))
    assert tags(a, 1) == ["3"]


def test_what_comes_before_the_word_of_its_process_is_not_lost(join) -> None:
    """The discovery may tell late who has come back. All of it comes then, in order."""
    (a, _), (b, _) = join("a"), join("b")
    until(lambda: "peer" in a.peers, "b")
    b.isend(Message("0", "b", "a"))
    assert tags(a, 1) == ["0"]
    on_change = a.endpoint._on_change
    b.close()
    discovery = a.endpoint.membership._discovery
    discovery._told["g", "a"].on_change = lambda roster: None
    back, _ = join("b")
    with_b = back.endpoint.roster
    for tag in "123":
        back.isend(Message(tag, "b", "a"))
    assert a.receive_once(0.05) is None
    on_change(with_b)
    found: list[str] = []

    def all_has_come() -> bool:
        found.extend(message.tag for message in a.receive(0.02))
        back.receive_by_id("none", 0.02)
        return len(found) >= 3

    until(all_has_come, "all")
    assert found == ["1", "2", "3"]


def test_all_senders_together_are_held_back(join) -> None:
    """What waits of all has a bound, and what is not heard comes when there is room, from all."""
    bounds = Bounds(max_messages_in_all=2)
    a, _ = join("a", bounds)
    others = [join(f"b-{i}")[0] for i in range(10)]
    for other in others:
        for i in range(10):
            other.isend(Message("t", other.name, "a", i))
    assert a.receive_by_id("none", 0.05).missing
    assert len(a.endpoint.inbox) == 8 + 9  # those of the first, and one of each other
    found: dict[str, list[int]] = {other.name: [] for other in others}

    def all_has_come() -> bool:
        for message in a.receive(0.02):
            found[message.source].append(message.body)
            assert len(a.endpoint.inbox) <= 8 + len(others)
        for other in others:
            other.receive_by_id("none", 0.01)
        return all(len(bodies) >= 10 for bodies in found.values())

    until(all_has_come, "all")
    assert all(bodies == list(range(10)) for bodies in found.values())
    assert (a.endpoint._waiting.num_messages, a.endpoint._waiting.num_bytes) == (0, 0)


def test_who_is_held_back_for_others_is_asked_when_they_are_taken(join) -> None:
    """Though nobody takes what waits of itself."""
    (a, _), (b, _), (c, _) = join("a", Bounds(max_messages_in_all=2)), join("b"), join("c")
    for _ in range(8):
        b.isend(Message("t", "b", "a", session_id="of b"))
    for _ in range(2):
        c.isend(Message("t", "c", "a"))
    assert a.receive_by_id("none", 0.05).missing
    assert len(a.endpoint.inbox) == 8 + 1
    assert len(a.receive_by_id(["of b"] * 8)) == 8

    def second_has_come() -> bool:
        for proxy in (a, c):
            proxy.receive_by_id("none", 0.02)
        return len(a.endpoint.inbox) == 2

    until(second_has_come, "the second of c")


def test_who_is_held_back_again_before_it_is_asked_is_asked_later(join, monkeypatch) -> None:
    """What was lost of it was noticed while too much waited, and too much waits once more by the
    time when the word goes out."""
    (a, _), (b, _) = join("a", Bounds(max_messages_in_all=2)), join("b")
    c, line = join("c")

    def wait(is_so: Callable[[], bool]) -> None:
        """Nobody takes anything meanwhile."""
        until(lambda: bool(a.receive_by_id("none", 0.02).missing) and is_so(), "that")

    def fill() -> None:
        for _ in range(7):
            b.isend(Message("t", "b", "a", session_id="of b"))
        wait(lambda: len(a.endpoint.inbox) == 8)

    until(lambda: all(len(proxy.peers.get("peer", [])) == 2 for proxy in (a, b, c)), "all")
    c.isend(Message("t", "c", "a"))
    wait(lambda: len(a.endpoint.inbox) == 1)
    fill()
    line.lost.add("a")
    c.isend(Message("t", "c", "a"))
    line.lost.discard("a")
    c.isend(Message("t", "c", "a"))
    wait(lambda: "c" in a.endpoint._waiting.behind)
    monkeypatch.setattr(endpoint_module, "ACK_DELAY_S", 3600.0)
    assert len(a.receive_by_id(["of b"] * 7)) == 7
    fill()
    monkeypatch.setattr(endpoint_module, "ACK_DELAY_S", 0.0)
    wait(lambda: not a.endpoint._owed)
    assert len(a.receive_by_id(["of b"] * 7)) == 7

    def have_come() -> bool:
        for proxy in (a, c):
            proxy.receive_by_id("none", 0.02)
        return len(a.endpoint.inbox) == 3

    until(have_come, "what was lost, and what follows")


def test_one_that_is_away_for_a_moment_keeps_its_sessions(join, monkeypatch) -> None:
    """However many names there are that have never been in the group: no more of those are heard
    than there is room for."""
    monkeypatch.setattr(endpoint_module, "MAX_STRANGERS", 2)
    a, _, _ = strangers(join, 5)
    b, _ = join("b")
    until(lambda: "peer" in a.peers, "b")
    session = a.isend(SessionMessage("ask", "a", "b"))
    asked = b.receive_once()
    assert asked is not None
    assert len(list(a.receive(0.1))) == 2

    def is_settled() -> bool:
        for proxy in (b, a):
            proxy.receive_by_id("none", 0.02)
        return a.endpoint._links["b"].is_settled

    until(is_settled, "the word that b has it")
    with_b = a.endpoint.roster
    a.endpoint._on_change({name: member for name, member in with_b.items() if name != "b"})
    assert a.endpoint._links.keys() == {"b", "stranger-0", "stranger-1"}
    a.endpoint._on_change(with_b)
    b.reply(asked, body=2)
    (answer,) = a.receive_by_id(session)
    assert answer.body == 2


def test_those_who_are_away_are_bounded(join, monkeypatch) -> None:
    """The first to leave are forgotten sooner, but for those for whom something is kept."""
    monkeypatch.setattr(endpoint_module, "MAX_AWAY", 2)
    a, _ = join("a")
    alone = a.endpoint.roster
    for i in range(6):
        member = Member(f"b-{i}", "peer", 1, "in-process:99", 1)
        a.endpoint._on_change({**alone, member.name: member})
        if i in (1, 5):
            a.isend(Message("kept", "a", member.name))
        a.endpoint._on_change(alone)
    assert a.endpoint._links.keys() == {"b-1", "b-5"}


def test_what_comes_before_its_sender_is_known_is_not_lost(join, monkeypatch) -> None:
    """Even if there are so many strangers that it is not heard: it is asked for when the discovery
    tells who that is."""
    monkeypatch.setattr(endpoint_module, "MAX_STRANGERS", 5)
    a, driver, links = strangers(join, 7)
    assert len(list(a.receive(0.1))) == 5
    member = Member("stranger-6", "peer", 9, driver.address, 1)
    a.endpoint._on_change({**a.endpoint.roster, "stranger-6": member})
    event = driver.receive(PATIENCE_S)
    assert isinstance(event, Arrived)
    for packet in links[6].again(read_head(event.frames[0])):
        driver.send("a", packet)
    message = a.receive_once()
    assert message is not None
    assert message.source == "stranger-6"


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


def test_an_interrupt_leaves_a_proxy_that_works(join) -> None:
    """Wherever it comes: here while a thread that has received waits for the lock."""
    (a, _), (b, line) = join("a"), join("b")
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


def test_an_interrupt_loses_nothing_that_has_come(join) -> None:
    """It waits for the lock then, and nothing follows on it that would show the gap."""
    (a, _), (b, line) = join("a"), join("b")
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
def test_what_an_interrupt_has_lost_is_asked_for(join, has_come_before: bool) -> None:
    """It came within the driver, where nobody else has the message; also if it was the first of its
    sender."""
    (a, _), (b, line) = join("a"), join("b")
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


@dataclass
class Detoured:
    """A discovery that tells of each peer an address on whose way something may happen."""

    inner: InProcessDiscovery
    ways: list[FaultProxy]

    def join(self, group: str, role: str, name: str, address: str, **options: Any) -> Membership:
        host, _, port = address.rpartition(":")
        self.ways.append(FaultProxy(int(port)))
        return self.inner.join(group, role, name, f"{host}:{self.ways[-1].port}", **options)


@pytest.mark.parametrize("make_driver", [GrpcDriver, ZmqDriver])
def test_all_comes_once_and_in_order_however_often_lines_break(make_driver) -> None:
    """Between two processes that live, in both directions, large and small."""
    number = 1500
    with ExitStack() as stack:
        found = Detoured(InProcessDiscovery(), [])
        options = {"discovery": found, "timeout_s": 4 * PATIENCE_S}
        a, b = [
            stack.enter_context(Proxy("g", "peer", name=name, driver=make_driver(), **options))
            for name in "ab"
        ]
        for way in found.ways:
            stack.callback(way.close)
        until(lambda: "peer" in a.peers and "peer" in b.peers, "each other")
        cuts = iter(range(number // 100, number, number // 6))
        at = next(cuts)
        got: list[int] = []
        answers: list[int] = []

        def send() -> None:
            for i in range(number):
                array = np.full(3000 if i % 25 else 600_000, i, np.int32)
                a.isend(Message("t", "a", "b", [i, array]))
            while len(answers) < number:
                message = a.receive_once()
                assert message is not None
                answers.append(message.body)

        thread = threading.Thread(target=send)
        thread.start()
        for message in b.receive(4 * PATIENCE_S):
            i, array = message.body
            assert (array == i).all()
            got.append(i)
            b.reply(message, body=i)
            if i == at:
                at = next(cuts, -1)
                for way in found.ways:
                    way.cut(reset=i % 2 == 0)
            if len(got) == number:
                break
        until(lambda: b.receive_by_id("none", 0.05) is None or not thread.is_alive(), "answers")
        thread.join(PATIENCE_S)
        assert got == answers == list(range(number))


def test_parts_for_a_group_that_is_no_more_hold_up_nobody(join) -> None:
    """One member is an operation ahead when another goes; the next group works, and what was sent
    for the old one is taken."""
    (a, _), (b, _), (c, _) = join("a"), join("b", Bounds(max_messages=8)), join("c")
    until(lambda: len(a.peers.get("peer", ())) == 2, "all")
    old = [proxy.group("peer") for proxy in (a, b, c)]
    c.close(0.0)
    for _ in range(3):
        with pytest.raises(CollectiveFailed) as caught:
            old[1].barrier(0.05)
        assert caught.value.missing == ("c",)
    groups = [proxy.group("peer") for proxy in (a, b)]
    assert [group.size for group in groups] == [2, 2]
    for proxy in (a, b):  # to take what has come for the old one, and to hear of it
        assert proxy.receive_once(0.1) is None
    assert b.endpoint._links["a"].num_kept == 0


def test_a_packet_for_one_who_was_here_before_is_nobodys(join) -> None:
    """An address may be used again. What is meant for its former owner is not taken for ours."""
    (a, _), (b, _) = join("a"), join("b")
    a.isend(Message("for b", "a", "b"))
    assert tags(b, 1) == ["for b"]
    until(lambda: "peer" in a.peers, "b")
    # As if the discovery had not told yet that somebody else is at the address of c.
    endpoint = a.endpoint
    there = endpoint.roster["b"]
    roster = {**endpoint.roster, "c": Member("c", "peer", 9, there.address, 99)}
    endpoint._on_change(roster)
    a.isend(Message("for c", "a", "c"))
    assert b.receive_once(0.1) is None
    a.isend(Message("for b", "a", "b"))
    assert tags(b, 1) == ["for b"]


def test_who_cannot_be_reached_keeps_nobody_else_away() -> None:
    """An address that is none for this driver: the others are connected all the same."""
    discovery = InProcessDiscovery()
    discovery.join(
        "g",
        "peer",
        "odd",
        "no address of zmq",
        timeout_s=1.0,
        on_change=lambda roster: None,
        on_lost=lambda error: None,
    )
    options = {"discovery": discovery, "timeout_s": PATIENCE_S}
    with (
        Proxy("g", "peer", name="a", driver=ZmqDriver(), **options) as a,
        Proxy("g", "peer", {"peer": 2}, name="b", driver=ZmqDriver(), **options) as b,
    ):
        a.isend(Message("x", "a", "b"))
        assert tags(b, 1) == ["x"]


class Full(LossyDriver):
    """The system has no room for another connection or thread, for the next so many attempts."""

    num_refused = 0
    num_unsent = 0

    def send(self, peer: str, frames: Frames) -> None:
        if self.num_unsent:
            self.num_unsent -= 1
            raise RuntimeError("can't start new thread")
        super().send(peer, frames)

    def connect(self, peer: str, address: str) -> None:
        if self.num_refused:
            self.num_refused -= 1
            raise OSError(errno.EMFILE, "too many open files")
        super().connect(peer, address)


def test_who_could_not_be_connected_to_is_tried_again() -> None:
    """By whoever waits, though nobody comes or goes; what was kept goes out then."""
    discovery, switchboard = InProcessDiscovery(), Switchboard()
    line = Full(switchboard)
    options = {"discovery": discovery, "timeout_s": PATIENCE_S}
    with Proxy("g", "peer", name="a", driver=line, **options) as a:
        waits = threading.Thread(target=lambda: a.receive_once())
        waits.start()
        until(lambda: a.endpoint._is_receiving, "it to wait")
        line.num_refused = 3
        driver = InProcessDriver(switchboard)
        with Proxy("g", "peer", name="b", driver=driver, **options) as b:
            a.isend(Message("kept", "a", "b"))
            assert tags(b, 1) == ["kept"]
            assert line.num_refused == 0
            assert not a.endpoint._unreached
            b.isend(Message("end", "b", "a"))
            waits.join(PATIENCE_S)
            assert not waits.is_alive()
            line.num_refused = 10**9
            a.endpoint._connect(a.endpoint.roster["b"])
            assert a.endpoint._unreached.keys() == {"b"}
        until(lambda: "peer" not in a.peers, "b to be gone")
        assert not a.endpoint._unreached


def test_what_could_not_be_sent_goes_out_later() -> None:
    """It is kept, so its sender need not know; and all that follows stays behind it."""
    discovery, switchboard = InProcessDiscovery(), Switchboard()
    line = Full(switchboard)
    options = {"discovery": discovery, "timeout_s": PATIENCE_S}
    with (
        Proxy("g", "peer", name="a", driver=line, **options) as a,
        Proxy("g", "peer", name="b", driver=InProcessDriver(switchboard), **options) as b,
    ):
        a.isend(Message("0", "a", "b"))
        line.num_unsent = 3
        for tag in "12":
            a.isend(Message(tag, "a", "b"))
        found: list[str] = []

        def all_has_come() -> bool:
            a.receive_by_id("none", 0.02)
            found.extend(message.tag for message in b.receive(0.02))
            return len(found) >= 3

        until(all_has_come, "all")
        assert found == ["0", "1", "2"]
        assert line.num_unsent == 0
        a.isend(Message("3", "a", "b"))
        assert tags(b, 1) == ["3"]


def test_a_lost_membership_is_told_to_whoever_waits(join) -> None:
    """And to whoever comes after."""
    (a, _), (b, _) = join("a"), join("b")
    discovery = a.endpoint.membership._discovery
    begun_at = time.monotonic()
    discovery.expire("g", "a")
    for _ in range(2):
        with pytest.raises(MembershipLost):
            a.receive_once()
    assert time.monotonic() - begun_at < PATIENCE_S
    until(lambda: "peer" not in b.peers, "it to be gone")
