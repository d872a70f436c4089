"""The section of the report on the study that the session is a part of."""

from collections.abc import Mapping
from html import escape

from xain_coordinator.cli.report.charts import number, table
from xain_coordinator.cli.report.measured import words
from xain_coordinator.export.studies import Table, pooled, remarks, rows
from xain_workloads.measures.figures import SHOWN

MAX_SITES = 8  # beside all of them

_TITLES = {
    "folds": "Folds",
    "leave_out": "Each site, by a model that never saw it",
    "cross": "Each model at each site",
    "search": "Search of options",
    "model": "A model at the sites",
}
_METHODS = {
    "folds": (
        "Each site divided its rows into folds by chance, each with its share of every class (or"
        " tenth of a target of numbers). A model was trained without each fold: of the other rows"
        " each site held out a part, which stopped the training and chose the round whose model"
        " was measured on the fold. So no row has trained, prepared or chosen the model"
        " that it measures. Figures of all folds are those of all rows, each by the model of its"
        " fold; their intervals take rows for independent, and models for given."
    ),
    "leave_out": (
        "The rows of each site were measured by a model that was trained and chosen at the others,"
        " with no row or statistic of the site. The AUC of each site left out ranks scores of"
        " different models together, and can lie below that of every site: tell those of the sites."
    ),
}


def section(study: Table | None) -> str:
    """The table of the study; empty without one."""
    if study is None:
        return ""
    head, *lines = ([escape(cell) for cell in line] for line in rows(study))
    texts = tuple(at for at, name in enumerate(head) if name in ("", "measured at"))
    method = [_METHODS[study["kind"]]] if study["kind"] in _METHODS else []
    told = "".join(f'<p class="soft">{escape(one)}</p>' for one in [*method, *remarks(study)])
    title = _TITLES.get(study["kind"], "Study")
    return f"<h2>{escape(title)}</h2>{table(head, lines, texts=texts)}{told}{_every(study)}"


def first_line(study: Table | None) -> str:
    """The first line of the page of a study: its figures of all rows; empty without them."""
    together = (
        None if study is None else next((one for one in pooled(study) if not one["site"]), None)
    )
    if study is None or together is None:
        return ""
    # The AUC of several models together is none of any site: see _METHODS.
    known = {
        n: of for n, of in together["figures"].items() if study["kind"] == "folds" or n != "auc"
    }
    told = ", ".join(f"{words(name)} {_cell(known[name])}" for name in SHOWN if name in known)
    return f"{together['model'].capitalize()}: {told} on {together['rows']:,} rows."


def _every(study: Table) -> str:
    """All figures of all rows, and of the rows of each site; empty without them."""
    shown = pooled(study)[: MAX_SITES + 1]
    names = list(dict.fromkeys(name for one in shown for name in one["figures"]))
    if not names:
        return ""
    head = ["figure", *(escape(one["site"] or one["model"]) for one in shown)]
    lines = [["rows", *(f"{one['rows']:,}" for one in shown)]]
    for name in names:
        cells = [_cell(one["figures"][name]) if name in one["figures"] else "" for one in shown]
        lines.append([escape(words(name)), *cells])
    return f"<h3>All figures</h3>{table(head, lines)}"


def _cell(figure: Mapping[str, float | None]) -> str:
    """A figure with its interval in brackets; empty without a value."""
    value, low, high = (figure[name] for name in ("value", "low", "high"))
    if value is None:
        return ""
    return number(value) + (
        "" if low is None or high is None else f" ({number(low)} to {number(high)})"
    )
