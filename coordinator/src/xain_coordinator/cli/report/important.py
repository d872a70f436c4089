"""Section of the report on the importance of the columns."""

from html import escape

from xain_coordinator.cli.importance import CAVEAT, difference_of, is_told, share_of, told
from xain_coordinator.cli.report.charts import number, table
from xain_coordinator.cli.report.measured import interval
from xain_wire.fl.inspection_pb2 import ColumnImportance, ColumnImportances, GetStatusResponse

MAX_ROWS = 30
MAX_SITES = 8  # in columns beside each other


def important(status: GetStatusResponse) -> str:
    """The table of the columns, the most important first; empty where none was measured."""
    if not status.HasField("importance"):
        return ""
    found = status.importance
    largest = max((one.difference.value for one in found.columns), default=0.0)
    sites = sorted({site for one in found.columns for site in one.sites})
    shown = sites if 1 < len(sites) <= MAX_SITES else []
    head = ["column", "", "more loss", "95 % interval", "of the loss", *map(escape, shown)]
    rows = [_row(one, found, largest, shown) for one in found.columns[:MAX_ROWS]]
    more = len(found.columns) - MAX_ROWS
    rest = (
        f'<p class="soft">and {more:,} more, see xain-coordinator importance --csv</p>'
        if more > 0
        else ""
    )
    by_site = " The last columns have the same of the rows of each site alone." if shown else ""
    text = escape(f"{told(found)}{by_site} {CAVEAT}")
    return (
        f"<h2>Which columns does model {found.round} need?</h2>"
        f'<p class="soft">{text}</p>{table(head, rows)}{rest}'
    )


def _row(
    one: ColumnImportance, found: ColumnImportances, largest: float, sites: list[str]
) -> list[str]:
    """Cells of a column's row. largest: importance with the longest bar. sites: whose own
    importances are shown."""
    figure = difference_of(one.difference)
    width = 100 * max(figure.value, 0.0) / largest if largest > 0 else 0.0
    bar = f'<span class="share" style="width:{width:.0f}%"></span>'
    value = number(figure.value)
    value = f"<b>{value}</b>" if is_told(one.difference) else value
    limits, share = interval(figure), share_of(found, one.difference)
    at = [number(one.sites[site].value) if site in one.sites else "" for site in sites]
    return [escape(one.column), bar, value, limits, share, *at]
