"""A KeyboardInterrupt in a call of the proxy: the links stay whole, and nothing that has come is
lost."""

import signal
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from integration.messaging.conftest import Group
from support.lossy import JoinLossy, LossyDriver, tags
from support.messaging import PATIENCE_S, until
from xain_membership.errors import Closed
from xain_messaging.endpoint import Endpoint
from xain_messaging.format.codec import Frames
from xain_messaging.format.messages import Message, SessionMessage, SessionType
from xain_messaging.inbox import Inbox
from xain_messaging.proxy import Proxy


def once(function: Callable[..., Any], *, is_done: bool) -> Callable[..., Any]:
    """The same, but interrupted the first time: when it is done, or before."""
    calls: list[None] = []

    def interrupt(*args: Any, **options: Any) -> Any:
        calls.append(None)
        if len(calls) > 1:
            return function(*args, **options)
        if is_done:
            function(*args, **options)
        raise KeyboardInterrupt

    return interrupt


def two(lossy: JoinLossy) -> tuple[Proxy, Proxy, LossyDriver]:
    """Two peers that know each other, and the driver of the second."""
    (a, _), (b, driver) = lossy("a"), lossy("b")
    until(lambda: a.peers["peer"] == ["b"] and b.peers["peer"] == ["a"], "each other")
    return a, b, driver


def test_a_signal_ends_a_wait(lossy: JoinLossy) -> None:
    """The exception of a signal handler comes out of the call, and the next call receives."""
    a, b, _ = two(lossy)

    def interrupt() -> None:
        until(lambda: bool(b.endpoint._waiters), "it to wait")
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    with ThreadPoolExecutor(1) as pool:
        sent = pool.submit(interrupt)
        with pytest.raises(KeyboardInterrupt):
            b.receive_once(PATIENCE_S)
        sent.result()
    a.isend(Message("1", "a", "b"))
    assert tags(b, 1) == ["1"]


@pytest.mark.parametrize("is_done", [False, True])
@pytest.mark.parametrize("where", ["received", "pop"])
def test_a_message_whose_receive_was_interrupted_is_for_the_next_call(
    lossy: JoinLossy, monkeypatch: pytest.MonkeyPatch, where: str, is_done: bool
) -> None:
    """Between the queue and the program. It comes before all later ones, once, and is acknowledged
    then."""
    a, b, _ = two(lossy)
    for i in range(3):
        a.isend(Message(str(i), "a", "b"))
    until(lambda: len(b.endpoint.inbox) == 3, "all to come")
    whose: type = {"received": Endpoint, "pop": Inbox}[where]
    monkeypatch.setattr(whose, where, once(getattr(whose, where), is_done=is_done))
    with pytest.raises(KeyboardInterrupt):
        b.receive_once(PATIENCE_S)
    b.receive_by_id("none", 0.02)  # acknowledges what the program has got
    assert len(b.endpoint._links["a"]._untaken) == 3
    assert tags(b, 3) == ["0", "1", "2"]
    assert b.receive_once(0.05) is None
    until(lambda: not a.endpoint._links["b"].num_kept, "the ack")


@pytest.mark.parametrize("is_done", [False, True])
def test_interrupted_receive_leaves_no_message_to_two_calls(
    lossy: JoinLossy, monkeypatch: pytest.MonkeyPatch, is_done: bool
) -> None:
    """A message is back in the queue before another thread has the lock and may receive it."""
    a, b, _ = two(lossy)
    a.isend(Message("1", "a", "b"))
    endpoint = b.endpoint
    until(lambda: len(endpoint.inbox) == 1, "it to come")
    left: list[tuple[int, int]] = []
    wait_for = endpoint.wait_for

    def look(*args: Any, **options: Any) -> Any:
        try:
            return wait_for(*args, **options)
        except KeyboardInterrupt:
            left.append((len(endpoint.inbox), len(endpoint._received)))
            raise

    monkeypatch.setattr(endpoint, "wait_for", look)
    monkeypatch.setattr(Inbox, "pop", once(Inbox.pop, is_done=is_done))
    with pytest.raises(KeyboardInterrupt):
        b.receive_once(PATIENCE_S)
    assert left == [(1, 0)]
    assert tags(b, 1) == ["1"]


