"""That every message comes once and in order, over lines that lose."""

import itertools
from collections import deque
from collections.abc import Iterable, Sequence
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
    MESSAGE,
    Bounds,
    Delivery,
    Link,
    Outbox,
    Packet,
    Untaken,
    read_head,
)


def received(link: Link, packet: Packet) -> Delivery | None:
    """Deliver a packet of at most one new message."""
    found = link.received(read_head(packet[0]), packet[1:])
    assert len(found) <= 1
    return found[0] if found else None


def heard(link: Link, packets: Iterable[Packet]) -> list[Delivery]:
    """Deliver packets of any number of messages."""
    return [
        delivery
        for packet in packets
        for delivery in link.received(read_head(packet[0]), packet[1:])
    ]


def ends(outbox_of_a: Outbox | None = None) -> tuple[Link, Link]:
    """Of one line, that stands."""
    a, b = Link("a", 10, "b", outbox_of_a or Outbox()), Link("b", 20, "a")
    assert a.connected() == b.connected() == []
    return a, b


def test_what_is_sent_is_kept_until_it_is_taken() -> None:
    """Having come is not enough; the word of it travels with the next message."""
    a, b = ends()
    packet = a.send(MESSAGE, [b"one"])
    assert packet is not None
    delivery = received(b, packet)
    assert delivery is not None
    assert list(delivery.frames) == [b"one"]
    answer = b.send(MESSAGE, [b"early"])
    assert answer is not None
    received(a, answer)
    assert a.num_kept == 1
    assert b.take(delivery) is None
    answer = b.send(MESSAGE, [b"late"])
    assert answer is not None
    received(a, answer)
    assert a.num_kept == 0
    assert a.kept_bytes == 0
    assert b.ack() is None


def told(link: Link, ack: Packet | None) -> list[Packet]:
    """It hears of what is taken. Returns what it sends again."""
    assert ack is not None
    assert received(link, ack) is None
    return link.again(read_head(ack[0]))


def deliver(a: Link, b: Link, number: int) -> list[Delivery]:
    """So many messages from one to the other."""
    found = [received(b, a.send(MESSAGE, [b"%d" % i]) or []) for i in range(number)]
    return [delivery for delivery in found if delivery is not None]


def bodies(found: Sequence[Delivery | None]) -> list[bytes]:
    return [bytes(delivery.frames[0]) for delivery in found if delivery is not None]


def test_what_is_taken_before_what_came_earlier_is_told() -> None:
    """One that nobody takes holds up no other: a reply is taken before a message that waits."""
    a, b = ends()
    first, second, third = deliver(a, b, 3)
    b.take(third)
    told(a, b.ack())
    assert a.num_kept == 2
    for delivery in deliver(a, b, 200):
        ack = b.take(delivery)
        if ack is not None:
            told(a, ack)
    told(a, b.ack())
    assert a.num_kept == 2
    # Another process gets just those two, and what is new.
    new = Link("b", 21, "a")
    assert bodies(heard(new, a.connected())) == [b"0", b"1"]
    assert bodies([received(new, a.send(MESSAGE, [b"new"]) or [])]) == [b"new"]
    b.take(first)
    b.take(second)


def test_the_word_of_what_is_taken_is_repeated() -> None:
    """It was on a line that broke; the sender has nothing new, and its outbox is full."""
    a, b = ends()
    (delivery,) = deliver(a, b, 1)
    b.take(delivery)
    assert b.ack() is not None  # and it is lost
    assert b.ack() is None
    for packet in b.connected():
        assert received(a, packet) is None
    assert a.num_kept == 0


def test_who_sends_again_what_is_taken_is_told_so() -> None:
    """With the next word, though nothing new is taken."""
    a, b = ends()
    (delivery,) = deliver(a, b, 1)
    b.take(delivery)
    assert b.ack() is not None
    for packet in a.connected():
        assert received(b, packet) is None
    assert b.owes_ack
    told(a, b.ack())
    assert a.num_kept == 0


def test_an_ack_goes_out_after_so_many() -> None:
    """Without waiting for anything that could carry it."""
    a, b = ends()
    acks = []
    for _ in range(2 * ACK_EVERY):
        delivery = received(b, a.send(MESSAGE, [b"x"]) or [])
        assert delivery is not None
        acks.append(b.take(delivery))
    assert [bool(ack) for ack in acks] == ([False] * (ACK_EVERY - 1) + [True]) * 2


