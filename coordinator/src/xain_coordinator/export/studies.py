"""The table of a study as JSON, as CSV and as rows of text.

As JSON it is one object: "study", the name; "kind"; "state", "completed" or the session that is
under way; "metric", by which the options of a search are compared; "lines"; "spreads", for each
figure "mean", "std" and "n"; "best", the settings of a search that is over, as lines of TOML. A
line has "model", "site" ("" for all sites together), "session", "rows", "note", "averages", and
"figures" with "value", "low", "high" and "baseline".
"""

import csv
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from xain_coordinator.core.view.study import (
    ALL_SITES,
    Outcome,
    Plan,
    best_option,
    lines,
    next_step,
    spreads,
)
from xain_coordinator.core.vocabulary.values import Step
from xain_workloads.measures.figures import CLASS_FIGURES, NUMBER_FIGURES, SHOWN

COMPLETED = "completed"
# The first value that there is, in a matrix of sites and models.
_OF_MATRIX = ("auc", "accuracy", "r2", "rmse")
_COLUMNS = (
    "model",
    "site",
    "session",
    "rows",
    "figure",
    "value",
    "low",
    "high",
    "baseline",
    "note",
)

Table = Mapping[str, Any]


def as_json(plan: Plan, step: Step, outcomes: Sequence[Outcome]) -> str:
    """The table of a study as JSON. step: of the present session."""
    is_over = next_step(plan, step.study, outcomes) is None
    best = best_option(plan, outcomes)
    found = {
        "study": step.study,
        "kind": plan.kind,
        "state": COMPLETED if is_over else step.shown,
        "metric": next((one.metric for one in outcomes if one.metric), ""),
        "lines": [
            {
                "model": one.model,
                "site": one.site,
                "session": one.session_id,
                "rows": one.num_rows,
                "note": one.note,
                "figures": {name: asdict(of) for name, of in one.figures.items()},
                "averages": dict(one.averages),
            }
            for one in lines(plan, outcomes)
        ],
        "spreads": {name: asdict(of) for name, of in spreads(plan, outcomes).items()},
        "best": None
        if best is None
        else [f"{key} = {value}" for key, value in plan.options[best].items()],
    }
    return json.dumps(found)


def as_csv(table: Table) -> str:
    """A line for each figure of each line of the table, then the means and standard deviations."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(_COLUMNS)
    for line in table["lines"]:
        where = [line["model"], line["site"], line["session"], line["rows"] or ""]
        for name, of in line["figures"].items():
            limits = [of[key] for key in ("value", "low", "high", "baseline")]
            writer.writerow([*where, name, *limits, line["note"]])
        for name, value in line["averages"].items():
            writer.writerow([*where, name, value, "", "", "", "average over sites"])
        if not line["figures"] and not line["averages"]:
            writer.writerow([*where, "", "", "", "", "", line["note"]])
    for name, of in table["spreads"].items():
        for label in ("mean", "std"):
            writer.writerow([label, "", "", "", name, of[label], "", "", "", f"n = {of['n']}"])
    return text.getvalue()


def rows(table: Table, *, intervals: bool = True) -> list[list[str]]:
    """The table as text: a row of headings, and those that a person looks at first."""
    if table["kind"] == "cross":
        return _matrix(table, intervals)
    shown = [one for one in table["lines"] if _is_shown(table["kind"], one)]
    names = _names(shown, table["metric"])
    head = ["", "measured at", "rows", *names, ""]
    found = [
        [
            one["model"],
            one["site"] or ("all sites" if one["rows"] else ""),
            f"{one['rows']:,}" if one["rows"] else "",
            *(_cell(one, name, intervals) for name in names),
            one["note"],
        ]
        for one in shown
    ]
    spread = table["spreads"]
    if spread:
        n = max(of["n"] for of in spread.values())
        cells = [
            f"{spread[name]['mean']:.4g} ± {spread[name]['std']:.2g}" if name in spread else ""
            for name in names
        ]
        found.append([f"mean ± sd of {n}", "", "", *cells, ""])
    return [head, *found]


def pooled(table: Table) -> list[Mapping[str, Any]]:
    """Lines of the rows of all folds, or of all sites that were left out: of all sites together,
    then of each. Of one left out the only line is that of its model."""
    if table["kind"] == "folds":
        return [one for one in table["lines"] if not one["session"]]
    if table["kind"] == "leave_out":
        together = [one for one in table["lines"] if not one["session"]]
        return together + [
            one for one in table["lines"] if one["site"] and one["model"] != ALL_SITES
        ]
    return []


def remarks(table: Table) -> list[str]:
    """Remarks on the table, a sentence or a line of TOML each."""
    found = []
    if table["state"] != COMPLETED:
        found.append(f"The study goes on: {table['state']}.")
    if table["best"] is not None:
        found += ["The best options, for the configuration:", *table["best"]]
    if table["kind"] == "search":
        if table["metric"]:
            found.append(f"Options are compared by {table['metric']}.")
        found.append(
            "The rows that these figures are of have chosen the options, so they are optimistic."
        )
    return found


def _is_shown(kind: str, line: Mapping[str, Any]) -> bool:
    """Whether a line is among those that a person looks at first: with folds, not those of each
    site in each fold."""
    return kind != "folds" or not line["site"] or not line["session"]


def _names(shown: Sequence[Mapping[str, Any]], metric: str) -> list[str]:
    """Names of the columns: a few figures, `metric` among them, and all averages."""
    known = {name for one in shown for name in one["figures"]}
    order = [name for name in (*CLASS_FIGURES, *NUMBER_FIGURES) if name in known]
    first = [name for name in order if name in (*SHOWN, metric)] or order
    return first + sorted({name for one in shown for name in one["averages"]} - known)


def _cell(line: Mapping[str, Any], name: str, intervals: bool) -> str:
    """A figure of a line with its confidence interval, an average, or "" for neither."""
    if name not in line["figures"]:
        return f"{line['averages'][name]:.4g}" if name in line["averages"] else ""
    of = line["figures"][name]
    if not intervals or of["low"] is None or of["high"] is None:
        return f"{of['value']:.4g}"
    return f"{of['value']:.4g} ({of['low']:.3g} to {of['high']:.3g})"


def _matrix(table: Table, intervals: bool) -> list[list[str]]:
    """A row for each model and a column for each site, of one figure."""
    known = {name for one in table["lines"] for name in one["figures"]}
    name = next((one for one in _OF_MATRIX if one in known), "")
    models = list(dict.fromkeys(one["model"] for one in table["lines"]))
    sites = sorted({one["site"] for one in table["lines"]} - {""})
    cells = {(one["model"], one["site"]): _cell(one, name, intervals) for one in table["lines"]}
    notes = {one["model"]: one["note"] for one in table["lines"] if one["note"]}
    head = [name, *(f"at {site}" for site in sites), "at all sites", ""]
    return [
        head,
        *(
            [
                model,
                *(cells.get((model, site), "") for site in sites),
                cells.get((model, ""), ""),
                notes.get(model, ""),
            ]
            for model in models
        ),
    ]
