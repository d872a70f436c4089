"""Peers that talk to each other, on every driver."""

import math
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from support.messaging import PATIENCE_S, taken, until
from support.waiting import beside
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


def test_scatter_gathers_every_answer(group):
    """One body each, one reply each, arrays among them."""
    master = group("master")
    workers = [group("worker", {"master": 1}) for _ in range(3)]
    until(lambda: len(master.peers.get("worker", [])) == 3, "the workers")
    group.double(*workers)
    bodies = {worker.name: np.arange(1000 * (i + 1.0)) for i, worker in enumerate(workers)}
    replies = master.scatter("double", SessionType.TASK, bodies.items())
    assert replies.missing == ()
    assert {reply.source for reply in replies} == bodies.keys()
    for reply in replies:
        np.testing.assert_array_equal(reply.body, bodies[reply.source] * 2)
        assert isinstance(reply, SessionMessage)
        assert reply.session_stage is TaskSessionStage.COMPLETE


def test_broadcast_reaches_a_role_and_no_other(group):
    """All of it, with one session for all."""
    master = group("master")
    workers = [group("worker") for _ in range(2)]
    bystander = group("bystander")
    until(lambda: len(master.peers.get("worker", [])) == 2, "the workers")
    sessions = master.ibroadcast("worker", "start", SessionType.NOTIFICATION, {"epoch": 3})
    assert len(sessions) == 2
    assert len(set(sessions)) == 1
    for worker in workers:
        message = taken(worker)
        assert (message.tag, message.body) == ("start", {"epoch": 3})
        worker.reply(message)
    assert len(master.receive_by_id(sessions)) == 2
    assert bystander.receive_once(0.05) is None
    with pytest.raises(PeersMissing, match="actor"):
        master.broadcast("actor", "start", SessionType.TASK)


def test_peer_that_has_not_answered_in_time_is_named(group, clock):
    """The answers that have come are given; the time is for all together."""
    master = group("master")
    quick, slow = group("worker", name="quick"), group("worker", name="slow")
    until(lambda: len(master.peers.get("worker", [])) == 2, "the workers")
    group.double(quick)
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
    slow.reply(taken(slow), body=4)
    message = taken(master)
    assert (message.source, message.body) == ("slow", 4)


def test_ask_returns_the_body_of_the_answer(group):
    """One call for one task to one peer; an answer that does not come is an error."""
    master, worker = group("master", name="master"), group("worker", name="worker")
    until(lambda: "worker" in master.peers, "the worker")
    with pytest.raises(PeersMissing, match="worker"):
        master.ask("worker", "double", 20, timeout_s=0.05)
    taken(worker)
    group.double(worker)
    assert master.ask("worker", "double", 21) == 42


def test_role_without_members_is_an_empty_list(group):
    """There is no KeyError, and a look does not add the role."""
    peers = group("peer").peers
    assert peers["worker"] == []
    assert dict(peers) == {}


def test_scatter_does_not_wait_for_a_peer_that_leaves(group):
    """A peer that leaves before it answers is missing as soon as it has left; so is a peer that had
    left before, though it is sent to."""
    master = group("master")
    quick, slow = group("worker", name="quick"), group("worker", name="slow")
    until(lambda: len(master.peers["worker"]) == 2, "the workers")
    group.double(quick)
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
        asked = taken(back)
        assert not scatter.done()
        back.reply(asked, body=4)
        assert scatter.result(PATIENCE_S).missing == ()


def test_scatter_to_present_peers(group):
    """A peer that is away gets nothing, also when it comes back, and is missing."""
    master, worker = group("master"), group("worker", name="here")
    away = group("worker", name="away")
    until(lambda: len(master.peers["worker"]) == 2, "the workers")
    away.close()
    until(lambda: master.peers["worker"] == ["here"], "one to be gone")
    group.double(worker)
    bodies = [("away", 1), ("here", 2), ("never", 3)]
    replies = master.scatter("double", SessionType.TASK, bodies, only_here=True)
    assert ([reply.body for reply in replies], replies.missing) == ([4], ("away", "never"))
    back = group("worker", name="away")
    until(lambda: len(master.peers["worker"]) == 2, "both again")
    assert back.receive_once(0.1) is None


