"""The end of a coordinator in a script's process, which may wait for code of the script."""

import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import FrameType
from typing import Any, Final

from xain_coordinator.process.embedding import Coordinator

TELL_S: Final = 0.5  # a longer wait is told of


def stop(
    coordinator: Coordinator,
    own: Sequence[str],
    tell: Callable[[str], None],
    *,
    is_interrupted: bool,
) -> None:
    """Stop a coordinator. A first Ctrl-C raises KeyboardInterrupt once it has stopped. A second one
    ends a script at once; in a notebook, whose process stays, it raises KeyboardInterrupt.

    own: the script's objects that the coordinator calls, for a user to read.
    is_interrupted: the first Ctrl-C has come already.
    """
    try:
        try:
            coordinator.stop(TELL_S)
        except TimeoutError:
            tell(_waiting_for(own))
            # The line says what the next Ctrl-C does.
            is_interrupted = True
            if isinstance(handler := signal.getsignal(signal.SIGINT), Interrupts):
                handler.has_come = True
            coordinator.stop()
    except KeyboardInterrupt:
        if not is_interrupted:
            stop(coordinator, own, tell, is_interrupted=True)
        else:
            _end_script()
        raise


class Interrupts:
    """Ctrl-C in a script under asyncio, from `listen` to `end`.

    The first goes to asyncio, which cancels the script's task. The second ends the script at once
    if the session `is_ending`: asyncio would raise KeyboardInterrupt, and Python then wait for its
    threads. In a thread that hears no signals this does nothing.

    has_come: the first, or a line that says what the next one does.
    """

    def __init__(self) -> None:
        self.is_ending = False
        self.has_come = False
        self._before: Any = None

    def listen(self) -> None:
        """Handle SIGINT here until end(), in the main thread."""
        before = signal.getsignal(signal.SIGINT)
        if threading.current_thread() is threading.main_thread() and callable(before):
            self._before = before
            signal.signal(signal.SIGINT, self)

    def end(self) -> None:
        """Handle SIGINT as before listen()."""
        self.is_ending = False
        is_last = signal.getsignal(signal.SIGINT) is self  # nobody has taken it since
        if is_last:
            signal.signal(signal.SIGINT, self._before)

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Handle SIGINT: a second one ends the script if the session is ending."""
        if self.has_come and self.is_ending:
            _end_script()
        self.has_come = True
        self._before(number, frame)


def _end_script() -> None:
    """End the process at once if it runs a script. A notebook's, which has no file, stays."""
    if hasattr(sys.modules["__main__"], "__file__"):
        with suppress(OSError):
            sys.stdout.flush()
        os._exit(128 + signal.SIGINT)  # Python would wait for its threads


def _waiting_for(own: Sequence[str]) -> str:
    """Words for what the stop of the coordinator waits for, and what Ctrl-C does."""
    what = " or ".join([*own, "a transfer"])
    text = f"the coordinator stops when what runs in it has returned: {what}"
    is_main = threading.current_thread() is threading.main_thread()
    if is_main or isinstance(signal.getsignal(signal.SIGINT), Interrupts):
        text += "; Ctrl-C ends the script at once, and loses nothing of the session"
    return text
