"""Standard streams as a program may be given them."""

import contextlib
import fcntl
import os
import subprocess
import termios
from collections.abc import Callable, Iterator
from typing import Any


def fill_pipe(fd: int) -> int:
    """Fill a pipe, so that the next write waits for a reader. Returns the number of bytes."""
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_NONBLOCK)
    num_bytes = 0
    with contextlib.suppress(BlockingIOError):
        while True:
            num_bytes += os.write(fd, b"\n" * 4096)
    with contextlib.suppress(BlockingIOError):
        while True:
            num_bytes += os.write(fd, b"\n")
    fcntl.fcntl(fd, fcntl.F_SETFL, flags)
    return num_bytes


@contextlib.contextmanager
def broken_streams(kind: str) -> Iterator[Callable[..., "subprocess.Popen[bytes]"]]:
    """A function that starts a program with standard output and standard error of this kind.

    full: a pipe whose reader has stopped. stopped: a terminal after Ctrl-S. broken: a pipe whose
    reader has gone. closed: there are none.
    """
    with contextlib.ExitStack() as stack:
        stream: int = subprocess.DEVNULL
        if kind == "full":
            reading, stream = os.pipe()
            stack.callback(os.close, reading)
            fill_pipe(stream)
        elif kind == "stopped":
            master, stream = os.openpty()
            stack.callback(os.close, master)
            termios.tcflow(stream, termios.TCOOFF)
        elif kind == "broken":
            reading, stream = os.pipe()
            os.close(reading)
        if stream >= 0:
            stack.callback(os.close, stream)
        shell = ["sh", "-c", 'exec "$0" "$@" >&- 2>&-'] if kind == "closed" else []

        def start(*command: str, **options: Any) -> "subprocess.Popen[bytes]":
            process = subprocess.Popen(
                [*shell, *command],
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,
                **options,
            )
            stack.callback(process.wait)
            stack.callback(process.kill)
            return process

        yield start
