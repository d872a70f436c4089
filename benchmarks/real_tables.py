"""The check list and the choice of the best model, on real tables over two to five sites.

    python benchmarks/real_tables.py [--folder DIR] [--only NAME,...]
        [--part checks|divisions|training]

Fetches the tables of benchmarks/studies.py. Checks each unspoilt; plants each kind of mistake that
docs/checks.md lists once, and looks whether somebody is told of it with site and column; divides
each by its columns, as hospitals for children and for adults are, and counts the warnings; and
trains each over processes with the defaults of the command line, and compares the best model with
the last one on the held-out rows of all sites. Prints four conclusions; writes
bench-results/real_tables.json.
"""

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import flags
import numpy as np
import processes
import results
from numpy.random import RandomState
from sklearn import metrics
from studies import SOURCES, studies
from table_mistakes import MISTAKES, Mistake

from support.spoilt import (
    MISSING,
    Finding,
    Read,
    Study,
    findings,
    read,
    text_of,
)
from xain_coordinator.export.trained import ask
from xain_participant.config import DataSettings
from xain_workloads.model import Model
from xain_workloads.tables.partition import split_train_test
from xain_workloads.tables.preprocessing import prepare
from xain_workloads.tables.table import Table
from xain_workloads.workload import from_metadata

WARNINGS = 3  # of a table that nobody has spoilt
NAMED = 0.9
BEHIND = 0.02  # of AUC or R2, that the best model may be behind the last one
MOST_ROWS = 1500  # of a table that is divided on purpose
ROUNDS = {"sgd": 20, "xgboost": 30}

# --- checks ---------------------------------------------------------------------------------------


def reads(
    study: Study, folder: Path, known: dict[str, Read], changed: Sequence[str]
) -> list[tuple[str, Read]]:
    """Read the files of all sites, those that are changed again and last."""
    found = {**known}
    for site in changed:
        file = folder / "site.csv"
        file.write_text(text_of(study.sites[site]), encoding="utf-8")
        found[site] = read(file, study.target, study.task)
    return sorted(found.items(), key=lambda item: len(changed) == 1 and item[0] in changed)


def is_named(finding: Finding, mistake: Mistake, site: str, column: str) -> bool:
    if not mistake.everywhere and finding.site != site:
        return False
    if finding.check in ("reader", "schema"):
        return column in finding.text or "Total" in finding.text
    return finding.check in mistake.checks.split() and finding.column == column


def checked(study: Study, folder: Path) -> Iterator[dict[str, Any]]:
    """A row for the study as it is, and one for each mistake."""
    known = dict(reads(study, folder, {}, [*study.sites]))
    told = findings(known.items())
    yield {
        "table": study.name,
        "mistake": "",
        "sites": len(study.sites),
        "refused": sum(one.level == "refuse" for one in told),
        "warned": sum(one.level == "warn" for one in told),
        "told": [f"{one.level} {one.check} {one}" for one in told],
    }
    for at, (name, mistake) in enumerate(MISTAKES.items()):
        chance = RandomState(at)
        site = sorted(study.sites)[chance.randint(len(study.sites))]
        if (planted := mistake.plant(study, site, chance)) is None:
            continue
        spoilt, column = planted
        changed = [*study.sites] if mistake.everywhere else [site]
        now = reads(spoilt, folder, known, changed)
        if all(one.profile == known[at].profile for at, one in now):
            continue  # what is read is the same
        new = [one for one in findings(now) if one not in told]
        yield {
            "table": study.name,
            "mistake": name,
            "site": "" if mistake.everywhere else site,
            "column": column,
            "named": any(is_named(one, mistake, site, column) for one in new),
            "told": [f"{one.level} {one.check} {one}" for one in new],
        }


def other_patients(study: Study) -> Iterator[tuple[str, Study]]:
    """The study divided on purpose: by each column a site that has nine in ten of the rows with the
    commonest category, or the lowest or the highest 30 % of the values, and few others. The rest
    is one site, or two."""
    rows = [row for rows in study.sites.values() for row in rows]
    chance = RandomState(0)
    rows = [rows[at] for at in sorted(chance.permutation(len(rows))[:MOST_ROWS])]
    strays, half = chance.rand(len(rows)) < 0.05, chance.rand(len(rows)) < 0.5
    for name in study.columns:
        cells = [row[name] for row in rows]
        if not study.is_number(name):
            common = max({*cells}, key=cells.count)
            chosen = [np.array([cell == common for cell in cells])]
        else:
            known = np.array([float(cell) if cell not in MISSING else np.nan for cell in cells])
            low, high = np.nanquantile(known, (0.3, 0.7))
            chosen = [known <= low, known >= high]
        for own in chosen:
            for at in (np.where(own ^ strays, 0, 1), np.where(own ^ strays, 0, 1 + half)):
                sites = {
                    f"site-{number}": [
                        row for row, of in zip(rows, at, strict=True) if of == number
                    ]
                    for number in sorted({*at.tolist()})
                }
                if len(sites) > 1 and min(map(len, sites.values())) >= 30:
                    yield name, replace(study, sites=sites)


