"""Telling a health check that the agent is alive, by the time of a file."""

import os
import time
from contextlib import suppress
from pathlib import Path

# The loop makes calls of 5 s at most between two waits, and may have to wait for the processor
# beside a training.
SLACK_S = 60.0


class Alive:
    """A file whose modification time is when the next sign of life is due; 1970 before the agent
    has begun.

    Raises OSError if the file cannot be made.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        path.touch()
        os.utime(path, (0, 0))  # the time may be that of an earlier run

    def expect(self, wait_s: float) -> None:
        """Say that the next sign of life comes after wait_s, or SLACK_S later."""
        until = time.time() + wait_s + SLACK_S
        # A file that is gone says enough to its readers, and is no reason to end a training.
        with suppress(OSError):
            os.utime(self._path, (until, until))
