"""Peers that talk to each other, on every driver."""

import math
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from integration.messaging.conftest import Group
from support.messaging import PATIENCE_S, until
from xain_membership.errors import Closed, TimedOut
from xain_membership.in_process import InProcessDiscovery
from xain_membership.ports import Membership
from xain_messaging import endpoint as endpoint_module
from xain_messaging import proxy as proxy_module
from xain_messaging.drivers.in_process import InProcessDriver, Switchboard
from xain_messaging.errors import (
    InvalidMessage,
    OutboxFull,
    PeersMissing,
)
from xain_messaging.format.codec import Frames
from xain_messaging.format.messages import Message, SessionMessage, SessionType, TaskSessionStage
from xain_messaging.inbox import Awaited
from xain_messaging.links import BATCH_MESSAGES, MESSAGE, Bounds, read_head
from xain_messaging.proxy import Proxy


class Clock:
    """The time of all proxies here, which may run ahead."""

    def __init__(self) -> None:
        self._ahead_s = 0.0

    def monotonic(self) -> float:
        return time.monotonic() + self._ahead_s

    def let_pass(self, seconds: float, proxy: Proxy) -> None:
        """Let time pass, and wake the threads that wait in this proxy."""
        self._ahead_s += seconds
        proxy.endpoint.wake()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """A clock with which a time is over only when all has happened that should happen within it."""
    clock = Clock()
    for module in (endpoint_module, proxy_module):
        monkeypatch.setattr(module, "time", clock)
    return clock


def awaited(proxy: Proxy) -> list[str]:
    """Peers of whom an answer is awaited, once for each."""
    with proxy.endpoint.lock:
        return [name for asked in proxy._asked.values() for name in Counter(asked).elements()]


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


def test_peer_that_has_not_answered_in_time_is_named(group: Group, clock: Clock) -> None:
    """The answers that have come are given; the time is for all together."""
    master = group("master")
    quick, slow = group("worker", name="quick"), group("worker", name="slow")
    until(lambda: len(master.peers.get("worker", [])) == 2, "the workers")
    thread = double(quick)
    with ThreadPoolExecutor(1) as pool:
        bodies = [("quick", 1), ("slow", 2)]
        scatter = pool.submit(master.scatter, "x", SessionType.TASK, bodies, timeout_s=1000.0)
        until(lambda: awaited(master) == ["slow"], "the answer of the quick one")
        clock.let_pass(1000.0, master)
        replies = scatter.result(PATIENCE_S)
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


def test_ask_returns_the_body_of_the_answer(group: Group) -> None:
    """One call for one task to one peer; an answer that does not come is an error."""
    master, worker = group("master", name="master"), group("worker", name="worker")
    until(lambda: "worker" in master.peers, "the worker")
    with pytest.raises(PeersMissing, match="worker"):
        master.ask("worker", "double", 20, timeout_s=0.05)
    assert worker.receive_once() is not None
    thread = double(worker)
    assert master.ask("worker", "double", 21) == 42
    group.close()
    thread.join(PATIENCE_S)


def test_role_without_members_is_an_empty_list(group: Group) -> None:
    """There is no KeyError, and a look does not add the role."""
    peers = group("peer").peers
    assert peers["worker"] == []
    assert dict(peers) == {}


def test_scatter_does_not_wait_for_a_peer_that_leaves(group: Group) -> None:
    """A peer that leaves before it answers is missing as soon as it has left; so is a peer that had
    left before, though it is sent to."""
    master = group("master")
    quick, slow = group("worker", name="quick"), group("worker", name="slow")
    until(lambda: len(master.peers["worker"]) == 2, "the workers")
    thread = double(quick)
    bodies = [("quick", 1), ("slow", 2)]
    with ThreadPoolExecutor(1) as pool:
        scatter = pool.submit(master.scatter, "double", SessionType.TASK, bodies, timeout_s=1e6)
        until(lambda: awaited(master) == ["slow"], "the answer of the quick one")
        assert not scatter.done()
        slow.close()
        assert scatter.result(PATIENCE_S).missing == ("slow",)
        scatter = pool.submit(master.scatter, "double", SessionType.TASK, bodies, timeout_s=1e6)
        assert scatter.result(PATIENCE_S).missing == ("slow",)
    back = group("worker", name="slow")
    until(lambda: len(master.peers["worker"]) == 2, "both again")
    for_back = [back.receive_once() for _ in range(2)]
    assert [message.body for message in for_back if message] == [2, 2]
    with ThreadPoolExecutor(1) as pool:
        scatter = pool.submit(master.scatter, "double", SessionType.TASK, bodies, timeout_s=1e6)
        asked = back.receive_once()
        assert asked is not None
        assert not scatter.done()
        back.reply(asked, body=4)
        assert scatter.result(PATIENCE_S).missing == ()
    group.close()
    thread.join(PATIENCE_S)


