"""One sync of a directory for many threads."""

import threading
from concurrent.futures import Future, wait
from pathlib import Path

from xain_foundation.durable import sync_directory


class SharedSync:
    """sync_directory for many threads: whoever asks while one is under way waits for the next one,
    which is one for all of them. A round whose updates come together needs a few instead of one
    each."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: dict[Path, Future[None]] = {}
        self._next: dict[Path, Future[None]] = {}

    def __call__(self, directory: Path) -> None:
        """Returns when a sync that began after this call has ended. Raises its OSError."""
        with self._lock:
            turn = self._next.get(directory)
            if turn is None:
                mine = self._next[directory] = Future()
                running = self._running.get(directory)
        if turn is not None:
            turn.result()
            return
        if running is not None:
            wait([running])
        with self._lock:
            # From here on it may be too late for a name that is changed now: the next turn's.
            del self._next[directory]
            self._running[directory] = mine
        try:
            sync_directory(directory)
        except BaseException as error:  # others wait for this one, whatever became of it
            mine.set_exception(error)
            raise
        else:
            mine.set_result(None)
        finally:
            with self._lock:
                if self._running.get(directory) is mine:
                    del self._running[directory]
