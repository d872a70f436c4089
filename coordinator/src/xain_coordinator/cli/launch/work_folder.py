"""The work folder of a launch, which one launcher at a time has."""

import fcntl
import os
from pathlib import Path


def hold(work: Path) -> int:
    """Lock a work folder until the file that is returned is closed, or this process has ended.

    Raises BlockingIOError while another launcher has it.
    """
    folder = os.open(work, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(folder)
        raise
    return folder


def is_held(work: Path) -> bool:
    """Whether a launcher has the folder."""
    try:
        os.close(hold(work))
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False
