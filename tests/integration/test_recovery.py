"""The coordinator dies and is started again on the same journal."""

import asyncio
import contextlib
import io
import itertools
import json
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import closing
from pathlib import Path

import grpc
import numpy as np
import pytest

from support.process import CoordinatorProcess
from support.wire import Member
from xain_coordinator import driver
from xain_coordinator.config import CoordinatorConfig
from xain_coordinator.core.events import ParticipantsSelected, SessionOpened
from xain_coordinator.core.values import Phase
from xain_coordinator.journal.sqlite import SqliteJournal
from xain_coordinator.ports import Record
from xain_participant import Agent, Participant
from xain_proto.fl import coordinator_pb2 as pb
from xain_proto.fl.inspection_pb2 import GetStatusRequest
from xain_proto.fl.inspection_pb2_grpc import InspectionStub


async def test_a_restart_goes_on_with_the_same_round(start, join):
    """Number, selection and accepted updates are kept, and the aggregate is the undisturbed one."""
    rounds = {"rounds": 2, "min_participants": 2}
    first = await start(rounds=rounds)
    a, b = join(first, "a"), join(first, "b")
    await a.rendezvous()
    await b.rendezvous()
    await a.until(pb.ROUND, 0)
    ref = await a.hand_in([1.0])
    before = first.driver.session
    await first.stop()

    second = await start(rounds=rounds)
    assert second.driver.session == before
    assert second.driver.session.phase is Phase.COLLECTING
    a, b = join(second, "a"), join(second, "b")
    assert (await a.heartbeat()).update_accepted  # known without a rendezvous
    await a.end(ref)  # asked again: acknowledged again
    await b.hand_in([3.0])
    await a.until(pb.ROUND, 1)
    assert np.load(io.BytesIO(await a.download("1/global"))).tolist() == [2.0]


async def test_an_end_is_an_end_after_a_restart_too(start, join):
    """A finished session is served with its cause; a new one is opened only when asked for."""
    first = await start(rounds={"rounds": 1})
    a = join(first, "a")
    await a.rendezvous()
    await a.until(pb.ROUND, 0)
    await a.hand_in([1.0])
    await a.until(pb.FINISHED, 0)
    await first.stop()

    second = await start(rounds={"rounds": 1})
    assert second.driver.session.cause == "completed"
    assert (await join(second, "b").heartbeat()).state == pb.FINISHED
    await second.stop()

    third = await start(rounds={"rounds": 1}, new_session=True)
    assert third.driver.session.session_id != second.driver.session.session_id
    assert third.driver.session.phase is Phase.STANDBY


async def test_rules_stay_those_that_the_session_was_opened_with(start):
    """Another configuration after a restart does not change a session under way."""
    first = await start(rounds={"rounds": 7})
    await first.stop()
    second = await start(rounds={"rounds": 9})
    assert second.driver.session.rules.rounds == 7


@pytest.mark.e2e
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


@pytest.mark.e2e
async def test_without_its_weights_a_session_does_not_start(start, join, tmp_path):
    """With the wrong storage, or one that is not mounted, what was acknowledged must not be taken
    for lost: nothing happens until the objects of the model and of the updates are there."""
    rounds = {"rounds": 2, "min_participants": 2}
    first = await start(rounds=rounds)
    a, b = join(first, "a"), join(first, "b")
    await a.rendezvous()
    await b.rendezvous()
    await a.until(pb.ROUND, 0)
    await a.hand_in([1.0])
    await first.stop()
    session = first.driver.session
    weights, journal = tmp_path / "weights", tmp_path / "journal.sqlite"

    async def refused_for(key: str) -> None:
        before = journal.read_bytes()
        refused = CoordinatorProcess(tmp_path, {})
        assert await refused.fails() == 1
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


