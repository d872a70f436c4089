"""The threads in which a gRPC server answers."""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from contextlib import suppress
from typing import Any, Final

# Between two attempts to start one.
RETRY_S: Final = 0.1


class Threads(Executor):
    """A thread for each call that runs. None holds up the end of the process, as those of a
    ThreadPoolExecutor do when somebody forgets to close.

    One more is there from the beginning: when the system has none for a call, it tries again, since
    what submit() raises would end the thread of gRPC that hears of calls. It also calls `look`,
    each time when it has had nothing to do for every_s, or RETRY_S if that is longer.
    """

    def __init__(self, look: Callable[[], None], every_s: float) -> None:
        self._look = look
        self._every_s = max(every_s, RETRY_S)
        self._late: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._last: Callable[[], object] | None = None
        self._is_over = threading.Event()
        self._standing = threading.Thread(target=self._stand, name="messages-late", daemon=True)
        self._standing.start()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> "Future[Any]":
        future: Future[Any] = Future()

        def run() -> None:
            try:
                future.set_result(fn(*args, **kwargs))
            except BaseException as error:  # it is the caller's
                future.set_exception(error)

        if not self._start(run):
            self._late.put(run)
        return future

    @staticmethod
    def _start(run: Callable[[], None]) -> bool:
        try:
            threading.Thread(target=run, name="messages", daemon=True).start()
        except Exception:  # RuntimeError, or no memory for it
            return False
        return True

    def _stand(self) -> None:
        while not self._is_over.is_set():
            with suppress(queue.Empty):
                run = self._late.get(timeout=self._every_s)
                while run is not None and not self._start(run):
                    if self._is_over.wait(RETRY_S):
                        break
                del run
            with suppress(Exception):  # whatever it says: nobody else starts what is late
                self._look()
        if self._last is not None:
            self._last()

    def end(self, last: Callable[[], object], timeout_s: float) -> None:
        """No call begins any more; `last` is what is done then, and waited for so long."""
        self._last = last
        self._is_over.set()
        self._late.put(None)
        self._standing.join(timeout_s)
