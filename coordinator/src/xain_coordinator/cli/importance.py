"""`xain-coordinator importance`: the columns of a table by their importance, as text and CSV."""

import csv
from collections.abc import Iterator
from io import StringIO

from rich.console import Console
from rich.table import Table
from rich.text import Text

from xain_coordinator.inspection.client import clean
from xain_wire.fl import coordinator_pb2 as pb
from xain_wire.fl.inspection_pb2 import ColumnImportances
from xain_workloads.comparing.importance import MAX_COLUMNS, REPEATS
from xain_workloads.exported.lineage import figures_of
from xain_workloads.measures.figures import Figure

COLUMNS = ("model", "metric", "column", "site", "importance", "low", "high", "rows", "repeats")
CAVEAT = (
    "It says what this model uses, not what causes the outcome; columns that go together share"
    " their importance, and each may look smaller than it is."
)
MAX_TOLD = 5  # columns in a line of text
LOSSES = {
    "log_loss": "log loss",
    "mse": "mean squared error",
    "error": "error rate",
}


def metric_of(found: ColumnImportances) -> str:
    """The loss that grows, in words."""
    words = LOSSES.get(found.metric, clean(found.metric))
    return f"{words}, with rows weighed by their class," if found.weighs_classes else words


def told(found: ColumnImportances) -> str:
    """Explanation of the figures, for people."""
    least = "" if found.repeats == REPEATS else "at least "
    shuffles = f"{least}{found.repeats} shuffle{'' if found.repeats == 1 else 's'}"
    text = (
        f"By how much the {metric_of(found)} of model {found.round} is larger if the values of one"
        " column are shuffled among the held-out rows of each site, so that the column tells the"
        f" model nothing; the mean of {shuffles}. It is {found.loss:.4g} on these"
        f" {found.num_samples:,} rows otherwise."
    )
    if (left_out := found.num_columns - len(found.columns)) > 0:
        why = f"beyond the first {MAX_COLUMNS:,}, or there was no time for them"
        text += f" {left_out:,} of {found.num_columns:,} columns were left out: they are {why}."
    if fewer := sum(one.num_samples < found.num_samples for one in found.columns):
        text += (
            f" {fewer:,} of the columns are of fewer rows, since sites had no time for them; the"
            " CSV has their rows."
        )
    if (missing := found.num_held_out - found.num_samples) > 0:
        text += f" Sites with {missing:,} other held-out rows have sent no importances of it."
    return text


def difference_of(figure: pb.Figure) -> Figure:
    """The importance in a message as a figure, with its interval."""
    return figures_of({"": figure})[""]


def share_of(found: ColumnImportances, figure: pb.Figure) -> str:
    """An importance as a share of the loss; empty without a loss."""
    return f"{figure.value / found.loss:+.1%}" if found.loss else ""


def sentence(found: ColumnImportances) -> str:
    """The most important columns, beyond chance; a line of a status."""
    of = f"{metric_of(found)} with the column shuffled (model {found.round})"
    shown = [
        # A squared error is told as a share: its unit is the square of that of the target.
        f"{clean(one.column)} "
        + (share_of(found, figure) if found.metric == "mse" else f"{figure.value:.3g}")
        for one in found.columns[:MAX_TOLD]
        if is_told(figure := one.difference)
    ]
    if not shown:
        rows = f"the {found.num_samples:,} held-out rows"
        return f"no single column matters to model {found.round} beyond chance on {rows}"
    return f"{', '.join(shown)} more {of}"


def is_told(figure: pb.Figure) -> bool:
    """Whether an importance is above 0 beyond chance."""
    return figure.low > 0 if figure.HasField("low") else figure.value > 0


def show(found: ColumnImportances, console: Console) -> None:
    """Print the columns for people."""
    console.print(Text(told(found)))
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("column", overflow="fold")
    for heading in ("more loss", "95 % interval", "of the loss"):
        table.add_column(heading, justify="right")
    for one in found.columns:
        figure = difference_of(one.difference)
        limits = "" if figure.low is None else f"{figure.low:.3g} to {figure.high:.3g}"
        value, share = f"{figure.value:.3g}", share_of(found, one.difference)
        table.add_row(Text(clean(one.column)), value, limits, share)
    console.print(table)
    console.print(Text(CAVEAT))


def to_csv(found: ColumnImportances) -> str:
    """A line for each column, of all sites together and then of each that is known."""
    text = StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    writer.writerows(_lines(found))
    return text.getvalue()


def _lines(found: ColumnImportances) -> Iterator[list[object]]:
    """The rows of the CSV file: for each column one of all sites together, then one of each
    site."""
    for one in found.columns:
        figures = {"": one.difference, **dict(sorted(one.sites.items()))}
        for site, message in figures.items():
            figure = difference_of(message)
            rows = found.sites[site] if site else one.num_samples
            yield [
                *(found.round, found.metric, one.column, site),
                *(figure.value, figure.low, figure.high, rows, found.repeats),
            ]