def test_scatter_to_present_peers(group: Group) -> None:
    """A peer that is away gets nothing, also when it comes back, and is missing."""
    master, worker = group("master"), group("worker", name="here")
    away = group("worker", name="away")
    until(lambda: len(master.peers["worker"]) == 2, "the workers")
    away.close()
    until(lambda: master.peers["worker"] == ["here"], "one to be gone")
    thread = double(worker)
    bodies = [("away", 1), ("here", 2), ("never", 3)]
    replies = master.scatter("double", SessionType.TASK, bodies, only_here=True)
    assert ([reply.body for reply in replies], replies.missing) == ([4], ("away", "never"))
    back = group("worker", name="away")
    until(lambda: len(master.peers["worker"]) == 2, "both again")
    assert back.receive_once(0.1) is None
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
    with pytest.raises(InvalidMessage):
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


def test_wrong_message_is_refused_before_it_is_sent(group: Group) -> None:
    """A wrong body, peer or sender is refused, and nothing has gone out then."""
    a, b = group("peer", name="a"), group("peer", name="b")
    until(lambda: "peer" in a.peers, "the other")
    with pytest.raises(InvalidMessage, match=r"body\['x'\]\[1\].*set"):
        a.isend(Message("t", "a", "b", {"x": [1, {2}]}))
    with pytest.raises(PeersMissing, match="nobody"):
        a.isend(Message("t", "a", "nobody"))
    with pytest.raises(ValueError, match="as 'b'"):
        a.isend(Message("t", "b", "a"))
    a.isend(Message("t", "a", "b", "fine"))
    message = b.receive_once()
    assert message is not None
    assert message.body == "fine"


def test_the_sender_may_go_on_with_its_arrays(group: Group) -> None:
    """The array arrives as it was when it was sent."""
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
    """A bounded number of messages is kept for it; taken ones make room."""
    a = group("peer", name="a", bounds=Bounds(max_messages=4))
    b = group("peer", name="b")
    until(lambda: "peer" in a.peers, "the other")
    for i in range(4):
        a.isend(Message("t", "a", "b", i))
    with pytest.raises(OutboxFull, match="'b' has not taken 4 messages"):
        a.isend(Message("t", "a", "b", 4), timeout_s=0.2)
    thread = threading.Thread(target=lambda: a.isend(Message("t", "a", "b", 4)))
    thread.start()
    bodies = [message.body for _, message in zip(range(5), b.receive(PATIENCE_S), strict=False)]
    assert bodies == [0, 1, 2, 3, 4]
    thread.join(PATIENCE_S)
    assert not thread.is_alive()


def test_full_peer_holds_up_no_other(group: Group, clock: Clock) -> None:
    """The peers of a scatter that have room get their messages, and answer; the others are missing.
    Where no answer is awaited, the error names the peers that got something."""
    a = group("peer", name="a", bounds=Bounds(max_messages=1))
    b, c = group("peer", name="b"), group("peer", name="c")
    until(lambda: len(a.peers.get("peer", [])) == 2, "the others")
    a.isend(Message("t", "a", "b", 0))
    thread = double(c)
    bodies = [("b", 1), ("c", 2), ("b", 3)]
    with ThreadPoolExecutor(1) as pool:
        scatter = pool.submit(a.scatter, "double", SessionType.TASK, bodies, timeout_s=1000.0)
        until(lambda: len(a.endpoint.inbox) == 1, "the answer of c")
        clock.let_pass(1000.0, a)
        replies = scatter.result(PATIENCE_S)
    assert [(reply.source, reply.body) for reply in replies] == [("c", 4)]
    assert replies.missing == ("b", "b")
    assert a.send(SessionMessage("double", "a", "b", 4), timeout_s=0.1).missing == ("b",)
    with pytest.raises(OutboxFull, match="'b' has not taken 1 messages") as caught:
        a.iscatter("double", SessionType.TASK, bodies, timeout_s=0.1)
    ((name, session),) = caught.value.sent
    assert name == "c"
    assert [reply.body for reply in a.receive_by_id(session)] == [4]
    message = b.receive_once()
    assert message is not None
    assert message.body == 0
    assert b.receive_once(0.05) is None
    group.close()
    thread.join(PATIENCE_S)


