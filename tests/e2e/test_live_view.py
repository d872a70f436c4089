"""The live view on a real terminal, and without one."""

import asyncio
import contextlib
import os
import pty
import re
import signal
import subprocess
import sys

from support.process import CoordinatorProcess
from support.wire import Member


def read_until(terminal: int, text: str) -> str:
    """The output of a terminal until it shows this text."""
    shown = b""
    while text.encode() not in shown:
        shown += os.read(terminal, 65536)  # bounded by the test's timeout
    return shown.decode(errors="replace")


def test_the_coordinators_terminal_shows_the_session(tmp_path):
    """The view stands below the log, and Ctrl-C leaves with the log alone."""
    terminal, inside = pty.openpty()
    words = ["-m", "xain_coordinator", f"--data-dir={tmp_path}", "--port=0", "--rounds=7"]
    process = subprocess.Popen(
        [sys.executable, *words],
        stdin=inside,
        stdout=inside,
        stderr=inside,
        env={**os.environ, "COLUMNS": "120", "LINES": "40", "TERM": "xterm"},
    )
    os.close(inside)
    try:
        shown = read_until(terminal, "0 of 7 rounds")
        assert "coordinator_serving" in shown
        process.send_signal(signal.SIGINT)
        shown = read_until(terminal, "stopped")
        assert process.wait(30) == 0
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        process.wait()
        os.close(terminal)


async def test_status_watch_prints_changes_in_a_pipe(tmp_path):
    """A line for each change, until the session has ended."""
    coordinator = CoordinatorProcess(tmp_path, {"rounds.min_participants": 1})
    await coordinator.start()
    member = Member(coordinator.port, "a")
    words = ["-m", "xain_coordinator", "status", "--watch"]
    watching = await asyncio.create_subprocess_exec(
        *(sys.executable, *words, f"--address=127.0.0.1:{coordinator.port}"),
        stdout=asyncio.subprocess.PIPE,
    )
    assert watching.stdout is not None
    try:
        first = (await watching.stdout.readline()).decode()
        assert re.fullmatch("standby .*0 of 10 .*\n", first)
        await member.rendezvous()
        second = (await watching.stdout.readline()).decode()
        assert re.fullmatch("collecting .*0 of 10 .*0 of 1 updates.*\n", second)
    finally:
        watching.kill()
        await watching.wait()
        await member.close()
        await coordinator.end()
