"""The files of [logging]: the status stream and the latency stream."""

import contextlib
import json
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from xain_coordinator.telemetry import log_lines
from xain_foundation.logs import logs
from xain_foundation.logs.line_file import LineFile
from xain_foundation.logs.logger import get_logger
from xain_foundation.names import shortened

log = get_logger(__name__)

_Latency = tuple[float, str, str, str, int | None, float]


class LatencyFile:
    """The latency stream: a line of JSON for each call that has ended and for each update that was
    accepted; see docs/logs.md. Raises OSError."""

    def __init__(self, path: Path) -> None:
        self._file = LineFile(path, _line, log)

    def call(self, method: str, participant_id: str, status: str, seconds: float) -> None:
        """Write that a call has ended now. participant_id: "" if the caller has none."""
        self._file.append((time.time(), method, participant_id, status, None, seconds))

    def update(self, participant_id: str, round_: int, seconds: float) -> None:
        """Write that an update of this round was accepted, so long after the round has opened."""
        self._file.append((time.time(), "", participant_id, "", round_, seconds))

    def close(self) -> None:
        """Close the file, after the lines that wait."""
        self._file.close()


@contextlib.contextmanager
def status_stream(path: Path, level: str) -> Iterator[None]:
    """Write the events of the session to a file too, whatever the level of the log is. level: of
    the log. Raises OSError."""
    file = LineFile(path, str, log)
    with contextlib.closing(file), logs.copied(log_lines.__name__, file.append, level):
        yield


def _line(latency: _Latency) -> str:
    """A latency as a line of JSON: of a call if it has a method, else of an update."""
    at, method, participant_id, status, round_, seconds = latency
    document: dict[str, object] = {"time": datetime.fromtimestamp(at, UTC).isoformat()}
    if method:
        document["method"] = method
    if participant_id:
        document["participant"] = shortened(participant_id)
    document |= {"status": status} if method else {"round": round_}
    return json.dumps(document | {"seconds": round(seconds, 6)})
