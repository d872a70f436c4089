"""Operator's commands for a coordinator that runs: here through its socket, elsewhere by TLS."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from support.process import CoordinatorProcess, SiteProcess
from xain_coordinator.access.control import initialise
from xain_participant.enrolment.joining import Token, join
from xain_participant.enrolment.kept import KeptCertificates

pytestmark = pytest.mark.timeout(600)


@pytest.fixture
async def closed(tmp_path: Path) -> AsyncIterator[CoordinatorProcess]:
    initialise(tmp_path / "access", ["localhost"])
    process = CoordinatorProcess(
        tmp_path,
        {"workload.name": "sgd", "rounds.rounds": 1000, "rounds.min_participants": 2},
    )
    await process.start()
    yield process
    await process.end()


async def joined(closed: CoordinatorProcess, name: str, role: str = "participant") -> Path:
    """The folder with certificates of somebody who has joined."""
    text = await closed.told("tokens", "create", f"--name={name}", f"--role={role}")
    kept = KeptCertificates(closed.folder / name)
    await asyncio.to_thread(join, kept, Token(text, "token"))
    return kept.folder


async def test_operator_needs_no_flag_here_and_a_certificate_elsewhere(closed):
    here = json.loads(await closed.told("status", "--json"))
    alice = await joined(closed, "alice", "operator")
    address = f"--address=127.0.0.1:{closed.port}"
    there = json.loads(await closed.told("status", "--json", address, f"--tls={alice}"))
    assert there["status"]["session_id"] == here["status"]["session_id"]
    assert "alice" in await closed.told("certs", "list", address, f"--tls={alice}")
    with pytest.raises(AssertionError, match="lets nobody in without a certificate"):
        await closed.told("status", address)
    site = await joined(closed, "ward-7")
    with pytest.raises(AssertionError, match="may not call"):
        await closed.told("certs", "list", address, f"--tls={site}")


async def test_participant_is_removed_and_the_session_finished(keep, closed):
    """Both sites end by themselves, and both commands are lines of the audit log."""
    sites = {name: keep(SiteProcess(closed.folder, name)) for name in ("north", "south")}
    for name, site in sites.items():
        await joined(closed, name)
        flags = ["--data=digits", f"--state-dir={closed.folder / name}"]
        await site.start(closed.port, *flags)
        await site.until_logged('"joined"')
    await closed.told("participants", "remove", "north")
    assert await sites["north"].died() == 1
    assert "an operator has removed participant 'north'" in sites["north"].log()
    await closed.told("session", "finish", "--reason", "enough for today")
    # The cause of the end depends on the rounds that have counted.
    assert await sites["south"].died() >= 0
    told = await closed.told("audit", "show")
    assert "participant_removed" in told
    assert "enough for today" in told


async def test_commands_go_on_in_the_folder_of_a_coordinator_that_was_killed(closed):
    """The socket is still there, and nobody answers at it."""
    await closed.told("tokens", "create", "--name", "ward-7")
    await closed.kill()
    assert (closed.folder / "journal.sock").exists()
    listed = json.loads(await closed.told("certs", "list", "--json"))
    assert listed[-1]["name"] == "ward-7"
    await closed.told("certs", "revoke", "ward-7")
    await closed.start()
    listed = json.loads(await closed.told("certs", "list", "--json"))
    assert (listed[-1]["name"], listed[-1]["revoked"]) == ("ward-7", True)
