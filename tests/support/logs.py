"""Captured log events of all packages."""

from collections.abc import Iterator
from contextlib import contextmanager

import structlog
from structlog.testing import LogCapture
from structlog.typing import EventDict

from xain_messaging import logger


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


class _Into(LogCapture):
    def __init__(self, entries: list[EventDict]) -> None:
        self.entries = entries
