"""A gRPC driver on a system that has no thread left, and one whose steps fail."""

import socket
import threading
import time
import weakref
from contextlib import suppress
from functools import partial
from typing import Any

import grpc
import pytest

from support.drivers import (
    Lost,
    Receiving,
    closing_all,
    has_come_or_goes_again,
    next_event,
    received,
)
from support.fault_proxy import FaultProxy
from support.messaging import PATIENCE_S, until
from support.s3_servers import free_ports
from xain_messaging.drivers.grpc_streams import GrpcDriver


class Threads:
    """num_missing: so many threads are not started when they are to be, since the system has none.

    by: only those that a thread of this name starts.
    of: only those of this name.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, by: str = "", of: str = "") -> None:
        self.num_missing = 0
        start = threading.Thread.start

        def start_if_any(thread: threading.Thread) -> None:
            is_meant = by in ("", threading.current_thread().name) and of in ("", thread.name)
            if self.num_missing and is_meant:
                self.num_missing -= 1
                raise RuntimeError("can't start new thread")
            start(thread)

        monkeypatch.setattr(threading.Thread, "start", start_if_any)


def test_a_send_without_a_thread_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """And leaves nothing that waits; the next one goes."""
    threads = Threads(monkeypatch)
    here, there = Receiving(GrpcDriver()), Receiving(GrpcDriver())
    with closing_all(here, there):
        here.connect("there", there.address)
        threads.num_missing = 1
        with pytest.raises(RuntimeError, match="thread"):
            here.send("there", [b"1"])
        here.send("there", [b"2"])
        assert received(there) == [b"2"]
        assert here.receive(0.0) is None


def test_a_stream_without_a_thread_is_a_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """gRPC needs one that sends. What is sent after the word goes over a connection that works, and
    nothing hangs in the end."""
    threads = Threads(monkeypatch, by="messages-out")
    here, there = Receiving(GrpcDriver()), Receiving(GrpcDriver())
    with closing_all(here, there):
        here.connect("there", there.address)
        threads.num_missing = 2
        for i in range(2):
            here.send("there", [b"lost"])
            assert next_event(here) == Lost("there"), i
        here.send("there", [b"x"])
        assert received(there) == [b"x"]
        threads.num_missing = 1000
        here.send("there", [b"y"])
        assert received(there) == [b"y"]
        here.close(PATIENCE_S)


def test_a_line_that_breaks_without_a_thread_is_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """There is none for the pause, nor for the next attempts: what is sent meanwhile is lost with a
    word, or comes."""
    # Not by us: if the pause is over when we send, that has to begin a thread.
    threads = Threads(monkeypatch, by="messages-out")
    here, there = Receiving(GrpcDriver()), Receiving(GrpcDriver())
    port = int(there.address.rpartition(":")[2])
    with closing_all(here, there), FaultProxy(port) as proxy:
        here.connect("there", f"127.0.0.1:{proxy.port}")
        here.send("there", [b"1"])
        assert received(there) == [b"1"]
        threads.num_missing = 1
        proxy.cut()
        assert next_event(here) == Lost("there")
        here.send("there", [b"2"])
        until(partial(has_come_or_goes_again, here, there, b"2"), "the second")
        assert threads.num_missing == 0


def test_a_stream_that_comes_waits_for_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is none for the moment; the streams after it are heard too, and nothing hangs in
    the end, also where there is none then."""
    threads = Threads(monkeypatch, of="messages")
    first, second, there = Receiving(GrpcDriver()), Receiving(GrpcDriver()), Receiving(GrpcDriver())
    with closing_all(first, second, there):
        for driver in (first, second):
            driver.connect("there", there.address)
        threads.num_missing = 2
        first.send("there", [b"1"])
        assert received(there) == [b"1"]
        assert threads.num_missing == 0
        threads.num_missing = many = 1 << 30
        second.send("there", [b"2"])
        until(lambda: threads.num_missing < many, "the attempt")
        there.close(0.0)


def test_a_driver_that_cannot_listen_leaves_no_thread() -> None:
    """Its port is taken."""
    there = Receiving(GrpcDriver())
    with closing_all(there):
        before = {thread for thread in threading.enumerate() if thread.name == "messages-late"}
        with pytest.raises(RuntimeError, match="bind"):
            GrpcDriver(there.address)
        after = {thread for thread in threading.enumerate() if thread.name == "messages-late"}
        assert after <= before


def test_a_driver_that_cannot_serve_leaves_its_port(monkeypatch: pytest.MonkeyPatch) -> None:
    """gRPC has no thread to serve in, and the server never ends; so the collector must not come to
    it, which would wait for that."""
    monkeypatch.setattr("xain_messaging.drivers.grpc_streams.STOP_S", 0.5)
    threads = Threads(monkeypatch, by=threading.current_thread().name)
    server = weakref.WeakSet[grpc.Server]()
    new_server = grpc.server

    def note(*given: Any, **options: Any) -> grpc.Server:
        made = new_server(*given, **options)
        server.add(made)
        threads.num_missing = 1
        return made

    monkeypatch.setattr("grpc.server", note)
    (port,) = free_ports(1)
    with pytest.raises(RuntimeError, match="thread"):
        GrpcDriver(f"127.0.0.1:{port}")
    assert threads.num_missing == 0
    until(partial(is_free, port), "the port to be free")
    assert len(server) == 1


def test_a_driver_that_is_interrupted_when_it_serves_leaves_its_port(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And no thread."""
    before = set(threading.enumerate())
    serve = GrpcDriver._serve

    def interrupt(driver: GrpcDriver, listen: str) -> int:
        serve(driver, listen)
        raise KeyboardInterrupt

    monkeypatch.setattr(GrpcDriver, "_serve", interrupt)
    (port,) = free_ports(1)
    with pytest.raises(KeyboardInterrupt):
        GrpcDriver(f"127.0.0.1:{port}")
    assert is_free(port)
    until(lambda: set(threading.enumerate()) <= before, "the threads to end")


def is_free(port: int) -> bool:
    with suppress(OSError), socket.socket() as one:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        one.bind(("127.0.0.1", port))
        return True
    return False


def test_close_goes_on_where_a_step_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody is served then, and what is closed again has nothing left to do. Nor does it wait
    without end for gRPC, whatever that waits for."""
    monkeypatch.setattr("xain_messaging.drivers.grpc_streams.STOP_S", 0.1)
    here, there, other = Receiving(GrpcDriver()), Receiving(GrpcDriver()), Receiving(GrpcDriver())
    ended = threading.Event()
    with closing_all(here, there, other):
        here.connect("there", there.address)
        here.connect("other", other.address)

        def fail() -> None:
            raise MemoryError

        monkeypatch.setattr(here._lines["there"], "finish", fail)
        with pytest.raises(MemoryError):
            here.close(0.0)
        assert here.receive(None) is None
        host, _, port = here.address.rpartition(":")
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((host, int(port))).close()
        server = there._server
        assert server is not None
        stop = server.stop
        monkeypatch.setattr(server, "stop", lambda _: ended)
        begun_at = time.monotonic()
        there.close(0.0)
        assert time.monotonic() - begun_at < PATIENCE_S / 2
        ended.set()
        stop(None)
