"""Learning with the defaults of the command line, against the library's own estimator.

    python benchmarks/learning.py [--quick] [--only TABLES] [--workloads W,...] [--sites N,...]
        [--splits S,...] [--seeds N] [--set KEY=VALUE ...]

Divides real tables (benchmarks/studies.py) among 2, 5 and 20 sites: at random, by label with
Dirichlet 0.1 (by decile of the target for regression), and by quantity. Trains each workload with
nothing set but its name, in process, with the functions that coordinator and participants use; the
model that is taken is the best one by the pooled loss of the rows that sites hold out. The other
side is the best of a small grid of scikit-learn's or XGBoost's estimator, fitted on the same rows
in one place and chosen on the same held-out rows. Both are tested on the same third part: accuracy,
or R2, averaged over seeds. A case is within if the federation is worse by at most 0.02.

Prints a row for each case, the share of cases within by workload, and the exchanges and local work
beside those of version 0.1; writes bench-results/learning.json. --set changes a default for all, to
try others.
"""

import os
import sys
import warnings
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

import flags

# The matrices are small: threads of the linear algebra would wait for each other.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import library
import numpy as np
import results
from federation import Trained, train
from studies import SOURCES, studies

from support.spoilt import text_of
from xain_participant.config import DataSettings
from xain_workloads.tables.partition import dirichlet, iid, split_train_test
from xain_workloads.tables.table import Table
from xain_workloads.workload import evaluate

TEST_FRACTION = 0.3
ALPHA = 0.1
ALLOWED = 0.02
SITES = (2, 5, 20)
SPLITS = ("random", "label", "quantity")
# The defaults of these settings, and nothing else, beside the number of participants.
KINDS: dict[str, dict[str, object]] = {
    "sgd": {"workload.name": "sgd"},
    "mlp": {"workload.name": "mlp"},
    "neural": {"workload.name": "neural"},
    "xgboost": {"workload.name": "xgboost"},
    "gradient": {"workload.name": "sgd", "workload.options.mode": "gradient"},
}
GOAL, GOAL_OF_EACH = 0.9, 0.8
ROUNDS_BEFORE = 10  # of each workload by default in version 0.1, with a pass over the rows in each


def divided(table: Table, sites: int, split: str, seed: int) -> list[Table]:
    """The rows of each site; a site without rows takes no part."""
    match split:
        case "random":
            parts = iid(table.num_samples, sites, seed=seed)
        case "label":
            parts = dirichlet(table.target, sites, alpha=ALPHA, seed=seed)
        case _:
            chance = np.random.RandomState(seed)
            shares = np.cumsum(chance.dirichlet(np.full(sites, 0.5)))
            rows = chance.permutation(table.num_samples)
            parts = np.split(rows, np.floor(shares[:-1] * len(rows)).astype(int))
    return [table.subset(np.sort(rows)) for rows in parts if len(rows)]


def whole(folder: Path, name: str) -> Table:
    """All rows of a study."""
    (study,) = studies(folder, [name])
    rows = [row for of_site in study.sites.values() for row in of_site]
    with results.scratch() as scratch:
        file = scratch / "whole.csv"
        file.write_text(text_of(rows), encoding="utf-8")
        # The task of a study is one of the literals, which mypy cannot see.
        settings = DataSettings(source=str(file), target=study.target, task=study.task)  # type: ignore[arg-type]
        return settings.load()


def score(trained: Trained, test: Table) -> float:
    metrics = evaluate(trained.taken, test)
    return metrics["accuracy"] if test.task == "classification" else metrics["r2"]


def measured(
    name: str, table: Table, kinds: Sequence[str], given: Any, changed: dict[str, object]
) -> Iterable[dict[str, Any]]:
    """A row for each workload, number of sites and way to divide the rows."""
    halves = [split_train_test(table, TEST_FRACTION, seed) for seed in range(given.seeds)]

    @cache
    def of_library(kind: str, seed: int) -> float:
        train_part, test = halves[seed]
        return library.score(kind, *split_train_test(train_part, 0.2, 0), test)

    for kind in kinds:
        settings = {**KINDS[kind], **changed}
        if table.task == "regression":
            settings["workload.options.task"] = "regression"
        for sites in flags.numbers(given.sites):
            for split in given.splits.split(","):
                done, ours, theirs = [], [], []
                for seed, (rows, test) in enumerate(halves):
                    one = train(settings, divided(rows, sites, split, seed), seed)
                    done.append(one)
                    ours.append(score(one, test))
                    theirs.append(of_library(library.LIBRARY[str(settings["workload.name"])], seed))
                difference = fmean(ours) - fmean(theirs)
                yield {
                    "table": name,
                    "workload": kind,
                    "sites": sites,
                    "split": split,
                    "metric": "R2" if table.task == "regression" else "accuracy",
                    "library": round(fmean(theirs), 4),
                    "federated": round(fmean(ours), 4),
                    "difference": round(difference, 4),
                    "rounds": round(fmean(one.rounds for one in done)),
                    "epochs": round(fmean(one.epochs for one in done)),
                    "diverged": sum(bool(one.diverged) for one in done),
                    "within": "yes" if difference >= -ALLOWED else "NO",
                }


def main() -> int:
    parser = flags.parser(__doc__, "two tables, two sites and one seed; nothing is judged")
    parser.add_argument("--folder", type=Path, default=results.FOLDER / "real-tables")
    parser.add_argument("--only", default="", help=f"some of {', '.join(SOURCES)}")
    parser.add_argument("--workloads", default=",".join(KINDS))
    parser.add_argument("--sites", default=",".join(map(str, SITES)))
    parser.add_argument("--splits", default=",".join(SPLITS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="changed")
    given = parser.parse_args()
    results.begin(quick=given.quick, any_load=True)  # no figure of time
    if given.quick:
        given.only, given.sites, given.seeds = "breast_cancer,diabetes", "2", 1
    changed = dict(pair.split("=", 1) for pair in given.changed)
    warnings.simplefilter("ignore")
    rows: list[dict[str, Any]] = []
    for name in given.only.split(",") if given.only else SOURCES:
        kinds = [kind for kind in given.workloads.split(",") if kind]
        for row in measured(name, whole(given.folder, name), kinds, given, changed):
            print(*(f"{value!s:>12}" for value in row.values()), flush=True)
            rows.append(row)
    shares = {}
    for kind in ("all", *given.workloads.split(",")):
        of = [row["within"] == "yes" for row in rows if kind in ("all", row["workload"])]
        shares[f"within, {kind}"] = f"{sum(of)} of {len(of)}"
    work = [
        {
            "workload": kind,
            "exchanges": round(fmean(row["rounds"] for row in rows if row["workload"] == kind)),
            "exchanges before": ROUNDS_BEFORE,
            "passes of a site": round(
                fmean(row["epochs"] for row in rows if row["workload"] == kind)
            ),
            "passes before": ROUNDS_BEFORE,
        }
        for kind in dict.fromkeys(row["workload"] for row in rows)
    ]
    results.report("learning", {"cases": rows, "exchanges and local work": work, **shares})
    goals = [GOAL, *(GOAL_OF_EACH for _ in range(len(shares) - 1))]
    parts = [tuple(map(int, text.split(" of "))) for text in shares.values()]
    is_reached = all(n >= goal * of for (n, of), goal in zip(parts, goals, strict=True))
    return 0 if is_reached or given.quick else 1


if __name__ == "__main__":
    sys.exit(main())
