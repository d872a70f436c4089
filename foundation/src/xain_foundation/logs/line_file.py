"""Lines appended to a file by a thread, so that a slow or full disk holds up nothing else."""

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from xain_foundation.logs.group_commit import GroupCommit
from xain_foundation.logs.logger import Logger
from xain_foundation.logs.rate_limited_log import RateLimitedLog

LINGER_S = 0.2  # lines of this time are written together
CLOSE_S = 2.0  # a disk that hangs must not hold the end of the process for longer


class AppendedFile:
    """A file that whole lines are appended to. An operator may rename or delete the file at any
    time; the next lines go to a new one. Missing folders are made.

    max_bytes: a file that would grow beyond is renamed to `path` with ".1" behind it, in place of
        the one that was renamed before; None: it may grow.
    """

    def __init__(self, path: Path, max_bytes: int | None = None) -> None:
        self.path = path.absolute()
        self._max_bytes = max_bytes
        self._fd: int | None = None

    def open(self) -> int:
        """Return the descriptor of the file, which is opened unless it is open. A line that the
        last writer has left unfinished ends here. Raises OSError."""
        if self._fd is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
            is_torn = _ends_within_a_line(self.path)
            self._fd = os.open(self.path, flags, 0o666)
            if is_torn:
                os.write(self._fd, b"\n")
        return self._fd

    def append(self, lines: bytes) -> None:
        """Write lines to the end of the file; a file that would grow too large is moved aside
        first. Raises OSError; then none of the lines is in the file, as far as it can be cut."""
        try:
            if self._fd is not None and self._is_moved(self._fd):
                self.close()
            size = os.fstat(self.open()).st_size
            if self._max_bytes is not None and 0 < size > self._max_bytes - len(lines):
                self.close()
                self.path.replace(self.path.with_name(f"{self.path.name}.1"))
                size = 0
            self._write_all(self.open(), size, lines)
        except OSError:
            self.close()
            raise

    def _write_all(self, fd: int, size: int, lines: bytes) -> None:
        view = memoryview(lines)
        try:
            while view:
                view = view[os.write(fd, view) :]
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(fd, size)
            raise

    def _is_moved(self, fd: int) -> bool:
        """Whether the path names another file by now, or none."""
        try:
            return not os.path.samestat(os.fstat(fd), self.path.stat())
        except FileNotFoundError:
            return True

    def close(self) -> None:
        fd, self._fd = self._fd, None
        if fd is not None:
            with contextlib.suppress(OSError):
                os.close(fd)


def _ends_within_a_line(path: Path) -> bool:
    if not path.is_file() or not path.stat().st_size:
        return False
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"


class LineFile:
    """An AppendedFile with a thread. Lines that the disk does not take, and the oldest of more than
    max_waiting, are lost, and the log says how many.

    render: makes the line of an item, without its end, in the thread. log: of the owner.
    Raises OSError if the file cannot be opened.
    """

    max_waiting = 100_000  # lines; about 20 MB

    def __init__(self, path: Path, render: Callable[[Any], str], log: Logger) -> None:
        self._file = AppendedFile(path)
        self._file.open()
        self._render = render
        self._num_told = 0  # of the lines that were lost
        self._tell = RateLimitedLog(log.warning, "log_lines_lost")
        self._items: GroupCommit[Any] = GroupCommit(
            self._write, name="lines", linger_s=LINGER_S, max_waiting=self.max_waiting
        )

    def append(self, item: Any) -> None:
        """Append the line of an item, soon. From any thread."""
        self._items.put(item)

    def close(self) -> None:
        """Write what waits. Harmless when repeated."""
        if self._items.close(CLOSE_S):
            self._file.close()

    def _write(self, items: list[Any]) -> int:
        """Append items to the file, and log lost ones. Returns how many the disk did not take."""
        num_lost = self._items.num_lost - self._num_told
        reason = f"more than {self.max_waiting} lines wait for the disk"
        num_failed = 0
        try:
            self._file.append("".join(f"{self._render(item)}\n" for item in items).encode())
        except OSError as error:
            num_failed, reason = len(items), str(error)
        if num_lost + num_failed:
            self._tell(path=str(self._file.path), lines=num_lost + num_failed, error=reason)
        self._num_told += num_lost + num_failed
        return num_failed


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
