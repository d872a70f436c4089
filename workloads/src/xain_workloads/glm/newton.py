"""Newton's method for generalised linear models, from sums that add up over sites.

In each round a site sends the score, the information matrix and the deviance of its rows at the
model. Their sums are those of all rows, so the steps, and where they end, do not depend on how rows
are divided. For the logarithmic, logistic and identity links the observed information is the
expected one, and a Newton step is one of Fisher scoring (McCullagh and Nelder 1989, section 2.5).

Model and update are vectors of one layout. A model's "coef" and "intercept" are the point that is
measured next. "before" is the last point that was accepted, and the sums of the vector are those of
all rows there. An update has the sums of one site at the model, and zeros elsewhere.

In the first step the parameters of a model are taken in one after the other. One that follows from
those before it, as a constant column does, is left out and stays 0. Later on the weights of rows
would hide that. One by which some outcomes are certain grows without end (separation: Albert and
Anderson 1984). It is held where it is as soon as the others have nearly converged, and these
converge without it.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from json import dumps, loads
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from xain_workloads.glm.design import Design
from xain_workloads.glm.options import LINEAR, options_of_model
from xain_workloads.model import (
    ENDED,
    LEFT_OUT,
    TOLD,
    Layout,
    TensorSpec,
    Vector,
    flatten,
    unflatten,
)

Array = NDArray[np.float64]

MAX_PARAMETERS = 2000  # whose information matrix takes 16 MB

# A step is the last one if its length in standard errors is below a millionth. Those after it are
# shorter by orders of magnitude.
_SHORT = 1e-12  # square of that length
_MOST_HALVINGS = 7  # of 1/2, 1/4 and so on, together 2**-28
_LONGEST_CHANGE = 3.0  # of the linear predictor in a step; a first logistic step makes 2 at most
_ROUNDING = 1e-10  # share of the deviance by which it may rise
# Share of a column's squares that is left when those before it are taken out of it. Less is
# rounding: in the first step a variance inflation factor of 1e10.
_LEAST_LEFT, _LEAST_LEFT_LATER = 1e-10, 1e-14
# Separation: the steps have become short in standard errors, since those of a separated parameter
# grow without end, while a parameter still moves by about 1, and the steps hardly get shorter.
_SEPARATED_STEP = 0.1
_NEARLY = 1e-4  # square of a step's length in standard errors
_SLOW = 0.1  # of a square to the one before it; 1/e for a separated parameter

_FIGURES = ("rows", "deviance", "decrement", "decrement_before", "halvings")
_MAX_SUM = 1e100

CONVERGED = "converged: a further step would change no coefficient by a millionth of its error"
_STUCK = "stopped: the deviance falls no further"
MAX_TOLD = 5  # columns in a sentence


class InvalidSums(ValueError):
    """An update has no sums that rows could have."""


@dataclass(frozen=True, slots=True, eq=False)
class Fit:
    """A model, or the sums of a site.

    point, before: (k, p + 1) of k blocks of parameters, the intercepts first.
    score: (m,), m = k (p + 1). information: (m, m), symmetric. totals: of the target, see
    families.py. rows, deviance: of the sums; no rows before the first step.
    decrement, decrement_before: of the step from `before` and of the one before it, the square of
        its length in standard errors; 0 if there was none.
    halvings: of the step from `before` to `point`.
    """

    point: Array
    before: Array
    score: Array
    information: Array
    totals: Array
    rows: float = 0.0
    deviance: float = 0.0
    decrement: float = 0.0
    decrement_before: float = 0.0
    halvings: float = 0.0

    @classmethod
    def at(cls, point: Array, num_totals: int) -> Self:
        """A model without sums."""
        m = point.size
        zeros = np.zeros((m, m))
        return cls(point, np.zeros_like(point), np.zeros(m), zeros, np.zeros(num_totals))

    @classmethod
    def of(cls, vector: Vector, layout: Layout) -> Self:
        """Read a vector. Raises ValueError if it is none of such a model."""
        arrays = unflatten(vector, layout)
        if [spec.name for spec in layout] != list(_NAMES):
            raise ValueError(f"the model's arrays are {[spec.name for spec in layout]}")
        point = np.concatenate([arrays["intercept"][:, None], arrays["coef"]], axis=1)
        m = point.size
        information = np.zeros((m, m))
        rows, columns = np.triu_indices(m)
        information[rows, columns] = information[columns, rows] = arrays["information"]
        figures = dict(zip(_FIGURES, arrays["figures"].tolist(), strict=True))
        before, score = arrays["before"], arrays["score"].ravel()
        return cls(point, before, score, information, arrays["totals"], **figures)

    @property
    def layout(self) -> Layout:
        """The layout of the vector."""
        k, width = self.point.shape
        m = self.point.size
        shapes = ((k, width - 1), (k,), (k, width), (k, width), (m * (m + 1) // 2,))
        sizes = (*shapes, self.totals.shape, (len(_FIGURES),))
        return tuple(
            TensorSpec(name, shape, "float64", "weight" if name in _WEIGHTS else "statistic")
            for name, shape in zip(_NAMES, sizes, strict=True)
        )

    def to_vector(self) -> Vector:
        """The vector, float64."""
        arrays: dict[str, NDArray[Any]] = {
            "coef": self.point[:, 1:],
            "intercept": self.point[:, 0],
            "before": self.before,
            "score": self.score.reshape(self.point.shape),
            "information": self.information[np.triu_indices(self.point.size)],
            "totals": self.totals,
            "figures": np.array([getattr(self, name) for name in _FIGURES]),
        }
        return flatten(arrays, self.layout)


_NAMES = ("coef", "intercept", "before", "score", "information", "totals", "figures")
_WEIGHTS = ("coef", "intercept")


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """The step from a point at which the sums are known.

    values: (m,). decrement: square of the length in standard errors, with separated parameters;
    rest: without. left_out, separated: (m,) parameters that are not moved.
    dispersion: of the rows about the model, 1 but for the linear one. num_free: parameters that
    have a value of their own.
    """

    values: Array
    decrement: float
    rest: float
    left_out: NDArray[np.bool_]
    separated: NDArray[np.bool_]
    dispersion: float
    num_free: int


def step_of(fit: Fit, design: Design, metadata: Mapping[str, str]) -> Step:
    """The Newton step at `before`, from the sums of the fit. metadata: of the model, with
    LEFT_OUT."""
    k, width = fit.point.shape
    family = options_of_model(metadata).family
    is_taken = np.ones(width, np.bool_)
    is_taken[list(map(int, left_out_of(metadata)))] = False
    taken = np.flatnonzero(np.tile(is_taken, k))
    lower, kept = _factored(fit.information, taken, _LEAST_LEFT_LATER, np.zeros(k * width))
    values = _solved(lower, kept, fit.score)
    decrement = max(float(np.sum(fit.score * values)), 0.0)
    dispersion = 1.0
    if family == LINEAR:
        after = max(fit.deviance - decrement, 0.0)
        # A perfect fit leaves nothing but rounding.
        around_mean = fit.totals[1] - fit.totals[0] ** 2 / fit.rows
        dispersion = max(after, 1e-16 * around_mean) / max(fit.rows - len(kept), 1.0)
        decrement = decrement / dispersion if dispersion else 0.0
    left_out = np.ones(k * width, np.bool_)
    left_out[kept] = False
    none = np.zeros(len(left_out), np.bool_)
    step = Step(values, decrement, decrement, left_out, none, dispersion, len(kept))
    is_slow = decrement > _SLOW * fit.decrement_before > 0
    if family == LINEAR or decrement > _NEARLY or not is_slow:
        return step
    separated = none
    # Parameters that grow together each take the part of the one that is held.
    while (found := np.abs(values) > _SEPARATED_STEP).any():
        separated = separated | found
        held = taken[~separated[taken]]
        lower, kept = _factored(fit.information, held, _LEAST_LEFT_LATER, np.zeros(k * width))
        values = _solved(lower, kept, fit.score)
    if not separated.any():
        return step
    rest = max(float(np.sum(fit.score * values)), 0.0)
    return replace(step, values=values, rest=rest, separated=separated)


def left_out_of(metadata: Mapping[str, str]) -> Mapping[str, str]:
    """Parameters of a block that follow from others, as text, and why."""
    found: Mapping[str, str] = loads(metadata.get(LEFT_OUT, "{}"))
    return found


def stepped(
    vector: Vector, layout: Layout, metadata: Mapping[str, str], updates: Iterable[Vector]
) -> tuple[Vector, Mapping[str, str]]:
    """The next model from the sums of all sites, in the order of their names, and its metadata,
    which say under ENDED why there is no further step, and under TOLD what a person must know.

    Raises InvalidSums.
    """
    model = Fit.of(vector, layout)
    k, width = model.point.shape
    design = Design.of(metadata, width - 1)
    here = _added(model, layout, updates)
    is_comparable = model.rows == here.rows and np.array_equal(model.totals, here.totals)
    most = model.deviance + _ROUNDING * (abs(model.deviance) + 1)
    if is_comparable and here.deviance > most:
        # Each time by more halves: a round may be slow.
        halvings = model.halvings + 1
        point = model.before + (model.point - model.before) / 2**halvings
        fit, ended = replace(model, point=point, halvings=halvings), ""
        if fit.halvings > _MOST_HALVINGS:
            fit, ended = replace(fit, point=model.before), _STUCK
        return fit.to_vector(), _ending(metadata, ended, metadata.get(TOLD, ""))
    fit = replace(here, before=model.point, decrement_before=model.decrement)
    if LEFT_OUT not in metadata:
        metadata = {**metadata, LEFT_OUT: dumps(_why_left_out(fit.information, design))}
    step = step_of(fit, design, metadata)
    share = 1.0
    if options_of_model(metadata).family != LINEAR:
        # The mean change of the linear predictor, by the weights of the rows. From one far off a
        # step of many rounds would lead back.
        weight = float(np.diagonal(fit.information).reshape(k, width)[:, 0].sum())
        change = np.sqrt(step.decrement / weight) if weight else 0.0
        share = min(1.0, _LONGEST_CHANGE / change) if change else 1.0
    point = fit.before + share * step.values.reshape(k, width)
    fit = replace(fit, point=point, decrement=step.decrement)
    ended = CONVERGED if step.rest <= _SHORT else ""
    return fit.to_vector(), _ending(metadata, ended, _told(step, design, metadata))


def check_sums(vector: Vector, layout: Layout) -> None:
    """Refuse an update that no rows could have. Raises InvalidSums."""
    fit = Fit.of(vector, layout)
    if not np.isfinite(vector).all() or np.abs(vector).max() > _MAX_SUM:
        raise InvalidSums(f"the sums have a number that is not finite, or above {_MAX_SUM:g}")
    if fit.rows < 1 or fit.rows % 1:
        raise InvalidSums(f"the sums are of {fit.rows:g} rows")
    if (np.diagonal(fit.information) < 0).any():
        raise InvalidSums("the information matrix has a negative number on its diagonal")
    of_steps = (fit.decrement, fit.decrement_before, fit.halvings)
    if fit.point.any() or fit.before.any() or any(of_steps):
        raise InvalidSums("the update has coefficients or steps, where only sums are taken")


def _added(model: Fit, layout: Layout, updates: Iterable[Vector]) -> Fit:
    total: Vector | None = None
    for update in updates:
        total = update.astype(np.float64) if total is None else np.add(total, update, out=total)
    assert total is not None, "a round was closed without updates"
    sums = Fit.of(total, layout)
    return replace(sums, point=model.point, before=model.before)


def _ending(metadata: Mapping[str, str], ended: str, told: str) -> Mapping[str, str]:
    """The metadata with these texts; without the keys where there are none."""
    kept = {key: value for key, value in metadata.items() if key not in (ENDED, TOLD)}
    return {**kept, **({ENDED: ended} if ended else {}), **({TOLD: told} if told else {})}


def _told(step: Step, design: Design, metadata: Mapping[str, str]) -> str:
    """Lines on parameters without a value."""
    lines = [
        f"{_capital(design.words(int(at)))} has no coefficient: {why}."
        for at, why in left_out_of(metadata).items()
        if int(at) not in design.references.values()
    ]
    separated = step.separated.reshape(-1, len(design.columns)).any(axis=0)
    if separated.any():
        names = [design.words(at) for at in np.flatnonzero(separated).tolist()]
        more = f" and {len(names) - MAX_TOLD} more" if len(names) > MAX_TOLD else ""
        lines.append(
            f"{_capital(', '.join(names[:MAX_TOLD]))}{more}: the coefficient has no finite value,"
            " since by it the outcome of some rows is certain (separation); leave the column out,"
            " or join categories with few rows."
        )
    if len(lines) > MAX_TOLD:
        lines[MAX_TOLD:] = [f"{len(lines) - MAX_TOLD} more columns have no coefficient."]
    return "\n".join(lines)


def _why_left_out(information: Array, design: Design) -> dict[str, str]:
    """The parameters of a block that follow from those before them, and why.

    information: at a model that gives all rows the same weights, but for those that were trained
    before. Its first block is that of the columns.
    """
    width = len(design.columns)
    block = information[:width, :width]
    diagonal = np.diagonal(block)
    smallest = design.smallest * diagonal[0]
    _, kept = _factored(block, design.order, _LEAST_LEFT, smallest)
    sizes = np.sqrt(np.maximum(diagonal, 0.0))
    found = {}
    for at in sorted(set(range(width)).difference(kept.tolist())):
        why = "it is constant"
        if diagonal[at] > smallest[at]:
            shares, *_ = np.linalg.lstsq(block[np.ix_(kept, kept)], block[kept, at], rcond=None)
            is_part = np.abs(shares) * sizes[kept] > 1e-6 * sizes[at]
            names = [design.words(one) for one in kept[is_part].tolist() if one]
            if names:
                more = f" and {len(names) - MAX_TOLD} more" if len(names) > MAX_TOLD else ""
                why = f"it follows from {', '.join(names[:MAX_TOLD])}{more}"
        found[str(at)] = why
    return found


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


# --- equations ---
#
# Without products of matrices, whose sums a library adds in an order of its own: a model that is
# made again after a crash has the same bytes.


def _factored(
    matrix: Array, order: NDArray[np.intp], least: float, smallest: Array
) -> tuple[Array, NDArray[np.intp]]:
    """The Cholesky factor of a matrix without the parameters that follow from those before them.

    order: parameters, in which they are taken in. least: share of an element of the diagonal that
    must be left. smallest: (m,) elements of the diagonal that are nothing but rounding.
    Returns (lower, kept): the factor of matrix[kept][:, kept].
    """
    rest = matrix[np.ix_(order, order)].copy()
    diagonal = np.diagonal(rest).copy()
    lower = np.zeros_like(rest)
    is_kept = np.zeros(len(order), np.bool_)
    for at in range(len(order)):
        pivot = rest[at, at]
        if not pivot > least * diagonal[at] or diagonal[at] <= smallest[order[at]]:
            continue
        is_kept[at] = True
        column = rest[at:, at] / np.sqrt(pivot)
        lower[at:, at] = column
        rest[at + 1 :, at + 1 :] -= np.multiply.outer(column[1:], column[1:])
    kept = np.flatnonzero(is_kept)
    return lower[np.ix_(kept, kept)], order[kept]


def _solved(lower: Array, kept: NDArray[np.intp], score: Array) -> Array:
    """The step (m,) whose product with the matrix is the score; 0 where nothing is kept."""
    right = score[kept].copy()
    for at in range(len(kept)):
        right[at] /= lower[at, at]
        right[at + 1 :] -= lower[at + 1 :, at] * right[at]
    for at in reversed(range(len(kept))):
        right[at] /= lower[at, at]
        right[:at] -= lower[at, :at] * right[at]
    values = np.zeros(len(score))
    values[kept] = right
    return values