def test_what_is_lost_comes_over_the_next_connection() -> None:
    """In order, and what had come is dropped."""
    a, b = ends()
    first, _, third = [a.send(MESSAGE, [b"%d" % i]) or [] for i in range(3)]
    assert received(b, first) is not None
    assert received(b, third) is None  # there is a gap
    assert bodies(heard(b, a.connected())) == [b"1", b"2"]
    assert a.send(MESSAGE, [b"3"]) is not None


def test_nothing_goes_to_one_that_is_away() -> None:
    """It is kept, within bounds, and goes out when it is back."""
    outbox = Outbox(Bounds(max_messages=3, max_bytes=1000))
    a, b = Link("a", 10, "b", outbox), Link("b", 20, "a")
    for i in range(3):
        assert a.why_no_room(100) is None
        assert a.send(MESSAGE, [b"%d" % i * 100]) is None
    assert "3 messages of 300 bytes" in (a.why_no_room(1) or "")
    outbox.bounds = Bounds(max_messages=9, max_bytes=1000)
    assert a.why_no_room(701) is not None
    assert a.why_no_room(700) is None
    assert len(heard(b, a.connected())) == 3


def test_there_is_always_room_for_the_first() -> None:
    """However large it is; but for one that is away only if nothing else is kept."""
    outbox = Outbox(Bounds(1, 1, 1, 1))
    away, here = Link("a", 1, "b", outbox), Link("a", 1, "c", outbox)
    here.connected()
    for link in (away, here):
        assert link.why_no_room(10**12) is None
    here.send(MESSAGE, [b"x"])
    assert "all peers together" in (away.why_no_room(1) or "")


def test_all_peers_together_have_their_bound() -> None:
    """Of messages and of bytes; what is taken or forgotten makes room."""
    outbox = Outbox(Bounds(max_messages_in_all=2, max_bytes_in_all=1000))
    (a, b), other = ends(outbox), Link("a", 10, "c", outbox)
    (delivery,) = deliver(a, b, 1)
    assert a.why_no_room(999) is None
    assert a.why_no_room(1000) is not None
    other.send(MESSAGE, [b"x" * 50])
    assert (outbox.num_messages, outbox.num_bytes) == (2, 51)
    assert a.why_no_room(1) is not None
    b.take(delivery)
    told(a, b.ack())
    assert other.why_no_room(1) is None
    other.forget()
    assert (outbox.num_messages, outbox.num_bytes, other.num_kept) == (0, 0, 0)


@pytest.mark.parametrize("bounds", [Bounds(max_messages=8), Bounds(max_bytes=8)])
def test_who_keeps_to_no_bounds_is_not_heard(bounds: Bounds) -> None:
    """Until half of what it has sent is taken; then it is asked to go on, over the same connection,
    and nothing is lost. The program hears of it once."""
    a, b = Link("a", 10, "b"), Link("b", 20, "a", Outbox(bounds))
    for link in (a, b):
        link.connected()
    found = deliver(a, b, 8)
    with pytest.raises(MalformedMessage, match="not taken"):
        received(b, a.send(MESSAGE, [b"x"]) or [])
    assert received(b, a.send(MESSAGE, [b"y"]) or []) is None  # there is a gap
    acks = [b.take(delivery) for delivery in found]
    assert [ack is not None for ack in acks] == [i == 4 for i in range(8)]
    again = told(a, acks[4])
    assert bodies(heard(b, again)) == [b"x", b"y"]
    assert told(a, b.ack()) == []
    assert bodies([received(b, a.send(MESSAGE, [b"z"]) or [])]) == [b"z"]


def test_what_is_behind_a_gap_is_asked_for() -> None:
    """Once, since it is on its way then; but over another connection once more."""
    a, b = ends()
    a.send(MESSAGE, [b"lost"])
    for text in (b"1", b"2"):
        assert received(b, a.send(MESSAGE, [text]) or []) is None
    ack = b.ack()
    assert not b.owes_ack
    assert received(b, a.send(MESSAGE, [b"3"]) or []) is None
    assert b.ack() is None
    (ack_once_more,) = b.connected()
    again = told(a, ack)
    assert bodies(heard(b, again)) == [b"lost", b"1", b"2", b"3"]
    assert heard(b, told(a, ack_once_more)) == []