def test_messages_that_wait_for_room_keep_their_order(group: Group) -> None:
    """A small message does not overtake a large one, and sessions keep the messages' order."""
    a = group("peer", name="a", bounds=Bounds(max_bytes=2000))
    b = group("peer", name="b")
    until(lambda: "peer" in a.peers, "the other")
    sessions: list[str] = []
    parts = [("b", bytes(i) if i % 3 else bytes(1200 + i)) for i in range(20)]
    thread = threading.Thread(
        target=lambda: sessions.extend(a.iscatter("t", SessionType.TASK, parts))
    )
    thread.start()
    until(lambda: a.endpoint._links["b"].num_kept == 3, "the first large one and the small ones")
    found = [message for _, message in zip(range(20), b.receive(PATIENCE_S), strict=False)]
    thread.join(PATIENCE_S)
    assert [("b", message.body) for message in found] == parts
    assert [message.session_id for message in found] == sessions


def test_below_the_minimal_number_senders_wait(group: Group) -> None:
    """The wait is bounded, and ends when a peer joins."""
    master = group("master", minimal_peers={"worker": 2}, minimal_peers_timeout_s=0.2)
    worker = group("worker", name="first")
    until(lambda: "worker" in master.peers, "the first")
    with pytest.raises(PeersMissing, match=r"worker \(1 of 2 are here\)"):
        master.isend(Message("t", master.name, "first"))
    group("worker", name="second")
    until(lambda: len(master.peers["worker"]) == 2, "the second")
    master.isend(Message("t", master.name, "first"))
    assert worker.receive_once() is not None


def test_expected_peers_that_do_not_come_are_named(group: Group) -> None:
    """Before anything begins; nobody of the failed one stays behind."""
    other = group("peer")
    with pytest.raises(PeersMissing, match=r"worker \(0 of 2 are here\)"):
        group("master", {"worker": 2}, join_timeout_s=0.3)
    until(lambda: "master" not in other.peers, "it to be gone")


def test_messages_that_are_not_awaited_stay(group: Group) -> None:
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
    """stop() may be called from another thread; close() ends it with an error."""
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


def test_stop_ends_receiving_though_more_comes(group: Group) -> None:
    """Messages that had come by then are taken; their follow-ups are not awaited."""
    a, b = group("peer", name="a"), group("peer", name="b")
    until(lambda: "peer" in a.peers, "the other")
    for i in range(3):
        a.isend(Message("t", "a", "b", i))
    num_taken = 0

    def all_is_there() -> bool:
        b.receive_by_id("none", 0.01)
        return len(b.endpoint.inbox) == 3 + num_taken

    for _ in b.receive(PATIENCE_S):
        num_taken += 1
        a.isend(Message("t", "a", "b"))
        a.isend(Message("t", "a", "b"))
        until(all_is_there, "what was sent")
        if num_taken == 3:
            b.stop()
        if num_taken == 20:
            break
    assert num_taken == 9
    assert b.receive_once() is None


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


def test_awaited_answer_is_for_the_thread_that_asked(group: Group) -> None:
    """One thread receives whatever comes while others ask; requests in the session that is awaited
    are for whoever receives."""
    a, b = group("peer", name="a"), group("peer", name="b")
    until(lambda: "peer" in a.peers and "peer" in b.peers, "each other")

    def ask_back(message: Message) -> None:
        there = b.receive_by_id(b.forward(message, "a", body="and back")).complete()
        b.reply(message, body=there[0].body)

    threads = [double(a), serve(b, ask_back)]
    for _ in range(20):
        replies = a.send(SessionMessage("ask", "a", "b"))
        assert [reply.body for reply in replies] == ["and back" * 2]
    group.close()
    for thread in threads:
        thread.join(PATIENCE_S)


