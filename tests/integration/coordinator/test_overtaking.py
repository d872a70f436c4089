"""Two coordinators of one session, which meet when a journal was copied."""

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from integration.conftest import Enter
from support.journals import copy_journal
from support.process import PATIENCE_S, CoordinatorProcess, Keep
from support.wire import Member, inside
from xain_coordinator.assembly.coordinator import SessionCoordinator
from xain_coordinator.config.coordinator import CoordinatorConfig
from xain_coordinator.stores.files import FileStore
from xain_coordinator.stores.prefixed import PrefixedStore
from xain_coordinator.upkeep.model_copies import ModelCopies
from xain_foundation.exit_statuses import EXIT_FENCED
from xain_wire.fl import coordinator_pb2 as pb

# A coordinator that never looks but before it publishes, and stops (SIGSTOP) where it is told to.
ODD = """
import os, signal, sys, threading
from xain_coordinator.process import run
from xain_coordinator.cli import main as cli
from xain_coordinator.upkeep.fence import Fence
from xain_coordinator.driver import effects as work

Fence.look_every_s = 100_000
{odd}
sys.exit(cli.main())
"""

LOOKS_OFTEN = "Fence.look_every_s = 0.1"

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

    async def stopped(self) -> None:
        """Wait until the process is stopped by SIGSTOP."""
        wait = asyncio.to_thread(os.waitid, os.P_PID, self.pid, os.WSTOPPED | os.WNOWAIT)
        await asyncio.wait_for(wait, PATIENCE_S)

    def resume(self) -> None:
        self.send(signal.SIGCONT)


class Ward:
    """Coordinators whose weights are in one folder, and their members."""

    def __init__(self, folder: Path, enter: Enter, keep: Keep) -> None:
        self.folder, self.enter, self.keep = folder, enter, keep

    def process(self, name: str, kind: type[CoordinatorProcess]) -> Any:
        settings = {
            "storage.path": self.folder / "weights",
            "rounds.rounds": 2,
            "rounds.min_participants": 2,
            # A member of these tests beats once, and its round may take as long as it takes.
            "server.heartbeat_timeout_s": 600,
            "server.drain_s": 1,
        }
        return self.keep(kind(self.folder / name, settings))

    async def copied(self, odd: str) -> tuple[Any, ...]:
        """An odd coordinator, another one with a copy of its journal, and two members of the first
        in round 0, one of which has handed in a one."""
        first, other = (
            self.process("first", OddProcess),
            self.process("other", CoordinatorProcess),
        )
        first.odd = odd
        await first.start()
        a, b = await self.enter(first, "a", "b", round_=0)
        await a.hand_in([1.0])
        # The journal as a snapshot of the machine has it: while nothing is being written.
        copy_journal(first.folder, other.folder)
        return first, other, a, b

    def models(self) -> list[str]:
        keys = FileStore(self.folder / "weights").keys()
        return sorted(key.partition("/")[2] for key in keys if key.endswith("/global"))

    def owners(self) -> list[str]:
        return sorted(str(path) for path in (self.folder / "weights").glob("*/owners/*"))


@pytest.fixture
def ward(tmp_path: Path, enter: Enter, keep: Keep) -> Ward:
    return Ward(tmp_path, enter, keep)


def last_words(process: CoordinatorProcess, event: str) -> str:
    (line,) = process.events(event)
    return str(line["error"])


