"""Backups of coordinators that run, and of stopped ones, and what is restored from them."""

import asyncio
import os
import re
import sys
from contextlib import closing
from pathlib import Path

import grpc
import pytest
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub

from integration.conftest import config_for
from support.process import PATIENCE_S, CoordinatorProcess, Keep
from support.waiting import until
from support.wire import Member
from xain_coordinator.cli.backup import back_up, restore
from xain_coordinator.cli.repair import objects_of
from xain_coordinator.journal.restore import open_stopped
from xain_coordinator.journal.sqlite import SqliteJournal
from xain_coordinator.stores.integrity import why_damaged
from xain_coordinator.stores.journalled import store_of_session
from xain_coordinator.stores.opening import open_store
from xain_wire.fl import coordinator_pb2 as pb
from xain_wire.fl.access_pb2 import CopyJournalRequest
from xain_wire.fl.access_pb2_grpc import ControlStub

PAGE = Path(__file__).parents[2] / "docs" / "operations.md"
LARGE = 10_000  # numbers of a model that lies in the store and not in the journal


def blocks() -> list[str]:
    """Commands of the page: back up, restore."""
    section = PAGE.read_text(encoding="utf-8").partition("## Back up and restore")[2]
    return re.findall(r"```sh\n(.*?)```", section.partition("\n## ")[0], re.DOTALL)