def test_cancelled_receive_leaves_messages_for_other_receivers(group: Group) -> None:
    """A thread that waits already gets what somebody has given up on."""
    a, b = group("peer", name="a"), group("peer", name="b")
    until(lambda: "peer" in a.peers and "peer" in b.peers, "each other")
    bodies: list[object] = []
    threads = [serve(a, lambda message: bodies.append(message.body)), double(b)]
    awaited = Awaited({"s"})
    a.endpoint.inbox.reserve(awaited)
    a.isend(SessionMessage("double", "a", "b", 3, session_id="s"))
    until(lambda: len(a.endpoint.inbox) == 1, "the answer")
    assert [reply.body for reply in a.receive_by_id("s")] == [6]
    a.isend(SessionMessage("double", "a", "b", 4, session_id="s"))
    until(lambda: len(a.endpoint.inbox) == 1, "the answer")
    a._release(awaited)
    until(lambda: bodies == [8], "it")
    group.close()
    for thread in threads:
        thread.join(PATIENCE_S)


def peers_of(driver: type[InProcessDriver]) -> tuple[Proxy, Proxy]:
    """Two peers in one process, the second with a driver of this class."""
    discovery, switchboard = InProcessDiscovery(), Switchboard()
    drivers = (InProcessDriver(switchboard), driver(switchboard))
    a, b = (
        Proxy("g", "peer", name=name, discovery=discovery, driver=each, timeout_s=PATIENCE_S)
        for name, each in zip("ab", drivers, strict=True)
    )
    return a, b


def test_acknowledgement_travels_with_the_answer() -> None:
    """However long that took."""
    kinds: list[str] = []

    class Noting(InProcessDriver):
        def send(self, peer: str, frames: Frames) -> None:
            head = read_head(frames[0])
            assert head is not None
            kinds.append(head.kind)
            super().send(peer, frames)

    a, b = peers_of(Noting)
    a.endpoint.delay_s = b.endpoint.delay_s = 0.0
    with a, b:
        a.isend(Message("task", "a", "b"))
        task = b.receive_once()
        assert task is not None
        b.reply(task, "done")
        assert kinds == [MESSAGE]
        assert a.receive_once() is not None


def test_messages_that_wait_for_others_go_when_the_program_waits() -> None:
    """A stream travels in few packets, and an answer is not late for that."""
    packets: list[int] = []

    class Noting(InProcessDriver):
        def send(self, peer: str, frames: Frames) -> None:
            head = read_head(frames[0])
            if peer == "a" and head.kind == MESSAGE:
                packets.append(len(head.messages))
            super().send(peer, frames)

    a, b = peers_of(Noting)
    with a, b:
        for i in range(BATCH_MESSAGES):
            b.isend(Message("x", "b", "a", i))
        assert packets == [1]
        b.isend(Message("x", "b", "a", BATCH_MESSAGES))
        assert packets == [1, BATCH_MESSAGES]
        b.isend(Message("x", "b", "a"))
        assert packets == [1, BATCH_MESSAGES]
        assert b.receive_once(0.0) is None
        assert packets == [1, BATCH_MESSAGES, 1]


def test_missing_peer_was_asked_and_has_not_answered(group: Group) -> None:
    """A peer that was only answered is not missing, and nothing is remembered of others."""
    a, b, c = (group("peer", name=name) for name in "abc")
    until(lambda: all(len(p.peers.get("peer", [])) == 2 for p in (a, b, c)), "all")
    sessions = a.isend(SessionMessage("work", "a", "b"))
    for_b = b.receive_once()
    assert for_b is not None
    b.reply(for_b, ack_reply=True)
    onward = b.forward(for_b, "c")
    assert b.receive_by_id(onward, 0.05).missing == ("c",)
    for_c = c.receive_once()
    assert for_c is not None
    c.reply(for_c)
    b.receive_by_id(onward).complete()
    b.reply(for_b)
    a.receive_by_id(sessions).complete()
    for _ in range(100):
        a.isend(Message("note", "a", "c", session_id="one"))
    assert a.receive_by_id("one", 0.05).missing == ("c",)
    assert a._asked == {"one": ("c",) * 100}
    assert not b._asked
    assert not c._asked
    answered = a.isend(SessionMessage("work", "a", "b"))
    for_b = b.receive_once()
    assert for_b is not None
    b.reply(for_b)
    assert a.receive_once() is not None
    assert answered[0] not in a._asked