def test_what_a_stranger_sent_is_asked_for_when_it_is_none_any_more() -> None:
    """It was dropped, and nothing is known but that its process is in the group now."""
    a = Link("a", 10, "b")
    a.connected()
    a.send(MESSAGE, [b"first"])
    b = Link("b", 20, "a")
    b.listed(10, has_missed=True)
    (ask,) = b.connected()
    assert bodies(heard(b, told(a, ask))) == [b"first"]


@pytest.mark.parametrize("seen", ["what follows", "an interrupt", "a new line"])
def test_what_is_missed_while_too_much_waits_is_asked_for_later(seen: str) -> None:
    """When others are taken, though nobody takes what waits of this peer itself."""
    bounds, waiting = Bounds(max_messages_in_all=8), Untaken()
    a, other = (Link("a", 10, name, Outbox(bounds), waiting) for name in "bc")
    b, c = (Link(name, 20, "a") for name in "bc")
    for link in (a, other, b, c):
        link.connected()
    deliver(b, a, 1)
    lost = [b.send(MESSAGE, [b"lost"]) or []]
    waits = deliver(c, other, 4)
    assert waiting.fills(0.5, bounds)
    if seen == "what follows":
        lost.append(b.send(MESSAGE, [b"after it"]) or [])
        assert received(a, lost[1]) is None
    else:
        a.missed()
    if seen == "a new line":
        a.gone()
        waiting.behind.clear()  # as when it is looked at meanwhile
        a.connected()
    assert waiting.behind == {"b": a}
    assert not a.owes_ack
    for delivery in waits:
        other.take(delivery)
    assert a.is_behind
    assert a.owes_ack
    again = heard(a, told(b, a.ack()))
    assert bodies(again) == [b"lost", b"after it"][: len(lost)]
    assert not a.is_behind


def test_what_came_again_and_found_no_room_is_asked_for_once_more() -> None:
    """Others have filled it meanwhile."""
    bounds, waiting = Bounds(max_messages_in_all=8), Untaken()
    a, other = (Link("a", 10, name, Outbox(bounds), waiting) for name in "bc")
    b, c = (Link(name, 20, "a") for name in "bc")
    for link in (a, other, b, c):
        link.connected()
    deliver(b, a, 1)
    lost = b.send(MESSAGE, [b"lost"])
    waits = deliver(c, other, 8 - 1)
    assert lost is not None
    with pytest.raises(MalformedMessage, match="not taken"):
        received(a, lost)
    for _ in range(2):
        while not a.owes_ack:
            other.take(waits.pop())
        asked = a.ack()
        waits += deliver(c, other, 8 - waiting.num_messages)
        assert heard(a, told(b, asked)) == []
    for delivery in waits:
        other.take(delivery)
    again = heard(a, told(b, a.ack()))
    assert bodies(again) == [b"lost"]


def test_a_head_adds_no_more_than_is_said() -> None:
    """With the longest names and numbers, and as much untaken as may be."""
    outbox = Outbox(Bounds(max_messages=12), last_number=2**63)
    a, b = Link("a" * 128, 2**63, "b" * 128, outbox), Link("b" * 128, 2**63, "a" * 128, outbox)
    for link in (a, b):
        link.connected()
    sent = [a.send(MESSAGE, [b"x"]) or [] for _ in range(12)]
    b.take(heard(b, sent)[-1])
    (answer,) = b.send(MESSAGE, [bytes(1000)]) or []
    assert len(answer) <= 1000 + MAX_HEAD_BYTES


def test_numbers_go_on_for_one_who_was_forgotten() -> None:
    """If the same process comes back, it has heard of the former ones, and would drop others."""
    outbox = Outbox()
    a, b = ends(outbox)
    for delivery in deliver(a, b, 3):
        b.take(delivery)
    told(a, b.ack())
    anew = Link("a", 10, "b", outbox)
    anew.connected()
    assert bodies([received(b, anew.send(MESSAGE, [b"new"]) or [])]) == [b"new"]


def test_another_process_gets_what_the_one_before_has_not_taken() -> None:
    """And nothing that it has; what the old one still sends is not heard."""
    a, b = ends()
    first, *_ = deliver(a, b, 3)
    b.take(first)
    told(a, b.ack())
    late = b.send(MESSAGE, [b"late"])
    new = Link("b", 21, "a")
    assert new.connected() == []
    a.gone()
    assert bodies(heard(new, a.connected())) == [b"1", b"2"]
    hello = received(a, new.send(MESSAGE, [b"hello"]) or [])
    assert hello is not None
    assert received(a, late or []) is None
    assert a.take(hello) is None


