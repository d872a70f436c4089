"""Section of the report on the coefficients of a regression without penalty."""

from collections.abc import Sequence
from html import escape
from itertools import groupby
from math import isinf

from xain_coordinator.cli.report.charts import number, table
from xain_workloads.glm.coefficients import Coefficient, Coefficients

MAX_ROWS = 200  # of a table
_LEAST_P = 0.0001  # below it a p-value is told as "below"


def effects(found: Coefficients | None) -> str:
    """The section; empty without coefficients."""
    if found is None:
        return ""
    test = f"{found.statistic} test"
    if not isinf(found.df):
        test += f" with {found.df:g} degrees of freedom"
    told = (
        f"{found.family.capitalize()} regression of {found.rows:,} rows without a penalty. A number"
        " is told per unit of its column, a category against the reference of its column. The"
        f" p-value is that of a {test} of the coefficient being 0."
    )
    if found.ratio:
        told += f" A {found.ratio} is the exponential of the coefficient."
    head = ["", "coefficient", "standard error", "95 % interval"]
    if found.ratio:
        head += [found.ratio, "95 % interval"]
    head += [found.statistic, "p", ""]
    parts = [f'<h2>Coefficients</h2><p class="soft">{escape(told)}</p>']
    if not found.ended:
        parts.append('<p class="warning">The fit has not converged: these are no results.</p>')
    for (outcome, reference), rows in groupby(found.of, lambda one: (one.outcome, one.reference)):
        if outcome:
            parts.append(f"<h3>{escape(outcome)}, against {escape(reference)}</h3>")
        parts.append(_table(head, list(rows), has_ratio=bool(found.ratio)))
    parts.append(f'<p class="soft">{escape(_fit(found))}</p>')
    return "".join(parts)


def _table(head: Sequence[str], rows: Sequence[Coefficient], *, has_ratio: bool) -> str:
    cells = []
    for one in rows[:MAX_ROWS]:
        line = [
            escape(one.term),
            _number(one.value),
            _number(one.error),
            _limits(one.low, one.high),
        ]
        if has_ratio:
            ratio = one.ratio or (None, None, None)
            line += [f"<b>{_number(ratio[0])}</b>" if one.ratio else "", _limits(*ratio[1:])]
        cells.append([*line, _number(one.statistic), _p(one.p), escape(one.note)])
    more = len(rows) - MAX_ROWS
    told = (
        f'<p class="soft">and {more} more, see export --to coefficients.csv</p>' if more > 0 else ""
    )
    return table(head, cells, texts=(len(head) - 1,)) + told


def _fit(found: Coefficients) -> str:
    name = "Sum of squares" if found.family == "linear" else "Deviance"
    told = (
        f"{name} {number(found.deviance)}, of an intercept alone {number(found.null_deviance)};"
        f" {found.num_free} parameters; log likelihood {found.log_likelihood:.6g};"
        f" AIC {found.aic:.6g}."
    )
    return f"{told} {found.ended.capitalize()}." if found.ended else told


def _number(value: float | None) -> str:
    return "" if value is None else number(value)


def _limits(low: float | None, high: float | None) -> str:
    return "" if low is None or high is None else f"{number(low)} to {number(high)}"


def _p(value: float | None) -> str:
    if value is None:
        return ""
    return f"below {_LEAST_P:g}" if value < _LEAST_P else f"{value:.4f}"
