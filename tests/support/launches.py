"""Processes of a launch, which its test finds by a variable that they inherit."""

import contextlib
import os
import signal
import time
from pathlib import Path

PATIENCE_S = 120.0
VARIABLE = "LAUNCH_OF_TEST"


def processes_of(name: str) -> list[int]:
    """Numbers of the processes of a launch that are alive, its launcher aside."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            variables = (folder / "environ").read_bytes().split(b"\0")
            command = (folder / "cmdline").read_bytes().split(b"\0")
            is_launcher = b"launch" in command or int(folder.name) == os.getpid()
            if f"{VARIABLE}={name}".encode() in variables and not is_launcher:
                found.append(int(folder.name))
    return found


def pid_with(name: str, argument: str) -> int:
    """Number of the process of a launch that has this argument, once it is there: one that was
    killed may be about to be started again."""
    give_up_at = time.monotonic() + PATIENCE_S
    while True:
        found = []
        for pid in processes_of(name):
            with contextlib.suppress(OSError):  # it has just ended
                if argument in Path(f"/proc/{pid}/cmdline").read_text().split("\0"):
                    found.append(pid)
        if found or time.monotonic() > give_up_at:
            (pid,) = found
            return pid
        time.sleep(0.05)  # a poll, not a race: it ends when the process is there


def kill(name: str) -> None:
    """Kill what is there of a launch."""
    for pid in processes_of(name):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
