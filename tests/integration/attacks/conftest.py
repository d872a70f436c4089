"""Coordinators under attack. Each test ends with a search for the secrets that it has made."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import grpc
import pytest

from integration.conftest import Start
from support.closed_coordinator import ROUNDS, ClosedCoordinator, closed_guard
from support.secret_search import Secrets, files_below
from xain_coordinator.server.guard import Guard
from xain_wire.fl import inspection_pb2
from xain_wire.fl.inspection_pb2_grpc import InspectionStub


class Said:
    """Answers of programs to their callers, and their command lines."""

    def __init__(self) -> None:
        self.messages: list[str] = []
        self.command_lines: list[tuple[str, bytes]] = []


@pytest.fixture
def said() -> Said:
    return Said()


@pytest.fixture(autouse=True)
def secrets(
    tmp_path: Path, said: Said, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> Iterator[Secrets]:
    """Keys and tokens of the test. At its end none is in its output, in what it was told, or in a
    file, but in those that keep them."""
    made = Secrets()
    yield made
    output = capfd.readouterr()
    texts = {
        "standard output": output.out,
        "standard error": output.err,
        "the log": caplog.text,
        "an answer": "\n".join(said.messages),
    }
    sources = [(where, text.encode()) for where, text in texts.items()]
    assert made.told_by([*sources, *said.command_lines, *files_below(tmp_path)]) == []


@pytest.fixture
def guard(tmp_path: Path, secrets: Secrets) -> Iterator[Guard]:
    made = closed_guard(tmp_path)
    secrets.add_key((tmp_path / "access" / "ca.key").read_bytes(), "the authority")
    secrets.add_key((tmp_path / "access" / "tls" / "tls.key").read_bytes(), "the coordinator")
    yield made
    made.close()


@pytest.fixture
async def closed(
    start: Start, tmp_path: Path, guard: Guard, secrets: Secrets, said: Said
) -> AsyncIterator[ClosedCoordinator]:
    """A closed coordinator with a round that two honest sites have open."""
    coordinator = await start(guard=guard, server={"health_port": 0}, rounds=ROUNDS)
    made = ClosedCoordinator(tmp_path, guard, coordinator, secrets)
    watching = asyncio.create_task(guard.watch())
    await made.open_round()
    yield made
    watching.cancel()
    async with grpc.aio.insecure_channel(f"unix:{tmp_path / 'journal.sock'}") as local:
        status = await InspectionStub(local).GetStatus(inspection_pb2.GetStatusRequest(whole=True))
    said.messages.append(str(status))
    await made.end()