def test_an_ack_is_not_the_answer(group):
    """A task may be acknowledged first; send() waits for what completes it."""
    master, worker = group("master", name="master"), group("worker", {"master": 1}, name="worker")
    until(lambda: "worker" in master.peers, "the worker")
    sessions = master.isend(SessionMessage("work", "master", "worker", 20))
    task = taken(worker)
    worker.reply(task, ack_reply=True)
    assert master.receive_by_id(sessions, 0.2).missing == ("worker",)
    worker.reply(task, body=21)
    assert [reply.body for reply in master.receive_by_id(sessions)] == [21]
    with pytest.raises(InvalidMessage):
        worker.reply(task, body=22)


def test_a_forwarded_task_is_answered_along_the_way(group):
    """A asks B, B asks C in the same session, and both hear."""
    a, b, c = group.peers(*"abc")
    sessions = a.isend(SessionMessage("work", "a", "b", 1))
    for_b = taken(b)
    onward = b.forward(for_b, "c", body=2)
    for_c = taken(c)
    assert (for_c.source, for_c.tag, for_c.body) == ("b", "work", 2)
    assert for_c.session_id == sessions[0] == onward[0]
    c.reply(for_c, body=3)
    (from_c,) = b.receive_by_id(onward)
    b.reply(for_b, body=from_c.body + 1)
    assert [reply.body for reply in a.receive_by_id(sessions)] == [4]


def test_wrong_message_is_refused_before_it_is_sent(group):
    """A wrong body, peer or sender is refused, and nothing has gone out then."""
    a, b = group.peers("a", "b")
    with pytest.raises(InvalidMessage, match=r"body\['x'\]\[1\].*set"):
        a.isend(Message("t", "a", "b", {"x": [1, {2}]}))
    with pytest.raises(InvalidMessage, match="nobody"):
        a.isend(Message("t", "a", "nobody"))
    with pytest.raises(ValueError, match="as 'b'"):
        a.isend(Message("t", "b", "a"))
    a.isend(Message("t", "a", "b", "fine"))
    assert taken(b).body == "fine"


def test_the_sender_may_go_on_with_its_arrays(group):
    """The array arrives as it was when it was sent."""
    a, b = group.peers("a", "b")
    array = np.zeros(300_000)
    for i in range(5):
        array[:] = i
        a.isend(Message("t", "a", "b", array))
    array[:] = -1
    for i in range(5):
        message = taken(b)
        assert (message.body == i).all()
        message.body[:] = 7  # it is the receiver's own


def test_a_peer_that_does_not_receive_holds_its_sender(group):
    """A bounded number of messages is kept for it; taken ones make room."""
    a = group("peer", name="a", bounds=Bounds(max_messages=4))
    b = group("peer", name="b")
    until(lambda: "peer" in a.peers, "the other")
    for i in range(4):
        a.isend(Message("t", "a", "b", i))
    with pytest.raises(OutboxFull, match="'b' has not taken 4 messages"):
        a.isend(Message("t", "a", "b", 4), timeout_s=0.2)
    with beside(lambda: a.isend(Message("t", "a", "b", 4))):
        bodies = [message.body for _, message in zip(range(5), b.receive(PATIENCE_S), strict=False)]
    assert bodies == [0, 1, 2, 3, 4]


def test_full_peer_holds_up_no_other(group, clock):
    """The peers of a scatter that have room get their messages, and answer; the others are missing.
    Where no answer is awaited, the error names the peers that got something."""
    a = group("peer", name="a", bounds=Bounds(max_messages=1))
    b, c = group("peer", name="b"), group("peer", name="c")
    until(lambda: len(a.peers.get("peer", [])) == 2, "the others")
    a.isend(Message("t", "a", "b", 0))
    group.double(c)
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
    assert taken(b).body == 0
    assert b.receive_once(0.05) is None