def divided(study: Study, folder: Path) -> Iterator[dict[str, Any]]:
    """A row for each division of the study on purpose."""
    for name, division in other_patients(study):
        told = findings(reads(division, folder, {}, [*division.sites]))
        warned = [one for one in told if one.level != "note"]
        yield {
            "table": study.name,
            "divided by": name,
            "sites": len(division.sites),
            "warned": len(warned),
            "units": sum(one.check in ("units", "offset") for one in warned),
            "told": [f"{one.level} {one.check} {one}" for one in warned],
        }


# --- training -------------------------------------------------------------------------------------


def trained(study: Study, workload: str, folder: Path) -> dict[str, Any]:
    """Train over processes, and measure the best and the last model on the held-out rows."""
    settings: dict[str, object] = {
        "workload.name": workload,
        "rounds.min_participants": len(study.sites),
        "rounds.rounds": ROUNDS[workload],
    }
    if study.task == "regression":
        settings["workload.options.task"] = "regression"
    held_out: list[Table] = []
    coordinator = processes.CoordinatorProcess(folder / "coordinator", settings)
    with ExitStack() as stack:
        stack.callback(coordinator.stop)
        coordinator.start()
        them = []
        for at, rows in enumerate(study.sites.values()):
            file = folder / f"site{at}.csv"
            file.write_text(text_of(rows), encoding="utf-8")
            # The task of a study is one of the literals, which mypy cannot see.
            data = DataSettings(source=str(file), target=study.target, task=study.task)  # type: ignore[arg-type]
            held_out.append(split_train_test(data.load(), data.test_fraction, 0, least=5)[1])
            command = [
                *(sys.executable, "-m", "xain_participant", "--set=logging.level=error"),
                *(f"--coordinator=127.0.0.1:{coordinator.port}", f"--id=site{at}"),
                *(f"--data={file}", f"--target={study.target}", f"--task={study.task}"),
            ]
            them.append(subprocess.Popen(command))
            stack.callback(them[-1].wait)
            stack.callback(them[-1].kill)
        statuses = [one.wait(processes.SESSION_LIMIT_S) for one in them]
        with ask(f"127.0.0.1:{coordinator.port}") as models:
            # Without a best one, all of them are no better than the commonest class or the mean.
            which_best = "last" if models.best is None else "best"
            chosen = {"best": models.choose(which_best).model, "last": models.choose("last").model}
            scores = {
                which: scored(models.load(model), held_out) for which, model in chosen.items()
            }
    name = "r2" if study.task == "regression" else "auc"
    return {
        "table": study.name,
        "workload": workload,
        "status": max(statuses),
        "best": "none" if which_best == "last" else chosen["best"].round,
        "loss_best": scores["best"]["loss"],
        "loss_last": scores["last"]["loss"],
        "score": name,
        "score_best": scores["best"][name],
        "score_last": scores["last"][name],
        "loss_of_baseline": scores["best"]["baseline"],
    }


def scored(model: Model, sites: Sequence[Table]) -> dict[str, float]:
    """Log loss and AUC, or squared error and R2, on the rows of all sites together."""
    workload = from_metadata(model.metadata)
    features = np.concatenate([prepare(model.metadata, site).features for site in sites])
    target = np.concatenate([site.target for site in sites])
    if target.dtype.kind == "f":
        predicted = workload.predict(model, features)
        return {
            "loss": float(metrics.mean_squared_error(target, predicted)),
            "r2": float(metrics.r2_score(target, predicted)),
            "baseline": float(np.var(target)),
        }
    classes = json.loads(model.metadata["classes"])
    probabilities = workload.probabilities(model, features)
    assert probabilities is not None
    codes = np.array([classes.index(label) for label in target.tolist()])
    shares = np.bincount(codes, minlength=len(classes)) / len(codes)
    scores = probabilities[:, 1] if len(classes) == 2 else probabilities
    return {
        "loss": float(metrics.log_loss(codes, probabilities, labels=range(len(classes)))),
        "auc": float(metrics.roc_auc_score(codes, scores, multi_class="ovr")),
        "baseline": float(-(shares[shares > 0] * np.log(shares[shares > 0])).sum()),
    }


