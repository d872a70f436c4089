"""The event loop of the process, and drivers that are closed in ways that nobody plans."""

import asyncio
import threading
from typing import Any

import grpc
import pytest

from support.messaging import PATIENCE_S
from xain_messaging import background
from xain_messaging.drivers.grpc_streams import GrpcDriver


def in_the_loop(work: Any) -> Any:
    """Call it on the loop's own thread."""

    async def call() -> Any:
        return work()

    return asyncio.run_coroutine_threadsafe(call(), background.event_loop()).result(PATIENCE_S)


def is_served(address: str) -> bool:
    with grpc.insecure_channel(address) as channel:
        try:
            grpc.channel_ready_future(channel).result(0.5)
        except grpc.FutureTimeoutError:
            return False
    return True


def test_a_driver_is_closed_on_the_thread_of_the_loop() -> None:
    """The garbage collector may do that. The thread does not wait for itself; the server ends."""
    driver = GrpcDriver()
    in_the_loop(lambda: driver.close(0.0))
    background.run(asyncio.sleep(0))  # the loop goes on
    assert driver._server is not None
    assert not background.run(driver._server.wait_for_termination(PATIENCE_S)), "it goes on"
    assert not is_served(driver.address)


def test_a_driver_is_not_made_on_the_thread_of_the_loop() -> None:
    """The thread would wait for itself."""
    with pytest.raises(RuntimeError, match="cannot wait"):
        in_the_loop(GrpcDriver)


def test_an_interrupted_close_ends_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """And all connections."""
    driver, other = GrpcDriver(), GrpcDriver()
    driver.connect("other", other.address)
    connection = driver._connections["other"]

    def interrupt(deadline: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(connection, "join", interrupt)
    with pytest.raises(KeyboardInterrupt):
        driver.close(PATIENCE_S)
    assert connection._is_closed
    assert not is_served(driver.address)
    other.close(0.0)


def test_an_interrupted_constructor_leaves_no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though it listens already."""
    run, ports = background.run, []

    def interrupt(work: Any) -> None:
        ports.append(run(work))
        raise KeyboardInterrupt

    monkeypatch.setattr(background, "run", interrupt)
    with pytest.raises(KeyboardInterrupt):
        GrpcDriver()
    assert not is_served(f"127.0.0.1:{ports[0]}")


def test_a_loop_whose_thread_did_not_start_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once the system has a thread for it."""
    monkeypatch.setattr(background, "_loop", None)
    monkeypatch.setattr(background, "_thread", None)

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="can't start"):
            background.event_loop()
    loop = background.event_loop()
    asyncio.run_coroutine_threadsafe(asyncio.sleep(0), loop).result(PATIENCE_S)
    loop.call_soon_threadsafe(loop.stop)
    assert background._thread is not None
    background._thread.join(PATIENCE_S)
    loop.close()
