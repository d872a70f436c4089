"""The section of the report on the study that the session is a part of."""

from html import escape

from xain_coordinator.cli.report.charts import table
from xain_coordinator.export.studies import Table, remarks, rows

_TITLES = {
    "folds": "Folds",
    "leave_out": "Each site, by a model that never saw it",
    "cross": "Each model at each site",
    "search": "Search of options",
    "model": "A model at the sites",
}


def section(study: Table | None) -> str:
    """The table of the study; empty without one."""
    if study is None:
        return ""
    head, *lines = ([escape(cell) for cell in line] for line in rows(study))
    texts = tuple(at for at, name in enumerate(head) if name in ("", "measured at"))
    told = "".join(f'<p class="soft">{escape(one)}</p>' for one in remarks(study))
    title = _TITLES.get(study["kind"], "Study")
    return f"<h2>{escape(title)}</h2>{table(head, lines, texts=texts)}{told}"