async def type_in(block: str, folder: Path) -> str:
    """Run a block of the page in one shell. Returns what it prints."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    process = await asyncio.create_subprocess_shell(
        f"set -e\n{block}",
        cwd=folder,
        env={**os.environ, "PATH": path},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await process.communicate()
    assert process.returncode == 0, output.decode()
    return output.decode()


@pytest.fixture
def coordinator(keep: Keep, tmp_path: Path) -> CoordinatorProcess:
    settings = {
        "rounds.min_participants": 2,
        "rounds.rounds": 9,
        "rounds.controller": "all",
        "storage.keep_updates": 0,
        "server.heartbeat_timeout_s": 10 * PATIENCE_S,  # members send none while a shell runs
    }
    return keep(CoordinatorProcess(tmp_path / "xain-data", settings))


async def joined(coordinator: CoordinatorProcess) -> tuple[Member, Member]:
    both = Member(coordinator.port, "a"), Member(coordinator.port, "b")
    for member in both:
        await member.rendezvous()
    return both


async def left(*members: Member) -> None:
    for member in members:
        await member.close()


async def test_restored_backup_goes_on_with_its_round(coordinator, tmp_path):
    """The blocks of the page, each in one shell; the backup is made of a coordinator that runs. An
    update from before the backup counts; one from after it is asked for again."""
    make_backup, put_back = blocks()
    await coordinator.start()
    a, b = await joined(coordinator)
    await a.until(pb.ROUND, 0)
    await a.hand_in([1.0] * LARGE)
    await type_in(make_backup, tmp_path)
    await b.hand_in([3.0] * LARGE)
    await a.until(pb.ROUND, 1)
    await coordinator.kill()
    await left(a, b)
    assert "damaged" not in await type_in(put_back, tmp_path)

    await coordinator.start()
    a, b = await joined(coordinator)
    assert (await a.heartbeat()).update_accepted
    await b.until(pb.ROUND, 0)
    await b.hand_in([3.0] * LARGE)
    await a.until(pb.ROUND, 1)
    await left(a, b)


async def test_objects_that_a_copy_of_the_journal_names_stay_while_it_is_asked_for(
    coordinator, tmp_path
):
    """Rounds go on beside a backup, however slow it is; what they need no more is removed when the
    backup is over. A health check beside it is answered."""
    await coordinator.start()
    a, b = await joined(coordinator)

    async def hand_in(round_: int) -> None:
        for member in (a, b):
            await member.until(pb.ROUND, round_)
            await member.hand_in([1.0] * LARGE, round_=round_)

    await a.until(pb.ROUND, 0)
    await a.hand_in([1.0] * LARGE)
    path = coordinator.folder / "journal.sock"
    channel = grpc.aio.insecure_channel(f"unix:{path}")
    call = ControlStub(channel).CopyJournal(CopyJournalRequest())
    answer = await call.read()
    copy = tmp_path / "copy.sqlite"
    copy.write_bytes((coordinator.folder / "journal.copy").read_bytes())
    assert answer.path == str(coordinator.folder / "journal.copy")
    with open_stopped(copy) as (_, last):
        refs = [ref for _, ref in objects_of(last).values()]
        session_id = last.session.session_id
    updates = [ref.key for ref in refs if "/a." in ref.key]
    assert len(updates) == 1
    await b.until(pb.ROUND, 0)
    await b.hand_in([1.0] * LARGE)
    for round_ in (1, 2):
        await hand_in(round_)
    await a.until(pb.ROUND, 3)
    storage = config_for(coordinator.folder, storage={"path": str(coordinator.folder / "weights")})
    with closing(open_store(storage.storage)) as opened:
        for ref in refs:
            with opened.open(f"{session_id}/{ref.key}") as reader_:
                assert reader_.size == ref.size_bytes
        health = await HealthStub(channel).Check(HealthCheckRequest())
        assert health.status == HealthCheckResponse.SERVING
        call.cancel()
        await until(lambda: f"{session_id}/{updates[0]}" not in set(opened.keys()))
    await left(a, b)
    await channel.close()


async def test_objects_that_a_store_has_lost_are_restored(
    in_round, tmp_path, storage_settings, capsys
):
    """Objects of all sessions come back, in files and in a bucket, and sound ones stay. A backup of
    damaged data names what it lacks, and has the rest; so does what is restored from it."""
    settings = {"rounds": {"rounds": 1, "initial_weights": "average"}, "storage": storage_settings}
    for is_new in (False, True):
        coordinator, member = await in_round("a", new_session=is_new, **settings)
        await member.hand_in([2.0] * LARGE)
        await member.until(pb.FINISHED, 0)
        await coordinator.stop()
    config, backup = config_for(tmp_path, **settings), tmp_path / "backup"
    assert back_up(config, backup) == 0
    assert back_up(config, backup) == 2, "it never writes into an older one"
    with closing(open_store(config.storage)) as opened:
        keys = set(opened.keys(""))
        opened.delete(*keys)
    config.journal.path.rename(tmp_path / "lost")
    assert restore(config, backup) == 0
    assert restore(config, backup) == 2, "there is a journal already"
    with open_stopped(config.journal.path) as (journal, last):
        assert len(journal.session_ids()) == 2
        with closing(open_store(config.storage)) as opened:
            models = {key for key in keys if key.endswith("/global")}
            assert models <= set(opened.keys("")), "those of the first session too"
            store = store_of_session(opened, journal, last.session.session_id)
            for _, ref in objects_of(last).values():
                assert not why_damaged(store, ref)
            # A model of the first session, at which `repair` does not look.
            gone = next(key for key in models if key.startswith(journal.session_ids()[0]))
            opened.delete(gone)
    capsys.readouterr()
    assert back_up(config, tmp_path / "other") == 1
    assert f"lost     {gone}: " in capsys.readouterr().out
    config.journal.path.rename(tmp_path / "lost")
    assert restore(config, tmp_path / "other") == 1
    assert f"lost     {gone}: " in capsys.readouterr().out


def test_backup_of_a_coordinator_that_starts_or_stops_says_to_try_again(tmp_path, capsys):
    """Such a coordinator has the journal open and no socket."""
    config = config_for(tmp_path)
    with closing(SqliteJournal(config.journal.path)):
        assert back_up(config, tmp_path / "backup") == 2
    assert "starts or stops makes no copy; try again" in capsys.readouterr().err
