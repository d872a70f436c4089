"""A coordinator that is told to stop: it does, whatever goes wrong meanwhile."""

import asyncio
import json
import signal
import socket
import sys
from pathlib import Path

import pytest

from integration.coordinator.test_overtaking import OddProcess
from support.commands import called
from xain_coordinator.journal.sqlite import SqliteJournal
from xain_wire.fl import coordinator_pb2 as pb


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_signals_drain_and_persist(enter, join, process, number):
    """A watch ends with UNAVAILABLE, the process exits with 0, and the session is there again."""
    [a] = await enter(process, "a")
    call = a.watch()
    assert (await call.read()).state == pb.STANDBY
    assert await process.stop(number) == 0
    assert (await call.code()).name == "UNAVAILABLE"
    await process.start()
    a = join(process, "a")
    assert (await a.heartbeat()).state == pb.STANDBY


# A coordinator with something wrong in it, which then is told to stop.
SPOILT = """
import asyncio, os, signal, sys, time
from pathlib import Path
from xain_coordinator.assembly.coordinator import SessionCoordinator
from xain_coordinator.process import run
from xain_coordinator.cli import main as cli

started = SessionCoordinator.start

async def start(self):
    await started(self)
    {spoil}
    os.kill(os.getpid(), signal.SIGTERM)

SessionCoordinator.start = start
run.LAST_STEPS_S = 0.5
cli.app(["--data-dir", sys.argv[1], "--port=0", "--set=server.drain_s=0"])
"""


async def spoilt(spoil: str, folder: Path) -> tuple[int, list[str]]:
    """The exit status and the logged events of a process with a defect."""
    status, _, log = await called("-c", SPOILT.format(spoil=spoil), str(folder))
    return status, [json.loads(line)["event"] for line in log.splitlines()]


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
async def test_a_thread_that_hangs_does_not_hold_the_process(tmp_path):
    """Stopped while a thread waits for a store that does not answer, it leaves soon all the same.
    The thread would take longer than this test may."""
    hang = "asyncio.get_running_loop().run_in_executor(None, time.sleep, 10_000)"
    status, told = await spoilt(hang, tmp_path)
    assert status == 0
    assert told == ["coordinator_serving", "stopping", "stopped", "threads_left_behind"]


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
async def test_an_error_while_stopping_is_called_one(tmp_path):
    """The log does not say "cannot_start", and the steps after it happen all the same."""
    fail = "self._worker.close = lambda: asyncio.to_thread(Path('/none/there').read_text)"
    status, told = await spoilt(fail, tmp_path)
    assert status == 1
    assert told == ["coordinator_serving", "stopping", "stop_failed"]
    SqliteJournal(tmp_path / "journal.sqlite").close()


async def test_sigterm_is_heard_while_a_store_hangs(tmp_path):
    """A start that waits for S3 ends when it is told to, long before S3 has timed out."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        process = OddProcess(
            tmp_path,
            {
                "storage.kind": "s3",
                "storage.endpoint": f"http://127.0.0.1:{silent.getsockname()[1]}",
                "storage.bucket": "b",
                "storage.access_key_id": "x",
                "storage.secret_access_key": "x",
                "storage.timeout_s": 600,
            },
        )
        process.odd = "run.LAST_STEPS_S = 0.2"
        spawned = await process.spawn()
        connection, _ = await asyncio.to_thread(silent.accept)
        with connection:
            spawned.terminate()
            async with asyncio.timeout(90):
                assert await spawned.wait() == 0
    assert '"coordinator_serving"' not in process.log()
