"""Input and output of all connections of a client, without threads of their own.

A thread that waits for an answer does the work: it polls the sockets of all connections, sends what
they take and hands out the answers that come, until its own has come. Other threads that wait
meanwhile sleep until their answer has come, or until they are woken to poll. This pattern is called
leader/followers (Schmidt et al. 2000). A request of a program with one thread needs no switch
between threads.
"""

import selectors
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Protocol

from xain_parameters.errors import Unavailable
from xain_parameters.messages import Message


class Polled(Protocol):
    """Methods of a connection that a poller calls."""

    def fileno(self) -> int: ...
    def flush(self) -> None: ...
    def on_ready(self, events: int) -> None: ...
    def end(self, why: Exception | None) -> None: ...


class Answer:
    """The answer to a request. One thread waits for it.

    num_bytes, out: see Connection.ask.
    """

    __slots__ = ("_poller", "error", "is_done", "message", "num_bytes", "out")

    def __init__(self, poller: "Poller", num_bytes: int, out: Sequence[memoryview] | None) -> None:
        self.num_bytes = num_bytes
        self.out = out
        self.message: Message | None = None
        self.error: Exception | None = None
        self.is_done = False  # there is a message or an error
        self._poller = poller

    def result(self, timeout_s: float) -> Message:
        """The answer, which may be Refused. Raises TimeoutError, and ConnectionError if the
        connection ended before."""
        if not self.is_done and not self._poller.wait(self, timeout_s):
            raise TimeoutError
        if self.error is not None:
            raise self.error
        assert self.message is not None
        return self.message


class Poller:
    """Sends and receives for connections, in the threads that wait for answers."""

    def __init__(self) -> None:
        # Connections with requests that no thread has tried to send.
        self.unsent: set[Polled] = set()
        self._selector = selectors.DefaultSelector()
        self._lock = threading.Lock()
        self._is_polling = False
        self._sleeping: dict[Answer, threading.Lock] = {}  # locked while its thread sleeps
        self._ending: set[Polled] = set()
        self._is_closed = False

    def add(self, connection: Polled) -> None:
        """Poll a connection from now on. Raises Unavailable after close()."""
        with self._lock:
            if self._is_closed:
                raise Unavailable("the client was closed")
            self._selector.register(connection, selectors.EVENT_READ, connection)

    def await_writable(self, connection: Polled, is_awaited: bool) -> None:
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if is_awaited else 0)
        self._selector.modify(connection, events, connection)

    def remove(self, connection: Polled) -> None:
        with suppress(KeyError):  # the poller was closed just after the connection was made
            self._selector.unregister(connection)

    def end(self, connection: Polled) -> None:
        """Have a connection ended that was shut, by the thread that polls if there is one."""
        with self._lock:
            self._ending.add(connection)
            if self._is_polling:
                return
            self._is_polling = True
        self._stop_polling()

    def close(self) -> None:
        """Close the poller. Called after the end of all connections."""
        with self._lock:
            self._is_closed = True
            if self._is_polling:
                return
        self._selector.close()

    def wait(self, answer: Answer, timeout_s: float) -> bool:
        """Wait until an answer has come; returns whether it has."""
        while self.unsent:
            try:
                connection = self.unsent.pop()
            except KeyError:  # another thread was first
                break
            connection.flush()
        deadline = time.monotonic() + timeout_s
        while not answer.is_done:
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            with self._lock:
                if answer.is_done:
                    break
                if polls := not self._is_polling:
                    self._is_polling = True
                else:
                    asleep = self._sleeping[answer] = threading.Lock()
                    asleep.acquire()
            if polls:
                self._poll(answer, deadline)
            elif not asleep.acquire(timeout=left):
                with self._lock:
                    if self._sleeping.pop(answer, None) is None and not self._is_polling:
                        self._wake_next()  # it was woken in this moment, to poll
        return True

    def finish(
        self, answer: Answer, message: Message | None, error: Exception | None = None
    ) -> None:
        """Set the message or error of an answer, and wake its thread. Called by one that polls."""
        with self._lock:
            answer.message, answer.error = message, error
            answer.is_done = True
            asleep = self._sleeping.pop(answer, None)
        if asleep is not None:
            asleep.release()

    def _poll(self, answer: Answer, deadline: float) -> None:
        """Send and receive for all connections until the answer or the deadline."""
        try:
            while not answer.is_done:
                left = deadline - time.monotonic()
                if left <= 0:
                    return
                for key, events in self._selector.select(left):
                    key.data.on_ready(events)
        finally:
            self._stop_polling()

    def _stop_polling(self) -> None:
        """End connections that were shut, and let another thread poll."""
        while True:
            with self._lock:
                if not self._ending:
                    self._is_polling = False
                    self._wake_next()
                    is_closed = self._is_closed
                    break
                connection = self._ending.pop()
            connection.end(None)
        if is_closed:
            self._selector.close()

    def _wake_next(self) -> None:
        """Let another thread poll from now on. Called under the lock."""
        for answer in self._sleeping:
            self._sleeping.pop(answer).release()
            return
