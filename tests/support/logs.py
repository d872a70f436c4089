"""Captured log events of all packages."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import structlog
from structlog.testing import LogCapture
from structlog.typing import EventDict

from xain_foundation.logs import logger, logs


@contextmanager
def capture_logs() -> Iterator[list[EventDict]]:
    """Capture all events, also of loggers that do not follow structlog.configure()."""
    before = logger.PROCESSORS[:]
    with structlog.testing.capture_logs() as entries:
        # One list for both, so that the events keep their order.
        logger.PROCESSORS[:] = [_Into(entries)]
        try:
            yield entries
        finally:
            logger.PROCESSORS[:] = before


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
        structlog.reset_defaults()


class _Into(LogCapture):
    def __init__(self, entries: list[EventDict]) -> None:
        self.entries = entries
