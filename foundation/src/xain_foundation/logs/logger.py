"""Loggers of a library: event names plus fields, through the standard library's `logging`.

structlog's own default prints to standard output, which belongs to the program. So these loggers
have processors of their own and leave structlog's global configuration alone. Where the program has
configured no logs, Python prints warnings and errors to standard error, and nothing below.
"""

import logging
from typing import Any, Final

import structlog
from structlog.typing import EventDict, Processor

# Frames from `logging` up to the call in this repository: three of structlog, then that call.
_NUM_FRAMES: Final = 4


class Fields(dict[str, Any]):
    """Fields of a line. As text, which other formatters than ours show: `event name=value ...`."""

    def __str__(self) -> str:
        fields = (f"{name}={self[name]!r}" for name in self if name not in ("event", "exc_info"))
        return " ".join([str(self.get("event")), *fields])


def to_record(logger: logging.Logger, method: str, event: EventDict) -> tuple[Any, dict[str, Any]]:
    """Arguments for `logging`, that structlog's ProcessorFormatter recognises as fields."""
    options: dict[str, Any] = {"extra": {"_logger": logger, "_name": method}}
    if exc_info := event.get("exc_info"):
        options["exc_info"] = exc_info
    if type(logger).findCaller is logging.Logger.findCaller:
        options["stacklevel"] = _NUM_FRAMES  # a logger class of structlog skips them itself
    return (Fields(event),), options


# A list that is changed in place by tests which look at what is logged.
PROCESSORS: Final[list[Processor]] = [structlog.stdlib.filter_by_level, to_record]


def get_logger(name: str) -> structlog.stdlib.BoundLogger:
    """The logger of a module."""
    logger: structlog.stdlib.BoundLogger = structlog.wrap_logger(
        logging.getLogger(name),
        processors=PROCESSORS,
        wrapper_class=structlog.stdlib.BoundLogger,
        context_class=dict,
        cache_logger_on_first_use=False,
    )
    return logger
