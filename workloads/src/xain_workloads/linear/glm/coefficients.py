"""Coefficients of a generalised linear model with their standard errors, tests and intervals.

They follow from the model alone: its sums have the information matrix of all rows. Coefficients are
those of the columns in their own units; of a category column each category is compared with the
reference. Standard errors are those of maximum likelihood, or of least squares, whose intervals are
by Student's t distribution (McCullagh and Nelder 1989, section 4.4; Casella and Berger 2002,
section 11.3).
"""

import csv
from collections.abc import Mapping
from dataclasses import dataclass
from io import StringIO
from json import loads
from math import exp, inf, sqrt

import numpy as np
from numpy.typing import NDArray

from xain_workloads.errors import NoModel
from xain_workloads.linear.glm.design import Design
from xain_workloads.linear.glm.families import log_likelihood, null_deviance
from xain_workloads.linear.glm.newton import STUCK, Step, left_out_of, step_of
from xain_workloads.linear.glm.options import LINEAR, LOGISTIC, NAME, POISSON, options_of_model
from xain_workloads.linear.glm.student import quantile, two_sided
from xain_workloads.linear.newton import Fit
from xain_workloads.model import ENDED, Model
from xain_workloads.tables.preprocessing import target_scale
from xain_workloads.tables.reading.scales import Scale

Array = NDArray[np.float64]

SEPARATED = "not finite (separation)"
# Name of the exponential of a coefficient.
RATIOS: Mapping[str, str] = {LOGISTIC: "odds ratio", POISSON: "rate ratio"}
_CONFIDENCE = 0.95
_LARGEST = 700.0  # exponent, above which an exponential is infinite
COLUMNS = (
    *("outcome", "reference_class", "term", "column", "level", "reference_level"),
    *("coefficient", "std_error", "statistic"),
    *("df", "p_value", "low", "high", "ratio", "ratio_low", "ratio_high", "note"),
)


@dataclass(frozen=True, slots=True)
class Coefficient:
    """One coefficient.

    outcome, reference: the class whose odds against the other it is about; "" for numbers.
    term, column, level, against: see design.Term. value: in the unit of the outcome, or a
    logarithm.
    error, statistic, p, low, high: None where `note` says why; statistic: the value in errors.
    ratio: odds or rate ratio with its limits; None of the linear family, and of the intercept.
    """

    outcome: str
    reference: str
    term: str
    column: str
    level: str
    against: str
    value: float | None
    error: float | None = None
    statistic: float | None = None
    p: float | None = None
    low: float | None = None
    high: float | None = None
    ratio: tuple[float, float, float] | None = None
    note: str = ""


@dataclass(frozen=True, slots=True)
class Coefficients:
    """The coefficients of a model, and how it fits.

    rows: that the sums are of. of_class: the rows of each class, empty for numbers.
    filled: share of missing values by column of numbers, of which one number took the place.
    df: degrees of freedom of the tests, infinite for z.
    deviance, null_deviance: of the model and of an intercept alone; sums of squares for the linear
    family. num_free: parameters with a value of their own. ended: why there was no further step, ""
    while there is.
    """

    family: str
    of: tuple[Coefficient, ...]
    rows: int
    of_class: Mapping[str, int]
    filled: Mapping[str, float]
    df: float
    num_free: int
    deviance: float
    null_deviance: float
    log_likelihood: float
    ended: str

    @property
    def ratio(self) -> str:
        """Name of the exponentials of the coefficients; "" for the linear family."""
        return RATIOS.get(self.family, "")

    @property
    def statistic(self) -> str:
        """Name of the statistic of the tests."""
        return "z" if self.df == inf else "t"

    @property
    def aic(self) -> float:
        """Akaike's information criterion, without the dispersion as a parameter."""
        return 2 * (self.num_free - self.log_likelihood)

    @property
    def is_at_end(self) -> bool:
        """Whether the fit has come to its end; other coefficients are no results."""
        return self.ended not in ("", STUCK)

    @property
    def deviance_per_df(self) -> float:
        """Deviance for each degree of freedom of the rows: the residual variance of the linear
        family. Some 1 where counts vary as those of Poisson regression; 0 if none is left."""
        left = self.rows - self.num_free
        return self.deviance / left if left > 0 else 0.0

    def to_csv(self) -> str:
        """A line for each coefficient, for a spreadsheet or R."""
        text = StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(COLUMNS)
        for one in self.of:
            df = self.df if one.error is not None and self.df != inf else ""
            tests = one.value, one.error, one.statistic, df, one.p, one.low, one.high
            ratio = one.ratio or ("", "", "")
            names = one.outcome, one.reference, one.term, one.column, one.level, one.against
            note = one.note or ("" if self.is_at_end else "not converged")
            writer.writerow((*names, *tests, *ratio, note))
        return text.getvalue()


