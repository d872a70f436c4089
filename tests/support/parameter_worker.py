"""A worker of the parameter server, in a process of its own: least squares by a dense array and the
rows of a table.

    python parameter_worker.py SCHEDULER NAME NUM_WORKERS FOLDER

The worker stops in the middle of clock C, with a part of its pushes made, while there is a file
FOLDER/hold-NAME-C, and says so by a file held-NAME-C.
"""

import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import xain_parameters as parameters
from xain_parameters.client.sync import Dense, Server, Table

LOOK_S = 0.01

Floats = NDArray[np.float64]


NUM_FEATURES, NUM_KEYS, DIM = 8, 20, 2
NUM_CLOCKS = 20
BATCH = 40  # rows of data in each clock of a worker


def truth() -> tuple[Floats, Floats]:
    chance = np.random.default_rng(1)
    return chance.normal(size=NUM_FEATURES), chance.normal(size=(NUM_KEYS, DIM))


def batch(worker: str, clock: int) -> tuple[Floats, NDArray[np.int64], Floats, Floats]:
    """(dense features, ids, features of the ids' rows, targets), the same for the same clock."""
    chance = np.random.default_rng([int(worker[1:]), clock])
    w, rows = truth()
    x = chance.normal(size=(BATCH, NUM_FEATURES))
    ids = chance.integers(NUM_KEYS, size=BATCH)
    z = chance.normal(size=(BATCH, DIM))
    return x, ids, z, (x * w).sum(axis=1) + (z * rows[ids]).sum(axis=1)


def tables(server: Server) -> tuple[Dense, Table]:
    w = server.dense("w", (NUM_FEATURES,), update=parameters.Adagrad(0.5), dtype=np.float64)
    rows = server.table(
        "rows",
        DIM,
        update=parameters.Adagrad(0.5),
        init=parameters.Uniform(0.05, seed=1),
        dtype=np.float64,
    )
    return w, rows


def train(server: Server, num_workers: int, at: Callable[[int], None] = lambda clock: None) -> None:
    """at: called in the middle of each clock."""
    w, rows = tables(server)
    for clock in server.clocks(0, workers=num_workers, stop=NUM_CLOCKS):
        x, ids, z, target = batch(server.worker, clock)
        error = (x * w.pull()).sum(axis=1) + (z * rows.pull(ids)).sum(axis=1) - target
        w.push((x * error[:, None]).mean(axis=0))
        at(clock)
        rows.push(ids, z * error[:, None] / BATCH)


def model(server: Server) -> tuple[Floats, Floats]:
    w, rows = tables(server)
    return w.pull(), rows.pull(np.arange(NUM_KEYS))


def residual(trained: tuple[Floats, Floats]) -> float:
    """The part of the targets' variance that a model does not explain: 1 or so at the begin."""
    x, ids, z, target = batch("w99", 0)
    error = (x * trained[0]).sum(axis=1) + (z * trained[1][ids]).sum(axis=1) - target
    return float((error**2).mean() / (target**2).mean())


def main() -> None:
    target, name, num_workers, folder = sys.argv[1:]

    def at(clock: int) -> None:
        hold = Path(folder) / f"hold-{name}-{clock}"
        if hold.exists():
            (Path(folder) / f"held-{name}-{clock}").touch()
            while hold.exists():
                time.sleep(LOOK_S)  # a poll: it ends when the file is gone

    with parameters.connect_sync(target, worker=name) as server:
        train(server, int(num_workers), at)


if __name__ == "__main__":
    main()
