"""Section of the report on the gain of each site."""

from collections.abc import Sequence
from html import escape

from xain_coordinator.cli.gains import WORSE, Compared, Gains, gains, measured_at_sites
from xain_coordinator.cli.report.charts import number, table
from xain_coordinator.cli.report.measured import interval, words
from xain_wire.fl.inspection_pb2 import GetStatusResponse, RoundStatus
from xain_workloads.exported.lineage import figures_of
from xain_workloads.measures.figures import Figure

MAX_ROWS = 200
COORDINATOR = "rows of the coordinator"
# Beside the metric that is compared, the first that there is: what readers know.
_KNOWN = ("auc", "r2", "accuracy")


def gained(status: GetStatusResponse, rounds: Sequence[RoundStatus]) -> str:
    """The table of global and local models by site; empty without local models."""
    found = gains(status, rounds)
    trend = f"<p>{escape(status.trend)}</p>" if status.trend else ""
    if found is None:
        return f"<h2>Would more passes help?</h2>{trend}" if trend else ""
    every = [
        one for one in (found.together, found.central, *found.sites.values()) if one is not None
    ]
    name = found.metric
    second = next(
        (k for k in _KNOWN if k != name and any(k in one.local.figures for one in every)), ""
    )
    shown = [metric for metric in (name, second) if metric]
    head = ["site", "rows held out"]
    for metric in shown:
        head += [f"{words(metric)}, model {found.number}", f"{words(metric)}, its own alone"]
    head += ["difference", "what it says"]
    rows = [_row(site, one, shown) for site, one in sorted(found.sites.items())[:MAX_ROWS]]
    if found.together is not None:
        rows.insert(0, _row("all rows", found.together, shown))
    if found.central is not None:
        rows.append(_row(COORDINATOR, found.central, shown))
    else:
        rows += _own(found, rounds, shown)
    command = ""
    passes = max((one.local.passes for one in every), default=0)
    told = (
        "Each site has also trained a model of its own rows alone, by its own statistics and for"
        f" {passes} passes. Both are measured on its held-out rows. The local model was chosen by"
        " these rows: it is the best of up to ten points of its training; the interval does not"
        " count that. A difference above 0 is a gain;"
        " its 95 % interval is that of paired rows, so that it may be clear where the others"
        " overlap. All rows: each by the local model of its site."
    )
    if found.central is not None:
        told += (
            " Rows of the coordinator: it has done the same with the rows of evaluate.data: of"
            " these it has trained the central model on four fifths, and both models are measured"
            " on the other fifth. Both models were chosen by rows that include these: the global"
            " one as the best of its rounds on all rows of the coordinator, the central one as the"
            " best of up to ten points of its training; the interval does not count that."
        )
        if command := measured_at_sites(found):
            told += " A session of its own measures the central model at the sites:"
            command = f"<pre>{escape(command)}</pre>"
    return (
        f'<h2>What does each site gain?</h2><p class="soft">{told}</p>{command}'
        f"{table(head, rows, texts=(len(head) - 1,))}{trend}"
    )


def _row(site: str, one: Compared, shown: Sequence[str]) -> list[str]:
    """Cells of a site's row: both models by the shown metrics, the difference, and how to read
    it."""
    cells = [escape(site), f"{one.local.num_samples:,}" if one.local.num_samples else ""]
    for metric in shown:
        cells += [_cell(figures.get(metric)) for figures in (one.of_all, one.local.figures)]
    reading = escape(one.reading)
    reading = f"<b>{reading}</b>" if one.reading == WORSE else reading
    some = one.rows_of_difference
    difference = _cell(one.difference) + (f'<br><span class="soft">{some}</span>' if some else "")
    return [*cells, difference, reading]


def _own(found: Gains, rounds: Sequence[RoundStatus], shown: Sequence[str]) -> list[list[str]]:
    """A row with the global model on the coordinator's own rows; none if it has no such rows."""
    known = (one.coordinator_evaluation for one in rounds if one.round == found.number)
    evaluation = next(known, None)
    if evaluation is None or not evaluation.figures:
        return []
    figures = figures_of(evaluation.figures)
    cells = [COORDINATOR, f"{evaluation.num_samples:,}"]
    for metric in shown:
        cells += [_cell(figures.get(metric)), ""]
    return [[*cells, "", ""]]


def _cell(figure: Figure | None) -> str:
    """A figure with its interval below it; empty for None."""
    if figure is None:
        return ""
    return f'{number(figure.value)}<br><span class="soft">{interval(figure)}</span>'
