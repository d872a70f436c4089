"""What has come, between the threads that bring it and the one that receives."""

import threading
from collections import deque

from xain_messaging.ports import DriverEvent


class EventQueue:
    """Bounds nothing: see ports.Driver."""

    def __init__(self) -> None:
        self._events: deque[DriverEvent] = deque()
        self._is_woken = False
        self._is_closed = False
        # With a lock that a signal handler may take again: it may wake.
        self._changed = threading.Condition(threading.RLock())

    def put(self, event: DriverEvent) -> None:
        with self._changed:
            self._events.append(event)
            self._changed.notify()

    def wake(self) -> None:
        """get() returns None, now or at its next call, unless there is an event."""
        with self._changed:
            self._is_woken = True
            self._changed.notify_all()

    def close(self) -> None:
        """get() returns None, from now on."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def get(self, timeout_s: float | None) -> DriverEvent | None:
        """The next; None after timeout_s, or when woken."""
        with self._changed:
            if not self._events and not self._is_woken and not self._is_closed and timeout_s != 0:
                self._changed.wait(timeout_s)
            if self._is_closed:
                return None
            self._is_woken = self._is_woken and bool(self._events)
            return self._events.popleft() if self._events else None
