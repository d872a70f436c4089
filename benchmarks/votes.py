"""Votes of bagged estimators over sites that differ, beside the same estimators in one place.

    python benchmarks/votes.py [--folder DIR] [--only NAME,...] [--estimator tree|forest]
        [--sites N,...] [--seeds N]

Divides real tables (see benchmarks/studies.py) at random, by label (Dirichlet's division with
alpha = 0.1) and by quantity (the n-th site has 1 / n of the rows of the first), trains in this
process with the functions that participants and coordinator use, and compares with scikit-learn's
bagging of 50 trees, or of 4 forests, in one place. 30 % of the rows are for the test. Prints how
many cells are within two points (0.02 of accuracy or of R2); writes bench-results/votes.json.
"""

import csv
from argparse import ArgumentParser
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import results
from sklearn.ensemble import (
    BaggingClassifier,
    BaggingRegressor,
    RandomForestClassifier,
    RandomForestRegressor,
)
from studies import SOURCES, studies

from support.spoilt import Study
from xain_workloads.ensembles.bagging import LoadedEstimators, seed_of
from xain_workloads.ensembles.stacking import Stack, halfway, next_model
from xain_workloads.model import Model
from xain_workloads.supervised import classes_of, coded_target
from xain_workloads.tables.data import load_table
from xain_workloads.tables.dataset import Dataset
from xain_workloads.tables.partition import dirichlet, iid, split_train_test
from xain_workloads.tables.preprocessing import prepare
from xain_workloads.tables.table import Table
from xain_workloads.workload import create, initial_model

WITHIN = 0.02
TABLES = "titanic,credit,attrition,penguins,breast_cancer,ames,wages,diabetes"
POOLED_TREES = 50  # trees
FOREST = {"n_estimators": 30}
FORESTS = 4  # of each site
DIVISIONS = ("at random", "by label", "by quantity")


def table_of(study: Study, folder: Path) -> Table:
    """All rows of a study."""
    rows = [row for site in study.sites.values() for row in site]
    path = folder / f"{study.name}.csv"
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return load_table(path, target=study.target, task=study.task)


def divided(table: Table, division: str, num_sites: int, seed: int) -> list[Table]:
    """The rows of each site that has some."""
    if division == "at random":
        parts = iid(table.num_samples, num_sites, seed=seed)
    elif division == "by label":
        parts = dirichlet(table.target, num_sites, alpha=0.1, seed=seed)
    else:
        shares = 1 / np.arange(1.0, num_sites + 1)
        chance = np.random.RandomState(seed)
        at = chance.choice(num_sites, table.num_samples, p=shares / shares.sum())
        parts = [np.flatnonzero(at == site) for site in range(num_sites)]
    return [table.subset(rows) for rows in parts if len(rows)]


def score(predicted: Any, target: Any, *, is_classes: bool) -> float:
    """Accuracy of (n, k) shares of classes, or R2 of (n, 1) numbers."""
    if is_classes:
        return float(np.mean(np.argmax(predicted, axis=1) == target))
    errors = np.square(predicted[:, 0] - target).mean()
    return float(1 - errors / np.var(target))


def trained(
    options: Mapping[str, Any], model: Model, sites: Sequence[Dataset]
) -> tuple[Model, Any]:
    """The last model of the rounds that the options need, and (rows, what it keeps) of each
    training that kept something."""
    workload: Any = create("bagging", options)
    kept = []
    for round_ in range(workload.options.rounds):
        updates = []
        for number, rows in enumerate(sites):
            name = f"p{number:02}"
            done = workload.train(model, rows, epochs=1, epoch_base=round_, seed=seed_of(0, name))
            updates.append((name, done.vector.tobytes(), done.num_samples))
            if done.kept:
                kept.append((done.num_samples, done.kept))
        vector = next_model(Stack.parse(model.vector.tobytes()), updates, model.metadata)
        model = replace(model, vector=np.frombuffer(vector, np.uint8))
    return model, kept


def predicted(model: Model, kept: Any, rows: Any) -> tuple[Any, Any]:
    """Mean votes of estimators that stay at their sites, and predictions of stacked votes."""
    total, weight = 0.0, 0
    for num_rows, frames in kept:
        loaded = LoadedEstimators(frames, model.metadata)
        total = total + num_rows * loaded.sum_of_votes(rows)
        weight += num_rows * len(loaded)
    votes = total / weight
    return votes, halfway(votes, rows, Stack.parse(model.vector.tobytes()), model.metadata)


