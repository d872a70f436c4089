"""Peers that talk to each other, on every driver."""

import threading
import time
from collections.abc import Callable

import numpy as np
import pytest

from integration.messaging.conftest import Group
from support.messaging import PATIENCE_S, until
from xain_messaging.errors import (
    BodyError,
    Closed,
    OutboxFull,
    PeersMissing,
    SessionError,
    TooFewPeers,
    UnknownPeer,
)
from xain_messaging.links import Bounds
from xain_messaging.messages import Message, SessionMessage, SessionType, TaskSessionStage
from xain_messaging.proxy import Proxy


def serve(proxy: Proxy, answer: Callable[[Message], None]) -> threading.Thread:
    """Answers in a thread until the proxy is closed."""

    def run() -> None:
        try:
            for message in proxy.receive():
                answer(message)
        except Closed:
            pass

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def double(proxy: Proxy) -> threading.Thread:
    """Answers with twice what it is given."""
    return serve(proxy, lambda message: proxy.reply(message, body=message.body * 2) and None)


def test_scatter_gathers_every_answer(group: Group) -> None:
    """One body each, one reply each, arrays among them."""
    master = group("master")
    workers = [group("worker", {"master": 1}) for _ in range(3)]
    until(lambda: len(master.peers.get("worker", [])) == 3, "the workers")
    threads = [double(worker) for worker in workers]
    bodies = {worker.name: np.arange(1000 * (i + 1.0)) for i, worker in enumerate(workers)}
    replies = master.scatter("double", SessionType.TASK, bodies.items())
    assert replies.missing == ()
    assert {reply.source for reply in replies} == bodies.keys()
    for reply in replies:
        np.testing.assert_array_equal(reply.body, bodies[reply.source] * 2)
        assert isinstance(reply, SessionMessage)
        assert reply.session_stage is TaskSessionStage.COMPLETE
    group.close()
    for thread in threads:
        thread.join(PATIENCE_S)


def test_broadcast_reaches_a_role_and_no_other(group: Group) -> None:
    """All of it, with one session for all."""
    master = group("master")
    workers = [group("worker") for _ in range(2)]
    bystander = group("bystander")
    until(lambda: len(master.peers.get("worker", [])) == 2, "the workers")
    sessions = master.ibroadcast("worker", "start", SessionType.NOTIFICATION, {"epoch": 3})
    assert len(sessions) == 2
    assert len(set(sessions)) == 1
    for worker in workers:
        message = worker.receive_once()
        assert message is not None
        assert (message.tag, message.body) == ("start", {"epoch": 3})
        worker.reply(message)
    assert len(master.receive_by_id(sessions)) == 2
    assert bystander.receive_once(0.05) is None
    with pytest.raises(PeersMissing, match="actor"):
        master.broadcast("actor", "start", SessionType.TASK)


def test_who_has_not_answered_in_time_is_named(group: Group) -> None:
    """The answers that have come are given; the time is for all together."""
    master = group("master")
    quick, slow = group("worker", name="quick"), group("worker", name="slow")
    until(lambda: len(master.peers.get("worker", [])) == 2, "the workers")
    thread = double(quick)
    before = time.monotonic()
    replies = master.scatter("x", SessionType.TASK, [("quick", 1), ("slow", 2)], timeout_s=0.5)
    assert time.monotonic() - before >= 0.5
    assert [reply.body for reply in replies] == [2]
    assert replies.missing == ("slow",)
    with pytest.raises(PeersMissing, match="slow"):
        replies.complete()
    late = slow.receive_once()
    assert late is not None
    slow.reply(late, body=4)
    message = master.receive_once()
    assert message is not None
    assert (message.source, message.body) == ("slow", 4)
    group.close()
    thread.join(PATIENCE_S)


