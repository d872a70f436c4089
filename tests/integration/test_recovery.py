"""The coordinator dies and is started again on the same journal."""

import asyncio
import itertools
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from support.process import CoordinatorProcess
from support.wire import Code, Member, assert_refused, npy
from xain_coordinator.core.vocabulary.values import Phase
from xain_coordinator.ports import StoreUnavailable
from xain_coordinator.stores.files import FileStore
from xain_participant import Agent, Participant
from xain_wire.fl import coordinator_pb2 as pb


@pytest.mark.parametrize("brought_by", ["upload", "name"])
async def test_a_found_update_counts_only_when_it_is_durable(
    in_round, start, join, monkeypatch, brought_by
):
    """An update that lies in the store after a restart was perhaps never synced by the process that
    wrote it: it is acknowledged when this process has synced it, and not before."""
    vector = np.zeros(100_000, np.float32)
    coordinator, a = await in_round("a", rounds={"rounds": 1})
    if brought_by == "upload":
        ref = await a.upload(vector)
    else:
        coordinator.store.put({"0/a": npy(vector)})
    await coordinator.stop()
    coordinator = await start(rounds={"rounds": 1})
    a = join(coordinator, "a")
    await a.heartbeat()
    sync = FileStore.sync

    def fail(self: FileStore, folder: Path) -> None:
        raise StoreUnavailable("the disk takes no sync")

    async def end() -> None:
        if brought_by == "upload":
            await a.end(ref)
        else:
            await a.end(name="a", round_=None)

    monkeypatch.setattr(FileStore, "sync", fail)
    await assert_refused(end(), Code.UNAVAILABLE)
    assert coordinator.driver.session.accepted("a", 0) is None
    monkeypatch.setattr(FileStore, "sync", sync)
    await end()
    assert coordinator.driver.session.accepted("a", 0) is not None


async def test_an_end_is_an_end_after_a_restart_too(in_round, start, join):
    """A finished session is served with its cause; a new one is opened only when asked for."""
    first, a = await in_round("a", rounds={"rounds": 1})
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


@pytest.mark.timeout(300)  # it starts some dozens of coordinators, one after the other
async def test_kill_9_at_every_sync_changes_nothing(tmp_path):
    """The coordinator dies at its first sync, its second, its third, ... in uploads, commits,
    initialisation and aggregation alike, until the session is through. The participants are real
    ones. The final model is that of the undisturbed run, and nobody trained a round twice. An
    optimiser goes on from what it remembered; it is stored before the model, and with a life
    between."""
    settings = {
        "rounds.rounds": 3,
        "rounds.min_participants": 3,
        "rounds.controller": "ordered",
        "aggregation.optimizer": "fedavgm",
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
            ends = asyncio.gather(*(asyncio.to_thread(agent.run) for agent in agents))
            if disturbed:
                deaths = await die_until_ended(coordinator, ends)
            assert await ends == [0, 0, 0]
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


async def die_until_ended(coordinator: CoordinatorProcess, ends: "asyncio.Future[Any]") -> int:
    """Start it until all participants have ended, and then once more; how often it died before."""
    for deaths in itertools.count():
        coordinator.dies_at = deaths + 1
        try:
            await coordinator.start()
        except AssertionError:
            continue  # it did not even get as far as serving
        dead = asyncio.create_task(coordinator.died())
        await asyncio.wait([dead, ends], return_when=asyncio.FIRST_COMPLETED)
        if ends.done():
            dead.cancel()
            break
    await coordinator.end()
    coordinator.dies_at = None
    await coordinator.start()
    return deaths


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


@pytest.mark.skipif(sys.platform != "linux", reason="prlimit, tmpfs")
async def test_a_full_disk_ends_the_process_and_not_the_session(tiny_disk, keep, join, tmp_path):
    """The process stops with a line that says why, and with status 1. When there is room again, the
    round goes on with every update that was acknowledged and without the others."""
    names = [f"p{i:02}" for i in range(32)]
    settings = {
        "journal.path": tiny_disk.folder / "journal.sqlite",
        "rounds.rounds": 1,
        "rounds.min_participants": len(names),
        "server.heartbeat_time_s": 600,
    }
    process = keep(CoordinatorProcess(tmp_path / "coordinator", settings))
    await process.start()
    members = {name: join(process, name) for name in names}
    acknowledged = []
    refused = None
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
    assert refused is Code.UNAVAILABLE
    async with asyncio.timeout(60):
        assert await process.died() == 1
    last = process.events()[-2:]
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
    # The first models all weigh the same.
    (mean,) = await members["p00"].model(1)
    assert mean == np.mean(range(len(names)))
