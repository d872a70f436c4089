"""Participants in processes of their own train one network in stages, and processes are killed."""

import asyncio
import io
import os
import select
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.process import PATIENCE_S, CoordinatorProcess, Process
from support.wire import Member
from xain_workloads.nets.neural import NeuralWorkload
from xain_workloads.tables.data import load_table
from xain_workloads.tables.preprocessing import prepare
from xain_workloads.workload import initial_model

pytestmark = pytest.mark.frameworks

ROUNDS, EPOCHS = 3, 40
OPTIONS: dict[str, Any] = {
    "mode": "pipeline",
    "dtype": "float64",
    "learning_rate": 0.05,
    "seed": 5,
}
RULES: dict[str, Any] = {
    "rounds.rounds": ROUNDS,
    "rounds.epochs": EPOCHS,
    "rounds.start_participants": 2,
    "rounds.max_participants": 8,
    "workload.name": "neural",
    "aggregation.rule": "assemble",
    "server.heartbeat_time_s": 0.5,
    "server.heartbeat_timeout_s": 5.0,
    **{f"workload.options.{key}": value for key, value in OPTIONS.items()},
}


class Stage(Process):
    """`xain-participant` on the data set iris."""

    def __init__(self, folder: Path, name: str, port: int, *flags: str) -> None:
        super().__init__(folder, name)
        self.participant_id = name
        self._command = ["-m", "xain_participant", "--data=iris", f"--id={name}"]
        self._command += [f"--coordinator=127.0.0.1:{port}", "--test-fraction=0", *flags]

    async def start(self) -> None:
        self._process = await self.run(self._command)

    async def child(self) -> int:
        """Process id of the process that trains its stage, once there is one."""
        tasks = Path(f"/proc/{self.pid}/task")
        async with asyncio.timeout(PATIENCE_S):
            while True:
                if (found := children(tasks)) is not None:
                    return found
                await asyncio.sleep(0.02)  # a poll: it ends when the process is there


def children(tasks: Path) -> int | None:
    """The process of a stage that a thread of a process has started; None if there is none."""
    found = " ".join((thread / "children").read_text() for thread in tasks.iterdir()).split()
    stages = [pid for pid in found if b"stage_process" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    return int(stages[0]) if stages else None


def wait_for_end(pid: int) -> None:
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    select.select([handle], [], [], PATIENCE_S)
    os.close(handle)


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    """Threads of torch would wait for each other on a busy machine."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


async def until_ended(pid: int) -> None:
    """Wait until a process is gone that is no child of ours."""
    await asyncio.wait_for(asyncio.to_thread(wait_for_end, pid), PATIENCE_S)


async def until_trained(round_: int, *stages: Stage) -> None:
    """Wait until a round is being trained at these participants."""
    for stage in stages:
        name = stage.participant_id
        line = f'"event": "training", "participant": "{name}", "round": {round_}'
        await stage.until_logged(line)


async def models_of(port: int) -> list[np.ndarray]:
    reader = Member(port, "reader")
    files = [await reader.download(f"{number}/global") for number in range(ROUNDS + 1)]
    await reader.close()
    return [np.load(io.BytesIO(file), allow_pickle=False) for file in files]


def require_like_one_process(models: list[np.ndarray]) -> None:
    """The models are those of a process that trains the whole network on the same batches."""
    table = load_table("iris")
    workload = NeuralWorkload.from_options({**OPTIONS, "mode": "federated"})
    model = initial_model(workload, [table.profile()])
    vector = model.vector
    for round_, together in enumerate(models):
        np.testing.assert_allclose(together, vector, rtol=1e-6, atol=1e-8)
        alone = type(model)(vector, model.layout, model.metadata)
        vector = workload.train(
            alone,
            prepare(model.metadata, table),
            epochs=EPOCHS,
            epoch_base=round_ * EPOCHS,
            seed=OPTIONS["seed"],
        ).vector


async def test_session_completes_after_kills_of_coordinator_stage_and_participant(
    tmp_path, keep, one_torch_thread
):
    """A killed coordinator goes on with the attempt. When the process of a stage is killed the
    round starts again with both participants; when a participant is killed, with the other one."""
    coordinator = keep(CoordinatorProcess(tmp_path, RULES))
    await coordinator.start()
    first, second = (keep(Stage(tmp_path, name, coordinator.port)) for name in ("a", "b"))
    await first.start()
    await second.start()
    await until_trained(0, first, second)
    await coordinator.kill()
    await coordinator.start()
    await until_trained(1, first, second)
    assert "round_restarted" not in coordinator.log()
    os.kill(await first.child(), signal.SIGKILL)
    await until_trained(2, first, second)
    restarted = coordinator.log().count('"round_restarted"')
    assert restarted >= 1
    child = await second.child()
    await second.kill()
    await until_ended(child)
    async with asyncio.timeout(2 * PATIENCE_S):
        assert await first.died() == 0
    assert coordinator.log().count('"round_restarted"') > restarted
    require_like_one_process(await models_of(coordinator.port))


async def test_participant_that_is_stopped_while_it_trains_a_stage_ends_at_once(tmp_path, keep):
    rules = {**RULES, "rounds.start_participants": 1, "rounds.epochs": 1_000_000}
    coordinator = keep(CoordinatorProcess(tmp_path, rules))
    await coordinator.start()
    stage = keep(Stage(tmp_path, "a", coordinator.port))
    await stage.start()
    await until_trained(0, stage)
    child = await stage.child()
    assert await stage.stop() == 128 + signal.SIGTERM
    await until_ended(child)