def test_a_process_that_the_roster_does_not_know_is_not_heard() -> None:
    """Whatever number it has made up: not its messages, its word of what is taken, nor what it asks
    for. The real one goes on, and what is held counts no more when it is dropped."""
    a, b = Link("a", 10, "b"), Link("b", 20, "a")
    a.listed(20)
    for link in (a, b):
        link.connected()
    kept = a.send(MESSAGE, [b"kept"]) or []
    made_up = Link("b", 10**18, "a")
    made_up.connected()
    packet = made_up.send(MESSAGE, [b"x"]) or []
    made_up.take(received(made_up, kept) or pytest.fail("it has heard nothing"))
    ack = made_up.ack() or []
    for again in (packet, ack, made_up.send(MESSAGE, [b"y"]) or []):
        assert received(a, again) is None
    asker = Link("b", 10**18, "a")
    asker.listed(10, has_missed=True)
    (ask,) = asker.connected()
    assert received(a, ask) is None
    assert a.again(read_head(ask[0])) == []
    assert a.num_kept == 1
    assert bodies([received(a, b.send(MESSAGE, [b"real"]) or [])]) == [b"real"]
    assert a.waiting.num_messages == 5
    a.drop_held()
    assert (a.waiting.num_messages, a.waiting.num_bytes) == (1, 4)


def released(link: Link) -> list[Delivery]:
    """Deliver what a link has held until the roster told of a process."""
    return [one for head, frames in link.release() for one in link.received(head, frames)]


def comes_back(bounds: Bounds) -> tuple[Link, Link, Delivery]:
    """A link, that of a later process at the other end, and a message of the process before."""
    a, b = Link("a", 10, "b", Outbox(bounds)), Link("b", 20, "a")
    a.listed(20)
    for link in (a, b):
        link.connected()
    (old,) = deliver(b, a, 1)
    new = Link("b", 21, "a")
    new.connected()
    return a, new, old


def test_packets_are_held_until_the_roster_knows_of_their_process() -> None:
    """The program gets them in order and once, and their sender is not asked for them."""
    a, new, old = comes_back(Bounds())
    for number in range(3):
        assert received(a, new.send(MESSAGE, [b"%d" % number]) or []) is None
    assert a.is_holding
    a.listed(21)
    assert bodies(released(a)) == [b"0", b"1", b"2"]
    assert not a.is_holding
    a.take(old)  # which nobody waits for any more
    (ack,) = a.connected()
    assert read_head(ack[0]).kind == "a"
    assert (new.num_kept, new.has_unheard) == (3, True)
    assert told(new, ack) == []
    assert (new.num_kept, new.has_unheard) == (3, False)
    assert bodies([received(a, new.send(MESSAGE, [b"3"]) or [])]) == [b"3"]


@pytest.mark.parametrize(
    ("bounds", "num_held"), [(Bounds(max_messages=3), 3), (Bounds(max_bytes=4), 4)]
)
def test_packets_for_which_there_is_no_room_are_asked_for(bounds: Bounds, num_held: int) -> None:
    """The program hears once that some are dropped; all come in order and once."""
    a, new, old = comes_back(bounds)
    a.take(old)  # room to ask for more
    packets = [new.send(MESSAGE, [b"%d" % number]) or [] for number in range(6)]
    assert heard(a, packets[:num_held]) == []
    with pytest.raises(MalformedMessage, match=r"process 21, and 20 is the last"):
        received(a, packets[num_held])
    assert heard(a, packets[num_held + 1 :]) == []
    a.listed(21)
    found = released(a)
    assert bodies(found) == [b"%d" % i for i in range(num_held)]
    for delivery in found:
        a.take(delivery)
    (ask,) = a.connected()
    again = told(new, ask)
    assert bodies(heard(a, again)) == [b"%d" % i for i in range(num_held, 6)]


def test_packets_that_were_held_too_long_are_asked_for() -> None:
    a, new, _ = comes_back(Bounds())
    assert received(a, new.send(MESSAGE, [b"0"]) or []) is None
    a.drop_held()
    assert received(a, new.send(MESSAGE, [b"1"]) or []) is None
    assert not a.is_holding
    a.listed(21)
    assert released(a) == []
    (ask,) = a.connected()
    assert bodies(heard(a, told(new, ask))) == [b"0", b"1"]


