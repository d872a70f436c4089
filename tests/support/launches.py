"""Processes of a launch, which its test finds by a variable that they inherit."""

import contextlib
import os
import signal
from pathlib import Path

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
    """Number of the process of a launch that has this argument."""
    (pid,) = [
        pid
        for pid in processes_of(name)
        if argument in Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    ]
    return pid


def kill(name: str) -> None:
    """Kill what is there of a launch."""
    for pid in processes_of(name):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