@pytest.mark.e2e
async def test_without_its_optimisers_state_a_session_does_not_start(start, join, tmp_path):
    """It is as much of the model as the weights are: without it the next step would be another."""
    settings = {"rounds": {"rounds": 4}, "aggregation": {"optimizer": "fedavgm"}}
    first = await start(**settings)
    a = join(first, "a")
    await a.rendezvous()
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
    assert await refused.fails() == 1
    assert f"{session.session_id}/{key}, which is not in" in told_at_start(refused.log())
    upload = first.store.upload(key)
    upload.write(data)
    upload.commit(overwrite=False)
    second = await start()  # whatever the configuration says now
    assert second.driver.session == session
    assert second.driver.session.rules.optimizer == "fedavgm"


@pytest.fixture
async def process(tmp_path: Path) -> AsyncIterator[CoordinatorProcess]:
    coordinator = CoordinatorProcess(
        tmp_path,
        {"rounds.rounds": 3, "rounds.min_participants": 3, "rounds.start_timeout_s": 0},
    )
    await coordinator.start()
    yield coordinator
    await coordinator.end()


@pytest.mark.e2e
async def test_kill_9_between_updates_loses_nothing(process):
    """Killed after each acknowledgement in turn, the session ends with the very bytes of a run
    that was never killed."""
    models = []
    for disturbed in (False, True):
        if disturbed:
            await process.end()
            await process.start("--new-session")
        members = [Member(process.port, name) for name in "abc"]
        for member in members:
            await member.rendezvous()
        for round_ in range(3):
            await members[0].until(pb.ROUND, round_)
            for number in range(3):
                vector = np.float32([round_, number, 0.1])
                await members[number].hand_in(vector, number + 1, round_)
                if disturbed:
                    await process.kill()
                    await process.start()
                    for member in members:
                        await member.close()
                    members = [Member(process.port, name) for name in "abc"]
        await members[0].until(pb.FINISHED, 2)
        models.append(await members[0].download("3/global"))
        for member in members:
            await member.close()
    assert models[0] == models[1]


class Walker(Participant):
    """Training whose result depends on all that came before, and differs between participants."""

    def __init__(self, step: float) -> None:
        self.step = np.float32(step)
        self.trained: list[int] = []

    def init_weights(self) -> np.ndarray:
        return np.full(3, self.step)

    def train_round(
        self, weights: np.ndarray, epochs: int, epoch_base: int
    ) -> tuple[np.ndarray, int]:
        self.trained.append(epoch_base)
        return weights * np.float32(0.9) + self.step, int(10 * self.step)


@pytest.mark.e2e
@pytest.mark.timeout(300)  # it starts some dozens of coordinators, one after the other
@pytest.mark.parametrize("optimizer", ["", "fedavgm"])
async def test_kill_9_at_every_sync_changes_nothing(tmp_path, optimizer):
    """The coordinator dies at its first sync, its second, its third, ... in uploads, commits,
    initialisation and aggregation alike, until the session is through. The participants are real
    ones. The final model is that of the undisturbed run, and nobody trained a round twice. An
    optimiser goes on from what it remembered; it is stored before the model, and with a life
    between."""
    settings = {
        "rounds.rounds": 3,
        "rounds.min_participants": 3,
        "rounds.controller": "ordered",
        "aggregation.optimizer": optimizer,
    }
    models = []
    for disturbed in (False, True):
        coordinator = CoordinatorProcess(tmp_path / f"disturbed-{disturbed}", settings)
        await coordinator.start()
        target = f"127.0.0.1:{coordinator.port}"
        walkers = [Walker(step) for step in (0.1, 0.2, 0.7)]
        agents = [Agent(w, target, f"site-{i}") for i, w in enumerate(walkers)]
        deaths = 0
        if disturbed:
            await coordinator.kill()
        try:
            ends = [asyncio.create_task(asyncio.to_thread(agent.run)) for agent in agents]
            if disturbed:
                deaths = await die_until_finished(coordinator)
            assert await asyncio.gather(*ends) == [0, 0, 0]
            assert [walker.trained for walker in walkers] == [[0, 1]] * 3
            reader = Member(coordinator.port, "reader")
            models.append(await reader.download("3/global"))
            await reader.close()
        finally:
            for agent in agents:
                agent.stop()
            await coordinator.end()
    assert models[0] == models[1]
    assert deaths > 5


