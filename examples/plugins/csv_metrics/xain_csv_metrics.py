"""Metrics as rows of a CSV file, chosen by `metrics.kind = "csv"`.

A row is measurement, participant, nanoseconds since 1970, field and value. The coordinator's queue
writes them in a thread of its own, so that no call waits for the disk.
"""

import csv
import math
import threading
import time
from collections.abc import Sequence
from io import StringIO
from pathlib import Path

from xain_coordinator.telemetry.queue import QueuedMetrics, Stamped


class CsvMetrics(QueuedMetrics):
    """MetricsStore that appends to the file `path`."""

    def __init__(self, path: str, linger_s: float = 0.2) -> None:
        super().__init__(CsvWriter(Path(path)), time.time_ns, linger_s=linger_s)


class CsvWriter:
    """Writes batches of points, in the thread of the queue."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def write(self, batch: Sequence[Stamped], closing: threading.Event) -> int:
        """Returns the number of points that are lost."""
        text, num_lost = StringIO(), 0
        rows = csv.writer(text, lineterminator="\n")
        for at_ns, point in batch:
            try:
                numbers = [value for value in point.fields.values() if not isinstance(value, str)]
                if not all(math.isfinite(value) for value in numbers):
                    raise ValueError("no number")
                id_ = point.tags.get("id", "")
                found = [
                    (point.measurement, id_, at_ns, name, value)
                    for name, value in point.fields.items()
                ]
            except (AttributeError, TypeError, ValueError):  # no point that can be written
                num_lost += 1
                continue
            rows.writerows(found)
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a", encoding="utf-8", newline="") as file:
                file.write(text.getvalue())
        except OSError:
            return len(batch)
        return num_lost

    def close(self) -> None:
        """Nothing is open between batches."""


def read(path: str) -> list[tuple[str, str, str, int, float]]:
    """Numbers for the contract suite: measurement, participant, field, time and value."""
    file = Path(path)
    if not file.exists():
        return []
    found = []
    with file.open(encoding="utf-8", newline="") as lines:
        for measurement, id_, at_ns, name, value in csv.reader(lines):
            try:
                found.append((measurement, id_, name, int(at_ns), float(value)))
            except ValueError:
                continue  # a text
    return found
