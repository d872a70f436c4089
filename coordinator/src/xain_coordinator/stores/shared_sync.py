"""Syncs of a directory that many threads share."""

import threading
from concurrent.futures import Future, wait
from pathlib import Path

from xain_foundation.durable import sync_directory


class SharedSync:
    """sync_directory for many threads: calls that come while a sync runs share the next one. A
    round whose updates come together needs a few syncs instead of one for each."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: dict[Path, Future[None]] = {}
        self._next: dict[Path, Future[None]] = {}

    def __call__(self, directory: Path) -> None:
        """Wait for a sync of the directory that began after this call. Raises its OSError."""
        with self._lock:
            shared = self._next.get(directory)
            if shared is None:
                mine = self._next[directory] = Future()
                running = self._running.get(directory)
        if shared is not None:
            shared.result()
            return
        if running is not None:
            wait([running])
        with self._lock:
            # From here on it may be too late for a name that is changed now: that is for the next
            # sync.
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