def coefficients_of(model: Model) -> Coefficients:
    """Compute a model's coefficients with errors, p values and intervals. Raises NoModel if the
    model is of another workload, or there was no step yet."""
    metadata = model.metadata
    if metadata.get("workload") != NAME:
        raise NoModel(
            f"a model of the workload {metadata.get('workload', '')!r} has no coefficients with"
            f" intervals; the workload {NAME!r} has"
        )
    fit = Fit.of(np.asarray(model.vector, np.float64), model.layout)
    if not fit.rows:
        raise NoModel("the model has no sums of rows yet; its coefficients follow the first round")
    options = options_of_model(metadata)
    design = Design.of(metadata, fit.point.shape[1] - 1)
    step = step_of(fit, design, metadata)
    scale = target_scale(metadata) if options.family == LINEAR else Scale()
    classes = tuple(loads(metadata.get("classes", "[]")))
    contrasts, outcomes, reference = _contrasts(classes, options.reference_class)
    df = max(fit.rows - step.num_free, 0.0) if options.family == LINEAR else inf
    reach = quantile((1 + _CONFIDENCE) / 2, df) if df else 0.0
    why = {int(at): text for at, text in left_out_of(metadata).items()}
    terms = design.terms(tuple(why))
    covariance = _covariance(fit, step) * scale.scale**2
    values = fit.point * scale.scale
    found = []
    for contrast, outcome in zip(contrasts, outcomes, strict=True):
        for term in terms:
            weights = np.outer(contrast, term.weights).ravel()
            value = float(weights @ values.ravel())
            if not term.column:
                value += scale.center
            about = (outcome, reference, term.name, term.column, term.level, term.against)
            if note := why.get(term.at, ""):
                found.append(Coefficient(*about, None, note=note))
                continue
            if (weights != 0)[step.separated].any() or not df:
                note = SEPARATED if df else "no degree of freedom is left"
                found.append(Coefficient(*about, value, note=note))
                continue
            error = sqrt(max(float(weights @ covariance @ weights), 0.0))
            statistic = value / error if error else (0.0 if not value else inf)
            low, high = value - reach * error, value + reach * error
            ratio = None
            if options.family in RATIOS and term.column:
                ratio = (_exp(value), _exp(low), _exp(high))
            p = two_sided(statistic, df)
            found.append(Coefficient(*about, value, error, statistic, p, low, high, ratio))
    totals = fit.totals.tolist()
    likelihood = log_likelihood(options.family, fit.deviance, totals, fit.rows)
    if options.family == LINEAR:
        likelihood -= fit.rows * float(np.log(scale.scale))
    return Coefficients(
        options.family,
        tuple(found),
        int(fit.rows),
        dict(zip(classes, map(int, totals), strict=True)) if classes else {},
        design.filled,
        df,
        step.num_free,
        fit.deviance * scale.scale**2,
        null_deviance(options.family, totals, fit.rows) * scale.scale**2,
        likelihood,
        metadata.get(ENDED, ""),
    )


def _contrasts(
    classes: tuple[str, ...], reference_class: str
) -> tuple[Array, tuple[str, ...], str]:
    """(Weights (c, k) of the blocks for each outcome, the outcomes, their reference class)."""
    if not classes:
        return np.ones((1, 1)), ("",), ""
    reference = reference_class or classes[0]
    # The block of each class; that of the first one is 0.
    blocks = np.concatenate([np.zeros((1, len(classes) - 1)), np.eye(len(classes) - 1)])
    at = classes.index(reference)
    outcomes = tuple(name for name in classes if name != reference)
    rows = [blocks[classes.index(name)] - blocks[at] for name in outcomes]
    return np.array(rows), outcomes, reference


def _covariance(fit: Fit, step: Step) -> Array:
    """(m, m) covariance of the parameters; 0 for those that are not moved."""
    free = np.flatnonzero(~(step.left_out | step.separated))
    found = np.zeros_like(fit.information)
    if len(free):
        inverse = np.linalg.inv(fit.information[np.ix_(free, free)])
        found[np.ix_(free, free)] = step.dispersion * (inverse + inverse.T) / 2
    return found


def _exp(value: float) -> float:
    return exp(value) if value < _LARGEST else inf
