"""One event loop in a thread of its own, for all asynchronous servers of this package in a process.

gRPC hands its events to every event loop of a process in turn, so a second loop would slow down the
first one.
"""

import asyncio
import os
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

_lock = threading.Lock()
_loop: asyncio.AbstractEventLoop | None = None
_thread: threading.Thread | None = None


def event_loop() -> asyncio.AbstractEventLoop:
    """Return the event loop of this process. The first call starts it in a daemon thread."""
    global _loop, _thread
    with _lock:
        if _loop is None:
            loop = asyncio.new_event_loop()
            thread = threading.Thread(target=loop.run_forever, name="messages-loop", daemon=True)
            try:
                thread.start()
            except BaseException:  # the system has no thread for it now; the next call tries again
                if not thread.is_alive():
                    loop.close()
                raise
            _loop, _thread = loop, thread
        return _loop


def run(work: Coroutine[Any, Any, T], timeout_s: float | None = None) -> T:
    """Run a coroutine in the loop, and return its result. After TimeoutError it still goes on."""
    try:
        loop = event_loop()
    except BaseException:  # a coroutine that never runs has to be closed
        work.close()
        raise
    return asyncio.run_coroutine_threadsafe(work, loop).result(timeout_s)


def _after_fork() -> None:
    global _loop, _thread, _lock
    _loop, _thread, _lock = None, None, threading.Lock()  # the thread is in the parent


if hasattr(os, "register_at_fork"):  # not on Windows, which has no fork
    os.register_at_fork(after_in_child=_after_fork)