async def die_until_finished(coordinator: CoordinatorProcess) -> int:
    """Start it until a life ends with the session's end and not with its own; how often."""
    for deaths in itertools.count():
        coordinator.dies_at = deaths + 1
        try:
            await coordinator.start()
        except AssertionError:
            continue  # it did not even get as far as serving
        dead = asyncio.create_task(coordinator.died())
        finished = asyncio.create_task(until_finished(coordinator.port))
        await asyncio.wait([dead, finished], return_when=asyncio.FIRST_COMPLETED)
        if not dead.done():
            dead.cancel()
            return deaths
        finished.cancel()
        await asyncio.wait([finished])
    raise AssertionError("unreachable")


async def until_finished(port: int) -> None:
    """Watch as a stranger would: by the status."""
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = InspectionStub(channel)
        while True:
            # A call that is cut off means that the coordinator has died; then this is cancelled.
            with contextlib.suppress(grpc.aio.AioRpcError):
                status = await stub.GetStatus(GetStatusRequest(), wait_for_ready=True)
                if status.phase == "finished":
                    return
            await asyncio.sleep(0.05)  # a poll; it ends with the session, or with the coordinator


@pytest.mark.e2e
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_signals_drain_and_persist(process, number):
    """A watch ends with UNAVAILABLE, the process exits with 0, and the session is there again."""
    a = Member(process.port, "a")
    await a.rendezvous()
    call = a.watch()
    assert (await call.read()).state == pb.STANDBY
    assert await process.stop(number) == 0
    assert (await call.code()).name == "UNAVAILABLE"
    await a.close()
    await process.start()
    a = Member(process.port, "a")
    assert (await a.heartbeat()).state == pb.STANDBY
    await a.close()


@pytest.mark.e2e
async def test_a_second_coordinator_is_refused(process, tmp_path):
    """A busy port and a journal in use are errors with one clear line, never shared (X14)."""
    same_port = CoordinatorProcess(tmp_path / "other", {}, port=process.port)
    assert await same_port.fails() == 1
    assert f"cannot listen on 127.0.0.1:{process.port}" in same_port.log()
    same_journal = CoordinatorProcess(tmp_path, {})
    assert await same_journal.fails() == 1
    assert "journal" in same_journal.log()
    a = Member(process.port, "a")
    assert (await a.rendezvous()).reply == pb.ACCEPT
    await a.close()


@pytest.mark.e2e
async def test_a_journal_that_makes_no_sense_is_one_line(tmp_path):
    """No traceback, no start, exit status 1."""
    rules = CoordinatorConfig().rules()
    journal = SqliteJournal(tmp_path / "journal.sqlite")
    events = (SessionOpened("s", rules, 0.0), ParticipantsSelected(0, ("a",)))
    journal.append([Record(0.0, event) for event in events])
    journal.close()
    coordinator = CoordinatorProcess(tmp_path, {})
    assert await coordinator.fails() == 1
    (line,) = coordinator.log().splitlines()
    told = json.loads(line)
    assert told["event"] == "cannot_start"
    assert told["error"].startswith("the journal cannot be replayed: record 1")


def told_at_start(log: str) -> str:
    """The one line of a start that failed."""
    (line,) = log.splitlines()
    told = json.loads(line)
    assert told["event"] == "cannot_start"
    return told["error"]


def contents(folder: Path) -> dict[str, bytes]:
    """Of the journal and what lies beside it."""
    return {path.name: path.read_bytes() for path in folder.glob("journal.sqlite*")}


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        pytest.param(lambda data: b"no journal\n" * 1000, "is not a journal", id="garbage"),
        # Where SQLite keeps the number of the format.
        pytest.param(
            lambda data: data[:60] + (77).to_bytes(4, "big") + data[64:],
            "has format 77, this version of the program reads up to",
            id="newer",
        ),
        pytest.param(lambda data: data[:-5000], "is damaged; restore it", id="cut"),
    ],
)
async def test_a_journal_that_cannot_be_used_is_one_line(start, tmp_path, spoil, told):
    """What to do is told, the exit status is 1, and the file is left as it is."""
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