# --- conclusions ----------------------------------------------------------------------------------


def conclusions(
    checks: Sequence[dict[str, Any]],
    divisions: Sequence[dict[str, Any]],
    trainings: Sequence[dict[str, Any]],
) -> dict[str, str]:
    unspoilt = [one for one in checks if not one["mistake"]]
    planted = [one for one in checks if one["mistake"]]
    found = {}
    if checks:
        named = sum(one["named"] for one in planted)
        is_enough = named >= NAMED * len(planted)
        found["mistakes that are named"] = f"{named} of {len(planted)}: {_yes(is_enough)}"
        most = max(one["warned"] for one in unspoilt)
        refused = sum(one["refused"] for one in unspoilt)
        is_quiet = most <= WARNINGS and not refused
        found["unspoilt tables"] = (
            f"{refused} refused, at most {most} warnings for one: {_yes(is_quiet)}"
        )
    if divisions:
        most = max(one["warned"] for one in divisions)
        quiet = sum(one["warned"] <= WARNINGS for one in divisions)
        units = sum(one["units"] for one in divisions)
        found["sites of other patients"] = (
            f"{len(divisions)} divisions, {len(divisions) - quiet} with more than {WARNINGS}"
            f" warnings, {most} at most, {units} of units and offsets together:"
            f" {_yes(quiet >= NAMED * len(divisions))}"
        )
    if trainings:
        worse = sum(
            one["loss_best"] > one["loss_last"] * (1 + 1e-9)
            or (one["best"] == "none" and one["loss_last"] < one["loss_of_baseline"])
            for one in trainings
        )
        behind = sum(one["score_best"] < one["score_last"] - BEHIND for one in trainings)
        untrained = sum(one["best"] == 0 for one in trainings)
        is_best = not worse and not untrained and behind <= (1 - NAMED) * len(trainings)
        found["best models"] = (
            f"{worse} of {len(trainings)} worse than the last by the loss, {behind} by more than "
            f"{BEHIND} of AUC or R2, {untrained} untrained: {_yes(is_best)}"
        )
    return found


def _yes(is_reached: bool) -> str:
    return "reached" if is_reached else "NOT REACHED"


def main() -> None:
    parser = flags.parser(__doc__, quick="a table that scikit-learn brings along")
    parser.add_argument("--folder", type=Path, default=results.FOLDER / "real-tables")
    parser.add_argument("--only", default="", help=f"some of {', '.join(SOURCES)}")
    parser.add_argument("--part", choices=("checks", "divisions", "training"))
    parser.add_argument("--workloads", default="sgd,xgboost")
    given = parser.parse_args()
    results.begin(quick=given.quick, any_load=True)  # no figure of time
    only = "diabetes" if given.quick else given.only
    checks, divisions, trainings = [], [], []
    for study in studies(given.folder, [name for name in only.split(",") if name]):
        if given.part in (None, "checks"):
            with results.scratch() as folder:
                checks += checked(study, folder)
        if given.part in (None, "divisions"):
            with results.scratch() as folder:
                divisions += divided(study, folder)
        if given.part in (None, "training"):
            for workload in given.workloads.split(",")[: 1 if given.quick else None]:
                with results.scratch() as folder:
                    trainings.append(trained(study, workload, folder))
                    print(trainings[-1], flush=True)
    for one in divisions:
        if one["warned"] > WARNINGS:
            print(one["table"], one["divided by"], *one["told"], sep="\n    ", flush=True)
    for one in checks:
        if not one.get("named", not one["told"]):
            where = f"{one['table']}, {one['mistake'] or 'unspoilt'} {one.get('column', '')}"
            print(where, *one["told"], sep="\n    ", flush=True)
    results.report(
        "real_tables",
        {
            "unspoilt": [
                {key: one[key] for key in ("table", "sites", "refused", "warned")}
                for one in checks
                if not one["mistake"]
            ],
            "mistakes": [
                {"mistake": name, "tables": len(found), "named": sum(one["named"] for one in found)}
                for name in MISTAKES
                if (found := [one for one in checks if one["mistake"] == name])
            ],
            "divisions": [
                {
                    "table": name,
                    "divisions": len(found),
                    "warned": sum(one["warned"] > 0 for one in found),
                    "units": sum(one["units"] for one in found),
                }
                for name in SOURCES
                if (found := [one for one in divisions if one["table"] == name])
            ],
            "trainings": trainings,
            **conclusions(checks, divisions, trainings),
        },
    )


if __name__ == "__main__":
    main()
