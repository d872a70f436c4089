"""The end of a coordinator in a script's process, which may wait for code of the script."""

import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Final

from xain_coordinator.process.embedding import Coordinator

TELL_S: Final = 0.5  # a longer wait is told of


def stop(coordinator: Coordinator, own: Sequence[str], tell: Callable[[str], None]) -> None:
    """Stop a coordinator. Ctrl-C meanwhile ends a script at once; in a notebook, whose process
    stays, it raises KeyboardInterrupt.

    own: the script's objects that the coordinator calls, for a user to read.
    """
    try:
        try:
            coordinator.stop(TELL_S)
        except TimeoutError:
            tell(_waiting_for(own))
            coordinator.stop()
    except KeyboardInterrupt:
        if not hasattr(sys.modules["__main__"], "__file__"):
            raise
        sys.stdout.flush()
        os._exit(128 + signal.SIGINT)  # Python would wait for its threads


def _waiting_for(own: Sequence[str]) -> str:
    what = " or ".join(own) or "an aggregation"
    text = f"the coordinator stops when what runs in it has returned: {what}"
    if threading.current_thread() is threading.main_thread():
        text += "; Ctrl-C ends the script at once, and loses nothing of the session"
    return text
