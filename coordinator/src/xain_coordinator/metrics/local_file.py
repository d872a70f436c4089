"""Metrics as lines of JSON in a file: the embedded default.

{"measurement": ..., "time": NANOSECONDS, "tags": {...}, "fields": {...}}
"""

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from xain_coordinator.core.values import Point
from xain_coordinator.metrics.queue import MAX_WAITING_BYTES, QueuedMetrics, Stamped

MAX_BYTES = 64 * 1024 * 1024

_LINGER_S = 0.2


class LocalMetricsFile(QueuedMetrics):
    """Metrics store that appends to `path`. Points that cannot be written are lost.

    wall_ns: the time for points that have none.
    max_bytes: a file that would grow beyond is renamed to `path` with ".1" behind it, in place of
        the one that was renamed before.
    max_waiting_bytes: of points that may wait for the disk.
    """

    def __init__(
        self,
        path: Path,
        wall_ns: Callable[[], int] = time.time_ns,
        *,
        max_bytes: int = MAX_BYTES,
        max_waiting_bytes: int = MAX_WAITING_BYTES,
    ) -> None:
        super().__init__(
            _LineWriter(RotatingFile(path.absolute(), max_bytes)),
            wall_ns,
            linger_s=_LINGER_S,
            max_waiting_bytes=max_waiting_bytes,
        )


class _LineWriter:
    def __init__(self, file: "RotatingFile") -> None:
        self._file = file

    def write(self, batch: Sequence[Stamped], closing: threading.Event) -> int:
        lines = [line for at_ns, point in batch if (line := _line(at_ns, point)) is not None]
        return len(batch) - self._file.append(lines)

    def close(self) -> None:
        self._file.close()


class RotatingFile:
    """File of whole lines that rotates; at most two files of max_bytes."""

    def __init__(self, path: Path, max_bytes: int) -> None:
        self._path = path
        self._max_bytes = max_bytes
        self._fd: int | None = None
        self._size = 0  # up to the end of the last whole line

    def append(self, lines: Sequence[bytes]) -> int:
        """Append lines; returns the number written. After a failure the next call tries again."""
        num_written = 0
        start = 0
        try:
            while start < len(lines):
                self._open()
                end, num_bytes = start, 0
                while end < len(lines):
                    if self._size + num_bytes + len(lines[end]) > self._max_bytes:
                        break
                    num_bytes += len(lines[end])
                    end += 1
                if end > start:
                    self._write(b"".join(lines[start:end]))
                    num_written += end - start
                    start = end
                elif self._size:
                    self._rotate()
                else:
                    start += 1  # longer than a file may be
        except OSError:
            self._give_up()
        return num_written

    def close(self) -> None:
        fd, self._fd = self._fd, None
        if fd is not None:
            # A network file system may tell only now that a write failed, but not which.
            with contextlib.suppress(OSError):
                os.close(fd)

    def _open(self) -> None:
        if self._fd is not None:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | getattr(os, "O_BINARY", 0)
        self._fd = os.open(self._path, flags, 0o666)
        self._size = os.lseek(self._fd, 0, os.SEEK_END)
        if self._size:
            os.lseek(self._fd, -1, os.SEEK_END)
            if os.read(self._fd, 1) != b"\n":
                self._write(b"\n")  # the last writer died within a line

    def _write(self, data: bytes) -> None:
        assert self._fd is not None, "the file is not open"
        view = memoryview(data)
        while view:
            view = view[os.write(self._fd, view) :]
        self._size += len(data)

    def _rotate(self) -> None:
        self.close()
        self._path.replace(self._path.with_name(f"{self._path.name}.1"))

    def _give_up(self) -> None:
        """Close the file, without the part of a line that a full disk may have taken."""
        if self._fd is None:
            return
        try:
            os.ftruncate(self._fd, self._size)
        except OSError:
            pass  # _open will end the line
        finally:
            self.close()


def _line(at_ns: int, point: Point) -> bytes | None:
    """The point as a line; None if it is not JSON, such as one with a field that is not finite."""
    try:
        document = {
            "measurement": point.measurement,
            "time": at_ns,
            "tags": dict(point.tags),
            "fields": dict(point.fields),
        }
        return json.dumps(document, allow_nan=False, separators=(",", ":")).encode() + b"\n"
    except (TypeError, ValueError):
        return None
