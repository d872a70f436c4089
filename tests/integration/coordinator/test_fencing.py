"""Two coordinators of one session, which meet when a journal was copied."""

import asyncio
import contextlib
import io
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from structlog.testing import capture_logs

from support.process import CoordinatorProcess
from support.s3_servers import S3Server
from support.wire import Member
from xain_coordinator import fencing
from xain_coordinator.app import EXIT_ERROR, EXIT_FENCED, Coordinator
from xain_coordinator.clock import SessionClock
from xain_coordinator.config import CoordinatorConfig, StorageSettings
from xain_coordinator.core.values import GlobalModel
from xain_coordinator.driver import Driver
from xain_coordinator.fencing import Fence, FencedStore, TakenOver
from xain_coordinator.journal.memory import MemoryJournal
from xain_coordinator.journal.sqlite import SqliteJournal
from xain_coordinator.ports import StoreUnavailable, WeightsStore
from xain_coordinator.stores.files import FileStore
from xain_coordinator.stores.memory import MemoryStore
from xain_coordinator.stores.prefixed import PrefixedStore
from xain_coordinator.stores.s3 import open_s3
from xain_coordinator.xain06.bucket import XainBucket
from xain_proto.fl import coordinator_pb2 as pb

SESSION = "5e5510485e55"

Journals = Callable[..., SqliteJournal]


# --- who is the owner -----------------------------------------------------------------------------


