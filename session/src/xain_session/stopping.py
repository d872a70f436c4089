"""The end of a coordinator in a script's process, which may wait for code of the script."""

import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final

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
            is_interrupted = True  # the line says what the next Ctrl-C does
            coordinator.stop()
    except KeyboardInterrupt:
        if not is_interrupted:
            stop(coordinator, own, tell, is_interrupted=True)
        elif hasattr(sys.modules["__main__"], "__file__"):
            with suppress(OSError):
                sys.stdout.flush()
            os._exit(128 + signal.SIGINT)  # Python would wait for its threads
        raise


def _waiting_for(own: Sequence[str]) -> str:
    what = " or ".join([*own, "a transfer"])
    text = f"the coordinator stops when what runs in it has returned: {what}"
    if threading.current_thread() is threading.main_thread():
        text += "; Ctrl-C ends the script at once, and loses nothing of the session"
    return text
