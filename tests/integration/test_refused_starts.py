"""Where a coordinator cannot start: one line says why, and nothing is changed."""

import asyncio
import json
import shutil
import socket
import sys
from pathlib import Path

import pytest

from support.process import CoordinatorProcess
from support.wire import Member
from xain_coordinator.config.coordinator import CoordinatorConfig
from xain_coordinator.core.vocabulary.events import ParticipantsSelected, SessionOpened
from xain_coordinator.journal.sqlite import SqliteJournal
from xain_coordinator.ports import Record
from xain_wire.fl import coordinator_pb2 as pb


def told_at_start(log: str) -> str:
    """The one line of a start that failed."""
    (line,) = log.splitlines()
    told = json.loads(line)
    assert told["event"] == "cannot_start"
    return told["error"]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("journal.sqlite*")}


async def test_a_new_session_that_cannot_start_leaves_the_old_one(start, tmp_path):
    """With --new-session and a busy port nothing is written: the next plain start goes on."""
    first = await start(rounds={"rounds": 7})
    await first.stop()
    with socket.create_server(("127.0.0.1", 0)) as busy:
        refused = CoordinatorProcess(tmp_path, {}, port=busy.getsockname()[1])
        assert await refused.fails("--new-session") == 1
    assert "cannot listen on" in refused.log()
    second = await start()
    assert second.driver.session == first.driver.session


async def test_without_its_weights_a_session_does_not_start(in_round, start, tmp_path):
    """With the wrong storage, or one that is not mounted, what was acknowledged must not be taken
    for lost: nothing happens until the objects of the model and of the updates are there."""
    rounds = {"rounds": 2, "min_participants": 2}
    first, a, _ = await in_round("a", "b", rounds=rounds)
    await a.hand_in([1.0])
    await first.stop()
    session = first.driver.session
    weights, journal = tmp_path / "weights", tmp_path / "journal.sqlite"

    async def refused_for(key: str) -> None:
        before = journal.read_bytes()
        refused = CoordinatorProcess(tmp_path, {})
        assert await refused.fails("--resume") == 1
        told = json.loads(refused.log().splitlines()[-1])
        assert told["event"] == "cannot_start"
        assert f"{session.session_id}/{key}, which is not in" in told["error"]
        assert str(weights) in told["error"]
        assert journal.read_bytes() == before

    away = weights.rename(tmp_path / "away")
    await refused_for("0/global")
    shutil.rmtree(weights)  # a new store, empty
    away.rename(weights)
    key = session.open_round.updates["a"].weights.ref.key
    with first.store.open(key) as reader:
        data = reader.read(0, reader.size)
    first.store.delete(key)
    await refused_for(key)
    upload = first.store.upload(key)
    upload.write(data)
    upload.commit(overwrite=False)
    second = await start(rounds=rounds)
    assert second.driver.session == session


async def test_without_its_optimisers_state_a_session_does_not_start(enter, start, tmp_path):
    """The optimiser's state is a part of the model: without it the next step would be another."""
    settings = {"rounds": {"rounds": 4}, "aggregation": {"optimizer": "fedavgm"}}
    first = await start(**settings)
    [a] = await enter(first, "a")
    for round_ in range(2):
        await a.until(pb.ROUND, round_)
        await a.hand_in([1.0], round_=round_)
    await a.until(pb.ROUND, 2)
    await first.stop()
    session = first.driver.session
    assert session.model.state.keys() == {"momentum"}
    key = session.model.state["momentum"].key
    with first.store.open(key) as reader:
        data = reader.read(0, reader.size)
    first.store.delete(key)
    refused = CoordinatorProcess(tmp_path, {})
    assert await refused.fails("--resume") == 1
    assert f"{session.session_id}/{key}, which is not in" in told_at_start(refused.log())
    upload = first.store.upload(key)
    upload.write(data)
    upload.commit(overwrite=False)
    second = await start()  # whatever the configuration says now
    assert second.driver.session == session
    assert second.driver.session.rules.optimizer == "fedavgm"


async def test_a_second_coordinator_is_refused(process, tmp_path):
    """A busy port and a journal in use are errors with one clear line, never shared (X14)."""
    same_port = CoordinatorProcess(tmp_path / "other", {}, port=process.port)
    assert await same_port.fails() == 1
    assert f"cannot listen on 127.0.0.1:{process.port}" in same_port.log()
    told = tmp_path / "address"
    told.write_text("of the first")
    same_journal = CoordinatorProcess(tmp_path, {"server.port_file": told})
    assert await same_journal.fails() == 1
    assert "journal" in same_journal.log()
    assert told.read_text() == "of the first"
    a = Member(process.port, "a")
    assert (await a.rendezvous()).reply == pb.ACCEPT
    await a.close()