def test_dropped_packets_are_asked_for_after_the_roster_has_told_of_a_process_between() -> None:
    a, _, old = comes_back(Bounds(max_messages=2))
    a.take(old)  # room to ask for more
    later = Link("b", 22, "a")
    later.connected()
    for number in range(2):
        assert received(a, later.send(MESSAGE, [b"%d" % number]) or []) is None
    with pytest.raises(MalformedMessage, match="process 22"):
        received(a, later.send(MESSAGE, [b"2"]) or [])
    for incarnation in (21, 22):
        a.listed(incarnation)
        assert not any(released(a))
    (ask,) = a.connected()
    assert bodies(heard(a, told(later, ask))) == [b"0", b"1"]  # and the rest when they are taken


def test_messages_that_a_former_process_has_heard_are_unheard_by_the_next() -> None:
    """A proxy that closes waits for the next process too."""
    a, b = ends()
    a.listed(20)
    taken, _ = deliver(a, b, 2)
    b.take(taken)
    told(a, b.ack())
    assert (a.num_kept, a.has_unheard) == (1, False)
    a.listed(21)
    assert len(a.connected()) == 1
    assert a.has_unheard


def test_the_roster_is_right_about_a_name_that_was_not_in_it() -> None:
    """Somebody had used it before, with a higher number."""
    a, made_up, b = Link("a", 10, "b"), Link("b", 10**18, "a"), Link("b", 20, "a")
    for link in (a, made_up, b):
        link.connected()
    deliver(made_up, a, 1)
    assert received(a, b.send(MESSAGE, [b"1"]) or []) is None
    a.listed(20)
    (ask,) = a.connected()
    assert bodies(heard(a, told(b, ask))) == [b"1"]


def test_a_process_that_the_roster_has_told_of_before_is_none_again() -> None:
    """Its place has been taken; what the later one has sent comes once, and goes on."""
    a, b = Link("a", 10, "b"), Link("b", 21, "a")
    a.listed(21)
    for link in (a, b):
        link.connected()
    former = Link("b", 20, "a")
    former.connected()
    # Also before the later one is heard.
    assert received(a, former.send(MESSAGE, [b"too late"]) or []) is None
    asker = Link("b", 20, "a")
    asker.listed(10, has_missed=True)
    (ask,) = asker.connected()
    a.send(MESSAGE, [b"kept"])
    assert a.again(read_head(ask[0])) == []
    taken, _ = deliver(b, a, 2)
    a.take(taken)
    for incarnation in (20, 21):
        a.listed(incarnation)
        for packet in a.connected():
            received(b, packet)
            assert [received(a, again) for again in b.again(read_head(packet[0]))] == []
    assert heard(a, b.connected()) == []
    assert bodies([received(a, b.send(MESSAGE, [b"next"]) or [])]) == [b"next"]


def test_what_was_on_its_way_when_another_process_came_is_heard() -> None:
    """Until that one is heard itself: it may be a last word."""
    a, b = Link("a", 10, "b"), Link("b", 20, "a")
    b.connected()
    a.listed(20)
    last = b.send(MESSAGE, [b"last"]) or []
    a.listed(21)
    assert a.connected() == []
    assert bodies([received(a, last)]) == [b"last"]


def test_what_may_have_been_lost_here_is_asked_for() -> None:
    """Also of one that has not been heard yet."""
    a, b = Link("a", 10, "b"), Link("b", 20, "a")
    for link in (a, b):
        link.connected()
    a.missed()
    assert a.ack() is None  # nobody is known who could be asked
    a.listed(20)
    b.send(MESSAGE, [b"lost"])
    a.missed()
    assert bodies(heard(a, told(b, a.ack()))) == [b"lost"]
    a.missed()
    assert told(b, a.ack()) == []