@pytest.mark.e2e
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
    assert "check the permissions of the file and its folder" in error


class TinyDisk:
    """Takes no more than a little from the coordinator's journal, until there is room."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def fill(self, process: CoordinatorProcess) -> None:
        raise NotImplementedError

    def empty(self) -> None:
        """Make room; the process has ended."""


ROOM = 48 * 1024  # a few appends


class FileSystem(TinyDisk):
    """A real one, of a megabyte."""

    def fill(self, process: CoordinatorProcess) -> None:
        usage = shutil.disk_usage(self.folder)
        self.filler = self.folder / "filler"
        self.filler.write_bytes(bytes(usage.free - ROOM))

    def empty(self) -> None:
        self.filler.unlink()


class SizeLimit(TinyDisk):
    """Where no file system may be mounted: no file may grow larger than this."""

    def fill(self, process: CoordinatorProcess) -> None:
        import resource

        limit = (self.folder / "journal.sqlite-wal").stat().st_size + ROOM
        resource.prlimit(process._process.pid, resource.RLIMIT_FSIZE, (limit, limit))


@pytest.fixture(params=[SizeLimit, FileSystem])
def tiny_disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[TinyDisk]:
    folder = tmp_path / "disk"
    folder.mkdir()
    if request.param is FileSystem:
        mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
        if subprocess.run(mount, capture_output=True, check=False).returncode != 0:
            pytest.skip("no file system may be mounted here")
    yield request.param(folder)
    if request.param is FileSystem:
        subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.e2e
@pytest.mark.skipif(sys.platform != "linux", reason="prlimit, tmpfs")
async def test_a_full_disk_ends_the_process_and_not_the_session(tiny_disk, tmp_path):
    """It stops with a line that says why, and with status 1. When there is room again, the round
    goes on with every update that was acknowledged and without the others."""
    names = [f"p{i:02}" for i in range(32)]
    settings = {
        "journal.path": tiny_disk.folder / "journal.sqlite",
        "rounds.rounds": 1,
        "rounds.min_participants": len(names),
        "server.heartbeat_time_s": 600,
    }
    process = CoordinatorProcess(tmp_path / "coordinator", settings)
    await process.start()
    members = {name: Member(process.port, name) for name in names}
    acknowledged = []
    refused = None
    try:
        for member in members.values():
            await member.rendezvous()
        await members["p00"].until(pb.ROUND, 0)
        tiny_disk.fill(process)
        for number, (name, member) in enumerate(members.items()):
            try:
                await member.hand_in([float(number)], number + 1)
            except grpc.aio.AioRpcError as error:
                refused = error.code()
                break
            acknowledged.append(name)
        assert refused is grpc.StatusCode.UNAVAILABLE
        async with asyncio.timeout(60):
            assert await process.died() == 1
        last = [json.loads(line) for line in process.log().splitlines()][-2:]
        assert [line["event"] for line in last] == ["coordinator_failed", "stopping"]
        assert str(settings["journal.path"]) in last[0]["error"]
        assert 0 < len(acknowledged) < len(names)

        tiny_disk.empty()
        await process.start()
        for number, (name, member) in enumerate(members.items()):
            accepted = (await member.heartbeat()).update_accepted
            assert accepted == (name in acknowledged)
            if not accepted:
                await member.hand_in([float(number)], number + 1)
        await members["p00"].until(pb.FINISHED, 0)
        # Of the first models every one weighs the same.
        (mean,) = np.load(io.BytesIO(await members["p00"].download("1/global")))
        assert mean == np.mean(range(len(names)))
    finally:
        for member in members.values():
            await member.close()
        await process.end()


async def test_a_restart_from_a_snapshot_goes_on(start, join, monkeypatch, tmp_path):
    """As one without: session, history and what is served are the same."""
    monkeypatch.setattr(driver, "SNAPSHOT_RECORDS", 1)
    rounds = {"rounds": 3, "min_participants": 2}
    first = await start(rounds=rounds)
    a, b = join(first, "a"), join(first, "b")
    await a.rendezvous()
    await b.rendezvous()
    for round_ in range(2):
        await a.until(pb.ROUND, round_)
        await a.hand_in([1.0 + round_], round_=round_)
        await b.hand_in([3.0 + round_], round_=round_)
    await a.until(pb.ROUND, 2)
    ref = await a.hand_in([7.0], round_=2)
    before = first.driver
    await first.stop()
    with closing(SqliteJournal(tmp_path / "journal.sqlite")) as journal:
        snapshot = journal.snapshot()
        assert snapshot is not None
        assert snapshot.session.round > 0
        assert len(list(journal.load(snapshot.num_records))) < len(list(journal.load()))

    second = await start(rounds=rounds)
    assert second.driver.session == before.session
    assert second.driver.history == before.history
    a, b = join(second, "a"), join(second, "b")
    await a.end(ref, round_=2)
    await b.hand_in([9.0], round_=2)
    await a.until(pb.FINISHED, 2)
    assert np.load(io.BytesIO(await a.download("3/global"))).tolist() == [8.0]
    assert np.load(io.BytesIO(await a.download("1/global"))).tolist() == [2.0]


# A coordinator with something wrong in it, which then is told to stop.
SPOILT = """
import asyncio, os, signal, sys, time
from pathlib import Path
from xain_coordinator import app, cli

