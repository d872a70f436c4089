"""The work folder of a launch, which one launcher at a time has."""

import fcntl
import os
from pathlib import Path

_LOCK = "launch.lock"


def hold(work: Path) -> int:
    """Lock a work folder until the file that is returned is closed, or this process has ended.
    Raises BlockingIOError while another launcher has it."""
    # A file that is open for writing: NFS locks no folder.
    lock = os.open(work / _LOCK, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        raise
    return lock


def is_held(work: Path) -> bool:
    """Whether a launcher has the folder."""
    try:
        os.close(hold(work))
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False
