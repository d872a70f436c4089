"""Federated against centralised training: accuracy, or R2, on rows that are not trained on.

    python benchmarks/learning.py [--quick] [--any-load] [--only PART]

Each case divides a data set among sites, trains in process with the functions that coordinator and
participants use (statistics, preprocessing, rounds of training, aggregation), and trains the same
model with the same number of epochs on all rows in one place. Both are tested on the same rows.
The mean over several seeds is compared: federated training may be worse by 0.01 if the rows are
divided at random, and by 0.03 if they are divided by label, by Dirichlet(0.1), or by decile of the
target for regression. Exit status 1 if a case is outside; it is marked in the table.
"""

import os
import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from statistics import fmean, stdev
from typing import Any

import flags

# The matrices are small: threads of the linear algebra would wait for each other.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import results

from xain_coordinator.aggregation.rules import make_rule
from xain_workloads.boosting_options import HISTOGRAM
from xain_workloads.data import load_table
from xain_workloads.growing import grown
from xain_workloads.histograms import growing, parse_sums
from xain_workloads.model import Model
from xain_workloads.partition import dirichlet, iid, split_train_test
from xain_workloads.preprocessing import prepare
from xain_workloads.schema import Column
from xain_workloads.table import Table
from xain_workloads.workload import (
    TrainResult,
    Workload,
    create,
    evaluate,
    fit_centralised,
    initial_model,
)

TEST_FRACTION = 0.3
ALPHA = 0.1
ALLOWED = {"iid": 0.01, "by_label": 0.03}
SITES = (1, 3, 7)


@dataclass(frozen=True)
class Kind:
    """A kind of model, and how long it trains.

    rounds: of one epoch each. rounds_per_epoch: more than 1 where a round is a part of an epoch.
    federated: options of federated training only.
    """

    workload: str
    rounds: int
    options: dict[str, Any] = field(default_factory=dict)
    rounds_per_epoch: int = 1
    federated: dict[str, Any] = field(default_factory=dict)


# Workloads have their defaults, except where an option is named.
KINDS = {
    "linear": Kind("sgd", rounds=50),
    "mlp": Kind("mlp", rounds=50),
    "neural": Kind("neural", rounds=50),
    # 50 boosting iterations of trees that grow by one level a round.
    "xgboost": Kind(
        "xgboost",
        rounds=150,
        options={"eta": 0.1, "max_depth": 3},
        rounds_per_epoch=3,
        federated={"mode": HISTOGRAM},
    ),
}

NEEDS = {"neural": "torch", "xgboost": "xgboost"}  # packages

# 50 epochs overfit the 309 rows of diabetes in one place (R2 0.25), which is no baseline.
FOR_REGRESSION = {
    **KINDS,
    "mlp": Kind("mlp", rounds=20),
    "neural": Kind("neural", rounds=20),
}


def synthetic() -> Table:
    """1500 rows with numbers of very different scales, gaps, categories and a useless column."""
    chance = np.random.RandomState(7)
    n = 1500
    income = np.exp(chance.normal(10.5, 0.6, n))
    dose = chance.normal(2e-3, 4e-4, n)
    age = chance.uniform(18, 90, n)
    ward = np.array(["north", "south", "east", "west"], dtype=object)[chance.randint(0, 4, n)]
    smoker = np.array(["yes", "no", "former"], dtype=object)[chance.randint(0, 3, n)]
    score = (np.log(income) - 10.5) / 0.6 + (dose - 2e-3) / 4e-4 - (age - 54) / 21
    score += np.select([ward == "north", ward == "south"], [1.5, -1.5]) + (smoker == "yes")
    target = np.where(score + chance.normal(0, 0.5, n) > 0.3, "ill", "well")
    income[chance.random_sample(n) < 0.1] = np.nan
    age[chance.random_sample(n) < 0.05] = np.nan
    ward[chance.random_sample(n) < 0.05] = None
    names = ("income", "dose", "age", "noise")
    numbers = (income, dose, age, chance.normal(0, 1e3, n))
    columns = (*map(Column, names), Column("ward", "category"), Column("smoker", "category"))
    values = dict(zip(names, numbers, strict=True)) | {"ward": ward, "smoker": smoker}
    return Table(columns, values, target)


# Loads a data set; seeds: the fewer rows, the more the test depends on which ones are drawn.
DATA_SETS: dict[str, tuple[Callable[[], Table], int]] = {
    "digits": (lambda: load_table("digits"), 2),
    "breast_cancer": (lambda: load_table("breast_cancer"), 3),
    "wine": (lambda: load_table("wine"), 10),
    "diabetes": (lambda: load_table("diabetes", task="regression"), 6),
    "synthetic": (synthetic, 2),
}


