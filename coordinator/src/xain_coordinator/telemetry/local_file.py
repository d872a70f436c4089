"""Metrics as lines of JSON in a file: the embedded default.

{"measurement": ..., "time": NANOSECONDS, "tags": {...}, "fields": {...}}
"""

import json
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from xain_coordinator.core.vocabulary.values import Point
from xain_coordinator.telemetry.queue import QueuedMetrics, Stamped
from xain_foundation.logs.line_file import AppendedFile

MAX_BYTES = 64 * 1024 * 1024

_LINGER_S = 0.2


class LocalMetricsFile(QueuedMetrics):
    """Metrics store that appends to `path`. Points that cannot be written are lost.

    wall_ns: the time for points that have none.
    max_bytes: see AppendedFile. bounds: of the queue.
    """

    def __init__(
        self,
        path: Path,
        wall_ns: Callable[[], int] = time.time_ns,
        *,
        max_bytes: int = MAX_BYTES,
        **bounds: int,
    ) -> None:
        writer = _LineWriter(AppendedFile(path, max_bytes))
        super().__init__(writer, wall_ns, linger_s=_LINGER_S, **bounds)


class _LineWriter:
    def __init__(self, file: AppendedFile) -> None:
        self._file = file

    def write(self, batch: Sequence[Stamped], closing: threading.Event) -> int:
        """Append a batch as lines of JSON. Returns the number of points that are lost: all of them
        if the file cannot be written."""
        lines = [line for at_ns, point in batch if (line := _line(at_ns, point)) is not None]
        try:
            self._file.append(b"".join(lines))
        except OSError:
            return len(batch)
        return len(batch) - len(lines)

    def close(self) -> None:
        self._file.close()


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
