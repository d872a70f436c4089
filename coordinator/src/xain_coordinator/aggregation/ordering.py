"""A lock that threads take in the order of their numbers."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Cancelled(Exception):
    """A thread with a smaller number has failed, so this one does not get the lock."""


class OrderedLock:
    """A lock that number 0 takes first, then 1, and so on, whichever thread asks first.

    A thread that fails before it has held the lock must call cancel(), since all others wait for
    it.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._next = 0
        self._is_cancelled = False

    @contextmanager
    def hold(self, number: int) -> Iterator[None]:
        """Hold the lock as soon as all smaller numbers have held it. Raises Cancelled."""
        with self._changed:
            self._changed.wait_for(lambda: self._next == number or self._is_cancelled)
            if self._is_cancelled:
                raise Cancelled
        yield
        with self._changed:
            self._next += 1
            self._changed.notify_all()

    def cancel(self) -> None:
        """Raise Cancelled in every thread that waits, and in every thread that asks later."""
        with self._changed:
            self._is_cancelled = True
            self._changed.notify_all()