def test_an_ack_is_not_the_answer(group: Group) -> None:
    """A task may be acknowledged first; send() waits for what completes it."""
    master, worker = group("master", name="master"), group("worker", {"master": 1}, name="worker")
    until(lambda: "worker" in master.peers, "the worker")
    sessions = master.isend(SessionMessage("work", "master", "worker", 20))
    task = worker.receive_once()
    assert task is not None
    worker.reply(task, ack_reply=True)
    assert master.receive_by_id(sessions, 0.2).missing == ("worker",)
    worker.reply(task, body=21)
    assert [reply.body for reply in master.receive_by_id(sessions)] == [21]
    with pytest.raises(SessionError):
        worker.reply(task, body=22)


def test_a_forwarded_task_is_answered_along_the_way(group: Group) -> None:
    """A asks B, B asks C in the same session, and both hear."""
    a, b, c = (group("peer", name=name) for name in "abc")
    until(lambda: len(a.peers.get("peer", [])) == 2, "the others")
    sessions = a.isend(SessionMessage("work", "a", "b", 1))
    for_b = b.receive_once()
    assert for_b is not None
    onward = b.forward(for_b, "c", body=2)
    for_c = c.receive_once()
    assert for_c is not None
    assert (for_c.source, for_c.tag, for_c.body) == ("b", "work", 2)
    assert for_c.session_id == sessions[0] == onward[0]
    c.reply(for_c, body=3)
    (from_c,) = b.receive_by_id(onward)
    b.reply(for_b, body=from_c.body + 1)
    assert [reply.body for reply in a.receive_by_id(sessions)] == [4]


def test_what_cannot_be_sent_is_refused_here(group: Group) -> None:
    """A body, a peer or a sender that is none; nothing has gone out then."""
    a, b = group("peer", name="a"), group("peer", name="b")
    until(lambda: "peer" in a.peers, "the other")
    with pytest.raises(BodyError, match=r"body\['x'\]\[1\].*set"):
        a.isend(Message("t", "a", "b", {"x": [1, {2}]}))
    with pytest.raises(UnknownPeer, match="nobody"):
        a.isend(Message("t", "a", "nobody"))
    with pytest.raises(ValueError, match="as 'b'"):
        a.isend(Message("t", "b", "a"))
    a.isend(Message("t", "a", "b", "fine"))
    message = b.receive_once()
    assert message is not None
    assert message.body == "fine"


def test_the_sender_may_go_on_with_its_arrays(group: Group) -> None:
    """What was sent is what the array was then."""
    a, b = group("peer", name="a"), group("peer", name="b")
    until(lambda: "peer" in a.peers, "the other")
    array = np.zeros(300_000)
    for i in range(5):
        array[:] = i
        a.isend(Message("t", "a", "b", array))
    array[:] = -1
    for i in range(5):
        message = b.receive_once()
        assert message is not None
        assert (message.body == i).all()
        message.body[:] = 7  # it is the receiver's own


def test_a_peer_that_does_not_receive_holds_its_sender(group: Group) -> None:
    """So much is kept for it, and no more; what is taken makes room."""
    a = group("peer", name="a", bounds=Bounds(max_messages=4))
    b = group("peer", name="b")
    until(lambda: "peer" in a.peers, "the other")
    for i in range(4):
        a.isend(Message("t", "a", "b", i))
    with pytest.raises(OutboxFull, match="'b' has not taken 4 messages"):
        a.isend(Message("t", "a", "b", 4), timeout_s=0.2)
    thread = threading.Thread(target=lambda: a.isend(Message("t", "a", "b", 4)))
    thread.start()
    bodies = [message.body for _, message in zip(range(5), b.receive(), strict=False)]
    assert bodies == [0, 1, 2, 3, 4]
    thread.join(PATIENCE_S)
    assert not thread.is_alive()


def test_below_the_minimal_number_senders_wait(group: Group) -> None:
    """For as long as they may; somebody who comes lets them go on."""
    master = group("master", minimal_peers={"worker": 2}, minimal_peers_timeout_s=0.2)
    worker = group("worker", name="first")
    until(lambda: "worker" in master.peers, "the first")
    with pytest.raises(TooFewPeers, match=r"worker \(1 of 2 are here\)"):
        master.isend(Message("t", master.name, "first"))
    group("worker", name="second")
    until(lambda: len(master.peers["worker"]) == 2, "the second")
    master.isend(Message("t", master.name, "first"))
    assert worker.receive_once() is not None


