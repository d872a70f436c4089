"""xain-coordinator, except that it kills itself (kill -9) at its n-th sync to disk.

    python dying.py N ARGUMENTS...

A sync is where bytes become durable: just before it is the worst moment to die. Those of SQLite are
its own and not seen here, so the times between them are hit by the files' syncs around them.
"""

import itertools
import os
import signal
import sys

from xain_coordinator.cli import main

number = int(sys.argv.pop(1))
counter = itertools.count(1)
fsync = os.fsync


def dying(fd: int) -> None:
    if next(counter) == number:
        os.kill(os.getpid(), signal.SIGKILL)
    fsync(fd)


os.fsync = dying
main()