def interrupt_when_answered(proxy: Proxy, number: int) -> None:
    """Interrupt this one while it awaits more answers than this number."""
    inbox = proxy.endpoint.inbox
    release = proxy.endpoint.wait_for

    def wait_for(attempt: Callable[[], Any], deadline: float, **options: Any) -> Any:
        def look() -> Any:
            found = attempt()
            if sum(len(one.entries) for one in inbox._awaited) >= number:
                proxy.endpoint.wait_for = release  # type: ignore[method-assign]  # once
                raise KeyboardInterrupt
            return found

        return release(look, deadline, **options)

    proxy.endpoint.wait_for = wait_for  # type: ignore[method-assign]  # for one call


def test_answers_of_an_interrupted_call_come_with_the_next(lossy: JoinLossy) -> None:
    """While others are awaited: receive_by_id() gets them all when it is called again; the answers
    to an interrupted scatter() come with receive()."""
    (a, _), (b, _), (c, _) = lossy("a"), lossy("b"), lossy("c")
    until(lambda: len(a.peers["peer"]) == 2, "both")
    sessions = a.iscatter("ask", SessionType.TASK, [("b", None), ("c", None)])
    asked = b.receive_once()
    assert asked is not None
    b.reply(asked, "answer", "b")
    interrupt_when_answered(a, 1)
    with pytest.raises(KeyboardInterrupt):
        a.receive_by_id(sessions)
    asked = c.receive_once()
    assert asked is not None
    c.reply(asked, "answer", "c")
    answers = a.receive_by_id(sessions).complete()
    assert sorted(answer.body for answer in answers) == ["b", "c"]

    def answer() -> None:
        asked = b.receive_once()
        assert asked is not None
        b.reply(asked, "answer", "again")

    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(answer)
        interrupt_when_answered(a, 1)
        with pytest.raises(KeyboardInterrupt):
            a.scatter("ask", SessionType.TASK, [("b", None), ("c", None)])
        done.result()
    message = a.receive_once()
    assert message is not None
    assert message.body == "again"
    assert a.receive_once(0.05) is None


@pytest.mark.parametrize("is_done", [False, True])
def test_answers_of_a_call_that_is_interrupted_at_its_end_come_with_the_next(
    lossy: JoinLossy, monkeypatch: pytest.MonkeyPatch, is_done: bool
) -> None:
    """All answers had come before the interrupt."""
    a, b, _ = two(lossy)
    sessions = a.isend(SessionMessage("ask", "a", "b"))
    asked = b.receive_once()
    assert asked is not None
    b.reply(asked, "answer", "b")
    monkeypatch.setattr(Proxy, "_release", once(Proxy._release, is_done=is_done))
    with pytest.raises(KeyboardInterrupt):
        a.receive_by_id(sessions)
    assert [answer.body for answer in a.receive_by_id(sessions)] == ["b"]


@pytest.mark.parametrize("is_done", [False, True])
def test_an_interrupted_send_leaves_the_link_whole(lossy: JoinLossy, is_done: bool) -> None:
    """Whether it has sent nobody knows; what is sent later comes, in order and once."""
    a, b, driver = two(lossy)
    b.isend(Message("0", "b", "a"))
    assert tags(a, 1) == ["0"]
    assert a.receive_once(0.05) is None  # so that it goes out on this thread, alone
    send = driver.send

    def interrupt(peer: str, frames: Frames) -> None:
        driver.send = send  # type: ignore[method-assign]  # once
        if is_done:
            send(peer, frames)
        raise KeyboardInterrupt

    until(lambda: not b.endpoint._links["a"].num_kept, "the ack")
    driver.send = interrupt  # type: ignore[method-assign]  # for one call
    with pytest.raises(KeyboardInterrupt):
        b.isend(Message("1", "b", "a"))
    b.isend(Message("2", "b", "a"))
    assert tags(a, 2) == ["1", "2"]
    assert a.receive_once(0.05) is None


