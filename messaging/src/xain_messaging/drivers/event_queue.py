"""What has come, between the threads that bring it and the one that receives."""

import queue
from typing import Generic, TypeVar

T = TypeVar("T")


class EventQueue(Generic[T]):
    """Bounds nothing: see ports.Driver."""

    def __init__(self) -> None:
        # Of None, who receives is only woken. A signal handler may put something into it while
        # somebody else does.
        self._events: queue.SimpleQueue[T | None] = queue.SimpleQueue()
        self._is_woken = False
        self._is_closed = False

    @property
    def size(self) -> int:
        return self._events.qsize()

    def put(self, event: T) -> None:
        self._events.put(event)

    def wake(self) -> None:
        """Let get() return now, or at its next call: with None, if nothing has come behind that."""
        if not self._is_woken:
            self._is_woken = True
            self._events.put(None)

    def close(self) -> None:
        """get() returns None, from now on."""
        self._is_closed = True
        self._events.put(None)

    def get(self, timeout_s: float | None) -> T | None:
        """The next; None after timeout_s, or when woken, unless there is one behind that: so one
        who is given None has had all that has come. For one thread at a time."""
        while not self._is_closed and (timeout_s != 0 or not self._events.empty()):
            try:
                event = self._events.get(timeout=timeout_s)
            except queue.Empty:
                return None
            if event is not None:
                return None if self._is_closed else event
            self._is_woken = False
            timeout_s = 0
        return None
