"""Full-batch gradient steps on digits over participant processes, each with its part of the rows.

    python benchmarks/gradient_steps.py [--participants 4] [--steps 1000]

A step is a round with all promises of a round: the participants compute the gradient of the
multinomial loss at the global model, their updates are committed to the journal, and the
coordinator stores and journals the model after the step.

Beside it, in the same run: the same steps by numpy in one process, as many calls of as many
processes, two a step, on a bare grpc.aio server, and a tenth of the steps with the data in memory.

step_ms_without_syncs: with the data directory in /dev/shm, where a sync to disk costs nothing.
largest_difference: of any weight from those of the numpy steps on all rows in one place.
Writes bench-results/gradient_steps.json.
"""

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

import flags

# The matrices are small: threads of the linear algebra would wait for each other.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import processes
import results
import round_overhead
from sklearn.datasets import load_digits

from xain_workloads.model import Model, unflatten
from xain_workloads.tables.dataset import Dataset
from xain_workloads.tables.partition import iid
from xain_workloads.workload import Workload, create

ETA0 = 0.5
OPTIONS = {"mode": "gradient", "alpha": 1e-3}
CHECKED_STEPS = 1000  # calls of the raw limit, enough for the clients' beginnings not to matter


def digits() -> Dataset:
    """All rows, with features from 0 to 1."""
    x, y = load_digits(return_X_y=True)
    return Dataset(x / 16, y.astype(str))


def workload() -> Workload:
    return create("sgd", OPTIONS)


def start_participant(target: str, index: int, participants: int) -> "subprocess.Popen[str]":
    arguments = [target, str(index), str(participants)]
    command = [sys.executable, __file__, "--role", "participant", *arguments]
    return subprocess.Popen(command, text=True)


def participate(target: str, index: int, participants: int) -> int:
    from xain_foundation.logs.logs import configure
    from xain_participant.agent.agent import run
    from xain_participant.tables.workload_participant import WorkloadParticipant

    configure("error", console=False, third_party=False)
    rows = iid(digits().num_samples, participants, seed=0)[index]
    return run(WorkloadParticipant(digits().subset(rows)), target, f"p{index}")


def measure(folder: Path, participants: int, steps: int) -> tuple[float, Model, dict[str, float]]:
    """Seconds of all steps, the last model, and the coordinator's processor time for each step."""
    settings = {
        "rounds.rounds": steps,
        "rounds.min_participants": participants,
        "rounds.start_participants": participants,
        "workload.name": "sgd",
        "workload.preprocessing.scaling": "none",
        "aggregation.rule": "gradient",
        "aggregation.options.eta0": ETA0,
        "evaluate.every": 0,
        **{f"workload.options.{name}": value for name, value in OPTIONS.items()},
    }
    coordinator = processes.CoordinatorProcess(folder, settings)
    them: list[subprocess.Popen[str]] = []
    try:
        coordinator.start()
        before = coordinator.processor_time
        target = f"127.0.0.1:{coordinator.port}"
        them = [start_participant(target, index, participants) for index in range(participants)]
        for one in them:
            if one.wait(processes.SESSION_LIMIT_S):
                raise SystemExit(f"a participant ended with status {one.returncode}")
        after = coordinator.processor_time
        rounds = coordinator.rounds()
        assert len(rounds) == steps, f"{len(rounds)} of {steps} steps"
        seconds = rounds[-1].opened_seconds + rounds[-1].seconds - rounds[0].opened_seconds
        spent = after.since(before, steps) if after is not None and before is not None else None
    finally:
        for one in them:
            if one.poll() is None:
                one.kill()
                one.wait()
        coordinator.stop()
    vector = np.load(next(folder.glob("weights/*/models/last.npy")))
    model = initial()
    cpu = {} if spent is None else {"user": spent.user_s, "system": spent.system_s}
    return seconds, Model(vector, model.layout, model.metadata), cpu


def initial() -> Model:
    return workload().initial_model([digits().profile()])


def on_all_rows(steps: int) -> tuple[float, Model]:
    """The same steps with numpy on all rows."""
    data, model = digits(), initial()
    codes = np.searchsorted(np.unique(data.target), data.target)
    onehot = np.eye(10)[codes]
    coef, intercept = np.zeros((10, 64)), np.zeros(10)
    begin = time.perf_counter()
    for _ in range(steps):
        scores = data.features @ coef.T + intercept
        exponentials = np.exp(scores - scores.max(axis=1, keepdims=True))
        errors = exponentials / exponentials.sum(axis=1, keepdims=True) - onehot
        coef -= ETA0 * (errors.T @ data.features / len(codes) + OPTIONS["alpha"] * coef)
        intercept -= ETA0 * errors.mean(axis=0)
    seconds = time.perf_counter() - begin
    return seconds, Model(np.concatenate([coef.ravel(), intercept]), model.layout, model.metadata)


def main() -> None:
    parser = flags.parser(__doc__, quick="few steps, to see that it works")
    parser.add_argument("--participants", type=int, default=4)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--role", default="main", help=argparse.SUPPRESS)
    parser.add_argument("rest", nargs="*", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.role == "participant":
        target, index, participants = given.rest
        sys.exit(participate(target, int(index), int(participants)))
    results.begin(quick=given.quick, any_load=given.any_load)
    if given.quick:
        given.participants, given.steps = 2, 20
    raw = round_overhead.measure_raw(given.participants, 20 if given.quick else CHECKED_STEPS)
    alone_s, alone = on_all_rows(given.steps)
    with results.scratch() as folder:
        seconds, model, spent = measure(folder, given.participants, given.steps)
    in_memory: dict[str, float] = {}
    if not given.quick and (shm := processes.shm_folder()) is not None:
        few = max(20, given.steps // 10)
        with results.scratch(shm) as folder:
            unsynced_s, _, _ = measure(folder, given.participants, few)
        in_memory["step_ms_without_syncs"] = round(1000 * unsynced_s / few, 2)
    ours, theirs = (unflatten(one.vector, one.layout) for one in (model, alone))
    difference = max(float(np.abs(ours[name] - theirs[name]).max()) for name in theirs)
    assert difference < 1e-9, f"the models differ by {difference:g}"
    results.report(
        "gradient_steps",
        {
            "participants": given.participants,
            "steps": given.steps,
            "seconds": round(seconds, 2),
            "step_ms": round(1000 * seconds / given.steps, 2),
            **in_memory,
            "bare_grpc_ms": round(1000 * raw, 2),
            "ratio_to_bare_grpc": round(seconds / given.steps / raw, 2),
            "numpy_in_one_process_ms": round(1000 * alone_s / given.steps, 2),
            "coordinator_user_ms": round(1000 * spent.get("user", 0), 2),
            "coordinator_system_ms": round(1000 * spent.get("system", 0), 2),
            "largest_difference": float(f"{difference:.2g}"),
        },
    )


if __name__ == "__main__":
    main()