@pytest.mark.parametrize("lost", ["a message", "the word that it is lost", "its repetition"])
def test_who_may_have_lost_something_asks_where_the_other_is(lost: str) -> None:
    """Nothing follows that would show the gap, and what is said but once may be lost: a message,
    the question for it, or what answers that question. Nothing goes twice that has come."""
    a, b = ends()
    deliver(a, b, 2)
    a.send(MESSAGE, [b"lost"])
    asks = b
    if lost != "a message":
        received(b, a.send(MESSAGE, [b"after it"]) or [])
        question = b.ack()
        asks = a
        if lost == "its repetition":
            told(a, question)
            asks = b
    answers = a if asks is b else b
    where = asks.where()
    assert told(answers, where) == []
    ack = answers.ack()
    if asks is b:
        assert told(b, ack) == []
        ack = b.ack()
    expected = [b"lost"] if lost == "a message" else [b"lost", b"after it"]
    assert bodies(heard(b, told(a, ack))) == expected
    assert told(a, b.where()) == told(b, a.ack()) == []
    assert b.ack() is None


def test_a_message_tells_where_a_peer_is() -> None:
    """The answer travels with it: there is no ack that could tell."""
    a, b = ends()
    a.send(MESSAGE, [b"lost"])
    received(b, a.send(MESSAGE, [b"after it"]) or [])
    assert told(a, b.ack())  # and it is lost
    told(a, b.where())
    assert received(b, a.send(MESSAGE, [b"last"]) or []) is None
    assert a.ack() is None
    again = heard(b, told(a, b.ack()))
    assert bodies(again) == [b"lost", b"after it", b"last"]


@pytest.mark.parametrize("asks", ["who has taken it", "who keeps it"])
def test_where_a_peer_is_tells_what_it_has_taken(asks: str) -> None:
    """The word of it was lost, and its sender has no room for what would bring it again."""
    a, b = ends()
    (delivery,) = deliver(a, b, 1)
    b.take(delivery)
    assert b.ack() is not None  # and it is lost
    if asks == "who has taken it":
        told(a, b.where())
    else:
        told(b, a.where())
        told(a, b.ack())
    assert a.num_kept == 0


@pytest.mark.parametrize("is_known", [True, False])
def test_a_question_that_is_lost_with_its_line_is_asked_over_the_next(is_known: bool) -> None:
    """Also of one of whom nothing has been heard yet."""
    a, b = ends()
    b.listed(10)
    if is_known:
        deliver(a, b, 1)
    a.send(MESSAGE, [b"lost"])
    assert b.where() is not None
    (ack,) = b.connected()
    assert bodies(heard(b, told(a, ack))) == [b"lost"]


def test_one_that_is_not_known_to_be_away_hears_what_was_lost() -> None:
    """The first that goes to it is lost, with the word that the line has broken."""
    a, b = ends()
    a.send(MESSAGE, [b"lost"])
    told(b, a.where())
    assert bodies(heard(b, told(a, b.ack()))) == [b"lost"]


def test_what_former_processes_sent_counts_until_it_is_taken() -> None:
    """However often one comes back, no more waits than of one that stays; what is not heard of the
    last one is asked for when there is room."""
    a = Link("a", 10, "b", Outbox(Bounds(max_messages=4)))
    a.connected()
    found = []
    for incarnation in range(1, 100):
        b = Link("b", incarnation, "a")
        b.connected()
        a.listed(incarnation)
        with suppress(MalformedMessage):
            found.append(received(a, b.send(MESSAGE, [b"x"]) or []))
    deliveries = [delivery for delivery in found if delivery is not None]
    assert len(deliveries) == 4
    assert a.waiting.num_messages == 4
    acks = [a.take(delivery) for delivery in deliveries]
    assert [ack is not None for ack in acks] == [False, False, True, False]
    assert (a.waiting.num_messages, a.waiting.num_bytes, a.has_untaken) == (0, 0, False)
    assert bodies(heard(a, told(b, acks[2]))) == [b"x"]


