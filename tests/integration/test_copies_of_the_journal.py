"""CopyJournal through the Unix socket, for a backup that does not end."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import grpc

from support.grpc_servers import serving_operators
from support.logs import capture_logs
from support.waiting import until
from xain_coordinator.server.calls.control_service import ControlService
from xain_coordinator.server.guard import Guard
from xain_wire.fl.access_pb2 import CopyJournalRequest
from xain_wire.fl.access_pb2_grpc import ControlStub, add_ControlServicer_to_server


async def test_backup_that_does_not_end_is_warned_of(tmp_path):
    """A backup holds up the removal of objects. The log tells, again and again, until the backup
    hangs up."""
    held = asyncio.Event()

    @contextlib.asynccontextmanager
    async def journal_copied() -> AsyncIterator[Path]:
        held.set()
        try:
            yield tmp_path / "copy"
        finally:
            held.clear()

    no_driver = None
    service = ControlService(Guard(), no_driver, str, journal_copied)
    service.long_backup_s = 0.05
    server = grpc.aio.server()
    add_ControlServicer_to_server(service, server)
    socket = f"unix:{tmp_path / 'journal.sock'}"
    async with (
        serving_operators(server, tmp_path),
        grpc.aio.insecure_channel(socket) as channel,
    ):
        with capture_logs() as logs:
            call = ControlStub(channel).CopyJournal(CopyJournalRequest())
            assert (await call.read()).path == str(tmp_path / "copy")
            await until(lambda: len(logs) >= 2)
        assert held.is_set()
        assert {line["event"] for line in logs} == {"backup_holds_up_removal"}
        assert logs[0]["copy"] == str(tmp_path / "copy")
        call.cancel()
        await until(lambda: not held.is_set())