def test_a_barrier_opens_when_so_many_wait(group: Group) -> None:
    """Any members of the group count, and the barrier may be used again."""
    peers = [group(role) for role in ("master", "worker", "worker")]
    with ThreadPoolExecutor(3) as pool:
        for _ in range(2):
            waits = [pool.submit(peer.barrier, "epoch", 3) for peer in peers[:2]]
            with pytest.raises(TimedOut):
                peers[2].barrier("other", 2, timeout_s=0.05)
            assert not any(wait.done() for wait in waits)
            peers[2].barrier("epoch", 3)
            for wait in waits:
                wait.result(PATIENCE_S)
    for name, number in (("a/b", 2), ("epoch", 0)):
        with pytest.raises(ValueError, match="barrier"):
            peers[0].barrier(name, number)
    peers[0].close()
    with pytest.raises(Closed):
        peers[0].barrier("epoch", 1)


@pytest.mark.parametrize("method", ["receive", "events"])
def test_close_in_another_thread_ends_a_loop(group: Group, method: str) -> None:
    """A loop that begins after close() raises Closed, as other calls do."""
    proxy = group("peer")
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(lambda: list(getattr(proxy, method)()))
        until(lambda: bool(proxy.endpoint._waiters), "it to wait")
        proxy.close()
        assert found.result(PATIENCE_S) == []
    with pytest.raises(Closed):
        next(getattr(proxy, method)())


def test_after_stop_nothing_is_received_any_more(group: Group) -> None:
    """The stop is for good: later messages stay, for threads that await answers too."""
    a, b = group("peer", name="a"), group("peer", name="b")
    until(lambda: "peer" in a.peers and "peer" in b.peers, "each other")
    a.stop()
    assert a.receive_once() is None
    b.isend(Message("later", "b", "a"))
    thread = double(b)
    replies = a.send(SessionMessage("double", "a", "b", 3)).complete()
    assert [reply.body for reply in replies] == [6]
    assert len(a.endpoint.inbox) == 1
    assert list(a.receive()) == []
    group.close()
    thread.join(PATIENCE_S)


# --- coming back ----------------------------------------------------------------------------------


def test_messages_that_a_peer_had_not_taken_go_to_the_next(group_anywhere: Group) -> None:
    """Messages that had arrived, but that the application never saw, come again, in order."""
    group = group_anywhere
    master, worker = group("master", name="m"), group("worker", {"master": 1}, name="w")
    until(lambda: "worker" in master.peers, "the worker")
    for i in range(10):
        master.isend(Message("t", "m", "w", i))
    taken = [worker.receive_once() for _ in range(3)]
    assert [message.body for message in taken if message] == [0, 1, 2]

    def master_knows() -> bool:
        for proxy in (worker, master):  # the word goes out while somebody waits for something
            proxy.receive_by_id("none", 0.02)
        return master.endpoint._links["w"].num_kept == 7

    until(master_knows, "the word of what is taken")
    worker.close()
    back = group("worker", {"master": 1}, name="w")
    rest = [message.body for _, message in zip(range(7), back.receive(PATIENCE_S), strict=False)]
    assert rest == list(range(3, 10))


def test_a_close_may_linger_without_end(group: Group) -> None:
    """close() is over as soon as all has gone out. A peer that has said that it leaves is not
    waited for, though the group has not said so yet."""
    join, seen = group.discovery.join, {}

    def join_for_good(*names: str, on_change: Any, **options: Any) -> Membership:
        return join(*names, on_change=lambda now: on_change(seen | now), **options)

    group.discovery.join = join_for_good
    a, b = group("peer", name="a"), group("peer", name="b")
    until(lambda: a.peers["peer"] == ["b"], "the other")
    until(lambda: b.peers["peer"] == ["a"], "the first")
    seen |= a.endpoint.roster
    a.isend(Message("t", "a", "b"))
    a.close(math.inf)
    assert b.receive_once(PATIENCE_S) is not None
    until(lambda: "a" in b.endpoint.left, "the first has left")
    assert b.peers["peer"] == ["a"]
    b.close(math.inf)