async def test_coordinator_that_others_reach_needs_certificates_or_consent(tmp_path):
    process = CoordinatorProcess(tmp_path, {"server.host": "0.0.0.0"})
    assert await process.fails() == 2
    log = process.log()
    assert "xain-coordinator certs init --host HOST" in log
    assert "--insecure" in log


@pytest.mark.parametrize(("host", "is_warned"), [("0.0.0.0", True), ("127.0.0.1", False)])
async def test_coordinator_that_others_reach_warns_of_it(tmp_path, host, is_warned):
    process = CoordinatorProcess(tmp_path, {"server.host": host, "server.insecure": True})
    await process.start()
    await process.until_logged("standby")
    assert await process.stop() == 0
    assert ('"open_to_others"' in process.log()) is is_warned


async def test_a_journal_that_makes_no_sense_is_one_line(tmp_path):
    """No traceback, no start, exit status 1."""
    rules = CoordinatorConfig().rules()
    journal = SqliteJournal(tmp_path / "journal.sqlite")
    events = (SessionOpened("s", rules, 0.0), ParticipantsSelected(0, ("a",)))
    journal.append([Record(0.0, event) for event in events])
    journal.close()
    coordinator = CoordinatorProcess(tmp_path, {})
    assert await coordinator.fails() == 1
    told = told_at_start(coordinator.log())
    assert told.startswith("the journal cannot be replayed: record 1")


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        pytest.param(lambda data: b"no journal\n" * 1000, "is not a journal", id="garbage"),
        # Where SQLite keeps the number of the format.
        pytest.param(
            lambda data: data[:60] + (77).to_bytes(4, "big") + data[64:],
            "has format 77, this version of the program reads",
            id="newer",
        ),
        pytest.param(lambda data: data[:-5000], "is damaged; restore it", id="cut"),
    ],
)
async def test_a_journal_that_cannot_be_used_is_one_line(start, tmp_path, spoil, told):
    """The line tells what to do, the exit status is 1, and the file is left as it is."""
    coordinator = await start()
    await coordinator.stop()
    path = tmp_path / "journal.sqlite"
    path.write_bytes(spoil(path.read_bytes()))
    before = contents(tmp_path)
    process = CoordinatorProcess(tmp_path, {})
    assert await process.fails() == 1
    error = told_at_start(process.log())
    assert str(path) in error
    assert told in error
    assert contents(tmp_path) == before


# Root may write everywhere, until it gives up the right to (PR_CAPBSET_DROP, CAP_DAC_OVERRIDE).
UNPRIVILEGED = """
import ctypes, os, sys

ctypes.CDLL(None).prctl(24, 1, 0, 0, 0)
os.execv(sys.executable, [sys.executable, "-m", "xain_coordinator", *sys.argv[1:]])
"""


@pytest.mark.skipif(sys.platform != "linux", reason="capabilities")
@pytest.mark.parametrize("what", ["file", "folder", "both"])
async def test_a_journal_that_may_not_be_written_is_one_line(start, tmp_path, what):
    """Permissions that were lost, a volume that is mounted read-only: nothing is begun that could
    not be written down, and nothing is changed."""
    coordinator = await start(journal={"path": str(tmp_path / "volume" / "journal.sqlite")})
    await coordinator.stop()
    path = tmp_path / "volume" / "journal.sqlite"
    modes = {"file": (0o444, 0o755), "folder": (0o644, 0o555), "both": (0o444, 0o555)}
    process = CoordinatorProcess(tmp_path, {"journal.path": path})
    for part, mode in zip((path, path.parent), modes[what], strict=True):
        part.chmod(mode)
    before = contents(path.parent)
    command = ["-c", UNPRIVILEGED, f"--data-dir={tmp_path}", f"--set=journal.path={path}"]
    refused = await process.run([*command, "--port=0"])
    async with asyncio.timeout(60):
        assert await refused.wait() == 1, process.log()
    assert contents(path.parent) == before
    error = told_at_start(process.log())
    assert str(path) in error
    assert "check the permissions" in error
