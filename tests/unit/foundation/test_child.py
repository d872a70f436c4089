"""Programs that end with the process that has started them."""

import os
import select
import signal
import subprocess
import sys

from support.process import PATIENCE_S

# Prints the processes: a child, a fork, and a child of the fork.
PARENT = """
import os, signal
from xain_foundation import child

print(child.start("waits").pid, flush=True)
if (fork := os.fork()) == 0:
    started = child.start("waits")
    print(os.getpid(), started.pid, flush=True)
signal.pause()
"""


def has_ended(process: int) -> bool:
    """Whether a process ends, which is given its time. process: a pidfd."""
    return bool(select.select([process], [], [], PATIENCE_S)[0])


def test_child_ends_with_its_parent_and_not_with_what_the_parent_has_forked(tmp_path):
    """A forked process, such as one that loads data, outlives a parent that was killed. It has
    children of its own."""
    (tmp_path / "waits.py").write_text("import signal\nsignal.pause()\n")
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT], cwd=tmp_path, stdout=subprocess.PIPE, text=True
    )
    with parent.stdout:
        (child,) = map(int, parent.stdout.readline().split())
        fork, child_of_fork = map(int, parent.stdout.readline().split())
    handles = [os.pidfd_open(pid) for pid in (child, fork, child_of_fork)]
    try:
        parent.kill()
        parent.wait()
        assert has_ended(handles[0])
        assert not select.select(handles[1:], [], [], 0)[0]
        signal.pidfd_send_signal(handles[1], signal.SIGKILL)
        assert has_ended(handles[2])
    finally:
        for handle in handles:
            if not select.select([handle], [], [], 0)[0]:
                signal.pidfd_send_signal(handle, signal.SIGKILL)
            os.close(handle)
