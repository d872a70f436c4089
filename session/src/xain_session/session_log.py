"""The log of a coordinator in a script's process: a file in its folder, and warnings on standard
error."""

import json
import logging
import sys
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import closing, contextmanager, suppress
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any, Final

import structlog

from xain_session.errors import for_script

LOG: Final = "coordinator.log"
MAX_BYTES: Final = 16 << 20  # then the file becomes coordinator.log.1
_LOUD: Final = ("warning", "error", "critical")
_TOLD_OTHERWISE: Final = ("rules_differ",)  # the deployment says which of them count


@contextmanager
def logged_in(folder: Path, max_bytes: int = MAX_BYTES) -> Iterator[None]:
    """Write the coordinator's log to a file, unless the program has settings of its own for
    structlog, which then stay."""
    if structlog.is_configured():
        yield
        return
    with closing(_File(folder / LOG, maxBytes=max_bytes, backupCount=1, encoding="utf-8")) as file:
        structlog.configure(
            processors=[
                structlog.processors.add_log_level,
                structlog.processors.TimeStamper(fmt="iso"),
                structlog.processors.format_exc_info,
                _Writer(file),
            ],
            wrapper_class=structlog.make_filtering_bound_logger("info"),
            logger_factory=structlog.ReturnLoggerFactory(),
        )
        try:
            yield
        finally:
            structlog.reset_defaults()


class _File(RotatingFileHandler):
    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802  the library's
        """Let a full disk cost lines of the log, and not the session."""


class _Writer:
    def __init__(self, file: _File) -> None:
        self._file = file

    def __call__(
        self, logger: Any, method: str, event: MutableMapping[str, Any]
    ) -> Mapping[str, Any]:
        if event["event"] in _TOLD_OTHERWISE:
            raise structlog.DropEvent
        if "hint" in event:
            event["hint"] = for_script(str(event["hint"]))
        self._file.handle(logging.makeLogRecord({"msg": json.dumps(event, default=str)}))
        if event.get("level") in _LOUD:
            with suppress(OSError, ValueError):
                sys.stderr.write(f"coordinator: {_readable(event)}\n")
        raise structlog.DropEvent


def _readable(event: Mapping[str, Any]) -> str:
    fields = {k: v for k, v in event.items() if k not in ("event", "level", "timestamp")}
    trace = fields.pop("exception", "")
    told = " ".join([str(event["event"]), *(f"{name}={value}" for name, value in fields.items())])
    return f"{told}\n{trace}" if trace else told
