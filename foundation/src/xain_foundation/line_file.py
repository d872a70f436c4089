"""Lines appended to a file by a thread, so that a slow or full disk holds up nothing else."""

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import structlog

from xain_foundation.group_commit import GroupCommit
from xain_foundation.rate_limited_log import RateLimitedLog

log = structlog.get_logger(__name__)

LINGER_S = 0.2  # lines of this time are written together
MAX_WAITING = 100_000  # lines; about 20 MB
CLOSE_S = 2.0  # a disk that hangs must not hold the end of the process for longer


class LineFile:
    """A file that lines are appended to. An operator may rename or delete the file at any time; the
    next lines go to a new one. Lines that the disk does not take, and the oldest of more than
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
        self._num_told = 0  # of the lines that were lost
        self._tell = RateLimitedLog(log.warning, "log_lines_lost")
        self._items: GroupCommit[Any] = GroupCommit(
            self._write, name="lines", linger_s=LINGER_S, max_waiting=MAX_WAITING
        )

    def append(self, item: Any) -> None:
        """Append the line of an item, soon. From any thread."""
        self._items.put(item)

    def close(self) -> None:
        """Write what waits. Harmless when repeated."""
        if self._items.close(CLOSE_S):
            self._close()

    def _write(self, items: list[Any]) -> int:
        num_lost = self._items.num_lost - self._num_told
        reason = f"more than {MAX_WAITING} lines wait for the disk"
        num_failed = 0
        try:
            self._append("".join(f"{self._render(item)}\n" for item in items).encode())
        except OSError as error:
            self._close()
            num_failed, reason = len(items), str(error)
        if num_lost + num_failed:
            self._tell(path=str(self._path), lines=num_lost + num_failed, error=reason)
        self._num_told += num_lost + num_failed
        return num_failed

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
        """Whether the path names another file by now, or none."""
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
