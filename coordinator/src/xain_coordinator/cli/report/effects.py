"""Section of the report on the coefficients of a regression without penalty."""

from collections.abc import Callable, Sequence
from html import escape
from itertools import groupby
from math import isinf, sqrt

from xain_coordinator.cli.report.charts import number, table
from xain_workloads.linear.glm.coefficients import Coefficient, Coefficients
from xain_workloads.linear.glm.options import LINEAR, POISSON

MAX_ROWS = 200  # of a table
_LEAST_P = 0.0001  # below it a p-value is told as "below"
_MAX_NAMED = 5  # columns in a sentence
# Deviance for each degree of freedom, above which counts are told to vary more than those of
# Poisson regression.
_MOST_DISPERSED = 1.5


def effects(found: Coefficients | None, num_steps: int = 0) -> str:
    """The section on the coefficients, with warnings and fit; empty without coefficients.
    num_steps: rounds that led to them."""
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
        what = "counts" if found.family == POISSON else "odds of the class"
        told += (
            f" The {found.ratio} is the exponential of the coefficient: above 1 {what} are higher,"
            " below 1 lower. Where its interval holds 1, no difference can be told."
        )
    head = ["", "coefficient", "standard error", "95 % interval"]
    if found.ratio:
        head += [found.ratio, "95 % interval"]
    head += [found.statistic, "p", ""]
    parts = [f'<h2>Coefficients</h2><p class="soft">{escape(told)}</p>']
    warnings = _warnings(found)
    parts += [f'<p class="warning">{escape(line)}</p>' for line in warnings]
    for (outcome, reference), rows in groupby(found.of, lambda one: (one.outcome, one.reference)):
        if outcome:
            title = f"{_class(outcome, found)}, against {_class(reference, found)}"
            parts.append(f"<h3>{escape(title)}</h3>")
        parts.append(_table(head, list(rows), has_ratio=bool(found.ratio)))
    parts.append(f'<p class="soft">{escape(_fit(found, num_steps))}</p>')
    return "".join(parts)


def _warnings(found: Coefficients) -> list[str]:
    """Sentences on what makes the coefficients doubtful, if anything does."""
    lines = []
    if not found.is_at_end:
        lines.append("The fit has not converged: these are no results.")
    if found.family == POISSON and found.deviance_per_df > _MOST_DISPERSED:
        lines.append(
            f"The deviance is {number(found.deviance_per_df)} for each degree of freedom, and some"
            " 1 where counts vary as this model has it: they vary more, so that intervals are too"
            " narrow and p-values too small. Standard errors of quasi-Poisson regression are some"
            f" {number(sqrt(found.deviance_per_df))} times as large."
        )
    if found.filled:
        shares = sorted(found.filled.items(), key=lambda one: -one[1])
        names = ", ".join(f"{name} {100 * share:.3g} %" for name, share in shares[:_MAX_NAMED])
        more = f" and {len(shares) - _MAX_NAMED} more" if len(shares) > _MAX_NAMED else ""
        lines.append(
            f"Missing numbers count as one number for all rows ({names}{more}), which makes"
            " intervals too narrow where they are many. For complete cases leave these rows out at"
            " the sites, by [data] where."
        )
    return lines


def _class(name: str, found: Coefficients) -> str:
    """A class with the number of its rows."""
    return f"{name} ({found.of_class[name]:,} rows)"


def _table(head: Sequence[str], rows: Sequence[Coefficient], *, has_ratio: bool) -> str:
    """Table of coefficients; has_ratio: with their exponentials."""
    cells = []
    for one in rows[:MAX_ROWS]:
        line = [
            escape(f"{one.term}, against {one.against}" if one.against else one.term),
            _number(one.value),
            _number(one.error),
            _limits(one.low, one.high),
        ]
        if has_ratio:
            ratio = one.ratio or (None, None, None)
            line += [
                f"<b>{_ratio(ratio[0])}</b>" if one.ratio else "",
                _limits(ratio[1], ratio[2], _ratio),
            ]
        cells.append([*line, _number(one.statistic), _p(one.p), escape(one.note)])
    more = len(rows) - MAX_ROWS
    told = (
        f'<p class="soft">and {more} more, see export --to coefficients.csv</p>' if more > 0 else ""
    )
    return table(head, cells, texts=(len(head) - 1,)) + told


def _fit(found: Coefficients, num_steps: int) -> str:
    """Sentence on how well the regression fits: deviance, likelihood, AIC, and how the fit
    ended."""
    is_linear = found.family == LINEAR
    name = "Sum of squares" if is_linear else "Deviance"
    told = (
        f"{name} {number(found.deviance)}, of an intercept alone {number(found.null_deviance)};"
        f" {found.num_free} parameters; log likelihood {found.log_likelihood:.6g};"
        f" AIC {found.aic:.6g}."
    )
    if is_linear and found.null_deviance > 0:
        told += (
            f" R² {number(1 - found.deviance / found.null_deviance)}, residual standard error"
            f" {number(sqrt(found.deviance_per_df))}."
        )
    if not found.ended:
        return told
    steps = "1 step" if num_steps == 1 else f"{num_steps} steps"
    return f"{told} After {steps} the fit {found.ended}."


def _number(value: float | None) -> str:
    """A number as text; empty for None."""
    return "" if value is None else number(value)


def _ratio(value: float | None) -> str:
    """A ratio, with enough digits to tell it from 1."""
    return f"{value:.4f}" if value is not None and 0.9 < value < 1.1 else _number(value)


def _limits(
    low: float | None, high: float | None, told: Callable[[float | None], str] = _number
) -> str:
    """An interval in words; empty without bounds. told: how to write a number."""
    return "" if low is None or high is None else f"{told(low)} to {told(high)}"


def _p(value: float | None) -> str:
    """A p-value as text; empty without one."""
    if value is None:
        return ""
    return f"below {_LEAST_P:g}" if value < _LEAST_P else f"{value:.4f}"
