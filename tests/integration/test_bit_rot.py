"""One bit of what is stored changes: it is found, and there is a way out."""

import asyncio
import subprocess
import threading
from asyncio import to_thread
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from integration.conftest import config_for
from support.logs import capture_logs
from support.waiting import until
from support.wire import Code, Member, assert_refused, inside, npy
from xain_coordinator.assembly.coordinator import SessionCoordinator
from xain_coordinator.cli import main as cli
from xain_coordinator.driver.effects import Stopped, StoreWorker
from xain_coordinator.journal.sqlite import SqliteJournal
from xain_coordinator.ports import JournalError, StoreError
from xain_foundation.logs import logs
from xain_participant import Agent, Participant, StateDirectory
from xain_wire.fl import coordinator_pb2 as pb
from xain_wire.fl.inspection_pb2 import ListRoundsRequest

LARGE = 50_000  # float32: more than what travels inside a call


def flip(path: Path) -> None:
    """Change one bit in the middle of a file."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x04
    path.write_bytes(content)


def stored(folder: Path, pattern: str) -> Path:
    """The only file of the weights store whose name fits; what is set aside has another one."""
    files = (p for p in (folder / "weights").rglob(pattern) if p.is_file())
    (path,) = (p for p in files if "damaged" not in p.parts)
    return path


class Constant(Participant):
    """Trains to a vector of its own, once it may."""

    def __init__(self, value: float, size: int, may_train: threading.Event | None = None) -> None:
        self.vector = np.full(size, value, np.float32)
        self.may_train = may_train
        self.num_trained = 0

    def init_weights(self) -> np.ndarray:
        return self._train()

    def train_round(self, weights: np.ndarray, epochs: int, epoch_base: int) -> tuple:
        return self._train(), 1

    def _train(self) -> np.ndarray:
        if self.may_train is not None:
            assert self.may_train.wait(20.0)
        self.num_trained += 1
        return self.vector


async def hand_in(member: Member, vector: np.ndarray) -> None:
    """Hand in for round 0: a small update inside the call, a large one before it."""
    if len(npy(vector)) > 1000:
        await member.hand_in(vector)
    else:
        await member.end(inside(vector, f"0/{member.participant_id}"))


def flip_in_journal(coordinator: SessionCoordinator) -> None:
    """Change one bit of the only small update, which the journal no longer has in memory."""
    journal = coordinator.journal
    assert isinstance(journal, SqliteJournal)
    (key,) = journal.object_keys()
    content = bytearray(journal.read_object(key) or b"")
    content[-1] ^= 0x04
    journal._recent.clear()
    journal._db.execute("UPDATE object SET data = ? WHERE key = ?", (bytes(content), key))


@pytest.mark.parametrize("size", [3, LARGE], ids=["in the journal", "in the store"])
async def test_damaged_update_is_asked_for_again(in_round, tmp_path, size):
    """The sender hears of it, and the model is that of the undisturbed run. The reason stands in
    the log and in the record of the round."""
    coordinator, a, b = await in_round("a", "b", rounds={"rounds": 2})
    await hand_in(a, np.full(size, 1.0, np.float32))
    if size == 3:
        flip_in_journal(coordinator)
    else:
        flip(stored(tmp_path, "*0/a*"))
    news = aiter(a.watch())
    assert (await anext(news)).update_accepted
    with capture_logs() as logs:
        await hand_in(b, np.full(size, 3.0, np.float32))
        told = await anext(news)
    assert (told.state, told.round, told.update_damaged) == (pb.ROUND, 0, True)
    assert (await a.heartbeat()).update_damaged
    (warning,) = (line for line in logs if line["event"] == "update_damaged")
    assert (warning["log_level"], warning["participant"]) == ("warning", "a")
    assert "has the digest" in warning["reason"]
    await hand_in(a, np.full(size, 1.0, np.float32))
    await a.until(pb.ROUND, 1)
    model = await a.model(1)
    assert (model == 2.0).all()
    rounds = await a.inspection.ListRounds(ListRoundsRequest())
    assert dict(rounds.rounds[0].damaged_updates) == {"a": warning["reason"]}
    assert set(rounds.rounds[0].contributors) == {"a", "b"}


@pytest.mark.parametrize("has_state", [True, False])
async def test_participant_brings_a_damaged_update_again(start, tmp_path, has_state):
    """From its state directory if it has one; otherwise it trains the round once more."""
    coordinator = await start(rounds={"rounds": 1, "min_participants": 2})
    may_train = threading.Event()
    a, b = Constant(1.0, LARGE), Constant(3.0, LARGE, may_train)
    target = f"127.0.0.1:{coordinator.port}"
    handed_in = threading.Event()

    def observe(step, *_) -> None:
        if step == "handed_in":
            handed_in.set()

    state = StateDirectory(tmp_path / "state", "a") if has_state else None
    agents = [Agent(a, target, "a", state=state, observer=observe), Agent(b, target, "b")]
    threads = [threading.Thread(target=agent.run) for agent in agents]
    for thread in threads:
        thread.start()
    try:
        assert await to_thread(handed_in.wait, 20.0)
        flip(stored(tmp_path, "*0/a*"))
        may_train.set()
        for thread in threads:
            await to_thread(thread.join, 20.0)
    finally:
        may_train.set()
        for agent in agents:
            agent.stop()
        if state is not None:
            state.close()
    assert coordinator.driver.session.cause == "completed"
    assert (a.num_trained, b.num_trained) == (1 if has_state else 2, 1)
    model = np.load(stored(tmp_path, "*1/global*"))
    assert (model == 2.0).all()


async def two_rounds(start, enter, **sections: object):
    """A session of three rounds whose round 2 is open; it was stopped."""
    coordinator = await start(rounds={"rounds": 3, "min_participants": 2}, **sections)
    members = await enter(coordinator, "a", "b")
    for round_ in range(2):
        await members[0].until(pb.ROUND, round_)
        for number, member in enumerate(members, 1):
            vector = np.full(LARGE, number * (round_ + 1), np.float32)
            await member.hand_in(vector, number, round_)
    await members[0].until(pb.ROUND, 2)
    await coordinator.stop()
    return coordinator


@pytest.mark.parametrize(
    ("aggregation", "pattern"),
    [
        ({}, "2/global*"),
        ({"optimizer": "fedadam"}, "2/global*"),
        ({"optimizer": "fedadam"}, "optimizer/2/*"),
        ({"rule": "geometric_median"}, "2/global*"),
        ({"rule": "gradient", "options": {"learning_rate": "invscaling"}}, "2/global*"),
        ({"rule": "gradient", "optimizer": "fedavgm"}, "optimizer/2/*"),
    ],
    ids=["average", "optimiser", "its state", "surveying rule", "gradient", "momentum"],
)
async def test_damaged_model_is_made_again_at_a_start(enter, start, tmp_path, aggregation, pattern):
    """From the updates of its round, with the journal's digest as the proof. What was damaged is
    set aside."""
    await two_rounds(start, enter, aggregation=aggregation)
    path = min(p for p in (tmp_path / "weights").rglob(pattern) if p.is_file())
    before = path.read_bytes()
    flip(path)
    damaged = path.read_bytes()
    with capture_logs() as logs:
        await start()
    assert path.read_bytes() == before
    told = [line for line in logs if line["event"] in ("model_damaged", "model_rebuilt")]
    assert [line["log_level"] for line in told] == ["warning", "warning"]
    assert "has the digest" in told[0]["reason"]
    aside = [p for p in (tmp_path / "weights").rglob("*damaged*/**/*") if p.is_file()]
    assert [p.read_bytes() for p in aside] == [damaged]


async def test_damaged_first_model_is_made_again(in_round, start, tmp_path):
    coordinator, _ = await in_round("a")
    await coordinator.stop()
    path = stored(tmp_path, "0/global*")
    before = path.read_bytes()
    flip(path)
    await start()
    assert path.read_bytes() == before


async def test_damaged_model_that_cannot_be_made_again_names_the_way_out(enter, start, tmp_path):
    """The updates of its round are gone. Nothing is served and nothing changed."""
    storage = {"path": str(tmp_path / "weights"), "keep_updates": 0}
    first = await two_rounds(start, enter, storage=storage)
    ref = first.driver.session.model.ref
    path = stored(tmp_path, "2/global*")
    flip(path)
    for update in (tmp_path / "weights").rglob("1/[ab].*"):
        update.unlink(missing_ok=True)
    damaged = path.read_bytes()
    with pytest.raises(StoreError) as caught:
        await start(storage=storage)
    message = str(caught.value)
    session_id = first.driver.session.session_id
    assert f"Restore {session_id}/2/global (digest {ref.digest}) from a backup" in message
    assert "or, to begin anew, add --new-session" in message
    assert path.read_bytes() == damaged


async def test_participant_that_finds_a_damaged_model_has_it_mended(in_round, tmp_path):
    """The participant does not download the damaged model for ever, and the session goes on."""
    coordinator, member = await in_round("a", rounds={"rounds": 2})
    await member.hand_in(np.full(LARGE, 1.0, np.float32))
    await member.until(pb.ROUND, 1)
    flip(stored(tmp_path, "1/global*"))
    agent = Agent(Constant(2.0, LARGE), f"127.0.0.1:{coordinator.port}", "a")
    try:
        assert await to_thread(agent.run) == 0
    finally:
        agent.stop()
    assert coordinator.driver.session.cause == "completed"
    assert (np.load(stored(tmp_path, "1/global*")) == 1.0).all()


async def test_damaged_model_found_by_a_participant_ends_the_coordinator_if_it_stays_damaged(
    in_round, tmp_path
):
    coordinator, a = await in_round("a", rounds={"rounds": 2})
    await a.hand_in(np.full(LARGE, 1.0, np.float32))
    await a.until(pb.ROUND, 1)
    model = (await a.start()).model
    flip(stored(tmp_path, "1/global*"))
    flip(stored(tmp_path, "0/a*"))
    request = pb.StartTrainingRoundRequest(damaged_model_digest=model.digest)
    await assert_refused(a.stub.StartTrainingRound(request, metadata=a.metadata), Code.UNAVAILABLE)
    async with asyncio.timeout(20.0):
        await coordinator.driver.failed.wait()
    assert isinstance(coordinator.driver.failure, StoreError)
    assert "0/a" in str(coordinator.driver.failure)


async def test_damaged_model_that_the_journal_does_not_know_is_published_again_once_deleted(
    enter, in_round, start, tmp_path, monkeypatch
):
    """The coordinator died between the publication and its record. Its digest is not known, so the
    coordinator cannot tell damage from another model; the error says what to do."""
    rounds = {"rounds": 2, "min_participants": 2}
    coordinator, a, b = await in_round("a", "b", rounds=rounds)
    published = threading.Event()

    def die(worker: StoreWorker, model: object) -> None:
        published.set()
        raise Stopped

    with monkeypatch.context() as patch:
        patch.setattr(StoreWorker, "_publish_elsewhere", die)
        for member, value in ((a, 1.0), (b, 3.0)):
            await member.hand_in(np.full(LARGE, value, np.float32))
        assert await to_thread(published.wait, 20.0)
        await coordinator.stop()
    path = stored(tmp_path, "*1/global*")
    good = path.read_bytes()
    flip(path)
    coordinator = await start(rounds=rounds)
    failure = await until(lambda: coordinator.driver.failure)
    assert "delete it and start again" in str(failure)
    await coordinator.stop()
    path.unlink()
    coordinator = await start(rounds=rounds)
    [a] = await enter(coordinator, "a", round_=1)
    assert path.read_bytes() == good


async def test_damaged_model_is_made_again_when_the_next_one_needs_it(in_round, tmp_path):
    """An optimiser steps from the global model, so the aggregation reads it."""
    coordinator, a = await in_round("a", rounds={"rounds": 2}, aggregation={"optimizer": "fedavgm"})
    await a.hand_in(np.full(LARGE, 1.0, np.float32))
    await a.until(pb.ROUND, 1)
    path = stored(tmp_path, "1/global*")
    before = path.read_bytes()
    flip(path)
    await a.hand_in(np.full(LARGE, 2.0, np.float32), round_=1)
    await a.until(pb.FINISHED, 1)
    assert path.read_bytes() == before
    assert coordinator.driver.session.cause == "completed"


@pytest.fixture
def repair(tmp_path, monkeypatch):
    """Runs `xain-coordinator repair` on the files of `start`."""
    monkeypatch.setattr(logs, "configure", lambda *_, **__: None)  # it is this process's own here

    def run(*arguments: str) -> Result:
        settings = ("storage.path=weights", "journal.path=journal.sqlite")
        paths = [f"--set={one.replace('=', f'={tmp_path}/')}" for one in settings]
        return CliRunner().invoke(cli.app, ["repair", *paths, *arguments])

    return run


async def test_repair_names_the_damage(enter, start, tmp_path, repair):
    """With a line for everything that was read, and a status for scripts."""
    coordinator = await two_rounds(start, enter)
    sound = repair()
    assert sound.exit_code == 0, sound.output
    lines = sound.stdout.splitlines()
    num_records = coordinator.driver._num_records
    assert lines[0].endswith(f"journal.sqlite: {num_records} records, sessions: 1")
    assert lines[1:] == [f"ok       model: {round_}/global" for round_ in range(3)]
    flip(stored(tmp_path, "1/global*"))
    rotten = repair()
    assert rotten.exit_code == 1
    (line,) = (line for line in rotten.stdout.splitlines() if line.startswith("damaged"))
    assert line.startswith("damaged  model: 1/global has the digest ")


@pytest.mark.parametrize("change", [flip, Path.unlink], ids=["damaged", "missing"])
async def test_repair_drops_a_damaged_update_by_name(
    in_round, start, join, tmp_path, repair, change
):
    """The reason is in the record of the round, and the session goes on."""
    coordinator, a, b = await in_round("a", "b", rounds={"rounds": 2})
    await a.hand_in([1.0])
    running = repair()
    assert (running.exit_code, running.stdout) == (2, "")
    assert "is in use by another process" in running.stderr
    await coordinator.stop()
    refused = [repair("--drop-update", name) for name in "ab"]
    assert [one.exit_code for one in refused] == [2, 2]
    assert "'a' is not damaged" in refused[0].stderr
    assert "no accepted update of 'b'" in refused[1].stderr

    change(stored(tmp_path, "0/a*"))
    assert repair().exit_code == 1
    dropped = repair("--drop-update", "a")
    assert dropped.exit_code == 0, dropped.output
    assert dropped.stdout.splitlines()[-1] == "dropped  update of a in round 0"
    assert repair().exit_code == 0

    coordinator = await start()
    a, b = join(coordinator, "a"), join(coordinator, "b")
    assert (await a.heartbeat()).update_damaged
    for number, member in enumerate((a, b), 1):
        await member.hand_in([float(number)])
    await a.until(pb.ROUND, 1)
    rounds = await a.inspection.ListRounds(ListRoundsRequest())
    reason = rounds.rounds[0].damaged_updates["a"]
    assert reason.startswith("dropped by an operator: 0/a.")


async def test_repair_names_a_damaged_record(enter, start, tmp_path, repair):
    await two_rounds(start, enter)
    path = tmp_path / "journal.sqlite"
    content = path.read_bytes()
    at = content.index(b'"num_samples":') + len(b'"num_samples":')
    path.write_bytes(content[:at] + b"7" + content[at + 1 :])
    damaged = repair()
    assert damaged.exit_code == 1
    assert damaged.stdout.startswith(f"damaged  the journal {path} is damaged: record ")
    assert "--new-session" in damaged.stdout
    with pytest.raises(JournalError, match=r"record [0-9]+ of session 1, a UpdateAccepted"):
        await start()


def test_repair_without_a_journal_creates_none(tmp_path, repair):
    missing = repair()
    assert (missing.exit_code, list(tmp_path.iterdir())) == (2, [])
    assert "there is no journal at" in missing.stderr


async def test_damaged_log_is_named_and_not_taken_for_another_copy(enter, start, tmp_path):
    """The damage is found after a kill. Cut there, the journal has all records before."""
    copy = tmp_path / "copy"
    copy.mkdir()
    coordinator = await start(rounds={"rounds": 9, "min_participants": 1})
    [a] = await enter(coordinator, "a")
    for round_ in range(8):
        await a.until(pb.ROUND, round_)
        await a.hand_in([1.0], round_=round_)
    await a.until(pb.ROUND, 8)
    # By another process: closing the file in this one would give up its lock.
    files = [tmp_path / name for name in ("journal.sqlite", "journal.sqlite-wal", "weights")]
    await to_thread(subprocess.run, ["cp", "-r", *files, copy], check=True)
    log = copy / "journal.sqlite-wal"
    flip(log)
    damaged = log.read_bytes()
    config = config_for(copy)
    with pytest.raises(JournalError, match="is damaged") as caught:
        SessionCoordinator(config)
    message = str(caught.value)
    assert "another copy" not in message
    command = message.partition("run: ")[2].split()
    assert command[-1] == str(log)
    assert log.read_bytes() == damaged
    await to_thread(subprocess.run, command, check=True)
    with closing(SqliteJournal(copy / "journal.sqlite")) as journal:
        assert 0 < len(list(journal.load())) < coordinator.driver._num_records
