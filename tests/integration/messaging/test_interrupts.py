"""A KeyboardInterrupt, wherever it comes while somebody receives."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from support.lossy import JoinLossy, LossyDriver, tags
from support.messaging import PATIENCE_S, until
from xain_messaging import endpoint as endpoint_module
from xain_messaging.codec import Frames
from xain_messaging.drivers.in_process import InProcessDriver
from xain_messaging.endpoint import Endpoint
from xain_messaging.inbox import Inbox
from xain_messaging.links import Bounds, read_head
from xain_messaging.messages import Message, SessionMessage, SessionType
from xain_messaging.ports import Arrived, DriverEvent, Lost
from xain_messaging.proxy import Proxy
from xain_messaging.sessions import Sessions


class Interrupted:
    """The lock of an endpoint, of which a wait is interrupted, once.

    was_receiving: whether nobody else might receive at that time.
    has_it: the lock, when the interrupt comes.
    leaves: after how many times that somebody lets go of it at the end of a `with` there is an
        interrupt, after that.
    """

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._lock = endpoint.lock
        self.is_armed = False
        self.was_receiving = False
        self.has_it = False
        self.leaves = 0

    def acquire(self) -> bool:
        if self.is_armed:
            self.was_receiving = self._endpoint._is_receiving
            self.is_armed = False
            if self.has_it:
                self._lock.acquire()
            raise KeyboardInterrupt
        return self._lock.acquire()

    def release(self) -> None:
        self._lock.release()

    def is_free(self) -> bool:
        """For another thread."""
        is_free = self._lock.acquire(blocking=False)
        if is_free:
            self._lock.release()
        return is_free

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()
        self.leaves -= 1
        if not self.leaves:
            raise KeyboardInterrupt


def interrupted(b: Proxy) -> Interrupted:
    """The lock of this one, in which an interrupt comes once it is armed."""
    lock = Interrupted(b.endpoint)
    b.endpoint.lock = lock
    return lock


@pytest.mark.parametrize("has_it", [False, True])
def test_an_interrupt_leaves_a_proxy_that_works(lossy: JoinLossy, has_it: bool) -> None:
    """Wherever it comes: here while a thread that has received waits for the lock, or just when it
    has it."""
    (a, _), (b, line) = lossy("a"), lossy("b")
    until(lambda: "peer" in a.peers, "b")
    lock = interrupted(b)
    lock.has_it = has_it
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
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(lock.is_free).result()
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


class Swallowed:
    """What a driver receives, of which one event is lost by an interrupt: the first that is_it.
    What is sent then is interrupted as well, so many times."""

    def __init__(
        self, line: LossyDriver, is_it: Callable[[DriverEvent], bool], num_more: int = 0
    ) -> None:
        self._line = line
        self._is_it = is_it
        self._num_more = num_more
        self._has_come = False
        line.receive = self.receive  # type: ignore[method-assign]  # it is this one's, for good
        line.send = self.send  # type: ignore[method-assign]  # as above

    def receive(self, timeout_s: float | None) -> DriverEvent | None:
        event = InProcessDriver.receive(self._line, timeout_s)
        if event is None or self._has_come or not self._is_it(event):
            return event
        self._has_come = True
        raise KeyboardInterrupt

    def send(self, peer: str, frames: Frames) -> None:
        if self._has_come and self._num_more:
            self._num_more -= 1
            raise KeyboardInterrupt
        LossyDriver.send(self._line, peer, frames)


def is_of_kind(kind: str) -> Callable[[DriverEvent], bool]:
    return lambda event: isinstance(event, Arrived) and read_head(event.frames[0]).kind == kind


def interrupts(b: Proxy, number: int) -> None:
    """So many come while it receives."""
    for _ in range(number):
        with pytest.raises(KeyboardInterrupt):
            b.receive_once(PATIENCE_S)


@pytest.mark.parametrize("num_more", [0, 1, 2])
def test_an_interrupt_that_swallows_a_question_leaves_the_link_whole(
    lossy: JoinLossy, num_more: int
) -> None:
    """The other has asked for what was lost, and asks but once; and what is done about it may be
    interrupted as well."""
    (a, _), (b, line) = lossy("a"), lossy("b")
    until(lambda: "peer" in a.peers and "peer" in b.peers, "each other")
    line.lost.add("a")
    b.isend(Message("lost", "b", "a"))
    line.lost.discard("a")
    b.isend(Message("after it", "b", "a"))
    Swallowed(line, is_of_kind("g"), num_more)
    assert a.receive_by_id("none", 0.05).missing  # it asks
    interrupts(b, 1 + num_more)
    assert b.receive_by_id("none", 0.0).missing
    found: list[str] = []

    def has_come() -> bool:
        found.extend(message.tag for message in a.receive(0.02))
        b.receive_by_id("none", 0.02)
        return len(found) >= 2

    until(has_come, "what was lost")
    assert found == ["lost", "after it"]


@pytest.mark.parametrize("num_more", [0, 1])
def test_an_interrupt_that_swallows_a_broken_line_leaves_the_link_whole(
    lossy: JoinLossy, num_more: int
) -> None:
    """Nobody but the driver knew, and it says so once."""
    (a, _), (b, line) = lossy("a"), lossy("b")
    until(lambda: "peer" in a.peers and "peer" in b.peers, "each other")
    line.lost.add("a")
    b.isend(Message("lost", "b", "a"))
    Swallowed(line, lambda event: isinstance(event, Lost), num_more)
    line.mend("a")
    interrupts(b, 1 + num_more)
    found: list[str] = []

    def has_come() -> bool:
        b.receive_by_id("none", 0.02)
        found.extend(message.tag for message in a.receive(0.02))
        return bool(found)

    until(has_come, "what was lost")
    assert found == ["lost"]


def test_an_interrupt_that_swallows_an_ack_leaves_the_link_whole(lossy: JoinLossy) -> None:
    """What is taken makes room, though it is told but once."""
    (a, _), (b, line) = lossy("a"), lossy("b", Bounds(max_messages=1))
    until(lambda: "peer" in a.peers and "peer" in b.peers, "each other")
    b.isend(Message("1", "b", "a"))
    Swallowed(line, is_of_kind("a"))
    assert tags(a, 1) == ["1"]
    assert a.receive_by_id("none", 0.05).missing  # it tells
    interrupts(b, 1)

    def has_room() -> bool:
        b.receive_by_id("none", 0.02)
        a.receive_by_id("none", 0.02)
        return not b.endpoint._links["a"].num_kept

    until(has_room, "room")


def test_an_interrupt_while_nothing_comes_sends_nothing_again(lossy: JoinLossy) -> None:
    """However much is on its way: a program may be interrupted every second."""
    (a, _), (b, line) = lossy("a"), lossy("b")
    until(lambda: "peer" in a.peers and "peer" in b.peers, "each other")
    for i in range(5):
        b.isend(Message(str(i), "b", "a"))
    receive, send, sent = line.receive, line.send, []

    def interrupt(timeout_s: float | None) -> DriverEvent | None:
        if timeout_s != 0:
            raise KeyboardInterrupt
        return receive(timeout_s)

    def count(peer: str, frames: Frames) -> None:
        sent.append(read_head(frames[0]).kind)
        send(peer, frames)

    line.receive, line.send = interrupt, count  # type: ignore[method-assign]  # for this test
    for _ in range(3):
        interrupts(b, 1)
        assert a.receive_by_id("none", 0.02).missing  # it answers
    assert set(sent) <= {"a", "w"}
    line.receive, line.send = receive, send  # type: ignore[method-assign]  # as before
    assert tags(a, 5) == list("01234")


def once(function: Callable[..., Any], *, is_done: bool) -> Callable[..., Any]:
    """The same, but interrupted the first time: when it is done, or before."""
    calls: list[None] = []

    def interrupt(*args: Any) -> Any:
        calls.append(None)
        if len(calls) > 1:
            return function(*args)
        if is_done:
            function(*args)
        raise KeyboardInterrupt

    return interrupt


@pytest.mark.parametrize("where", ["decode", "sessions", "after sessions", "inbox", "after inbox"])
def test_what_is_heard_is_not_lost_on_its_way(
    lossy: JoinLossy, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """Between the line and the queue, where it counts as heard: it would not come again. It can be
    answered, once."""
    (a, _), (b, _) = lossy("a"), lossy("b")
    until(lambda: "peer" in a.peers and "peer" in b.peers, "each other")
    session = a.isend(SessionMessage("ask", "a", "b"))
    is_done = where.startswith("after")
    whose, name = {
        "decode": (endpoint_module, "decode"),
        "sessions": (Sessions, "received"),
        "inbox": (Inbox, "add"),
    }[where.split()[-1]]
    monkeypatch.setattr(whose, name, once(getattr(whose, name), is_done=is_done))
    interrupts(b, 1)
    asked = b.receive_once(PATIENCE_S)
    assert asked is not None
    assert b.receive_once(0.0) is None
    b.reply(asked)
    assert len(a.receive_by_id(session).complete()) == 1


@pytest.mark.parametrize("where", ["taken", "popped"])
def test_what_is_taken_is_not_lost_on_its_way(
    lossy: JoinLossy, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """Between the queue and the program: it comes with the next call, and before all that is
    later."""
    (a, _), (b, _) = lossy("a"), lossy("b")
    until(lambda: "peer" in a.peers and "peer" in b.peers, "each other")
    for i in range(3):
        a.isend(Message(str(i), "a", "b"))
    if where == "taken":
        monkeypatch.setattr(b.endpoint, "take", once(b.endpoint.take, is_done=True))
    else:
        interrupted(b).leaves = 1
    interrupts(b, 1)
    assert tags(b, 3) == ["0", "1", "2"]
    b.receive_by_id("none", 0.02)
    a.receive_by_id("none", 0.02)
    assert not a.endpoint._links["b"].num_kept


def interrupt_when_answered(line: LossyDriver, *others: Proxy) -> Callable[[], None]:
    """These answer what they are asked while this one waits, and then an interrupt comes. Returns
    what brings that to an end."""
    receive = line.receive
    to_answer = list(others)

    def answer_and_interrupt(timeout_s: float | None) -> DriverEvent | None:
        while timeout_s != 0 and to_answer:
            other = to_answer.pop(0)
            asked = other.receive_once()
            assert asked is not None
            other.reply(asked, "answer", other.name)
        event = receive(0.0)
        if event is None and timeout_s != 0:
            raise KeyboardInterrupt
        return event

    line.receive = answer_and_interrupt  # type: ignore[method-assign]  # until it is put back

    def put_back() -> None:
        line.receive = receive  # type: ignore[method-assign]  # as above

    return put_back


def test_answers_that_have_come_are_not_lost(lossy: JoinLossy) -> None:
    """While others are awaited: who asks for them again gets them all."""
    (a, line), (b, _), (c, _) = lossy("a"), lossy("b"), lossy("c")
    until(lambda: len(a.peers.get("peer", [])) == 2, "both")
    sessions = a.iscatter("ask", SessionType.TASK, [("b", None), ("c", None)])
    end = interrupt_when_answered(line, b)
    with pytest.raises(KeyboardInterrupt):
        a.receive_by_id(sessions)
    end()
    asked = c.receive_once()
    assert asked is not None
    c.reply(asked, "answer", "c")
    answers = a.receive_by_id(sessions).complete()
    assert sorted(answer.body for answer in answers) == ["b", "c"]


def test_answers_that_nobody_awaits_any_more_are_not_lost(lossy: JoinLossy) -> None:
    """Who was interrupted while he waited for all of them has no session to ask for: they come with
    all else, as those do that come too late."""
    (a, line), (b, _), (c, _), _ = lossy("a"), lossy("b"), lossy("c"), lossy("d")
    until(lambda: len(a.peers.get("peer", [])) == 3, "all")
    end = interrupt_when_answered(line, b, c)
    with pytest.raises(KeyboardInterrupt):
        a.scatter("ask", SessionType.TASK, [(name, None) for name in "bcd"])
    end()
    assert [message.body for message in a.receive(0.0)] == ["b", "c"]
    assert a.receive_once(0.0) is None


def test_an_interrupt_when_all_has_come_loses_no_answer(lossy: JoinLossy) -> None:
    """It comes when the last lock is let go of."""
    (a, _), (b, _) = lossy("a"), lossy("b")
    until(lambda: "peer" in a.peers and "peer" in b.peers, "each other")
    session = a.isend(SessionMessage("ask", "a", "b"))
    asked = b.receive_once()
    assert asked is not None
    b.reply(asked)
    lock = interrupted(a)
    lock.leaves = 4  # to reserve, to wait, to see who is missing, and to release
    with pytest.raises(KeyboardInterrupt):
        a.receive_by_id(session)
    assert lock.leaves < 0
    assert len(a.receive_by_id(session).complete()) == 1
    assert not a.endpoint.inbox._awaited
