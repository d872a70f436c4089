"""Three parallelisms on the same data: accuracy, or R2, bytes on the wire, seconds.

    python benchmarks/parallelisms.py [--only PART] [--participants N] [--any-load]

Each case starts a coordinator and participants as processes of their own, with their rows in CSV
files, and tests the last model on rows that nobody trains on. The rows are divided at random or by
label, by Dirichlet(0.5). Beside it stands the same kind of model, fitted by scikit-learn on all
rows in one place. Small data sets are divided several times, and the mean is compared; bytes and
seconds are the median. Bytes are counted by a proxy before the coordinator's port, both ways
together.

"averaging" and "pipeline" train the same network. A pipeline has all rows at each participant, a
stage for each, at most four; the participants send activations and gradients to each other, which
the proxy does not see.
within: whether the case is within 0.01 of the centralised model.
"""

import json
import subprocess
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean, median
from typing import Any

import flags
import numpy as np
import processes
import results
from counting_proxy import CountingProxy

from xain_workloads.data import load_table
from xain_workloads.dataset import Task
from xain_workloads.partition import dirichlet, iid, split_train_test
from xain_workloads.table import Table

ALPHA = 0.5
ALLOWED = 0.01
TEST_FRACTION = 0.3
PARTICIPANTS = (1, 3, 7)
# Task, and number of divisions into rows of training and of the test: the fewer rows, the more.
DATA_SETS: Mapping[str, tuple[Task, int]] = {
    "digits": ("classification", 1),
    "breast_cancer": ("classification", 2),
    "wine": ("classification", 4),
    "diabetes": ("regression", 4),
}
PENALTY = 1e-3
STEPS = 300
TREES = 42  # divisible by every number of participants and rounds
BAGGING_ROUNDS = 2
EPOCHS = 30
MAX_STAGES = 4
LAYERS = """[
    { type = "linear", out_features = 64 }, { type = "relu" },
    { type = "linear", out_features = 32 }, { type = "relu" },
    { type = "linear" },
]"""


@dataclass(frozen=True)
class Case:
    """settings: of the coordinator, by dotted key. baseline: fits in one place."""

    kind: str
    settings: Mapping[str, object]
    baseline: Any
    is_divided: bool = True


def cases(task: Task, participants: int) -> Iterator[Case]:
    """The kinds of parallelism for a number of participants."""
    from sklearn.ensemble import BaggingClassifier, BaggingRegressor
    from sklearn.linear_model import LogisticRegression, Ridge
    from sklearn.neural_network import MLPClassifier, MLPRegressor
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    is_regression = task == "regression"
    yield Case(
        "gradient",
        {
            "workload.name": "sgd",
            "workload.options.task": task,
            "workload.options.mode": "gradient",
            "workload.options.loss": "squared_error" if is_regression else "log_loss",
            "workload.options.alpha": PENALTY,
            "aggregation.rule": "gradient",
            "aggregation.options.eta0": 0.1 if is_regression else 0.5,
            "rounds.rounds": STEPS,
        },
        lambda rows: make_pipeline(
            StandardScaler(),
            # Both minimise the mean loss and half of PENALTY times the squared weights.
            Ridge(alpha=PENALTY * rows)
            if is_regression
            else LogisticRegression(C=1 / (PENALTY * rows), max_iter=1000),
        ),
    )
    estimators = TREES // (participants * BAGGING_ROUNDS)
    bagged = BaggingRegressor if is_regression else BaggingClassifier
    tree = "DecisionTreeRegressor" if is_regression else "DecisionTreeClassifier"
    yield Case(
        "bagging",
        {
            "workload.name": "bagging",
            "workload.options.estimator": tree,
            "workload.options.estimators": estimators,
            "workload.options.publish": "true",
            "workload.preprocessing.scaling": "none",
            "aggregation.rule": "ensemble",
            "rounds.rounds": BAGGING_ROUNDS,
        },
        lambda rows: bagged(n_estimators=TREES, random_state=0),
    )
    if find_spec("torch") is None:
        return
    network = {
        "workload.name": "neural",
        "workload.options.task": task,
        "workload.options.layers": LAYERS.replace("\n", ""),
        "workload.options.learning_rate": 0.01 if is_regression else 0.05,
        "workload.options.batch_size": 32,
    }
    perceptron = MLPRegressor if is_regression else MLPClassifier

    def alone(rows: int) -> Any:
        hidden = perceptron(hidden_layer_sizes=(64, 32), max_iter=200, random_state=0)
        return make_pipeline(StandardScaler(), hidden)

    yield Case("averaging", {**network, "rounds.rounds": EPOCHS}, alone)
    if participants <= MAX_STAGES:
        yield Case(
            "pipeline",
            {
                **network,
                "workload.options.mode": "pipeline",
                "workload.options.stages": participants,
                "aggregation.rule": "assemble",
                "rounds.rounds": 3,
                "rounds.epochs": EPOCHS // 3,
            },
            alone,
            is_divided=False,
        )


def write_csv(path: Path, table: Table) -> None:
    """The rows of a table, the target last."""
    names = [column.name for column in table.columns]
    columns = [table.values[name] for name in names]
    lines = [",".join([*names, "target"])]
    for *values, target in zip(*columns, table.target, strict=True):
        lines.append(",".join([*(repr(float(value)) for value in values), str(target)]))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def matrix(table: Table) -> np.ndarray:
    return np.column_stack([table.values[column.name] for column in table.columns])