started = app.Coordinator.start

async def start(self):
    await started(self)
    {spoil}
    os.kill(os.getpid(), signal.SIGTERM)

app.Coordinator.start = start
app.LAST_STEPS_S = 0.5
cli.app(["--data-dir", sys.argv[1], "--port=0", "--set=server.drain_s=0"])
"""


async def spoilt(spoil: str, folder: Path) -> tuple[int, list[str]]:
    """Its exit status and the events in its log."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", SPOILT.format(spoil=spoil), str(folder)),
        stderr=asyncio.subprocess.PIPE,
    )
    _, log = await process.communicate()
    return process.returncode, [json.loads(line)["event"] for line in log.splitlines()]


@pytest.mark.e2e
@pytest.mark.skipif(sys.platform == "win32", reason="signals")
async def test_a_thread_that_hangs_does_not_hold_the_process(tmp_path):
    """Stopped while a thread waits for a store that does not answer, it leaves soon all the same.
    The thread would take longer than this test may."""
    hang = "asyncio.get_running_loop().run_in_executor(None, time.sleep, 10_000)"
    status, told = await spoilt(hang, tmp_path)
    assert status == 0
    assert told == ["serving", "stopping", "stopped", "threads_left_behind"]


@pytest.mark.e2e
@pytest.mark.skipif(sys.platform == "win32", reason="signals")
async def test_an_error_while_stopping_is_called_one(tmp_path):
    """Not "cannot_start"; and the steps after it happen all the same."""
    fail = "self._worker.close = lambda: asyncio.to_thread(Path('/none/there').read_text)"
    status, told = await spoilt(fail, tmp_path)
    assert status == 1
    assert told == ["serving", "stopping", "stop_failed"]
    SqliteJournal(tmp_path / "journal.sqlite").close()


async def test_sigterm_is_heard_while_a_store_hangs(tmp_path):
    """A start that waits for S3 ends when it is told to, long before S3 has timed out."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        process = CoordinatorProcess(
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
        spawned = await process.spawn()
        connection, _ = await asyncio.to_thread(silent.accept)
        with connection:
            spawned.terminate()
            async with asyncio.timeout(90):
                assert await spawned.wait() == 0
    assert '"serving"' not in process.log()