async def test_the_older_hears_and_ends(ward, join):
    """The older ends by itself, though it has nothing to publish, with the status that says why.
    Started again it does not serve, and the newer goes on to the end as if it were alone."""
    older, newer, a, _ = await ward.copied(LOOKS_OFTEN)
    watch = a.watch()
    await watch.read()
    await newer.start()
    assert await asyncio.wait_for(older.died(), 60) == EXIT_FENCED
    assert (await watch.code()).name == "UNAVAILABLE"
    error = last_words(older, "coordinator_failed")
    assert "another coordinator has taken over" in error
    assert f"owner 2 (host {socket.gethostname()}, pid " in error

    a, b = join(newer, "a"), join(newer, "b")
    assert (await a.heartbeat()).update_accepted
    assert await older.fails() == EXIT_FENCED
    assert "has gone on from another copy" in last_words(older, "cannot_start")
    await b.hand_in([3.0])
    await a.until(pb.ROUND, 1)
    assert await older.fails() == EXIT_FENCED
    for member in (a, b):
        await member.hand_in([5.0], round_=1)
    await a.until(pb.FINISHED, 1)
    models = [(await a.model(r)).tolist() for r in (1, 2)]
    assert models == [[2.0], [5.0]]
    assert await newer.stop() == 0


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
async def test_overtaken_coordinator_that_wakes_up_publishes_nothing(ward, join):
    """Stopped while it aggregates, as a machine is that moves, and overtaken: it does not bring its
    model to an end, which is another one than the newer will make."""
    older, newer, _, b = await ward.copied(STOPS_BEFORE_AGGREGATION)
    # The process may stop before it has answered the last update of the round.
    last_update = asyncio.create_task(b.hand_in([3.0]))
    await older.stopped()
    await newer.start()
    assert ward.models() == ["0/global"]
    older.resume()
    await asyncio.gather(last_update, return_exceptions=True)  # ended if the process ends first
    assert await asyncio.wait_for(older.died(), 60) == EXIT_FENCED
    assert ward.models() == ["0/global"]
    a, b = join(newer, "a"), join(newer, "b")
    await b.hand_in([9.0])
    await a.until(pb.ROUND, 1)
    assert (await a.model(1)).tolist() == [5.0]


async def test_a_copy_from_another_round_ends_nobody(ward, join):
    """A backup whose session has gone on since could not publish any more, its rounds being over.
    It does not start, and who works on the session does not hear of it. An operator may choose to
    go on from it; then the other one ends."""
    running, backup, a, b = await ward.copied(LOOKS_OFTEN)
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
    b = join(backup, "b")
    await b.hand_in([7.0])
    await b.until(pb.ROUND, 1)
    assert (await b.model(1)).tolist() == [4.0]


# --- inside the test's process ---


def config_of(folder: Path, name: str) -> CoordinatorConfig:
    """The configuration of a coordinator with a journal of its own and the weights of all."""
    return CoordinatorConfig.model_validate(
        {
            "storage": {"path": str(folder / "weights")},
            "journal": {"path": str(folder / name / "journal.sqlite")},
            "metrics": {"kind": "none"},
            "server": {"port": 0, "drain_s": 1.0, "heartbeat_timeout_s": 600},
            "rounds": {"rounds": 2, "min_participants": 2, "initial_weights": "average"},
        }
    )


async def test_new_session_does_not_publish_small_models_of_an_overtaken_one(
    enter, tmp_path, monkeypatch
):
    """The older coordinator was killed with a model in its journal, and a newer one goes on with
    the round that this model was made in. The older one is then started with a new session."""

    config = partial(config_of, tmp_path)

    async def send(member: Member, value: float) -> None:
        await member.end(inside(np.float32([value])), 1, 0)

    with monkeypatch.context() as killed:
        killed.setattr(ModelCopies, "_copy", lambda self, keys: None)
        async with running(config("older")) as older:
            a, b = await enter(older, "a", "b", round_=0)
            await send(a, 1.0)
            copy_journal(tmp_path / "older", tmp_path / "newer")
            await send(b, 3.0)
            await a.until(pb.ROUND, 1)
    async with running(config("newer")):
        pass
    new = SessionCoordinator(config("older"), new_session=True)
    try:
        await new.start()
        session_id = older.driver.session.session_id
        store = PrefixedStore(new.weights, session_id)
        assert "1/global" not in list(store.keys())
        assert new.driver.session.session_id != session_id
    finally:
        await new.stop()
    async with running(config("newer")) as newer:
        assert newer.driver.session.session_id == session_id


@contextlib.asynccontextmanager
async def running(config: CoordinatorConfig) -> AsyncIterator[SessionCoordinator]:
    coordinator = SessionCoordinator(config)
    try:
        await coordinator.start()
        yield coordinator
    finally:
        await coordinator.stop()