def test_messages_that_wait_for_room_keep_their_order(group):
    """A small message does not overtake a large one, and sessions keep the messages' order."""
    a = group("peer", name="a", bounds=Bounds(max_bytes=2000))
    b = group("peer", name="b")
    until(lambda: "peer" in a.peers, "the other")
    sessions = []
    parts = [("b", bytes(i) if i % 3 else bytes(1200 + i)) for i in range(20)]
    with beside(lambda: sessions.extend(a.iscatter("t", SessionType.TASK, parts))):
        until(lambda: a.endpoint._links["b"].num_kept == 3, "the first large one and small ones")
        found = [message for _, message in zip(range(20), b.receive(PATIENCE_S), strict=False)]
    assert [("b", message.body) for message in found] == parts
    assert [message.session_id for message in found] == sessions


def test_below_the_minimal_number_senders_wait(group):
    """The wait is bounded, and ends when a peer joins."""
    master = group("master", minimal_peers={"worker": 2}, minimal_peers_timeout_s=0.2)
    worker = group("worker", name="first")
    until(lambda: "worker" in master.peers, "the first")
    with pytest.raises(PeersMissing, match=r"worker \(1 of 2 are here\)"):
        master.isend(Message("t", master.name, "first"))
    group("worker", name="second")
    until(lambda: len(master.peers["worker"]) == 2, "the second")
    master.isend(Message("t", master.name, "first"))
    taken(worker)


def test_expected_peers_that_do_not_come_are_named(group):
    """Before anything begins; nobody of the failed one stays behind."""
    other = group("peer")
    with pytest.raises(PeersMissing, match=r"worker \(0 of 2 are here\)"):
        group("master", {"worker": 2}, join_timeout_s=0.3)
    until(lambda: "master" not in other.peers, "it to be gone")


def test_messages_that_are_not_awaited_stay(group):
    """receive_by_id() takes its own; the others come in their order."""
    a, b = group.peers("a", "b")
    b.isend(Message("one", "b", "a"))
    sessions = a.isend(SessionMessage("ask", "a", "b"))
    asked = taken(b)
    b.isend(Message("two", "b", "a"))
    b.reply(asked, tag="answer")
    assert [reply.tag for reply in a.receive_by_id(sessions)] == ["answer"]
    assert [message.tag for message in a.receive(0.2)] == ["one", "two"]


def test_stop_ends_receiving(group):
    """stop() may be called from another thread; close() ends it with an error."""
    proxy = group("peer")
    tags = []
    with beside(lambda: tags.extend(m.tag for m in proxy.receive())):
        proxy.stop()
    other = group("peer")
    other.close()
    with pytest.raises(Closed):
        other.receive_once()


def test_stop_ends_receiving_though_more_comes(group):
    """Messages that had come by then are taken; their follow-ups are not awaited."""
    a, b = group.peers("a", "b")
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
def test_a_time_without_end(group, timeout_s):
    """However it is written."""
    a, b = group.peers("a", "b")
    timer = threading.Timer(0.1, lambda: a.isend(Message("t", "a", "b")))
    timer.start()
    taken(b, timeout_s)
    timer.join()


def test_several_threads_share_a_proxy(group):
    """Each gets its own answers."""
    master, worker = group("master", name="master"), group("worker", name="worker")
    until(lambda: "worker" in master.peers and "master" in worker.peers, "each other")
    group.double(worker)
    wrong = []

    def ask(i: int) -> None:
        for j in range(50):
            number = 1000 * i + j
            replies = master.send(SessionMessage("double", "master", "worker", number))
            if [reply.body for reply in replies] != [2 * number]:
                wrong.append(replies)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(ask, range(4)))
    assert not wrong


def test_awaited_answer_is_for_the_thread_that_asked(group):
    """One thread receives whatever comes while others ask; requests in the session that is awaited
    are for whoever receives."""
    a, b = group.peers("a", "b")

    def ask_back(message: Message) -> None:
        there = b.receive_by_id(b.forward(message, "a", body="and back")).complete()
        b.reply(message, body=there[0].body)

    group.double(a)
    group.serve(b, ask_back)
    for _ in range(20):
        replies = a.send(SessionMessage("ask", "a", "b"))
        assert [reply.body for reply in replies] == ["and back" * 2]