def measured(name: str, table: Table, kind: str, sites: Sequence[int], seed: int) -> Iterator[dict]:
    """A row for each division and number of sites."""
    is_classes = table.task == "classification"
    named = "Classifier" if is_classes else "Regressor"
    options: dict[str, Any] = {"estimator": f"DecisionTree{named}"}
    bagged = BaggingClassifier if is_classes else BaggingRegressor
    central = bagged(n_estimators=POOLED_TREES, random_state=0)
    if kind == "forest":
        options = {
            "estimator": f"RandomForest{named}",
            "parameters": FOREST,
            "estimators": FORESTS,
        }
        forest = RandomForestClassifier if is_classes else RandomForestRegressor
        central = bagged(forest(**FOREST), n_estimators=FORESTS, random_state=0)
    train, test = split_train_test(table, 0.3, seed)
    workload: Any = create("bagging", options)
    whole = initial_model(workload, [train.profile()])
    rows, held_out = (prepare(whole.metadata, one) for one in (train, test))
    classes = classes_of(table.task, whole.metadata)
    central.fit(rows.features, coded_target(table.task, classes, rows))
    target = coded_target(table.task, classes, held_out)
    pooled = central.predict_proba if is_classes else central.predict
    known = pooled(held_out.features).reshape(len(target), -1)
    best = score(known, target, is_classes=is_classes)
    for division in DIVISIONS:
        for num_sites in sites:
            parts = divided(train, division, num_sites, seed)
            found: dict[str, float] = {}
            for publish in (True, False):
                chosen = {**options, "publish": publish}
                model = initial_model(create("bagging", chosen), [p.profile() for p in parts])
                at_sites = [prepare(model.metadata, part) for part in parts]
                features = prepare(model.metadata, test).features
                last, kept = trained(chosen, model, at_sites)
                if publish:
                    made: Any = create("bagging", chosen)
                    stacked = (
                        made.probabilities(last, features)
                        if is_classes
                        else made.predict(last, features)[:, np.newaxis]
                    )
                    found["published"] = score(stacked, target, is_classes=is_classes)
                else:
                    votes, mixed = predicted(last, kept, features)
                    found["soft"] = score(votes, target, is_classes=is_classes)
                    found["kept"] = score(mixed, target, is_classes=is_classes)
            yield {
                "table": name,
                "estimator": kind,
                "division": division,
                "sites": num_sites,
                "seed": seed,
                "one place": best,
                **found,
            }


def summary(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Differences to one place, by task, division and vote."""
    found = []
    for division in (*DIVISIONS, "all"):
        for vote in ("soft", "published", "kept"):
            apart = [
                row[vote] - row["one place"] for row in rows if division in (row["division"], "all")
            ]
            found.append(
                {
                    "division": division,
                    "vote": vote,
                    "cells": len(apart),
                    "within": sum(one >= -WITHIN for one in apart),
                    "mean": round(float(np.mean(apart)), 4),
                    "worst": round(min(apart), 4),
                }
            )
    return found


def main() -> None:
    parser = ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--folder", type=Path, default=Path("bench-results/tables"))
    parser.add_argument("--only", default=TABLES, help="names of tables, with commas")
    parser.add_argument("--estimator", choices=("tree", "forest"), default="tree")
    parser.add_argument("--sites", default="2,5,20", help="numbers of sites, with commas")
    parser.add_argument("--seeds", type=int, default=1)
    given = parser.parse_args()
    rows: list[dict[str, Any]] = []
    sites = [int(number) for number in given.sites.split(",")]
    with results.scratch() as folder:
        for study in studies(given.folder, given.only.split(",")):
            table = table_of(study, folder)
            for seed in range(given.seeds):
                for row in measured(study.name, table, given.estimator, sites, seed):
                    print(*(results.shown(value) for value in row.values()), flush=True)
                    rows.append(row)
    tasks = {name: SOURCES[name].task for name in given.only.split(",")}
    told: dict[str, object] = {"cells": rows}
    for task in sorted(set(tasks.values())):
        told[task] = summary([row for row in rows if tasks[row["table"]] == task])
    results.report("votes", told)


if __name__ == "__main__":
    main()
