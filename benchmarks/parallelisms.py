"""Three parallelisms on the same data: accuracy, or R2, bytes on the wire, seconds.

    python benchmarks/parallelisms.py [--only PART] [--participants N] [--seeds N] [--add]
                                      [--any-load]

Each case trains on the rows of several participants, and fits the same kind of model with
scikit-learn on all rows in one place. Both are tested on the same 30 % of the rows. The mean of the
differences over several seeds is compared; a seed decides which rows are set aside and how the
others are divided: at random, or by label, by Dirichlet(0.5), which takes deciles of the target for
regression.

The first seed runs a coordinator and participants as processes of their own, with their rows in CSV
files. Its bytes are counted by a proxy before the coordinator's port, both ways together; `seconds`
are those of the rounds. The other seeds run in this process, with the functions of coordinator and
participants.

"averaging" and "pipeline" train the same network. Averaging has the default batch size, a sixteenth
of the site's rows from 4 to 32, so that small sites take several steps an epoch. A pipeline has all
rows at each participant, a stage for each, at most four; the participants send activations and
gradients to each other, which the proxy does not see. Other seeds of a pipeline train the network
in one piece, which has the same losses.

With --add the rows of bench-results/parallelisms.json stay which this run does not measure, so that
the grid can be run in parts.

processes, centralised, score: the first seed in processes, and means over all seeds.
error: standard error of the mean difference.
within: whether the mean difference is at least -0.01.
"""

import json
import os
import subprocess
import sys
import tomllib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import flags

# The matrices are small: threads of the linear algebra would wait for each other.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import processes
import results
from counting_proxy import CountingProxy

from xain_coordinator.aggregation.rules import make_rule
from xain_workloads.ensembles.bagging import seed_of
from xain_workloads.ensembles.stacking import Stack, next_model
from xain_workloads.tables.data import load_table
from xain_workloads.tables.dataset import Task
from xain_workloads.tables.partition import dirichlet, iid, split_train_test
from xain_workloads.tables.preprocessing import PreprocessingOptions, prepare
from xain_workloads.tables.table import Table
from xain_workloads.workload import create, evaluate, initial_model

ALPHA = 0.5
ALLOWED = 0.01
TEST_FRACTION = 0.3
PARTICIPANTS = (1, 3, 7)
# Task, and number of seeds: the fewer rows, the more the score depends on which ones are drawn.
DATA_SETS: Mapping[str, tuple[Task, int]] = {
    "digits": ("classification", 4),
    "breast_cancer": ("classification", 10),
    "wine": ("classification", 20),
    "diabetes": ("regression", 20),
}
PENALTY = 1e-3
STEPS = 300
TREES = 40  # of each participant; the centralised ensemble has as many as all of them together
EPOCHS = 30
MAX_STAGES = 4
LAYERS = """[
    { type = "linear", out_features = 64 }, { type = "relu" },
    { type = "linear", out_features = 32 }, { type = "relu" },
    { type = "linear" },
]"""


@dataclass(frozen=True)
class Case:
    """settings: of the coordinator, by dotted key.

    is_divided: whether each participant has rows of its own, or all rows.
    """

    kind: str
    settings: Mapping[str, Any]
    is_divided: bool = True

    def options(self, section: str) -> dict[str, Any]:
        """Settings of a section, read as in a file of configuration where they are text."""
        found = {
            key.removeprefix(f"{section}."): value
            for key, value in self.settings.items()
            if key.startswith(f"{section}.")
        }
        if "layers" in found:
            found["layers"] = tomllib.loads(f"layers = {found['layers']}")["layers"]
        return found


def baseline(kind: str, task: Task, *, num_rows: int, num_trees: int) -> Any:
    """The centralised estimator of scikit-learn, not yet fitted.

    num_rows: of training. num_trees: of bagging.
    """
    from sklearn.compose import TransformedTargetRegressor
    from sklearn.ensemble import BaggingClassifier, BaggingRegressor
    from sklearn.linear_model import LogisticRegression, Ridge
    from sklearn.neural_network import MLPClassifier, MLPRegressor
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    is_regression = task == "regression"
    if kind == "bagging":
        bagged = BaggingRegressor if is_regression else BaggingClassifier
        return bagged(n_estimators=num_trees, random_state=0)
    if kind == "gradient":
        # Both minimise the mean loss and half of PENALTY times the squared weights.
        linear = (
            Ridge(alpha=PENALTY * num_rows)
            if is_regression
            else LogisticRegression(C=1 / (PENALTY * num_rows), max_iter=1000)
        )
        return make_pipeline(StandardScaler(), linear)
    hidden = {"hidden_layer_sizes": (64, 32), "random_state": 0}
    if not is_regression:
        return make_pipeline(StandardScaler(), MLPClassifier(max_iter=200, **hidden))
    # More epochs, or a target that is not scaled, overfit the 309 rows of diabetes: R2 0.40.
    network = MLPRegressor(max_iter=EPOCHS, **hidden)
    scaled = TransformedTargetRegressor(network, transformer=StandardScaler())
    return make_pipeline(StandardScaler(), scaled)


