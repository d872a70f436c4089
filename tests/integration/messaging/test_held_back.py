"""Senders whose messages find no room at a peer."""

import time
from functools import partial

from support.messaging import PATIENCE_S, taken, until
from xain_messaging.format.messages import Message, SessionMessage
from xain_messaging.links import Bounds
from xain_messaging.proxy import Proxy


def test_a_late_answer_in_the_queue_holds_up_no_other(lossy):
    """The late answer stays in the queue, and the connection goes on."""
    (a, _), (b, _) = lossy("a"), lossy("b", Bounds(max_messages=8))
    late = a.isend(SessionMessage("ask", "a", "b"))
    assert a.receive_by_id(late, 0.05).missing == ("b",)
    b.reply(taken(b))
    for _ in range(20):
        session = a.isend(SessionMessage("ask", "a", "b"))
        b.reply(taken(b))
        a.receive_by_id(session).complete()
    assert len(a.receive_by_id(late)) == 1


def test_all_senders_together_are_held_back(lossy):
    """The waiting messages of all senders are bounded; the others come when there is room."""
    bounds = Bounds(max_messages_in_all=8)
    a, _ = lossy("a", bounds)
    others = [lossy(f"b-{i}")[0] for i in range(10)]
    for other in others:
        for i in range(10):
            other.isend(Message("t", other.name, "a", i))
    until(lambda: len(a.endpoint._totals.behind) == 10, "too much of all")
    assert 8 <= len(a.endpoint.inbox) <= 8 + 9  # and one at least of each
    found = {other.name: [] for other in others}

    def all_has_come() -> bool:
        for message in a.receive(0.02):
            found[message.source].append(message.body)
            assert len(a.endpoint.inbox) <= 8 + len(others)
        for other in others:
            other.receive_by_id("none", 0.01)
        return all(len(bodies) >= 10 for bodies in found.values())

    until(all_has_come, "all")
    assert all(bodies == list(range(10)) for bodies in found.values())
    assert (a.endpoint._totals.num_waiting, a.endpoint._totals.waiting_bytes) == (0, 0)


def test_sender_held_back_by_others_is_asked_when_theirs_are_taken(lossy):
    """No message of its own need be taken for that."""
    (a, _), (b, _), (c, _) = lossy("a", Bounds(max_messages_in_all=8)), lossy("b"), lossy("c")
    for _ in range(8):
        b.isend(Message("t", "b", "a", session_id="of b"))
    until(lambda: len(a.endpoint.inbox) == 8, "those of b")
    for _ in range(2):
        c.isend(Message("t", "c", "a"))
    until(lambda: "c" in a.endpoint._totals.behind, "those of c")
    assert len(a.endpoint.inbox) == 8 + 1
    assert len(a.receive_by_id(["of b"] * 8)) == 8
    until(partial(has_heard, a, c, 2), "the second of c")


def test_held_back_peers_are_asked_when_others_are_answered(lossy):
    """A program that answers each message takes it with the answer, and not with its next wait."""
    (a, _), (b, _), (c, _) = lossy("a", Bounds(max_messages_in_all=8)), lossy("b"), lossy("c")
    a.endpoint.probe_s = 10 * PATIENCE_S
    until(lambda: a.endpoint._probe_at > time.monotonic() + PATIENCE_S, "the I/O thread to see it")
    for _ in range(8):
        b.isend(SessionMessage("ask", "b", "a"))
    until(lambda: len(a.endpoint.inbox) == 8, "those of b")
    for _ in range(2):
        c.isend(Message("t", "c", "a"))
    until(lambda: "c" in a.endpoint._totals.behind, "those of c")
    for _ in range(8):
        a.reply(taken(a))
    until(lambda: len(a.endpoint.inbox) == 2, "those of c")


def has_heard(a: Proxy, c: Proxy, number: int) -> bool:
    """Whether so many messages wait at the first now, after both have done what is due."""
    for proxy in (a, c):
        proxy.receive_by_id("none", 0.02)
    return len(a.endpoint.inbox) == number