@pytest.fixture(params=["memory", "files", "seaweedfs", "minio_gateway"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[WeightsStore]:
    """A session's part of a store."""
    match request.param:
        case "memory":
            yield MemoryStore()
        case "files":
            yield PrefixedStore(FileStore(tmp_path / "weights"), SESSION)
        case name:
            server: S3Server = request.getfixturevalue(name)
            settings = server.settings(server.new_bucket(), path=tmp_path / "spool")
            s3 = open_s3(StorageSettings.model_validate(settings))
            yield PrefixedStore(s3, SESSION)
            s3.close()


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journals]:
    """The journal of this name, which begins as a copy of the other one, or empty."""
    opened: dict[str, SqliteJournal] = {}

    def get(name: str, copy_of: str = "") -> SqliteJournal:
        if name not in opened:
            if copy_of:
                copy_journal(tmp_path / copy_of, tmp_path / name)
            opened[name] = SqliteJournal(tmp_path / name / "journal.sqlite")
        return opened[name]

    yield get
    for each in opened.values():
        each.close()


def fence(store: WeightsStore, journal: SqliteJournal) -> Fence:
    return Fence(store, journal, SESSION, "the place")


def owners(store: WeightsStore) -> list[str]:
    return sorted(store.keys("owners/"))


def is_owner(one: Fence) -> bool:
    try:
        one.check()
    except TakenOver:
        return False
    return True


def test_the_newer_is_the_owner(store: WeightsStore, journal: Journals) -> None:
    """Of several starts the last one is; the others hear who it is, and nothing of theirs stays in
    the store or, for long, in the journal."""
    fences = []
    for number in range(1, 4):
        fences.append(fence(store, journal("a")))
        fences[-1].take_over()
        assert [is_owner(one) for one in fences] == [False] * (number - 1) + [True]
        (key,) = owners(store)
        assert key.startswith(f"owners/0000000{number}.")
        assert len(journal("a").owners(SESSION)) <= 2
    with pytest.raises(TakenOver, match=rf"owner 3 \(host .*, pid {os.getpid()}, since 2.*owner 1"):
        fences[0].check()


def test_who_was_overtaken_does_not_come_back(store: WeightsStore, journal: Journals) -> None:
    """Started again on its own journal, as whatever watches over it would, it changes nothing: what
    the other has acknowledged since is not in there. An operator who knows that it is lost can have
    it so; then the other hears of it, should it be alive."""
    fence(store, journal("a")).take_over()
    newer = fence(store, journal("b", copy_of="a"))
    newer.take_over()
    before = owners(store)
    for _ in range(2):
        with pytest.raises(TakenOver, match=f"start that one.*delete {SESSION}/owners in the pl"):
            fence(store, journal("a")).take_over()
        assert owners(store) == before
    assert is_owner(newer)
    newer = fence(store, journal("b"))  # its own may, as often as it dies
    newer.take_over()

    for key in owners(store):
        store.delete(key)
    chosen = fence(store, journal("a"))
    chosen.take_over()
    assert is_owner(chosen)
    assert not is_owner(newer)


class Failing(MemoryStore):
    """Fails to put, having done it or not; calls `meanwhile` at the given operation of its kind."""

    fails: bool = False
    does: bool = False
    is_away: bool = False
    countdown = -1
    meanwhile: Callable[[], None] = staticmethod(lambda: None)

    def _step(self) -> None:
        self.countdown -= 1
        if self.countdown == -1:
            self.meanwhile()

    def put(self, objects: Mapping[str, bytes]) -> None:
        self._step()
        if self.does or not self.fails:
            super().put(objects)
        if self.fails:
            raise StoreUnavailable("no answer")

    def keys(self, prefix: str = "") -> Iterator[str]:
        self._step()
        if self.is_away:
            raise StoreUnavailable("no route")
        return super().keys(prefix)

    def delete(self, *keys: str) -> None:
        self._step()
        super().delete(*keys)


@pytest.mark.parametrize("arrives", ["never", "at once", "late"])
def test_a_start_that_failed_is_in_nobodys_way(journal: Journals, arrives: str) -> None:
    """Whether or not the store has heard of it, and also if it hears later: the same journal's next
    start is the owner, and stays it."""
    store = Failing()
    fence(store, journal("a")).take_over()
    store.fails, store.does = True, arrives == "at once"
    with pytest.raises(StoreUnavailable):
        fence(store, journal("a")).take_over()
    failed = max(journal("a").owners(SESSION))
    store.fails = False
    next_one = fence(store, journal("a"))
    next_one.take_over()
    if arrives == "late":
        store.put({f"owners/{failed}": b"as it was sent"})
    assert is_owner(next_one)
    fence(store, journal("a")).take_over()


@pytest.mark.parametrize("step", range(5))  # it lists, puts, lists, lists, and deletes
def test_of_two_that_start_at_once_one_is_the_owner(journal: Journals, step: int) -> None:
    """Whenever one comes between two steps of the other. Whoever is not hears it at its start, or
    when it looks the next time."""
    store = Failing()
    fence(store, journal("a")).take_over()
    one, other = fence(store, journal("a")), fence(store, journal("b", copy_of="a"))
    came_between: list[bool] = []

    def come() -> None:
        with contextlib.suppress(TakenOver):
            other.take_over()
        came_between.append(True)

    store.meanwhile, store.countdown = come, step
    with contextlib.suppress(TakenOver):
        one.take_over()
    assert came_between
    assert sorted(map(started_and_owns, (one, other))) == [False, True]


def started_and_owns(one: Fence) -> bool:
    """Whoever did not start, because it heard of the other at once, owns nothing."""
    try:
        return is_owner(one)
    except AssertionError:
        return False


def test_a_store_that_was_emptied_has_no_newer_coordinator(journal: Journals) -> None:
    """As when it is not mounted: no reason to give up."""
    store = MemoryStore()
    one = fence(store, journal("a"))
    one.take_over()
    for key in owners(store):
        store.delete(key)
    assert is_owner(one)


def test_what_is_no_owner_is_not_taken_for_one(journal: Journals) -> None:
    """Other names in the folder, and words that a terminal would obey."""
    store = MemoryStore()
    one = fence(store, journal("a"))
    one.take_over()
    store.put({"owners/99999999": b"", "owners/x.part": b"", f"owners/9/{'0' * 32}": b""})
    assert is_owner(one)
    store.put({f"owners/00000007.{'0' * 32}": b"\x1b[2J\n\xff" + b"x" * 10_000})
    with pytest.raises(TakenOver) as caught:
        one.check()
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 1000


def test_only_publishing_needs_the_owner(journal: Journals) -> None:
    """An object that is written once is not written any more; the rest is as before."""
    store = MemoryStore()
    older = fence(store, journal("a"))
    older.take_over()
    guarded = FencedStore(store, older.check)
    first = guarded.upload("0/global")
    first.write(b"0")
    first.commit(overwrite=False)
    late = guarded.upload("1/global")
    late.write(b"1")
    fence(store, journal("a")).take_over()
    with pytest.raises(TakenOver):
        late.commit(overwrite=False)
    late.abort()
    update = guarded.upload("0/p")
    update.write(b"u")
    update.commit(overwrite=True)
    guarded.put({"0/q": b"u"})
    guarded.settle("0/q")
    guarded.delete("0/q")
    with guarded.open("0/global") as reader:
        assert reader.read(0, 10) == b"0"
    assert set(guarded.keys("0/")) | set(guarded.keys("1/")) == {"0/global", "0/p"}


async def test_a_store_that_is_away_ends_nobody(
    journal: Journals, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is said once that nobody can look, and what happened meanwhile is noticed afterwards."""
    monkeypatch.setattr(fencing, "LOOK_EVERY_S", 0.001)
    store = Failing()
    older = fence(store, journal("a"))
    older.take_over()
    driver = Driver.open(
        MemoryJournal(), SessionClock, CoordinatorConfig().rules(), lambda: SESSION
    )
    failed = threading.Event()
    looks: list[None] = []

    def look() -> None:
        looks.append(None)
        store.countdown = 0
        if len(looks) == 3:
            failed.set()

    store.meanwhile, store.is_away, store.countdown = look, True, 0
    with capture_logs() as told:
        watch = asyncio.create_task(older.watch(driver))
        assert await asyncio.to_thread(failed.wait, 60)
        assert driver.failure is None
        store.is_away = False
        fence(store, journal("a")).take_over()
        await asyncio.wait_for(watch, 60)
    assert isinstance(driver.failure, TakenOver)
    warnings = [line for line in told if line["event"] == "store_unavailable"]
    assert [line["error"] for line in warnings] == ["no route"]
    await driver.close()


async def test_a_defect_of_the_watch_ends_the_process(
    journal: Journals, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would never notice anything again."""
    monkeypatch.setattr(fencing, "LOOK_EVERY_S", 0.0)
    one = fence(MemoryStore(), journal("a"))  # which has not taken over: an AssertionError
    driver = Driver.open(
        MemoryJournal(), SessionClock, CoordinatorConfig().rules(), lambda: SESSION
    )
    await one.watch(driver)
    assert isinstance(driver.failure, AssertionError)
    await driver.close()


# --- processes ------------------------------------------------------------------------------------

# A coordinator that never looks but before it publishes, and stops (SIGSTOP) where it is told to.
ODD = """
import os, signal, sys, threading
from xain_coordinator import app, cli, fencing, work

fencing.LOOK_EVERY_S = 100_000
{odd}
cli.main()
"""

STOPS_BEFORE_AGGREGATION = """
aggregate = work.aggregate

def stopping(*arguments):
    # To this thread, so that it does not get any further before the process stops.
    signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
    return aggregate(*arguments)

work.aggregate = stopping
"""


class OddProcess(CoordinatorProcess):
    """odd: statements that come first."""

    odd = ""

    async def spawn(self, *extra: str) -> asyncio.subprocess.Process:
        flags = [f"--set={key}={value}" for key, value in self._settings.items()]
        program = ["-c", ODD.format(odd=self.odd), f"--data-dir={self.folder}"]
        return await self.run([*program, f"--port={self.port}", *flags, *extra])

    def resume(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)


class Ward:
    """Coordinators whose weights are in one folder, and their members."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.processes: list[CoordinatorProcess] = []
        self.members: list[Member] = []

    def process(self, name: str, kind: type[CoordinatorProcess] = CoordinatorProcess) -> Any:
        settings: dict[str, object] = {
            "storage.path": self.folder / "weights",
            "rounds.rounds": 2,
            "rounds.min_participants": 2,
            # A member of these tests beats once, and its round may take as long as it takes.
            "server.heartbeat_timeout_s": 600,
            "server.drain_s": 1,
        }
        process = kind(self.folder / name, settings)
        self.processes.append(process)
        return process

    def enter(self, process: CoordinatorProcess, name: str) -> Member:
        self.members.append(Member(process.port, name))
        return self.members[-1]

    async def begin(self, process: CoordinatorProcess) -> tuple[Member, Member]:
        """Two members in round 0, the first of which has handed in a one."""
        await process.start()
        a, b = self.enter(process, "a"), self.enter(process, "b")
        await a.rendezvous()
        await b.rendezvous()
        await a.until(pb.ROUND, 0)
        await a.hand_in([1.0])
        return a, b

    def copy(self, source: CoordinatorProcess, target: CoordinatorProcess) -> None:
        """The journal as a snapshot of the machine has it: while nothing is being written."""
        copy_journal(source.folder, target.folder)

    def models(self) -> list[str]:
        keys = FileStore(self.folder / "weights").keys()
        return sorted(key.partition("/")[2] for key in keys if key.endswith("/global"))

    def owners(self) -> list[str]:
        return sorted(str(path) for path in (self.folder / "weights").glob("*/owners/*"))


def copy_journal(source: Path, target: Path) -> None:
    """In a process of its own: closing a file gives up its process's locks on it."""
    target.mkdir(exist_ok=True)
    subprocess.run(
        [
            sys.executable,
            "-c",
            "import pathlib, shutil, sys\n"
            "for path in pathlib.Path(sys.argv[1]).glob('journal.sqlite*'):\n"
            "    shutil.copy(path, sys.argv[2])\n",
            *(str(source), str(target)),
        ],
        check=True,
        timeout=60,
    )


@pytest.fixture
async def ward(tmp_path: Path) -> AsyncIterator[Ward]:
    ward = Ward(tmp_path)
    yield ward
    for process in ward.processes:
        await process.end()
    for member in ward.members:
        await member.close()


def last_words(process: CoordinatorProcess, event: str) -> str:
    """What the log says of the error."""
    lines = process.log().splitlines()
    told = [json.loads(line) for line in lines if line.startswith("{")]  # gRPC has lines of its own
    (line,) = [each for each in told if each["event"] == event]
    error: str = line["error"]
    return error


@pytest.mark.e2e
async def test_the_older_hears_and_ends(ward: Ward) -> None:
    """By itself, although nothing is to be published, and with the status that says why. Started
    again it does not serve, and the newer goes on to the end as if it were alone."""
    older, newer = ward.process("older"), ward.process("newer")
    a, _ = await ward.begin(older)
    ward.copy(older, newer)
    watch = a.watch()
    await watch.read()
    await newer.start()
    assert await asyncio.wait_for(older.died(), 60) == EXIT_FENCED
    assert (await watch.code()).name == "UNAVAILABLE"
    error = last_words(older, "coordinator_failed")
    assert "another coordinator has taken over" in error
    assert f"owner 2 (host {socket.gethostname()}, pid " in error

    a, b = ward.enter(newer, "a"), ward.enter(newer, "b")
    assert (await a.heartbeat()).update_accepted
    assert await older.fails() == EXIT_FENCED
    assert "has gone on from another copy" in last_words(older, "cannot_start")
    await b.hand_in([3.0])
    await a.until(pb.ROUND, 1)
    assert await older.fails() == EXIT_FENCED
    for member in (a, b):
        await member.hand_in([5.0], round_=1)
    await a.until(pb.FINISHED, 1)
    models = [np.load(io.BytesIO(await a.download(f"{r}/global"))).tolist() for r in (1, 2)]
    assert models == [[2.0], [5.0]]
    assert await newer.stop() == 0


@pytest.mark.e2e
@pytest.mark.skipif(sys.platform == "win32", reason="signals")
async def test_what_wakes_up_publishes_nothing(ward: Ward) -> None:
    """Stopped while it aggregates, as a machine is that moves, and overtaken: it does not bring its
    model to an end, which is another one than the newer will make."""
    older, newer = ward.process("older", OddProcess), ward.process("newer")
    older.odd = STOPS_BEFORE_AGGREGATION
    _, b = await ward.begin(older)
    ward.copy(older, newer)
    await b.hand_in([3.0])
    await newer.start()
    assert ward.models() == ["0/global"]
    older.resume()
    assert await asyncio.wait_for(older.died(), 60) == EXIT_FENCED
    assert ward.models() == ["0/global"]
    a, b = ward.enter(newer, "a"), ward.enter(newer, "b")
    await b.hand_in([9.0])
    await a.until(pb.ROUND, 1)
    assert np.load(io.BytesIO(await a.download("1/global"))).tolist() == [5.0]


@pytest.mark.e2e
async def test_a_copy_from_another_round_ends_nobody(ward: Ward) -> None:
    """A backup whose session has gone on since could not publish any more, its rounds being over.
    It does not start, and who works on the session does not hear of it. An operator may choose to
    go on from it; then the other one ends."""
    running, backup = ward.process("running"), ward.process("backup")
    a, b = await ward.begin(running)
    ward.copy(running, backup)
    await b.hand_in([3.0])
    await a.until(pb.ROUND, 1)
    before = ward.owners()
    assert await backup.fails() == EXIT_FENCED
    error = last_words(backup, "cannot_start")
    assert "/1/global, which the journal" in error
    assert "start that one" in error
    assert ward.owners() == before
    await a.hand_in([5.0], round_=1)

    (model,) = (ward.folder / "weights").glob("*/1/global.weights")
    model.unlink()
    await backup.start()
    assert await asyncio.wait_for(running.died(), 60) == EXIT_FENCED
    b = ward.enter(backup, "b")
    await b.hand_in([7.0])
    await b.until(pb.ROUND, 1)
    assert np.load(io.BytesIO(await b.download("1/global"))).tolist() == [4.0]


@pytest.mark.e2e
async def test_a_copy_whose_updates_are_dropped_says_what_it_is(ward: Ward) -> None:
    """The session has gone on since: that comes first. Made to go on from it all the same, it ends
    with what is missing, and why."""
    running, backup = ward.process("running"), ward.process("backup")
    a, b = await ward.begin(running)
    ward.copy(running, backup)
    await b.hand_in([3.0])
    await a.until(pb.ROUND, 1)
    for member in (a, b):
        await member.hand_in([5.0], round_=1)
    await a.until(pb.FINISHED, 1)
    weights = ward.folder / "weights"
    async with asyncio.timeout(60):
        while list(weights.glob("*/0/a.*")):  # noqa: ASYNC110  # files have no event to wait for
            await asyncio.sleep(0.02)
    assert await backup.fails() == EXIT_FENCED
    assert "which the journal" in last_words(backup, "cannot_start")
    assert await running.stop() == 0
    for model in [*weights.glob("*/1/global.weights"), *weights.glob("*/2/global.weights")]:
        model.unlink()
    assert await backup.fails() == EXIT_ERROR
    assert "([storage] keep_updates)" in backup.log().splitlines()[-1]


@pytest.mark.e2e
async def test_a_start_that_fails_ends_nobody(ward: Ward) -> None:
    """On a busy port, or without its weights, a copy leaves the one that runs in its place."""
    running, copy = ward.process("running"), ward.process("copy")
    a, b = await ward.begin(running)
    ward.copy(running, copy)
    before = ward.owners()
    assert len(before) == 1
    with socket.create_server(("127.0.0.1", 0)) as busy:
        copy.port = busy.getsockname()[1]
        assert await copy.fails() == EXIT_ERROR
    assert "cannot listen on" in last_words(copy, "cannot_start")
    elsewhere = ward.folder / "elsewhere"
    assert await copy.fails(f"--set=storage.path={elsewhere}") == EXIT_ERROR
    assert not list(elsewhere.glob("*/owners/*"))
    assert ward.owners() == before
    await b.hand_in([3.0])
    await a.until(pb.ROUND, 1)
    assert running.status is None


# A coordinator on S3 whose takeover is not answered at first, or never.
UNANSWERED = """
fencing.LOOK_EVERY_S = 100_000
app.FIRST_RETRY_S = 1.0
app.LAST_STEPS_S = 0.2
take_over = fencing.Fence.take_over
tries = []

def unanswered(fence):
    tries.append(1)
    if len(tries) == 1:
        from xain_coordinator.ports import StoreUnavailable
        raise StoreUnavailable("no answer")
    take_over(fence)

fencing.Fence.take_over = unanswered
"""

HANGS = """
import time
app.LAST_STEPS_S = 0.2

def hanging(fence):
    print("it hangs", file=sys.stderr, flush=True)
    time.sleep(10_000)  # until it is stopped

fencing.Fence.take_over = hanging
"""


@pytest.mark.e2e
async def test_a_takeover_without_an_answer_is_tried_again(ward: Ward, seaweedfs: S3Server) -> None:
    """As the other requests of a start are. That the first attempt is over does not end the
    process."""
    process = ward.process("a", OddProcess)
    process.odd = UNANSWERED
    settings = seaweedfs.settings(seaweedfs.new_bucket())
    await process.start(*(f"--set=storage.{key}={value}" for key, value in settings.items()))
    assert '"next_try_s"' in process.log()
    assert await process.stop() == 0


@pytest.mark.e2e
@pytest.mark.skipif(sys.platform == "win32", reason="signals")
async def test_sigterm_is_heard_while_a_takeover_hangs(ward: Ward) -> None:
    process = ward.process("a", OddProcess)
    process.odd = HANGS
    spawned = await process.spawn()
    seen = False
    while not seen:
        await asyncio.sleep(0.02)  # a poll, not a race: it ends when the line is there
        seen = "it hangs" in process.log()
    spawned.terminate()
    assert await asyncio.wait_for(spawned.wait(), 60) == 0
    assert '"serving"' not in process.log()


# --- S3 -------------------------------------------------------------------------------------------


async def test_neither_part_of_a_bucket_gets_an_older_ones_model(
    seaweedfs: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model for XAIN's participants is published twice. Overtaken between the two, a coordinator
    does not show it to them; and the newer one has it all the same, since it is the same."""
    monkeypatch.setattr(fencing, "LOOK_EVERY_S", 100_000.0)
    bucket = seaweedfs.new_bucket()

    def config(name: str) -> CoordinatorConfig:
        folder = tmp_path / name
        spool = {"path": str(folder / "spool"), "format": "xain-pickle"}
        return CoordinatorConfig.model_validate(
            {
                "storage": seaweedfs.settings(bucket, **spool),
                "journal": {"path": str(folder / "journal.sqlite")},
                "metrics": {"kind": "none"},
                "server": {"port": 0, "drain_s": 1.0, "heartbeat_timeout_s": 600},
                "rounds": {"rounds": 2, "min_participants": 1},
            }
        )

    publish = XainBucket.publish
    between, go_on = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def waiting(self: XainBucket, model: GlobalModel) -> None:
        if model.round == 1 and not go_on.is_set():
            loop.call_soon_threadsafe(between.set)
            go_on.wait(60)
        publish(self, model)

    monkeypatch.setattr(XainBucket, "publish", waiting)
    with contextlib.closing(seaweedfs.client()) as client:

        def keys() -> set[str]:
            """Without the session's id."""
            listed = client.list_objects_v2(Bucket=bucket)["Contents"]
            return {each["Key"].replace(older.driver.session.session_id, "S") for each in listed}

        async with running(config("older")) as older:
            a = Member(older.port, "a")
            await a.rendezvous()
            await a.until(pb.ROUND, 0)
            await a.hand_in([1.0])
            await asyncio.wait_for(between.wait(), 60)
            await a.close()
            copy_journal(tmp_path / "older", tmp_path / "newer")
            newer = Coordinator(config("newer"))
            try:
                # What its start does before it serves; the rest would publish the same model.
                assert newer._fence is not None
                await asyncio.to_thread(newer._fence.take_over)
                go_on.set()
                await asyncio.wait_for(older.driver.failed.wait(), 60)
                assert isinstance(older.driver.failure, TakenOver)
                assert "participant" not in str(older.driver.failure)
                assert {"S/1/global", "0/global"} <= keys()
                assert "1/global" not in keys()
                await newer.start()
                a = Member(newer.port, "a")
                await a.until(pb.ROUND, 1)
                await a.close()
                assert "1/global" in keys()
            finally:
                await newer.stop()


async def test_a_copy_that_falls_behind_while_it_starts_ends_nobody(tmp_path: Path) -> None:
    """Between its first look at the journal and the end of its start the session goes on without
    it: it does not overtake the coordinator that is ahead."""

    def config(name: str) -> CoordinatorConfig:
        return CoordinatorConfig.model_validate(
            {
                "storage": {"path": str(tmp_path / "weights")},
                "journal": {"path": str(tmp_path / name / "journal.sqlite")},
                "metrics": {"kind": "none"},
                "server": {"port": 0, "drain_s": 1.0, "heartbeat_timeout_s": 600},
                "rounds": {"rounds": 2, "min_participants": 2},
            }
        )

    async with running(config("original")) as original:
        a, b = Member(original.port, "a"), Member(original.port, "b")
        await a.rendezvous()
        await b.rendezvous()
        await a.until(pb.ROUND, 0)
        await a.hand_in([1.0])
        copy_journal(tmp_path / "original", tmp_path / "copy")
        copy = Coordinator(config("copy"))
        try:
            await b.hand_in([3.0])
            await a.until(pb.ROUND, 1)
            with pytest.raises(TakenOver, match="/1/global"):
                await copy.start()
        finally:
            await copy.stop()
        await a.hand_in([5.0], round_=1)
        await b.hand_in([7.0], round_=1)
        await a.until(pb.FINISHED, 1)
        assert original.driver.failure is None
        await a.close()
        await b.close()


@contextlib.asynccontextmanager
async def running(config: CoordinatorConfig) -> AsyncIterator[Coordinator]:
    coordinator = Coordinator(config)
    try:
        await coordinator.start()
        yield coordinator
    finally:
        await coordinator.stop()