def divided(table: Table, sites: int, split: str, seed: int) -> list[Table]:
    """The rows of each site; a site without rows takes no part."""
    if split == "iid":
        parts = iid(table.num_samples, sites, seed=seed)
    else:
        parts = dirichlet(table.target, sites, alpha=ALPHA, seed=seed)
    return [table.subset(rows) for rows in parts if len(rows)]


def trained(workload: Workload, sites: Sequence[Table], rounds: int, seed: int) -> Model:
    """The model after so many rounds."""
    model = initial_model(workload, [site.profile() for site in sites])
    rows = [prepare(model.metadata, site) for site in sites]
    for round_ in range(rounds):
        updates = [
            workload.train(model, data, epochs=1, epoch_base=round_, seed=seed) for data in rows
        ]
        model = replace(model, vector=aggregated(model, updates))
    return model


def aggregated(model: Model, updates: Sequence[TrainResult]) -> Any:
    """The vector of the next model, as the default rule makes it, or the rule "trees"."""
    if model.vector.dtype == np.uint8:
        before = model.vector.tobytes()
        state = growing(before, model.metadata)
        sums = [parse_sums(update.vector.tobytes(), state) for update in updates]
        return np.frombuffer(grown(before, model.metadata, sums), np.uint8)
    tile = np.stack([update.vector for update in updates])
    weights = np.array([update.num_samples for update in updates], dtype=np.float64)
    mean = make_rule("weighted_average", {}).combine(tile, weights / weights.sum())
    return mean.astype(model.vector.dtype)


def score(model: Model, test: Table) -> float:
    """Accuracy, or R2."""
    metrics = evaluate(model, test)
    return metrics["accuracy"] if test.task == "classification" else metrics["r2"]


def measured(name: str, kind_name: str, *, quick: bool) -> Iterable[dict[str, Any]]:
    """A row for each number of sites and each way to divide the rows."""
    load, num_seeds = DATA_SETS[name]
    table = load()
    kind = (FOR_REGRESSION if table.task == "regression" else KINDS)[kind_name]
    seeds = range(1 if quick else num_seeds)
    rounds = 2 * kind.rounds_per_epoch if quick else kind.rounds
    epochs = rounds // kind.rounds_per_epoch
    options = {**kind.options, "task": table.task}
    alone = create(kind.workload, options)
    workload = create(kind.workload, {**options, **kind.federated})
    halves = [split_train_test(table, TEST_FRACTION, seed) for seed in seeds]
    central = [
        score(fit_centralised(alone, train, epochs=epochs, seed=seed), test)
        for seed, (train, test) in zip(seeds, halves, strict=True)
    ]
    for sites in SITES:
        for split in ALLOWED if sites > 1 else ("iid",):
            federated = [
                score(trained(workload, divided(train, sites, split, seed), rounds, seed), test)
                for seed, (train, test) in zip(seeds, halves, strict=True)
            ]
            differences = [ours - one for ours, one in zip(federated, central, strict=True)]
            difference = fmean(differences)
            yield {
                "data": name,
                "model": kind_name,
                "sites": sites,
                "split": split.replace("_", " "),
                "metric": "R2" if table.task == "regression" else "accuracy",
                "centralised": round(fmean(central), 4),
                "federated": round(fmean(federated), 4),
                "difference": round(difference, 4),
                "seeds": len(seeds),
                "spread": round(stdev(differences), 4) if len(seeds) > 1 else None,
                "within": "yes" if difference >= -ALLOWED[split] else "NO",
            }


def main() -> int:
    parser = flags.parser(__doc__, "two data sets, two rounds and one seed; nothing is judged")
    parser.add_argument(
        "--only", default="", metavar="PART", help="of a data set's or model's name"
    )
    given = parser.parse_args()
    results.begin(quick=given.quick, any_load=given.any_load)
    warnings.simplefilter("ignore")
    rows: list[dict[str, Any]] = []
    names = ("wine", "diabetes") if given.quick else tuple(DATA_SETS)
    kinds = [name for name in KINDS if find_spec(NEEDS.get(name, "numpy")) is not None]
    for name in KINDS.keys() - {*kinds}:
        print(f"{NEEDS[name]} is not installed: the cases of {name} are left out")
    for name in names:
        for kind in kinds:
            if given.only in f"{name} {kind}":
                for row in measured(name, kind, quick=given.quick):
                    print(*(f"{value!s:>12}" for value in row.values()), flush=True)
                    rows.append(row)
    outside = [row for row in rows if row["within"] == "NO"]
    results.report("learning", {"cases": rows, "outside": len(outside)})
    return 1 if outside and not given.quick else 0


if __name__ == "__main__":
    sys.exit(main())
