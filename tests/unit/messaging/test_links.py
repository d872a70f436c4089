"""Links: every message comes once and in order, over connections that lose."""

import itertools
import sys
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import msgpack
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from xain_messaging.errors import MalformedMessage
from xain_messaging.links import (
    ACK_EVERY,
    MAX_HEAD_BYTES,
    MAX_UNTAKEN,
    MESSAGE,
    Bounds,
    Delivery,
    Link,
    Packet,
    Totals,
    read_head,
)


def send(link: Link, body: bytes) -> Packet | None:
    link.keep(MESSAGE, [body], len(body))
    return link.next_packet()


def come(link: Link, packets: Iterable[Packet | None]) -> list[Delivery]:
    """Deliver packets. Returns their messages."""
    return [
        delivery
        for packet in packets
        if packet is not None
        for delivery in link.received(read_head(packet[0]), packet[1:])
    ]


def ask(link: Link, packet: Packet | None) -> list[Packet]:
    """Deliver an ack. Returns the packets that it asks for."""
    assert come(link, [packet]) == []
    assert packet is not None
    return link.answer_to(read_head(packet[0]))


def bodies(found: Iterable[Delivery]) -> list[bytes]:
    return [bytes(delivery.frames[0]) for delivery in found]


def ends(bounds_of_b: Bounds | None = None) -> tuple[Link, Link]:
    """Two connected links."""
    a, b = Link("a", 10, "b"), Link("b", 20, "a", Totals(bounds_of_b or Bounds()))
    a.listed(20)
    b.listed(10)
    assert a.connected() == b.connected() == []
    return a, b


def test_a_message_is_kept_until_it_is_taken():
    """Having come is not enough; the ack travels with the next message."""
    a, b = ends()
    (delivery,) = come(b, [send(a, b"one")])
    come(a, [send(b, b"early")])
    assert (a.num_kept, a.has_unheard) == (1, True)
    assert not b.take(delivery)
    come(a, [send(b, b"late")])
    assert (a.num_kept, a.kept_bytes, a.totals.num_kept) == (0, 0, 0)
    assert b.ack() is None


def test_a_message_that_is_taken_before_earlier_ones_is_acknowledged():
    """However many wait before it: a message that the program leaves holds up no other."""
    a, b = ends()
    found = come(b, [send(a, b"%d" % i) for i in range(2 * MAX_UNTAKEN)])
    b.take(found[1])
    ask(a, b.ack())
    assert a.num_kept == 2 * MAX_UNTAKEN - 1
    b.take(found[-1])
    ask(a, b.ack())
    assert a.num_kept == 2 * MAX_UNTAKEN - 1  # too many wait before it to be named
    for delivery in found[2 : MAX_UNTAKEN + 2]:
        b.take(delivery)
    ask(a, b.ack())
    assert a.num_kept == MAX_UNTAKEN - 2


