"""What a file system must be asked for before a change of names outlives a power cut."""

import errno
import os
import sys
import threading
from concurrent.futures import Future, wait
from pathlib import Path

OPEN_FLAGS = getattr(os, "O_BINARY", 0)  # Windows would translate line ends


def sync_directory(directory: Path) -> None:
    """Make the names in a directory durable. Raises OSError."""
    if sys.platform == "win32":
        return  # a directory cannot be opened there; NTFS journals its names itself
    fd = os.open(directory, os.O_RDONLY | OPEN_FLAGS)
    try:
        os.fsync(fd)
    except OSError as error:
        # Some network file systems have no such operation: there is nothing more we can ask for.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP):
            raise
    finally:
        os.close(fd)


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


def make_directory(directory: Path) -> None:
    """Create a directory with its parents, durably. Raises OSError."""
    missing = []
    current = directory
    while not current.exists():
        missing.append(current)
        current = current.parent
    directory.mkdir(parents=True, exist_ok=True)
    for created in missing:
        sync_directory(created.parent)
