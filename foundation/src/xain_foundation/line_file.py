"""Lines appended to a file by a thread, so that a slow or full disk holds up nothing else."""

import contextlib
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import structlog

from xain_foundation.rare_lines import RareLine

log = structlog.get_logger(__name__)

LINGER_S = 0.2  # lines of this time are written together
MAX_WAITING = 100_000  # lines; about 20 MB
CLOSE_S = 2.0  # a disk that hangs must not hold the end of the process for longer


class LineFile:
    """A file that lines are appended to. An operator may rename or delete the file at any time; the
    next lines go to a new one. Lines that the disk does not take, or that are more than
    MAX_WAITING, are lost, and the log says how many.

    render: makes the line of an item, without its end, in the thread.
    Raises OSError if the file cannot be opened. Missing folders are made.
    """

    def __init__(self, path: Path, render: Callable[[Any], str]) -> None:
        self._path = path.absolute()
        self._render = render
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._fd: int | None = self._open()
        self._torn = False  # the last write ended within a line
        self._queue: SimpleQueue[Any] = SimpleQueue()
        self._num_lost = 0
        self._tell = RareLine(log.warning, "log_lines_lost")
        self._thread = threading.Thread(target=self._run, name="lines", daemon=True)
        self._thread.start()

    def append(self, item: Any) -> None:
        """Append the line of an item, soon. Takes a microsecond; from any thread."""
        if self._queue.qsize() < MAX_WAITING:
            self._queue.put(item)
        else:
            self._num_lost += 1

    def close(self) -> None:
        """Write what waits. Harmless when repeated."""
        self._queue.put(_END)
        self._thread.join(CLOSE_S)

    def _run(self) -> None:
        is_open = True
        while is_open:
            items = [self._queue.get()]
            if items[0] is not _END:
                time.sleep(LINGER_S)
            with contextlib.suppress(Empty):
                while len(items) < MAX_WAITING:
                    items.append(self._queue.get_nowait())
            is_open = _END not in items
            lines = [self._render(item) for item in items if item is not _END]
            self._write(lines)
        self._close()

    def _write(self, lines: list[str]) -> None:
        num_lost, self._num_lost = self._num_lost, 0
        reason = f"more than {MAX_WAITING} lines wait for the disk"
        try:
            if lines:
                self._append("".join(f"{line}\n" for line in lines).encode())
        except OSError as error:
            self._close()
            num_lost, reason = num_lost + len(lines), str(error)
        if num_lost:
            self._tell(path=str(self._path), lines=num_lost, error=reason)

    def _append(self, data: bytes) -> None:
        if self._fd is not None and self._is_moved(self._fd):
            self._close()
        if self._fd is None:
            self._fd = self._open()
        view = memoryview(b"\n" + data if self._torn else data)
        while view:
            num_written = os.write(self._fd, view)
            view = view[num_written:]
            self._torn = bool(view)

    def _is_moved(self, fd: int) -> bool:
        """Whether another file, or none, has the name by now."""
        try:
            return not os.path.samestat(os.fstat(fd), self._path.stat())
        except FileNotFoundError:
            return True

    def _open(self) -> int:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | getattr(os, "O_BINARY", 0)
        return os.open(self._path, flags, 0o666)

    def _close(self) -> None:
        fd, self._fd = self._fd, None
        if fd is not None:
            with contextlib.suppress(OSError):
                os.close(fd)


_END = object()


def why_unwritable(path: Path) -> str:
    """Why a LineFile of this path could not be opened, as far as that can be told without making a
    file; "" if it can."""
    path = path.absolute()
    if path.is_dir():
        return "it is a folder"
    if path.exists():
        return "" if os.access(path, os.W_OK) else "permission denied"
    folder = next(folder for folder in path.parents if folder.exists())
    if not folder.is_dir():
        return f"{folder} is no folder"
    return "" if os.access(folder, os.W_OK | os.X_OK) else f"permission denied in {folder}"
