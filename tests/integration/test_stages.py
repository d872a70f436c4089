"""Stages of one network, each trained by a process of its own, give what one process gives."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support import stage_member
from xain_workloads.errors import Diverged
from xain_workloads.nets.neural import NeuralWorkload
from xain_workloads.tables.dataset import Dataset

pytestmark = pytest.mark.frameworks

SIZE = 3  # processes, each of which imports torch
LAYERS = [
    {"type": "linear", "out_features": 12},
    {"type": "tanh"},
    {"type": "linear", "out_features": 8},
    {"type": "relu"},
    {"type": "linear", "out_features": 6},
    {"type": "tanh"},
    {"type": "linear"},
]
# 50 rows in batches of 17, 17 and 16, which no number of micro-batches divides.
OPTIONS: dict[str, Any] = {
    "layers": LAYERS,
    "batch_size": 20,
    "micro_batches": 3,
    "learning_rate": 0.1,
    "dtype": "float64",
    "seed": 3,
}
TOLERANCE = 1e-9


class Group:
    """Processes that train stages on request."""

    def __init__(self, file: Path) -> None:
        program = [sys.executable, stage_member.__file__]
        self._processes = [
            subprocess.Popen(
                [*program, str(rank), str(SIZE), str(file)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(SIZE)
        ]

    def train(self, members: int, **case: Any) -> list[dict[str, Any]]:
        """The answers of the first ranks. case: the options of the workload, and more."""
        for process in self._processes:
            process.stdin.write(json.dumps({"members": members, **case}) + "\n")
            process.stdin.flush()
        return [json.loads(process.stdout.readline()) for process in self._processes[:members]]

    def close(self) -> None:
        for process in self._processes:
            process.stdin.close()
        statuses = []
        for process in self._processes:
            try:
                statuses.append(process.wait(60))
            finally:
                process.kill()
                process.stdout.close()
        assert statuses == [0] * SIZE


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Group]:
    stage_member.allow_networks()
    processes = Group(tmp_path_factory.mktemp("group") / "store")
    yield processes
    processes.close()


def data(name: str = "iris") -> Dataset:
    return stage_member.load_whole(name).subset(range(40, 90))


def alone(options: dict[str, Any], name: str = "iris") -> tuple[Any, dict[str, float]]:
    """Weights and metrics of the same training in one process."""
    given = {k: v for k, v in options.items() if k not in ("cuts", "micro_batches", "schedule")}
    workload = NeuralWorkload.from_options(given)
    model = workload.initial_model([stage_member.load_whole(name).profile()])
    made = workload.train(model, data(name), epochs=2, epoch_base=1, seed=options.get("seed", 0))
    return made.vector, dict(made.metrics)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("members", "cuts"), [(1, ()), (2, ()), (2, (1,)), (3, (2, 6)), (3, ())])
def test_stages_give_the_weights_and_losses_of_one_process(group, members, cuts, schedule):
    options = {**OPTIONS, "cuts": cuts, "schedule": schedule}
    answers = group.train(members, options=options)
    vector, metrics = alone(options)
    assert [answer.get("error") for answer in answers] == [None] * members
    together = np.concatenate([answer["vector"] for answer in answers])
    np.testing.assert_allclose(together, vector, rtol=TOLERANCE, atol=TOLERANCE)
    for answer in answers:
        assert answer["metrics"] == pytest.approx(metrics, abs=TOLERANCE)
    if cuts:
        first = [answer["names"][0].partition(".")[0] for answer in answers]
        assert [int(name) >= cut for name, cut in zip(first, (0, *cuts), strict=True)]


@pytest.mark.parametrize(
    "options",
    [
        {"task": "regression", "layers": LAYERS},
        {"builder": "nets:named"},
        {"layers": LAYERS, "optimizer": "adam", "dtype": "float32"},
    ],
)
def test_regression_builders_and_adam_train_in_stages(group, options):
    name = "diabetes" if "task" in options else "iris"
    options = {"learning_rate": 0.01, "micro_batches": 4, **options}
    answers = group.train(3, options=options, data=name)
    vector, metrics = alone(options, name)
    assert [answer.get("error") for answer in answers] == [None] * 3
    together = np.concatenate([answer["vector"] for answer in answers])
    np.testing.assert_allclose(together, vector, rtol=1e-4, atol=1e-5)
    assert answers[0]["metrics"] == pytest.approx(metrics, rel=1e-4)


def test_scores_that_no_network_gives_are_divergence_at_every_member(group):
    """All weights are finite, and the federated mode refuses the same training."""
    options = {**OPTIONS, "learning_rate": 1e13}
    with pytest.raises(Diverged):
        alone(options)
    for answer in group.train(2, options=options):
        assert answer["error"].startswith("Diverged: training diverged in epochs 2 to 3")


@pytest.mark.parametrize(
    ("case", "why"),
    [
        ({"options": OPTIONS, "rows_of_rank_1": 49}, "rank 0 has 50, rank 1 has 49 rows"),
        ({"options": {"builder": "nets:skipping"}}, "does not run its children"),
        ({"options": {**OPTIONS, "cuts": (1,), "layers": LAYERS[1:]}}, "has no weights"),
    ],
)
def test_network_that_has_no_stages_is_refused_at_every_member(group, case, why):
    for answer in group.train(2, **case):
        assert answer["error"].startswith("DataError")
        assert why in answer["error"]
