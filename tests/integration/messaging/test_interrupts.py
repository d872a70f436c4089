"""A KeyboardInterrupt while a call of the proxy waits, and signal handlers that close a proxy."""

import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from support.lossy import tags, two
from support.messaging import PATIENCE_S, taken, until
from xain_membership.errors import Closed
from xain_messaging.format.messages import Message, SessionType
from xain_messaging.proxy import Proxy


def test_a_signal_ends_a_wait(lossy):
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


def interrupt_when_answered(proxy: Proxy, number: int) -> None:
    """Interrupt this one while it awaits more answers than this number."""
    inbox = proxy.endpoint.inbox
    release = proxy.endpoint.wait_for

    def wait_for(attempt: Callable[[], Any], deadline: float, **options: Any) -> Any:
        def look() -> Any:
            found = attempt()
            if sum(len(one.entries) for one in inbox._awaited) >= number:
                proxy.endpoint.wait_for = release
                raise KeyboardInterrupt
            return found

        return release(look, deadline, **options)

    proxy.endpoint.wait_for = wait_for


def test_answers_of_an_interrupted_call_come_with_the_next(lossy):
    """While others are awaited: receive_by_id() gets them all when it is called again; the answers
    to an interrupted scatter() come with receive()."""
    (a, _), (b, _), (c, _) = lossy("a"), lossy("b"), lossy("c")
    until(lambda: len(a.peers["peer"]) == 2, "both")
    sessions = a.iscatter("ask", SessionType.TASK, [("b", None), ("c", None)])
    b.reply(taken(b), "answer", "b")
    interrupt_when_answered(a, 1)
    with pytest.raises(KeyboardInterrupt):
        a.receive_by_id(sessions)
    c.reply(taken(c), "answer", "c")
    answers = a.receive_by_id(sessions).complete()
    assert sorted(answer.body for answer in answers) == ["b", "c"]

    def answer() -> None:
        b.reply(taken(b), "answer", "again")

    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(answer)
        interrupt_when_answered(a, 1)
        with pytest.raises(KeyboardInterrupt):
            a.scatter("ask", SessionType.TASK, [("b", None), ("c", None)])
        done.result()
    assert taken(a).body == "again"
    assert a.receive_once(0.05) is None


def test_an_interrupted_close_leaves_the_group(lossy, monkeypatch):
    """The driver is closed too, while close() waits for the I/O thread."""
    a, b, driver = two(lossy)
    closed = []
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


def test_a_signal_handler_may_close_a_proxy(group):
    """The interrupted thread runs the driver; its call ends with Closed."""
    a, b = group("peer", name="a"), group("peer", name="b")
    b.endpoint.poll_s = PATIENCE_S
    until(lambda: a.peers["peer"] == ["b"], "the other")
    main = threading.main_thread().ident or 0
    received = []

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


def test_a_signal_handler_closes_while_its_thread_holds_the_lock(lossy):
    """close() waits end_s at most for the I/O thread, which closes the driver with the lock."""
    a, _, _ = two(lossy)
    a.endpoint.end_s = 0.1
    with a.endpoint.lock:  # as in any call of the proxy
        a.close(0.0)
        assert a.endpoint._io.is_alive()
    until(lambda: not a.endpoint._io.is_alive(), "the I/O thread to end")
    with pytest.raises(Closed):
        a.endpoint._driver.connect("b", "nowhere")
