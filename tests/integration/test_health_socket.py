"""The Unix socket beside the journal, with clients that are no health checks."""

import asyncio
import contextlib
import os
import socket
import tracemalloc
from collections.abc import AsyncIterator
from pathlib import Path

from support.logs import capture_logs
from support.process import PATIENCE_S
from xain_coordinator.server.health_socket import COPIED, COPY_JOURNAL, HealthSocket

SENT_BYTES = 32 << 20


def ask_for_a_copy(path: Path) -> socket.socket:
    """A backup that sends and sends after it has its copy."""
    client = socket.socket(socket.AF_UNIX)
    client.settimeout(PATIENCE_S)
    client.connect(str(path))
    client.sendall(COPY_JOURNAL)
    found = b""
    while found.count(b"\n") < 2:
        found += client.recv(1024)
    assert found.endswith(f"{COPIED}copy\n".encode())
    piece = bytes(1 << 20)
    for _ in range(SENT_BYTES // len(piece)):
        client.sendall(piece)
    return client


async def test_backup_that_does_not_end_is_warned_of_and_read_with_bounded_memory(
    tmp_path: Path,
) -> None:
    """A backup holds up the removal of objects. The log names its process, again and again, until
    the backup hangs up."""
    held = asyncio.Event()

    @contextlib.asynccontextmanager
    async def journal_copied() -> AsyncIterator[Path]:
        held.set()
        yield tmp_path / "copy"
        held.clear()

    health = HealthSocket(tmp_path / "journal.sqlite")
    health.long_backup_s = 0.05
    tracemalloc.start()
    try:
        async with health.open(lambda: True, journal_copied):
            with capture_logs() as logs:
                client = await asyncio.to_thread(ask_for_a_copy, tmp_path / "journal.sock")
                async with asyncio.timeout(PATIENCE_S):
                    while len(logs) < 2:  # noqa: ASYNC110  # a log has no event
                        await asyncio.sleep(0.01)  # a poll, not a race: it ends with the lines
            assert held.is_set()
            assert {line["event"] for line in logs} == {"backup_holds_up_removal"}
            assert {line["pid"] for line in logs} == {os.getpid()}
            assert logs[0]["copy"] == str(tmp_path / "copy")
            client.close()
            async with asyncio.timeout(PATIENCE_S):
                while held.is_set():  # noqa: ASYNC110  # no event tells of clear()
                    await asyncio.sleep(0.01)  # a poll, not a race: it ends with the backup
        _, peak_bytes = tracemalloc.get_traced_memory()
        assert peak_bytes < SENT_BYTES // 4
    finally:
        tracemalloc.stop()
