"""Ctrl-C, SIGTERM and SIGHUP end a launch at its next pause, between two steps: so a program that
is started is registered, too, and a call of gRPC is never broken off."""

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupts:
    """number: the first signal that came, 0 if none."""

    def __init__(self) -> None:
        self.number = 0

    def pause(self, seconds: float) -> None:
        """Sleep for all of the time, then raise KeyboardInterrupt if a signal has come by then."""
        time.sleep(seconds)  # for the caller, which polls
        if self.number:
            raise KeyboardInterrupt

    def _note_signal(self, number: int, frame: FrameType | None) -> None:
        """Keep the first signal; the next pause raises KeyboardInterrupt."""
        self.number = self.number or number

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Handle the signals while the context is open, then put the earlier handlers back. A
        signal that is ignored, as SIGHUP is under nohup, stays ignored."""
        before = {
            number: signal.signal(number, self._note_signal)
            for number in _SIGNALS
            if signal.getsignal(number) is not signal.SIG_IGN
        }
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
