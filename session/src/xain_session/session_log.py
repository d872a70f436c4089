"""The log of a coordinator in a script's process: a file in its folder, and warnings on standard
error."""

import json
import logging
import sys
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from functools import partial
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any, Final

from xain_foundation.logs.logs import copied
from xain_session.errors import for_script

LOG: Final = "coordinator.log"
COORDINATOR: Final = "xain_coordinator"  # a logger, and all below it
MAX_BYTES: Final = 16 << 20  # then the file becomes coordinator.log.1
_LOUD: Final = ("warning", "error", "critical")
_TOLD_OTHERWISE: Final = ("rules_differ",)  # the deployment says which of them count


@contextmanager
def logged_in(folder: Path, max_bytes: int = MAX_BYTES) -> Iterator[None]:
    """Write the coordinator's log to a file, unless the program has settings of its own for the
    coordinator's logger, which then stay."""
    logger = logging.getLogger(COORDINATOR)
    if logger.handlers or logger.level:
        yield
        return
    file = _File(folder / LOG, maxBytes=max_bytes, backupCount=1, encoding="utf-8")
    logger.propagate = False  # warnings reach standard error in words for a script
    with closing(file), copied(COORDINATOR, partial(_write, file), "info"):
        try:
            yield
        finally:
            logger.propagate = True


class _File(RotatingFileHandler):
    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802  the library's
        """Let a full disk cost lines of the log, and not the session."""


def _write(file: _File, line: str) -> None:
    """Write a line of the log, and print it for the script's user if it is loud."""
    event = json.loads(line)
    if event["event"] in _TOLD_OTHERWISE:
        return
    if "hint" in event:
        event["hint"] = for_script(str(event["hint"]))
    file.handle(logging.makeLogRecord({"msg": json.dumps(event)}))
    if event["level"] in _LOUD:
        with suppress(OSError, ValueError):
            sys.stderr.write(f"coordinator: {_readable(event)}\n")


def _readable(event: Mapping[str, Any]) -> str:
    """Convert an event to text for people."""
    fields = {k: v for k, v in event.items() if k not in ("event", "level", "logger", "timestamp")}
    trace = fields.pop("exception", "")
    told = " ".join([str(event["event"]), *(f"{name}={value}" for name, value in fields.items())])
    return f"{told}\n{trace}" if trace else told
