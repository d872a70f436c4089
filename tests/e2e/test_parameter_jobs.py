"""Four jobs of real processes on one group, with kill -9 of servers, workers and the scheduler.

Each job ends with the model of a group of its own: two bulk synchronous ones bit for bit, and one
under SSP and one under ASP, whose pushes are applied as they come, within TOLERANCE.
"""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

import xain_parameters as parameters
from support.parameter_processes import Fleet
from support.parameter_worker import TASKS, Floats, model, residual, train

pytestmark = pytest.mark.e2e

TOLERANCE = 0.01  # of the targets' variance; 0.001 or so without deaths


class Job(NamedTuple):
    staleness: int | None
    workers: tuple[str, ...]


# The jobs by task. "tall" joins late, a1 is killed, and c0 stalls until all other jobs are over.
JOBS = {
    "wide": Job(0, ("a0", "a1", "a2")),
    "tall": Job(0, ("b0", "b1")),
    "small": Job(2, ("c0", "c1")),
    "other": Job(None, ("d0", "d1")),
}
BULK_SYNCHRONOUS = [name for name, job in JOBS.items() if job.staleness == 0]

Model = tuple[Floats, Floats]


def model_of(target: str, task: str) -> Model:
    with parameters.connect_sync(target, worker="reader", job=task) as reader:
        return model(reader, TASKS[task])


@pytest.fixture(scope="module")
def alone() -> dict[str, Model]:
    """The model of each job in a group of its own, without deaths."""
    models = {}
    for task, job in JOBS.items():
        with parameters.LocalGroup(2) as group:

            def work(name: str, group: parameters.LocalGroup, task: str, job: Job) -> None:
                with group.connect(name, job=task) as server:
                    train(server, job.staleness, len(job.workers), task=TASKS[task])

            threads = [
                threading.Thread(target=work, args=(name, group, task, job)) for name in job.workers
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            models[task] = model_of(group.target, task)
        if task not in BULK_SYNCHRONOUS:
            assert residual(models[task], TASKS[task]) < TOLERANCE
    return models


def start(fleet: Fleet, task: str, *names: str) -> None:
    job = JOBS[task]
    fleet.start_workers(
        *(names or job.workers), staleness=job.staleness, num_workers=len(job.workers), task=task
    )


def train_four(
    fleet: Fleet, servers: tuple[str, ...], *kills: Callable[[], tuple[str, ...]]
) -> dict[str, Model]:
    """kills: each kills servers, and with them the scheduler or not; returns what is to be started
    again. The first one does so in the middle of a clock of "wide", the second one of all jobs."""
    fleet.hold("a0", 3, 6)
    fleet.hold("a1", 9)
    fleet.hold("b0", 5)
    fleet.hold("c0", 4)
    # Workers under ASP would be at their end before the second kill.
    for name in JOBS["other"].workers:
        fleet.hold(name, 8)
    fleet.start_servers(*servers)
    for task in ("wide", "small", "other"):
        start(fleet, task)
    for clock, kill in zip((3, 6), kills, strict=True):
        fleet.until_held("a0", clock)
        if clock == 6:
            for name, other in (("b0", 5), ("c0", 4), ("d0", 8), ("d1", 8)):
                fleet.until_held(name, other)
        killed = kill()
        fleet.release("a0", clock)
        if "scheduler" in killed:
            fleet.start_scheduler()
        fleet.start_servers(*(name for name in killed if name != "scheduler"))
        if clock == 3:
            start(fleet, "tall")
    for name in JOBS["other"].workers:
        fleet.release(name, 8)
    fleet.until_held("a1", 9)
    fleet.kill("a1")
    fleet.release("a1", 9)
    start(fleet, "wide", "a1")
    fleet.kill("scheduler")
    fleet.release("b0", 5)
    fleet.start_scheduler()
    for task in ("wide", "tall", "other"):
        fleet.ended(*JOBS[task].workers)
    assert fleet.status().jobs["small"].opened <= 4
    fleet.release("c0", 4)
    fleet.ended(*JOBS["small"].workers)
    return {task: model_of(fleet.target, task) for task in JOBS}


def assert_same(trained: dict[str, Model], alone: dict[str, Model]) -> None:
    for task, mine in trained.items():
        if task in BULK_SYNCHRONOUS:
            for values, expected in zip(mine, alone[task], strict=True):
                np.testing.assert_array_equal(values, expected)
        else:
            assert residual(mine, TASKS[task]) < TOLERANCE


def test_four_jobs_with_replicas_end_with_the_models_of_groups_of_their_own(
    tmp_path: Path, alone: dict[str, Model]
) -> None:
    """Two servers die one after the other, each when all ranges have a backup."""
    with Fleet(tmp_path, "--replicas", "1") as fleet:

        def kill(name: str) -> tuple[str, ...]:
            fleet.until_replicated()
            fleet.kill(name)
            return (name,)

        servers = ("s0", "s1", "s2")
        trained = train_four(fleet, servers, lambda: kill("s0"), lambda: kill("s1"))
        assert_same(trained, alone)
        assert fleet.status().num_rollbacks == 0


def test_four_jobs_with_a_log_end_with_the_models_of_groups_of_their_own(
    tmp_path: Path, alone: dict[str, Model]
) -> None:
    """A server dies, and later all servers and the scheduler at a time."""
    with Fleet(tmp_path, "--log") as fleet:

        def kill(*names: str) -> tuple[str, ...]:
            # A job whose ranges a server has not begun on its disk goes back to its beginning. One
            # that has come to its second clock uses all of them, which the begin comes before.
            fleet.until(
                lambda status: all(
                    name in status.jobs and status.jobs[name].opened >= 1
                    for name in ("wide", "small", "other")
                )
            )
            for name in names:
                fleet.kill(name)
            return names

        all_of_them = ("scheduler", "s0", "s1")
        trained = train_four(fleet, ("s0", "s1"), lambda: kill("s0"), lambda: kill(*all_of_them))
        assert_same(trained, alone)
        assert fleet.status().num_rollbacks == 0


def test_four_jobs_go_back_to_their_own_checkpoints(
    tmp_path: Path, alone: dict[str, Model]
) -> None:
    """A server dies that has the only copy of its ranges, when there are checkpoints."""
    # In each clock: one is given up where ranges move, and the second kill waits for one.
    cuts = ("--checkpoints", str(tmp_path / "cuts"), "--checkpoint-interval", "1")
    with Fleet(tmp_path, *cuts) as fleet:

        def kill() -> tuple[str, ...]:
            fleet.until(lambda status: bool(status.jobs["wide"].cuts))
            fleet.kill("s0")
            return ("s0",)

        trained = train_four(fleet, ("s0", "s1"), lambda: (), kill)
        assert_same(trained, alone)
        jobs = fleet.status().jobs
        assert {name: job.num_rollbacks for name, job in jobs.items()} == dict.fromkeys(JOBS, 1)