@pytest.mark.parametrize("bounds", [Bounds(max_messages_in_all=8), Bounds(max_bytes_in_all=80)])
def test_all_peers_together_are_not_heard_beyond_their_bounds(bounds: Bounds) -> None:
    """But for one message of each, which somebody may await. When half of it is taken it is time to
    ask for the rest, of all of them."""
    outbox, waiting = Outbox(bounds), Untaken()
    here = [Link("a", 10, f"b-{i}", outbox, waiting) for i in range(20)]
    there = [Link(f"b-{i}", 20, "a") for i in range(20)]
    for link in (*here, *there):
        link.connected()
    found = []
    for _ in range(5):
        for a, b in zip(here, there, strict=True):
            with suppress(MalformedMessage):
                found.append((a, received(a, b.send(MESSAGE, [bytes(10)]) or [])))
    waits = [(a, delivery) for a, delivery in found if delivery is not None]
    assert len(waits) == waiting.num_messages == 20  # of 8 that may wait, and one of each
    assert waiting.num_bytes == 200
    assert waiting.behind.keys() == {link.name for link in here}
    asks: dict[str, Packet | None] = {}
    while waiting.fills(0.5, bounds):
        a, delivery = waits.pop()
        asks[a.name] = a.take(delivery)  # nothing of it waits any more
    assert len(asks) == 17
    for a in here[:3]:
        assert a.owes_ack
        asks[a.name] = a.ack()
    before = waiting.num_messages
    again = [
        delivery
        for a, b in zip(here, there, strict=True)
        for delivery in heard(a, told(b, asks[a.name]))
    ]
    # As many as may wait, and the first of each that had none.
    assert 8 <= waiting.num_messages == before + len(again) <= 8 + 17
    assert bodies(again) == [bytes(10)] * len(again)


GOOD = ["m", "a", "b", 1, 0, 1, 1, [], [[1, "m", 0, b""]]]


def changed(**fields: Any) -> bytes:
    """A head of which some fields, by their place, are others."""
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
        changed(at_0="a"),
        changed(at_1="a/b"),
        changed(at_1=1),
        changed(at_2=None),
        changed(at_3="1"),
        changed(at_4=-1),
        changed(at_5=True),
        changed(at_7=None),
        changed(at_7=["x"]),
        changed(at_7=[1]),
        changed(at_8=[]),
        changed(at_8=[[0, "m", 0, b""]]),
        changed(at_8=[[1, "x", 0, b""]]),
        changed(at_8=[[1, "m", -1, b""]]),
        changed(at_8=[[1, "m", 0, None]]),
        changed(at_8=[[2, "m", 0, b""], [2, "m", 0, b""]]),
    ],
)
def test_what_is_no_head_is_malformed(head: bytes) -> None:
    """Whatever a peer sends."""
    assert read_head(changed()).messages == [(1, "m", 0, b"")]
    with pytest.raises(MalformedMessage):
        read_head(head)