def test_cancelled_receive_leaves_messages_for_other_receivers(group):
    """A thread that waits already gets what somebody has given up on."""
    a, b = group.peers("a", "b")
    bodies = []
    group.serve(a, lambda message: bodies.append(message.body))
    group.double(b)
    awaited = Awaited({"s"})
    a.endpoint.inbox.reserve(awaited)
    a.isend(SessionMessage("double", "a", "b", 3, session_id="s"))
    until(lambda: len(a.endpoint.inbox) == 1, "the answer")
    assert [reply.body for reply in a.receive_by_id("s")] == [6]
    a.isend(SessionMessage("double", "a", "b", 4, session_id="s"))
    until(lambda: len(a.endpoint.inbox) == 1, "the answer")
    a._release(awaited)
    until(lambda: bodies == [8], "it")


def peers_of(driver: type[InProcessDriver]) -> tuple[Proxy, Proxy]:
    """Two peers in one process, the second with a driver of this class."""
    discovery, switchboard = InProcessDiscovery(), Switchboard()
    drivers = (InProcessDriver(switchboard), driver(switchboard))
    a, b = (
        Proxy("g", "peer", name=name, discovery=discovery, driver=each, timeout_s=PATIENCE_S)
        for name, each in zip("ab", drivers, strict=True)
    )
    return a, b


def test_acknowledgement_travels_with_the_answer():
    """However long that took."""
    kinds = []

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
        b.reply(taken(b), "done")
        assert kinds == [MESSAGE]
        taken(a)


def test_messages_that_wait_for_others_go_when_the_program_waits():
    """A stream travels in few packets, and an answer is not late for that."""
    packets = []

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


def test_missing_peer_was_asked_and_has_not_answered(group):
    """A peer that was only answered is not missing, and nothing is remembered of others."""
    a, b, c = group.peers(*"abc")
    sessions = a.isend(SessionMessage("work", "a", "b"))
    for_b = taken(b)
    b.reply(for_b, ack_reply=True)
    onward = b.forward(for_b, "c")
    assert b.receive_by_id(onward, 0.05).missing == ("c",)
    c.reply(taken(c))
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
    b.reply(taken(b))
    taken(a)
    assert answered[0] not in a._asked


def test_a_barrier_opens_when_so_many_wait(group):
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
def test_close_in_another_thread_ends_a_loop(group, method):
    """A loop that begins after close() raises Closed, as other calls do."""
    proxy = group("peer")
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(lambda: list(getattr(proxy, method)()))
        until(lambda: bool(proxy.endpoint._waiters), "it to wait")
        proxy.close()
        assert found.result(PATIENCE_S) == []
    with pytest.raises(Closed):
        next(getattr(proxy, method)())


def test_after_stop_nothing_is_received_any_more(group):
    """The stop is for good: later messages stay, for threads that await answers too."""
    a, b = group.peers("a", "b")
    a.stop()
    assert a.receive_once() is None
    b.isend(Message("later", "b", "a"))
    group.double(b)
    replies = a.send(SessionMessage("double", "a", "b", 3)).complete()
    assert [reply.body for reply in replies] == [6]
    assert len(a.endpoint.inbox) == 1
    assert list(a.receive()) == []


# --- coming back ----------------------------------------------------------------------------------


def test_messages_that_a_peer_had_not_taken_go_to_the_next(group_anywhere):
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


def test_a_close_may_linger_without_end(group):
    """close() is over as soon as all has gone out. A peer that has said that it leaves is not
    waited for, though the group has not said so yet."""
    join, seen = group.discovery.join, {}

    def join_for_good(*names: str, on_change: Any, **options: Any) -> Membership:
        return join(*names, on_change=lambda now: on_change(seen | now), **options)

    group.discovery.join = join_for_good
    a, b = group.peers("a", "b")
    seen |= a.endpoint.roster
    a.isend(Message("t", "a", "b"))
    a.close(math.inf)
    taken(b)
    until(lambda: "a" in b.endpoint.left, "the first has left")
    assert b.peers["peer"] == ["a"]
    b.close(math.inf)
