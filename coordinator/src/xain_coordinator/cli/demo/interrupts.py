"""Delivery of Ctrl-C and SIGTERM only at moments at which no child process can be left behind."""

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
EXIT_BASE = 128  # a shell's exit status for a signal is this plus its number


# Several signals at once, as at the end of a terminal, are one wish. A later one is another: an
# exception that was raised at the wrong place may have been swallowed there.
REPEATED_S = 0.5


class Interrupts:
    """Turns signals into KeyboardInterrupt, except while they are held back.

    number: the first signal that came, 0 if none.
    """

    def __init__(self) -> None:
        self.number = 0
        self._depth = 0
        self._pending = False
        self._raised_at = -REPEATED_S

    @property
    def exit_status(self) -> int:
        """Exit status of a program that was ended by the signal."""
        return EXIT_BASE + (self.number or signal.SIGINT)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold signals back in this context, so that a child that is started in it is also
        registered."""
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
        if self._pending and not self._depth:
            self._raise()

    def hold_to_the_end(self) -> None:
        """Begin the end of the program; further signals change nothing."""
        self._depth += 1

    def _came(self, number: int, frame: FrameType | None) -> None:
        self.number = self.number or number
        if self._depth:
            self._pending = True
        elif time.monotonic() - self._raised_at >= REPEATED_S:
            self._raise()

    def _raise(self) -> None:
        self._pending = False
        self._raised_at = time.monotonic()
        raise KeyboardInterrupt

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Handle the signals here while the context is open. A signal that is ignored, as SIGHUP is
        under nohup, stays ignored."""
        if threading.current_thread() is not threading.main_thread():
            yield  # only the main thread may
            return
        before = {
            number: signal.signal(number, self._came)
            for number in _SIGNALS
            if signal.getsignal(number) is not signal.SIG_IGN
        }
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
