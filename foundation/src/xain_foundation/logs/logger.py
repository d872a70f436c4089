"""Loggers: event names plus fields, through the standard library's `logging`.

Where the program has configured no logs, Python prints warnings and errors to standard error, and
nothing below.
"""

import logging
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

# Frames from `logging` up to the call that logs: a method of Logger, and its _write().
_NUM_FRAMES: Final = 3


class Fields(dict[str, Any]):
    """Fields of a line. As text, which other formatters than ours show: `event name=value ...`."""

    def __str__(self) -> str:
        fields = (f"{name}={self[name]!r}" for name in self if name not in ("event", "exc_info"))
        return " ".join([str(self.get("event")), *fields])


class Logger:
    """A logger of `logging`. bound: fields of each line."""

    def __init__(self, name: str, bound: Mapping[str, Any] = MappingProxyType({})) -> None:
        self._logger = logging.getLogger(name)
        self._bound = bound

    def bind(self, **fields: Any) -> "Logger":
        """A logger whose lines have these fields too."""
        return Logger(self._logger.name, {**self._bound, **fields})

    def is_on(self, level: int) -> bool:
        return self._logger.isEnabledFor(level)

    def debug(self, event: str, **fields: Any) -> None:
        self._write(logging.DEBUG, event, fields)

    def info(self, event: str, **fields: Any) -> None:
        self._write(logging.INFO, event, fields)

    def warning(self, event: str, **fields: Any) -> None:
        self._write(logging.WARNING, event, fields)

    def error(self, event: str, **fields: Any) -> None:
        self._write(logging.ERROR, event, fields)

    def exception(self, event: str, **fields: Any) -> None:
        """An error with the traceback of the exception that is handled."""
        self._write(logging.ERROR, event, {"exc_info": True, **fields})

    def _write(self, level: int, event: str, fields: dict[str, Any]) -> None:
        if self._logger.isEnabledFor(level):
            line = Fields({"event": event, **self._bound, **fields})
            self._logger.log(level, line, exc_info=fields.get("exc_info"), stacklevel=_NUM_FRAMES)


def get_logger(name: str) -> Logger:
    """The logger of a module."""
    return Logger(name)