def test_a_message_that_an_interrupt_has_swallowed_is_sent_again(lossy: JoinLossy) -> None:
    """No later message shows the gap."""
    a, b, driver = two(lossy)
    send = driver.send

    def interrupt(peer: str, frames: Frames) -> None:
        driver.send = send  # type: ignore[method-assign]  # once
        raise KeyboardInterrupt

    driver.send = interrupt  # type: ignore[method-assign]  # for one call
    with pytest.raises(KeyboardInterrupt):
        b.send(SessionMessage("1", "b", "a"))
    assert tags(a, 1) == ["1"]


def test_an_interrupted_close_leaves_the_group(
    lossy: JoinLossy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver is closed too, while close() waits for the I/O thread."""
    a, b, driver = two(lossy)
    closed: list[float] = []
    close = driver.close
    monkeypatch.setattr(
        driver, "close", lambda linger_s: (closed.append(linger_s), close(linger_s))
    )
    join = b.endpoint._io.join

    def interrupt(timeout: float | None = None) -> None:
        join(timeout)
        raise KeyboardInterrupt

    monkeypatch.setattr(b.endpoint._io, "join", interrupt)
    with pytest.raises(KeyboardInterrupt):
        b.endpoint.close(0.0)
    assert closed == [0.0]
    until(lambda: a.peers["peer"] == [], "it to have left")


def interrupt_at(number: int) -> Callable[[Any, str, Any], Any]:
    """A trace function that interrupts at the so many-th line of the package. What a call of the
    proxy has taken and not returned yet is lost in an interrupt, so lines of proxy.py count not."""
    left = number

    def trace(frame: Any, event: str, argument: Any) -> Any:
        nonlocal left
        path = frame.f_code.co_filename
        if "xain_messaging" not in path or path.endswith("proxy.py"):
            return None
        if event == "line":
            left -= 1
            if left == 0:
                raise KeyboardInterrupt
        return trace

    return trace


def test_an_interrupt_at_any_line_loses_and_doubles_nothing(lossy: JoinLossy) -> None:
    """A program that runs the driver itself is interrupted at one line after the other. Every task
    comes to it once and in order, and every answer to its peer."""
    a, b, _ = two(lossy)
    a.endpoint.probe_s = b.endpoint.probe_s = 0.02
    b.endpoint.poll_s = PATIENCE_S  # the I/O thread does not
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(b.receive_once)
        until(lambda: bool(b.endpoint._waiters), "it to wait")
        a.isend(Message("from now on the program runs the driver", "a", "b"))
        assert first.result(PATIENCE_S) is not None
    asked: list[str] = []
    taken: list[str] = []

    def answer(message: Message | None) -> None:
        assert message is not None
        taken.append(message.session_id)
        b.reply(message)

    is_interrupted = True
    while is_interrupted:
        asked += a.isend(SessionMessage("ask", "a", "b"))
        is_interrupted = False
        sys.settrace(interrupt_at(len(asked)))
        try:
            message = b.receive_once(PATIENCE_S)
        except KeyboardInterrupt:
            is_interrupted = True
        finally:
            sys.settrace(None)
        if not is_interrupted:
            answer(message)
    assert len(asked) > 100
    while len(taken) < len(asked):
        answer(b.receive_once(PATIENCE_S))
    assert taken == asked
    assert b.receive_once(0.05) is None  # and all its answers go out
    answers = [message.session_id for _, message in zip(asked, a.receive(PATIENCE_S), strict=False)]
    assert answers == asked
    assert a.receive_once(0.05) is None


def test_an_interrupt_while_others_are_woken_keeps_none_of_them_asleep(lossy: JoinLossy) -> None:
    """The main thread reads a message for another thread, and is interrupted at one line after the
    other of what wakes that thread."""
    a, b, _ = two(lossy)
    b.endpoint.poll_s = PATIENCE_S  # the I/O thread does not read
    main = threading.main_thread().ident or 0
    functions = {"_notify", "_wake_all"}

    def interrupt_at(left: int) -> Callable[[Any, str, Any], Any]:
        def trace(frame: Any, event: str, argument: Any) -> Any:
            nonlocal left
            left -= event == "line" and frame.f_code.co_name in functions
            if not left and event == "line":
                left -= 1
                raise KeyboardInterrupt
            return trace if frame.f_code.co_filename.endswith("endpoint.py") else None

        return trace

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(b.receive_once)
        until(lambda: bool(b.endpoint._waiters), "it to wait")
        a.isend(Message("from now on the program reads", "a", "b"))
        assert first.result(PATIENCE_S) is not None

        def await_other(session_id: str) -> None:
            until(lambda: b.endpoint._poller == main, "the main thread to read")
            other = pool.submit(b.receive_by_id, session_id, 10 * PATIENCE_S)
            until(lambda: bool(b.endpoint._waiters), "the other to wait")
            a.isend(Message("for the other", "a", "b", session_id=session_id))
            assert [each.session_id for each in other.result(PATIENCE_S)] == [session_id]
            a.isend(Message("for the main thread", "a", "b"))

        number, is_interrupted = 0, True
        while is_interrupted:
            number += 1
            is_interrupted = False
            done = pool.submit(await_other, f"s{number}")
            sys.settrace(interrupt_at(number))
            try:
                message = b.receive_once(2 * PATIENCE_S)
            except KeyboardInterrupt:
                is_interrupted = True
            finally:
                sys.settrace(None)
            done.result()
            if is_interrupted:
                message = b.receive_once(PATIENCE_S)
            assert message is not None
            assert message.tag == "for the main thread"
    assert number > 4


def test_a_signal_handler_may_close_a_proxy(group: Group) -> None:
    """The interrupted thread runs the driver; its call ends with Closed."""
    a, b = group("peer", name="a"), group("peer", name="b")
    b.endpoint.poll_s = PATIENCE_S
    until(lambda: a.peers["peer"] == ["b"], "the other")
    main = threading.main_thread().ident or 0
    received: list[Message | None] = []

    def send_and_signal() -> None:
        until(lambda: bool(b.endpoint._waiters), "it to wait")
        a.isend(Message("first", "a", "b"))
        until(lambda: bool(received), "it to be received")
        until(lambda: bool(b.endpoint._poller or b.endpoint._waiters), "it to wait again")
        signal.pthread_kill(main, signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, lambda *_: b.close())
    try:
        with ThreadPoolExecutor(1) as pool:
            sent = pool.submit(send_and_signal)
            received.append(b.receive_once())
            with pytest.raises(Closed):
                b.receive_once()
            sent.result()
    finally:
        signal.signal(signal.SIGUSR1, before)
    until(lambda: a.peers["peer"] == [], "it to have left")


def test_an_interrupted_close_closes_the_driver(
    lossy: JoinLossy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The I/O thread does it, though what close() does before was cut off."""
    a, _, _ = two(lossy)
    monkeypatch.setattr(Endpoint, "_send_last", once(Endpoint._send_last, is_done=False))
    with pytest.raises(KeyboardInterrupt):
        a.close()
    until(lambda: not a.endpoint._io.is_alive(), "the I/O thread to end")
    with pytest.raises(Closed):
        a.endpoint._driver.connect("b", "nowhere")


def test_a_signal_handler_closes_while_its_thread_holds_the_lock(lossy: JoinLossy) -> None:
    """close() waits end_s at most for the I/O thread, which closes the driver with the lock."""
    a, _, _ = two(lossy)
    a.endpoint.end_s = 0.1
    with a.endpoint.lock:  # as in any call of the proxy
        a.close(0.0)
        assert a.endpoint._io.is_alive()
    until(lambda: not a.endpoint._io.is_alive(), "the I/O thread to end")
    with pytest.raises(Closed):
        a.endpoint._driver.connect("b", "nowhere")