@pytest.mark.parametrize("at", range(4))
def test_a_take_that_is_interrupted_loses_no_ack(at):
    """A message is taken again after an interrupt at any of the lines before it counts as taken,
    and its sender keeps it no more."""
    a, b = ends()
    (delivery,) = come(b, [send(a, b"one")])
    left = at

    def interrupt(frame, event, argument):
        nonlocal left
        if frame.f_code is Link.take.__code__ and event == "line":
            left -= 1
            if left == -1:
                raise KeyboardInterrupt
        return interrupt

    traced = sys.gettrace()
    sys.settrace(interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            b.take(delivery)
    finally:
        sys.settrace(traced)
    b.take(delivery)
    assert (b.has_untaken, b.totals.num_waiting) == (False, 0)
    ask(a, b.ack())
    assert (a.num_kept, a.totals.num_kept) == (0, 0)


def test_an_ack_is_due_after_so_many_messages():
    a, b = ends()
    found = come(b, [send(a, b"x") for _ in range(2 * ACK_EVERY)])
    dues = []
    for delivery in found:
        dues.append(b.take(delivery))
        if dues[-1]:
            b.ack()
    assert dues == ([False] * (ACK_EVERY - 1) + [True]) * 2


@pytest.mark.parametrize("kind", ["a gap", "a question", "a new connection"])
def test_a_lost_message_comes_again_once(kind):
    """A new connection, a question or a later message shows the loss."""
    a, b = ends()
    send(a, b"lost")
    if kind == "a new connection":
        again = a.connected()
    else:
        assert come(b, [send(a, b"behind") if kind == "a gap" else a.where()]) == []
        asked = b.ack()
        assert b.ack() is None
        again = ask(a, asked)
    expected = [b"lost", b"behind"] if kind == "a gap" else [b"lost"]
    assert bodies(come(b, again)) == expected
    assert come(b, a.connected()) == []


def test_a_lost_ack_is_repeated():
    """When the receiver connects anew, when its peer asks, or when the message comes again."""
    for repeat in ("connect", "ask", "send"):
        a, b = ends()
        (delivery,) = come(b, [send(a, b"x")])
        b.take(delivery)
        assert b.ack() is not None  # lost
        if repeat == "connect":
            come(a, b.connected())
        elif repeat == "ask":
            where = a.where()
            assert come(b, [where]) == []
            come(a, b.answer_to(read_head((where or [])[0])))
        else:
            come(b, a.connected())
            come(a, [b.ack()])
        assert a.num_kept == 0


def test_bounds_of_the_sender():
    """The bounds are to one peer and to all; a first message to a present peer has room."""
    totals = Totals(Bounds(max_messages=2, max_bytes=100, max_messages_in_all=3))
    here, away = Link("a", 1, "b", totals), Link("a", 1, "c", totals)
    here.connected()
    for link in (here, away):
        assert link.why_no_room(10**12) is None
    send(here, bytes(50))
    assert here.why_no_room(50) is None
    assert "1 messages of 50 bytes" in (here.why_no_room(51) or "")
    send(here, b"")
    assert here.why_no_room(1) is not None
    assert send(away, b"x") is None  # kept
    assert "all peers together" in (Link("a", 1, "d", totals).why_no_room(1) or "")
    here.forget()
    assert (totals.num_kept, totals.kept_bytes) == (1, 1)


def test_messages_beyond_the_bounds_of_the_receiver_come_when_there_is_room():
    """One of each peer is heard in any case; the others when half of what waits is taken."""
    a, b = ends(Bounds(max_messages_in_all=4))
    c = Link("b", 20, "c", b.totals)
    c.listed(30)
    found = come(b, [send(a, b"%d" % i) for i in range(4)])
    with pytest.raises(MalformedMessage, match="4 messages of 4 bytes"):
        come(b, [send(a, b"4")])
    assert b.totals.behind == {"a": b}
    assert come(b, [send(a, b"5")]) == []
    other = Link("c", 30, "b")
    other.listed(20)
    other.connected()
    assert len(come(c, [send(other, b"first")])) == 1
    for delivery in found[:2]:
        b.take(delivery)
        assert b.ack() is None or not b.owes_ack
    b.take(found[2])
    b.take(found[3])
    assert bodies(come(b, ask(a, b.ack()))) == [b"4", b"5"]


def test_next_process_gets_messages_that_the_last_has_not_taken():
    """Messages of the former process are dropped from then on, and those of the next one too until
    the roster lists it."""
    a, b = ends()
    first, *_ = come(b, [send(a, b"%d" % i) for i in range(3)])
    b.take(first)
    come(a, [b.ack()])
    late = send(b, b"late")
    new = Link("b", 21, "a")
    new.listed(10)
    assert new.connected() == []
    assert come(a, [send(new, b"early")]) == []
    a.gone()
    a.listed(21)
    assert bodies(come(new, a.connected())) == [b"1", b"2"]
    assert come(a, [late]) == []
    assert bodies(come(a, ask(new, a.ack()))) == [b"early"] or a.num_kept == 2


def test_messages_of_a_former_process_count_as_waiting_until_they_are_taken():
    a, b = ends()
    (old,) = come(a, [send(b, b"old")])
    a.listed(21)
    assert (a.totals.num_waiting, a.totals.waiting_bytes) == (1, 3)
    for _ in range(2):
        assert not a.take(old)
    assert (a.totals.num_waiting, a.totals.waiting_bytes) == (0, 0)


def test_a_head_adds_no_more_than_is_said():
    """The names and numbers are the longest, and as much as possible is untaken."""
    totals = Totals(last_number=2**63)
    a, b = Link("a" * 128, 2**63, "b" * 128, totals), Link("b" * 128, 2**63, "a" * 128)
    for link in (a, b):
        link.listed(2**63)
        link.connected()
    b.take(come(b, [send(a, b"x") for _ in range(2 * MAX_UNTAKEN)])[0])
    (answer,) = send(b, bytes(1000)) or []
    assert len(answer) <= 1000 + MAX_HEAD_BYTES


GOOD = ["m", "a", "b", 1, 0, 1, 1, 1, [], [[1, "m", 0, b""]]]


def changed(**fields: Any) -> bytes:
    """A head of which some fields, by their position, are others."""
    head = [fields.get(f"at_{i}", value) for i, value in enumerate(GOOD)]
    return bytes(msgpack.packb(head))


@pytest.mark.parametrize(
    "head",
    [
        b"",
        b"\xc1",
        msgpack.packb(1),
        msgpack.packb(GOOD[:-1]),
        changed(at_0="x"),
        changed(at_0=["m"]),
        changed(at_1=1),
        changed(at_2=None),
        changed(at_3="1"),
        changed(at_4=-1),
        changed(at_5=True),
        changed(at_8=None),
        changed(at_8=["x"]),
        changed(at_9=[[1, "x", 0, b""]]),
        changed(at_9=[[1, "m", -1, b""]]),
        changed(at_9=[[1, "m", 0, None]]),
        changed(at_9=[[1, "m", 0, b""]])[:-2] + b"\x91" * 5000 + b"\xc0",  # in each other
    ],
)
def test_bytes_that_are_no_head_are_malformed(head):
    assert read_head(changed()).messages == [(1, "m", 0, b"")]
    with pytest.raises(MalformedMessage):
        read_head(head)


@pytest.mark.parametrize("numbers", [[0], [1, 1], [1, 0], [2, 1]])
def test_messages_whose_numbers_do_not_rise_are_dropped(numbers):
    """A message, with all that follow it in its packet."""
    _, b = ends()
    head = read_head(changed(at_3=10, at_9=[[number, "m", 0, b""] for number in numbers]))
    assert [delivery.number for delivery in b.received(head, [])] == [n for n in numbers[:1] if n]


class Links(RuleBasedStateMachine):
    """Two peers, a connection each way that loses all it holds when it breaks, and programs that
    take in any order. One of them, b, dies now and then, and comes back as another process. They
    send more than their bounds allow, and hear only so much."""

    def __init__(self) -> None:
        super().__init__()
        self.incarnations = itertools.count(100)
        self.names = ("a", "b")
        self.links = {name: self.new_link(name) for name in self.names}
        self.packets: dict[str, deque[Packet]] = {name: deque() for name in self.names}  # to it
        self.inboxes: dict[str, list[Delivery]] = {name: [] for name in self.names}
        self.num_sent = dict.fromkeys(self.names, 0)
        # What each has got, by the process that got it, and what was taken by one.
        self.got: dict[str, list[int]] = {name: [] for name in self.names}
        self.taken_of_a: set[int] = set()
        self.links["b"].listed(self.links["a"].own_incarnation)
        self.links["a"].listed(self.other)

    def new_link(self, name: str) -> Link:
        other = "b" if name == "a" else "a"
        link = Link(name, next(self.incarnations), other, Totals(Bounds(max_messages_in_all=3)))
        link.connected()
        return link

    @property
    def other(self) -> int:
        """The process that b is now."""
        return self.links["b"].own_incarnation

    def put(self, name: str, packet: Packet | None) -> None:
        if packet is not None:
            self.packets["b" if name == "a" else "a"].append(packet)

    @rule(name=st.sampled_from("ab"))
    def send(self, name: str) -> None:
        self.num_sent[name] += 1
        self.put(name, send(self.links[name], b"%d" % self.num_sent[name]))

    @rule(name=st.sampled_from("ab"), number=st.integers(2, 4))
    def send_batch(self, name: str, number: int) -> None:
        """Several messages in one packet."""
        for _ in range(number):
            self.num_sent[name] += 1
            body = b"%d" % self.num_sent[name]
            self.links[name].keep(MESSAGE, [body], len(body))
        self.put(name, self.links[name].next_packet())

    @rule(name=st.sampled_from("ab"), number=st.integers(1, 5))
    def deliver(self, name: str, number: int) -> None:
        for _ in range(min(number, len(self.packets[name]))):
            packet = self.packets[name].popleft()
            head = read_head(packet[0])
            found: list[Delivery] = []
            with suppress(MalformedMessage):  # more than it hears
                found = self.links[name].received(head, packet[1:])
            for again in self.links[name].answer_to(head):
                self.put(name, again)
            self.delivered(name, found)

    def delivered(self, name: str, found: list[Delivery]) -> None:
        for delivery in found:
            self.inboxes[name].append(delivery)
            # The last words of an earlier process may be heard until the next one is.
            if name == "b" or delivery.incarnation == self.other:
                self.got[name].append(int(bytes(delivery.frames[0])))

    @rule(name=st.sampled_from("ab"), data=st.data())
    def take(self, name: str, data: st.DataObject) -> None:
        if self.inboxes[name]:
            position = data.draw(st.integers(0, len(self.inboxes[name]) - 1))
            delivery = self.inboxes[name].pop(position)
            if name == "b":
                self.taken_of_a.add(int(bytes(delivery.frames[0])))
            self.take_one(name, delivery)

    def take_one(self, name: str, delivery: Delivery) -> None:
        if self.links[name].take(delivery):
            self.put(name, self.links[name].ack())

    @rule(name=st.sampled_from("ab"))
    def ack(self, name: str) -> None:
        self.put(name, self.links[name].ack())

    @rule(to=st.sampled_from("ab"), data=st.data())
    def break_connection(self, to: str, data: st.DataObject) -> None:
        """Some of its end is lost; the sender hears of it and sends again."""
        waiting = self.packets[to]
        for _ in range(data.draw(st.integers(0, len(waiting)))):
            waiting.pop()
        sender = "b" if to == "a" else "a"
        for packet in self.links[sender].connected():
            self.put(sender, packet)

    @rule(name=st.sampled_from("ab"), loses=st.sampled_from(["what comes", "an ack", "a break"]))
    def interrupt(self, name: str, loses: str) -> None:
        """Something is lost in it that is said but once."""
        if loses == "what comes" and self.packets[name]:
            self.packets[name].popleft()
        elif loses == "an ack":
            self.links[name].ack()
        elif loses == "a break":
            self.packets["b" if name == "a" else "a"].clear()
        self.put(name, self.links[name].where())

    @precondition(lambda self: self.num_sent["a"] > 3)
    @rule()
    def die(self) -> None:
        """b, with all that it has not taken and all that it has sent."""
        self.links["b"] = self.new_link("b")
        self.links["b"].listed(self.links["a"].own_incarnation)
        self.packets["b"].clear()
        self.inboxes["b"].clear()
        self.got["b"] = []
        self.num_sent["b"] = 0
        self.got["a"] = []
        self.packets["a"].clear()

    @rule()
    def tell(self) -> None:
        """The roster, which process b is; a makes a new connection then."""
        self.links["a"].listed(self.other)
        self.packets["b"].clear()
        for packet in self.links["a"].connected():
            self.put("a", packet)

    @rule(data=st.data())
    def tell_an_earlier_one(self, data: st.DataObject) -> None:
        """A roster that has lost all may."""
        self.links["a"].listed(data.draw(st.integers(1, self.links["a"]._incarnation)))

    @rule()
    def make_up(self) -> None:
        """Send a packet of another process under the name of b."""
        made_up = Link("b", 10**18, "a")
        made_up.keep(MESSAGE, [b"0"], 1)
        for packet in made_up.connected():
            self.packets["a"].append(packet)

    @invariant()
    def waiting_messages_are_bounded(self) -> None:
        for name in self.names:
            totals = self.links[name].totals
            assert len(self.links[name]._untaken) <= 3
            assert totals.num_waiting == len(self.inboxes[name])
            assert totals.waiting_bytes == sum(one.num_bytes for one in self.inboxes[name])

    @invariant()
    def all_comes_once_and_in_order(self) -> None:
        for numbers in self.got.values():
            assert numbers == sorted(set(numbers))
        assert self.got["a"] == list(range(1, len(self.got["a"]) + 1))

    @invariant()
    def nothing_that_was_not_taken_is_forgotten(self) -> None:
        """The sender keeps a message until a process has taken it."""
        assert set(range(1, self.num_sent["a"] + 1)) - self.taken_of_a <= set(self.links["a"]._kept)

    def teardown(self) -> None:
        """In the end all messages are there, though no connection breaks any more."""
        self.tell()
        for _ in range(1000):
            if not any(self.packets.values()) and not any(self.inboxes.values()):
                break
            for name in self.names:
                self.deliver(name, 10**6)
                while self.inboxes[name]:
                    delivery = self.inboxes[name].pop()
                    if name == "b":
                        self.taken_of_a.add(int(bytes(delivery.frames[0])))
                    self.take_one(name, delivery)
                self.ack(name)
        assert self.got["a"] == list(range(1, self.num_sent["b"] + 1))
        assert self.taken_of_a == set(range(1, self.num_sent["a"] + 1))
        assert not self.links["a"].num_kept
        assert not self.links["b"].num_kept


TestLinks: Any = Links.TestCase
TestLinks.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