def cases(task: Task, participants: int) -> Iterator[Case]:
    """The kinds of parallelism for a number of participants."""
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
    )
    tree = "DecisionTreeRegressor" if is_regression else "DecisionTreeClassifier"
    yield Case(
        "bagging",
        {
            "workload.name": "bagging",
            "workload.options.estimator": tree,
            "workload.options.estimators": TREES,
            "workload.options.publish": True,
            "aggregation.rule": "ensemble",
            "rounds.rounds": 2 if is_regression else 6,
        },
    )
    if find_spec("torch") is None:
        return
    network = {
        "workload.name": "neural",
        "workload.options.task": task,
        "workload.options.layers": LAYERS.replace("\n", ""),
        "workload.options.learning_rate": 0.005 if is_regression else 0.05,
    }
    yield Case("averaging", {**network, "rounds.rounds": EPOCHS})
    if participants <= MAX_STAGES:
        yield Case(
            "pipeline",
            {
                **network,
                "workload.options.batch_size": 32,
                "workload.options.mode": "pipeline",
                "workload.options.stages": participants,
                "aggregation.rule": "assemble",
                "rounds.rounds": 3,
                "rounds.epochs": EPOCHS // 3,
            },
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


def divided(table: Table, participants: int, split: str, seed: int) -> Sequence[Table]:
    """The rows of each participant; one without rows takes no part."""
    if split == "iid":
        parts = iid(table.num_samples, participants, seed=seed)
    else:
        parts = dirichlet(table.target, participants, alpha=ALPHA, seed=seed)
    return [table.subset(rows) for rows in parts if len(rows)]


def in_processes(
    folder: Path, case: Case, task: Task, sites: Sequence[Table], test: Table
) -> dict[str, Any]:
    """Metric of the last model on the test rows, MB on the wire, and seconds of all rounds."""
    write_csv(folder / "test.csv", test)
    rules: dict[str, object] = {
        "rounds.min_participants": len(sites),
        "rounds.start_participants": len(sites),
        "server.weights_port": "off",  # all bytes pass the proxy
        **{
            key: json.dumps(value) if isinstance(value, bool) else value
            for key, value in case.settings.items()
        },
        "evaluate.every": 1 << 20,  # the last model only
        "evaluate.data": folder / "test.csv",
        "evaluate.target": "target",
        "evaluate.task": task,
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
                "--test-fraction=0",  # the score is of rows that no site has
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
        score = score_of(rounds, task)
    trained = [one for one in rounds if one.seconds]
    begin, end = trained[0].opened_seconds, trained[-1].opened_seconds + trained[-1].seconds
    return {
        "score": score,
        "megabytes": round(num_bytes / 1e6, 2),
        "seconds": round(end - begin, 2),
    }


def score_of(rounds: Sequence[Any], task: Task) -> float:
    """The coordinator's evaluation of the last model."""
    name = metric_of(task)
    return next(
        round_.coordinator_evaluation.metrics[name]
        for round_ in reversed(rounds)
        if name in round_.coordinator_evaluation.metrics
    )


def metric_of(task: Task) -> str:
    return "r2" if task == "regression" else "accuracy"


def in_this_process(case: Case, task: Task, sites: Sequence[Table], test: Table) -> float:
    """Metric of the last model on the test rows."""
    options = {**case.options("workload.options")}
    if case.kind == "pipeline":  # the network in one piece
        sites = sites[:1]
        options = {key: options[key] for key in options.keys() - {"mode", "stages"}}
    workload = create(case.settings["workload.name"], options)
    preprocessing = PreprocessingOptions(**case.options("workload.preprocessing"))
    model = initial_model(workload, [site.profile() for site in sites], preprocessing)
    rows = [prepare(model.metadata, site) for site in sites]
    epochs = case.settings.get("rounds.epochs", 1)
    rule = make_rule("weighted_average", {})
    weights = np.array([len(data.target) for data in rows], np.float64)
    weights /= weights.sum()
    for round_ in range(case.settings["rounds.rounds"]):
        updates = [
            workload.train(
                model,
                data,
                epochs=epochs,
                epoch_base=round_ * epochs,
                seed=seed_of(0, f"p{i}") if case.kind == "bagging" else 0,
            )
            for i, data in enumerate(rows)
        ]
        if case.kind == "bagging":
            sent = [(f"p{i}", u.vector.tobytes(), u.num_samples) for i, u in enumerate(updates)]
            vector = next_model(Stack.parse(model.vector.tobytes()), sent, model.metadata)
            model = replace(model, vector=np.frombuffer(vector, np.uint8))
            continue
        mean = rule.combine(np.stack([update.vector for update in updates]), weights)
        if case.kind == "gradient":
            mean = model.vector - case.settings["aggregation.options.eta0"] * mean
        model = replace(model, vector=mean.astype(model.vector.dtype))
    return evaluate(model, test)[metric_of(task)]


def measured(
    data: str, only: str, participants: Sequence[int], splits: Sequence[str], num_seeds: int
) -> Iterator[dict[str, Any]]:
    """A row for each kind, number of participants, and way to divide the rows."""
    task, _ = DATA_SETS[data]
    table = load_table(data, task=task)
    seeds = range(num_seeds)
    halves = [split_train_test(table, TEST_FRACTION, seed) for seed in seeds]
    for number in participants:
        for case in cases(task, number):
            if only not in f"{data} {case.kind}":
                continue
            central = [
                float(
                    baseline(case.kind, task, num_rows=train.num_samples, num_trees=TREES * number)
                    .fit(matrix(train), train.target)
                    .score(matrix(test), test.target)
                )
                for train, test in halves
            ]
            for split in splits if case.is_divided and number > 1 else ("iid",):
                scores: list[float] = []
                first: dict[str, Any] = {}
                for seed, (train, test) in zip(seeds, halves, strict=True):
                    sites = [train] * number
                    if case.is_divided:
                        sites = divided(train, number, split, seed)
                    if first:
                        scores.append(in_this_process(case, task, sites, test))
                        continue
                    with results.scratch() as folder:
                        first = in_processes(folder, case, task, sites, test)
                    scores.append(first["score"])
                pairs = zip(scores, central, strict=True)
                differences = [score - one for score, one in pairs]
                difference = fmean(differences)
                yield {
                    "data": data,
                    "parallelism": case.kind,
                    "participants": number,
                    "split": split.replace("_", " ") if case.is_divided and number > 1 else "-",
                    "metric": "R2" if task == "regression" else "accuracy",
                    "processes": round(first["score"], 4),
                    "centralised": round(fmean(central), 4),
                    "score": round(fmean(scores), 4),
                    "difference": round(difference, 4),
                    "error": round(stdev(differences) / len(seeds) ** 0.5, 4),
                    "seeds": len(seeds),
                    "within": "yes" if difference >= -ALLOWED else "NO",
                    "megabytes": first["megabytes"],
                    "seconds": first["seconds"],
                }


def added(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Rows of earlier runs and these rows, which replace earlier ones of the same case."""
    latest = {case_of(row): row for row in (*results.earlier("parallelisms", "cases"), *rows)}
    return [latest[case] for case in sorted(latest)]


def case_of(row: Mapping[str, Any]) -> tuple[int, str, int, str]:
    position = [*DATA_SETS].index(row["data"])
    return position, row["parallelism"], row["participants"], row["split"]


def main() -> None:
    parser = flags.parser(__doc__, "one data set, two seeds, three participants")
    parser.add_argument("--only", default="", metavar="PART", help="of a data set's or kind's name")
    parser.add_argument("--participants", type=int, metavar="N", help="instead of 1, 3 and 7")
    parser.add_argument("--seeds", type=int, metavar="N", help="at least 2")
    parser.add_argument("--add", action="store_true", help="to the rows of earlier runs")
    given = parser.parse_args()
    results.begin(quick=given.quick, any_load=given.any_load)
    warnings.simplefilter("ignore")
    rows: list[dict[str, Any]] = []
    for data in ("wine",) if given.quick else DATA_SETS:
        participants = (given.participants,) if given.participants else PARTICIPANTS
        splits = ("iid",) if given.quick else ("iid", "by_label")
        numbers = (3,) if given.quick else participants
        num_seeds = 2 if given.quick else given.seeds or DATA_SETS[data][1]
        for row in measured(data, given.only, numbers, splits, num_seeds):
            print(*(f"{value!s:>13}" for value in row.values()), flush=True)
            rows.append(row)
    table = added(rows) if given.add else rows
    outside = [row for row in table if row["within"] == "NO"]
    results.report("parallelisms", {"cases": table, "outside": len(outside)})


if __name__ == "__main__":
    main()
