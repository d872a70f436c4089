"""A worker of the parameter server, in a process of its own: least squares by a dense array and the
rows of a table.

    python parameter_worker.py SCHEDULER NAME STALENESS NUM_WORKERS FOLDER [TASK]

TASK: one of TASKS, which is also the name of the job; without it no job is named.
STALENESS: "none" for no limit. The worker stops in the middle of clock C, with a part of its pushes
made, while there is a file FOLDER/hold-NAME-C, and says so by a file held-NAME-C.
"""

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

import xain_parameters as parameters
from xain_parameters.client.sync import Dense, Server, Table

LOOK_S = 0.01

Floats = NDArray[np.float64]


class Task(NamedTuple):
    """Sizes of a training. batch: rows of data in each clock of a worker."""

    num_features: int = 8
    num_keys: int = 20
    dim: int = 2
    num_clocks: int = 20
    batch: int = 40


TASKS = {
    "": Task(),
    "wide": Task(num_features=30, num_clocks=16, batch=120),
    "tall": Task(num_keys=60, dim=3, num_clocks=24, batch=200),
    "small": Task(num_features=4, num_keys=10, dim=1),
    "other": Task(num_features=12, num_clocks=18, batch=60),
}
ONLY = TASKS[""]


def truth(task: Task) -> tuple[Floats, Floats]:
    chance = np.random.default_rng(1)
    return chance.normal(size=task.num_features), chance.normal(size=(task.num_keys, task.dim))


def batch(worker: str, clock: int, task: Task) -> tuple[Floats, NDArray[np.int64], Floats, Floats]:
    """(dense features, ids, features of the ids' rows, targets), the same for the same clock."""
    chance = np.random.default_rng([int(worker[1:]), clock])
    w, rows = truth(task)
    x = chance.normal(size=(task.batch, task.num_features))
    ids = chance.integers(task.num_keys, size=task.batch)
    z = chance.normal(size=(task.batch, task.dim))
    return x, ids, z, (x * w).sum(axis=1) + (z * rows[ids]).sum(axis=1)


def tables(server: Server, task: Task) -> tuple[Dense, Table]:
    w = server.dense("w", (task.num_features,), update=parameters.Adagrad(0.5), dtype=np.float64)
    rows = server.table(
        "rows",
        task.dim,
        update=parameters.Adagrad(0.5),
        init=parameters.Uniform(0.05, seed=1),
        dtype=np.float64,
    )
    return w, rows


def train(
    server: Server,
    staleness: int | None,
    num_workers: int,
    at: Callable[[int], None] = lambda clock: None,
    task: Task = ONLY,
) -> None:
    """at: called in the middle of each clock."""
    w, rows = tables(server, task)
    for clock in server.clocks(staleness, workers=num_workers, stop=task.num_clocks):
        x, ids, z, target = batch(server.worker, clock, task)
        error = (x * w.pull()).sum(axis=1) + (z * rows.pull(ids)).sum(axis=1) - target
        w.push((x * error[:, None]).mean(axis=0))
        at(clock)
        rows.push(ids, z * error[:, None] / task.batch)


def model(server: Server, task: Task = ONLY) -> tuple[Floats, Floats]:
    w, rows = tables(server, task)
    return w.pull(), rows.pull(np.arange(task.num_keys))


def residual(trained: tuple[Floats, Floats], task: Task = ONLY) -> float:
    """The part of the targets' variance that a model does not explain: 1 or so at the begin."""
    x, ids, z, target = batch("w99", 0, task)
    error = (x * trained[0]).sum(axis=1) + (z * trained[1][ids]).sum(axis=1) - target
    return float((error**2).mean() / (target**2).mean())


def main() -> None:
    target, name, staleness, num_workers, folder, *named = sys.argv[1:]
    job = named[0] if named else None

    def at(clock: int) -> None:
        hold = Path(folder) / f"hold-{name}-{clock}"
        if hold.exists():
            (Path(folder) / f"held-{name}-{clock}").touch()
            while hold.exists():
                time.sleep(LOOK_S)  # a poll: it ends when the file is gone

    with parameters.connect_sync(target, worker=name, job=job) as server:
        limit = None if staleness == "none" else int(staleness)
        train(server, limit, int(num_workers), at, TASKS[job or ""])


if __name__ == "__main__":
    main()
