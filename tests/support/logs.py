"""Captured log events of all packages."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from xain_foundation.logs import logs
from xain_foundation.logs.logger import Fields

OURS = (*logs._OURS, "xain_foundation", "xain")


@contextmanager
def capture_logs(level: int = logging.DEBUG) -> Iterator[list[dict[str, Any]]]:
    """Capture the events of our loggers, from a level on."""
    entries: list[dict[str, Any]] = []
    with given_to(lambda name, fields: entries.append({**fields, "log_level": name}), level):
        yield entries


@contextmanager
def given_to(take: Callable[[str, Fields], None], level: int = logging.DEBUG) -> Iterator[None]:
    """Give the events of our loggers, from a level on, to a function and to nothing else."""
    loggers = [logging.getLogger(name) for name in OURS]
    before = [(logger, logger.level, logger.propagate) for logger in loggers]
    handler = _Given(take)
    for logger in loggers:
        logger.addHandler(handler)
        logger.setLevel(level)
        logger.propagate = False
    try:
        yield
    finally:
        for logger, level_before, propagates in before:
            logger.removeHandler(handler)
            logger.setLevel(level_before)
            logger.propagate = propagates


class _Given(logging.Handler):
    def __init__(self, take: Callable[[str, Fields], None]) -> None:
        super().__init__()
        self._take = take

    def emit(self, record: logging.LogRecord) -> None:
        if isinstance(record.msg, Fields):
            self._take(record.levelname.lower(), record.msg)


@contextmanager
def restored() -> Iterator[None]:
    """Undo what a command configures: other tests must not find its handler on a closed stream."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    source, is_told = logging._srcfile, logging.logThreads
    try:
        yield
    finally:
        logging.captureWarnings(False)
        root.handlers[:] = handlers
        root.setLevel(level)
        for name in logs._OURS:
            logging.getLogger(name).setLevel(logging.NOTSET)
        logging._srcfile = source
        logging.logThreads = logging.logProcesses = logging.logMultiprocessing = is_told