def divided(table: Table, participants: int, split: str) -> Sequence[Table]:
    """The rows of each participant."""
    if split == "iid":
        parts = iid(table.num_samples, participants, seed=0)
    else:
        parts = dirichlet(table.target, participants, alpha=ALPHA, seed=0)
    return [table.subset(rows) for rows in parts if len(rows)]


def run(
    folder: Path, case: Case, task: Task, sites: Sequence[Table], test: Table
) -> dict[str, Any]:
    """Metric of the last model on the test rows, MB on the wire, and seconds of all rounds."""
    write_csv(folder / "test.csv", test)
    rules: dict[str, object] = {
        "rounds.min_participants": len(sites),
        "rounds.start_participants": len(sites),
        "evaluate.every": 1 << 20,  # the last model only
        "evaluate.data": folder / "test.csv",
        "evaluate.target": "target",
        "evaluate.task": task,
        **case.settings,
    }
    if task == "classification":  # a participant may lack some of them
        rules["schema.classes"] = json.dumps(sorted({str(label) for label in test.target}))
    coordinator = processes.CoordinatorProcess(folder / "coordinator", rules)
    with ExitStack() as stack:
        stack.callback(coordinator.stop)
        coordinator.start()
        proxy = stack.enter_context(CountingProxy(coordinator.port))
        them: list[subprocess.Popen[bytes]] = []
        for number, site in enumerate(sites):
            path = folder / f"site{number}.csv"
            write_csv(path, site)
            command = [
                *(sys.executable, "-m", "xain_participant"),
                *("--coordinator", f"127.0.0.1:{proxy.port}", "--id", f"p{number}"),
                *("--data", str(path), "--target", "target", "--task", task),
                "--set=logging.level=error",
            ]
            them.append(subprocess.Popen(command))
            stack.callback(them[-1].wait)
            stack.callback(them[-1].kill)
        for one in them:
            if one.wait(processes.SESSION_LIMIT_S):
                raise SystemExit(f"a participant ended with status {one.returncode}")
        rounds = coordinator.rounds()
        num_bytes = proxy.num_bytes_up + proxy.num_bytes_down
    trained = [one for one in rounds if one.seconds]
    begin, end = trained[0].opened_seconds, trained[-1].opened_seconds + trained[-1].seconds
    return {
        "score": score_of(rounds, task),
        "megabytes": round(num_bytes / 1e6, 2),
        "seconds": round(end - begin, 2),
    }


def score_of(rounds: Sequence[Any], task: Task) -> float:
    """The coordinator's evaluation of the last model."""
    name = "r2" if task == "regression" else "accuracy"
    return next(
        round_.coordinator_evaluation.metrics[name]
        for round_ in reversed(rounds)
        if name in round_.coordinator_evaluation.metrics
    )


def measured(
    data: str, only: str, participants: Sequence[int], splits: Sequence[str]
) -> Iterator[dict[str, Any]]:
    """A row for each kind, number of participants, and way to divide the rows."""
    task, num_seeds = DATA_SETS[data]
    num_seeds = num_seeds if len(splits) > 1 else 1
    table = load_table(data, task=task)
    halves = [split_train_test(table, TEST_FRACTION, seed) for seed in range(num_seeds)]
    for number in participants:
        for case in cases(task, number):
            if only not in f"{data} {case.kind}":
                continue
            for split in splits if case.is_divided and number > 1 else ("iid",):
                central, found = [], []
                for train, test in halves:
                    baseline = case.baseline(train.num_samples).fit(matrix(train), train.target)
                    central.append(float(baseline.score(matrix(test), test.target)))
                    sites = divided(train, number, split) if case.is_divided else [train] * number
                    with results.scratch() as folder:
                        found.append(run(folder, case, task, sites, test))
                score = fmean(one["score"] for one in found)
                difference = score - fmean(central)
                yield {
                    "data": data,
                    "parallelism": case.kind,
                    "participants": number,
                    "split": split.replace("_", " "),
                    "metric": "R2" if task == "regression" else "accuracy",
                    "centralised": round(fmean(central), 4),
                    "score": round(score, 4),
                    "difference": round(difference, 4),
                    "within": "yes" if difference >= -ALLOWED else "no",
                    "megabytes": round(median(one["megabytes"] for one in found), 2),
                    "seconds": round(median(one["seconds"] for one in found), 2),
                }


def main() -> None:
    parser = flags.parser(__doc__, "one division of one data set, three participants")
    parser.add_argument("--only", default="", metavar="PART", help="of a data set's or kind's name")
    parser.add_argument("--participants", type=int, metavar="N", help="instead of 1, 3 and 7")
    given = parser.parse_args()
    results.begin(quick=given.quick, any_load=given.any_load)
    warnings.simplefilter("ignore")
    rows: list[dict[str, Any]] = []
    for data in ("wine",) if given.quick else DATA_SETS:
        participants = (given.participants,) if given.participants else PARTICIPANTS
        splits = ("iid",) if given.quick else ("iid", "by_label")
        for row in measured(data, given.only, (3,) if given.quick else participants, splits):
            print(*(f"{value!s:>13}" for value in row.values()), flush=True)
            rows.append(row)
    outside = [row for row in rows if row["within"] == "no"]
    results.report("parallelisms", {"cases": rows, "outside": len(outside)})


if __name__ == "__main__":
    main()