def test_expected_peers_who_do_not_come_are_named(group: Group) -> None:
    """Before anything begins; nobody of the failed one stays behind."""
    other = group("peer")
    with pytest.raises(PeersMissing, match=r"worker \(0 of 2 are here\)"):
        group("master", {"worker": 2}, join_timeout_s=0.3)
    until(lambda: "master" not in other.peers, "it to be gone")


def test_messages_that_nobody_awaits_stay(group: Group) -> None:
    """receive_by_id() takes its own; the others come in their order."""
    a, b = group("peer", name="a"), group("peer", name="b")
    until(lambda: "peer" in a.peers and "peer" in b.peers, "each other")
    b.isend(Message("one", "b", "a"))
    sessions = a.isend(SessionMessage("ask", "a", "b"))
    asked = b.receive_once()
    assert asked is not None
    b.isend(Message("two", "b", "a"))
    b.reply(asked, tag="answer")
    assert [reply.tag for reply in a.receive_by_id(sessions)] == ["answer"]
    assert [message.tag for message in a.receive(0.2)] == ["one", "two"]


def test_stop_ends_receiving(group: Group) -> None:
    """From another thread; and close() with an error."""
    proxy = group("peer")
    tags: list[str] = []
    thread = threading.Thread(target=lambda: tags.extend(m.tag for m in proxy.receive()))
    thread.start()
    proxy.stop()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
    other = group("peer")
    other.close()
    with pytest.raises(Closed):
        other.receive_once()


@pytest.mark.parametrize("timeout_s", [1e12, float("inf")])
def test_a_time_without_end(group: Group, timeout_s: float) -> None:
    """However it is written."""
    a, b = group("peer", name="a"), group("peer", name="b")
    until(lambda: "peer" in a.peers, "the other")
    timer = threading.Timer(0.1, lambda: a.isend(Message("t", "a", "b")))
    timer.start()
    message = b.receive_once(timeout_s)
    assert message is not None
    timer.join()


def test_several_threads_share_a_proxy(group: Group) -> None:
    """Each gets its own answers."""
    master, worker = group("master", name="master"), group("worker", name="worker")
    until(lambda: "worker" in master.peers and "master" in worker.peers, "each other")
    thread = double(worker)
    wrong: list[object] = []

    def ask(i: int) -> None:
        for j in range(50):
            number = 1000 * i + j
            replies = master.send(SessionMessage("double", "master", "worker", number))
            if [reply.body for reply in replies] != [2 * number]:
                wrong.append(replies)

    askers = [threading.Thread(target=ask, args=(i,)) for i in range(4)]
    for asker in askers:
        asker.start()
    for asker in askers:
        asker.join(PATIENCE_S)
    assert not wrong
    group.close()
    thread.join(PATIENCE_S)


# --- coming back ----------------------------------------------------------------------------------


def test_what_a_peer_had_not_taken_goes_to_the_next(group_anywhere: Group) -> None:
    """Messages that had arrived, but that the application never saw, come again, in order."""
    group = group_anywhere
    master, worker = group("master", name="m"), group("worker", {"master": 1}, name="w")
    until(lambda: "worker" in master.peers, "the worker")
    for i in range(10):
        master.isend(Message("t", "m", "w", i))
    taken = [worker.receive_once(), worker.receive_once()]
    assert [message.body for message in taken if message] == [0, 1]
    assert worker.receive_once(0.05) is not None  # 2; and its ack goes out with the wait
    worker.receive_by_id("none", 0.1)
    worker.close()
    back = group("worker", {"master": 1}, name="w")
    rest = [message.body for _, message in zip(range(7), back.receive(), strict=False)]
    assert rest == list(range(3, 10))