class Lines(RuleBasedStateMachine):
    """Two peers, a line each way that loses all it holds when it breaks, and applications that take
    in any order. One of them, b, dies now and then, and comes back as another process. They send
    more than their bounds allow, and hear only so much."""

    def __init__(self) -> None:
        super().__init__()
        self.incarnations = itertools.count(100)
        self.names = ("a", "b")
        self.links = {name: self.new_link(name) for name in self.names}
        self.lines: dict[str, deque[Packet]] = {name: deque() for name in self.names}  # to it
        self.inboxes: dict[str, list[Delivery]] = {name: [] for name in self.names}
        self.num_sent = dict.fromkeys(self.names, 0)
        # What each has got, by the process that got it, and what was taken by one.
        self.got: dict[str, list[int]] = {name: [] for name in self.names}
        self.taken_of_a: set[int] = set()
        self.links["a"].listed(self.other)

    def new_link(self, name: str) -> Link:
        other = "b" if name == "a" else "a"
        link = Link(name, next(self.incarnations), other, Outbox(Bounds(max_messages=3)))
        link.connected()
        return link

    @property
    def other(self) -> int:
        """The process that b is now."""
        return self.links["b"].own_incarnation

    def put(self, name: str, packet: Packet | None) -> None:
        if packet is not None:
            self.lines["b" if name == "a" else "a"].append(packet)

    @rule(name=st.sampled_from("ab"))
    def send(self, name: str) -> None:
        self.num_sent[name] += 1
        self.put(name, self.links[name].send(MESSAGE, [b"%d" % self.num_sent[name]]))

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
        for _ in range(min(number, len(self.lines[name]))):
            packet = self.lines[name].popleft()
            head = read_head(packet[0])
            found: list[Delivery] = []
            with suppress(MalformedMessage):  # more than it hears
                found = self.links[name].received(head, packet[1:])
            for again in self.links[name].again(head):
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
            place = data.draw(st.integers(0, len(self.inboxes[name]) - 1))
            delivery = self.inboxes[name].pop(place)
            if name == "b":
                self.taken_of_a.add(int(bytes(delivery.frames[0])))
            self.put(name, self.links[name].take(delivery))

    @rule(name=st.sampled_from("ab"))
    def ack(self, name: str) -> None:
        self.put(name, self.links[name].ack())

    @rule(to=st.sampled_from("ab"), data=st.data())
    def break_line(self, to: str, data: st.DataObject) -> None:
        """Some of its end is lost; the sender hears of it and sends again."""
        line = self.lines[to]
        for _ in range(data.draw(st.integers(0, len(line)))):
            line.pop()
        sender = "b" if to == "a" else "a"
        for packet in self.links[sender].connected():
            self.put(sender, packet)

    @rule(name=st.sampled_from("ab"), loses=st.sampled_from(["what comes", "an ack", "a break"]))
    def interrupt(self, name: str, loses: str) -> None:
        """Something is lost in it that is said but once."""
        if loses == "what comes" and self.lines[name]:
            self.lines[name].popleft()
        elif loses == "an ack":
            self.links[name].ack()
        elif loses == "a break":
            self.lines["b" if name == "a" else "a"].clear()
        self.put(name, self.links[name].where())

    @precondition(lambda self: self.num_sent["a"] > 3)
    @rule()
    def die(self) -> None:
        """b, with all that it has not taken and all that it has sent."""
        self.links["b"] = self.new_link("b")
        self.lines["b"].clear()
        self.inboxes["b"].clear()
        self.got["b"] = []
        self.num_sent["b"] = 0
        self.got["a"] = []
        self.lines["a"].clear()

    @rule()
    def tell(self) -> None:
        """The roster, which process b is; a makes a new connection then."""
        self.links["a"].listed(self.other)
        self.release()
        self.lines["b"].clear()
        for packet in self.links["a"].connected():
            self.put("a", packet)

    @rule(data=st.data())
    def tell_an_earlier_one(self, data: st.DataObject) -> None:
        """A roster that has lost all may."""
        self.links["a"].listed(data.draw(st.integers(1, self.links["a"]._newest)))
        self.release()

    @rule()
    def hold_no_longer(self) -> None:
        self.links["a"].drop_held()

    def release(self) -> None:
        """a handles what it has held."""
        for head, frames in self.links["a"].release():
            with suppress(MalformedMessage):  # more than it hears
                self.delivered("a", self.links["a"].received(head, frames))
            for again in self.links["a"].again(head):
                self.put("a", again)

    @rule()
    def make_up(self) -> None:
        """Somebody else uses the name of b."""
        made_up = Link("b", 10**18, "a")
        made_up.connected()
        made_up.send(MESSAGE, [b"0"])
        for packet in made_up.connected():
            self.lines["a"].append(packet)

    @invariant()
    def what_waits_is_bounded(self) -> None:
        """Of whichever process it is."""
        assert all(len(inbox) <= 3 for inbox in self.inboxes.values())
        for name in self.names:
            waiting = self.links[name].waiting
            held = self.links[name]._held
            assert len(held) <= 3
            assert waiting.num_messages == len(self.inboxes[name]) + len(held)
            assert waiting.num_bytes == sum(one.num_bytes for one in [*self.inboxes[name], *held])

    @invariant()
    def all_comes_once_and_in_order(self) -> None:
        for numbers in self.got.values():
            assert numbers == sorted(set(numbers))
        assert self.got["a"] == list(range(1, len(self.got["a"]) + 1))

    @invariant()
    def nothing_that_was_not_taken_is_forgotten(self) -> None:
        """By the sender, until a process has taken it."""
        assert set(range(1, self.num_sent["a"] + 1)) - self.taken_of_a <= set(self.links["a"]._kept)

    def teardown(self) -> None:
        """Though no line breaks any more, in the end all is there."""
        self.tell()
        for _ in range(1000):
            if not any(self.lines.values()) and not any(self.inboxes.values()):
                break
            for name in self.names:
                self.deliver(name, 10**6)
                while self.inboxes[name]:
                    delivery = self.inboxes[name].pop()
                    if name == "b":
                        self.taken_of_a.add(int(bytes(delivery.frames[0])))
                    self.put(name, self.links[name].take(delivery))
                self.ack(name)
        assert self.got["a"] == list(range(1, self.num_sent["b"] + 1))
        assert self.taken_of_a == set(range(1, self.num_sent["a"] + 1))
        assert not self.links["a"].num_kept
        assert not self.links["b"].num_kept


TestLines: Any = Lines.TestCase
TestLines.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
