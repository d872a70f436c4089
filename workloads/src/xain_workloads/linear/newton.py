"""Newton's method over a federation, from sums that add up over sites.

In each round a site sends the score, the information matrix and the deviance of its rows at the
model. Their sums are those of all rows, so the steps do not depend on how rows are divided. For the
logarithmic, logistic and identity links the observed information is the expected one, and a Newton
step is one of Fisher scoring (McCullagh and Nelder 1989, section 2.5).

Model and update are vectors of one layout. A model's "coef" and "intercept" are the point that is
measured next. "before" is the last point that was accepted, and the sums of the vector are those of
all rows there. An update has the sums of one site at the model, and zeros elsewhere.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from xain_workloads.errors import InvalidContent
from xain_workloads.model import Layout, TensorSpec, Vector, flatten, unflatten

Array = NDArray[np.float64]

MAX_PARAMETERS = 2000  # whose information matrix takes 16 MB

MOST_HALVINGS = 7  # of 1/2, 1/4 and so on, together 2**-28
_ROUNDING = 1e-10  # share of the deviance by which it may rise
_FIGURES = ("rows", "deviance", "decrement", "decrement_before", "halvings")
_NAMES = ("coef", "intercept", "before", "score", "information", "totals", "figures")
_WEIGHTS = ("coef", "intercept")
_MAX_SUM = 1e100
_LEAST_DEVIANCE = 1.0  # which rounding does not reach; below 0 a fit would count as perfect


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
        """Make a model at this point, without sums."""
        m = point.size
        zeros = np.zeros((m, m))
        return cls(point, np.zeros_like(point), np.zeros(m), zeros, np.zeros(num_totals))

    @classmethod
    def of(cls, vector: Vector, layout: Layout) -> Self:
        """Read a fit from a flat vector. Raises ValueError if the arrays are of another model."""
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
        return layout_of(k, width, len(self.totals))

    def to_vector(self) -> Vector:
        """Write point, sums and figures as one flat vector, float64."""
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


def layout_of(k: int, width: int, num_totals: int) -> Layout:
    """The layout of a model of k blocks of parameters, each of `width`."""
    m = k * width
    shapes = ((k, width - 1), (k,), (k, width), (k, width), (m * (m + 1) // 2,))
    sizes = (*shapes, (num_totals,), (len(_FIGURES),))
    return tuple(
        TensorSpec(name, shape, "float64", "weight" if name in _WEIGHTS else "statistic")
        for name, shape in zip(_NAMES, sizes, strict=True)
    )


def check_sums(vector: Vector, layout: Layout, *, least_rows: int = 1) -> None:
    """Refuse an update that no rows could have. Raises InvalidContent."""
    fit = Fit.of(vector, layout)
    if not np.isfinite(vector).all() or np.abs(vector).max() > _MAX_SUM:
        raise InvalidContent(f"the sums have a number that is not finite, or above {_MAX_SUM:g}")
    if fit.rows < least_rows or fit.rows % 1:
        raise InvalidContent(f"the sums are of {fit.rows:g} rows")
    if (np.diagonal(fit.information) < 0).any():
        raise InvalidContent("the information matrix has a negative number on its diagonal")
    if fit.deviance < -_LEAST_DEVIANCE:
        raise InvalidContent(f"the deviance is {fit.deviance:g}")
    of_steps = (fit.decrement, fit.decrement_before, fit.halvings)
    if fit.point.any() or fit.before.any() or any(of_steps):
        raise InvalidContent("the update has coefficients or steps, where only sums are taken")


def summed(model: Fit, layout: Layout, updates: Iterable[Vector]) -> Fit:
    """Add up the sums of all updates, in their order; the point is that of the model."""
    total: Vector | None = None
    for update in updates:
        total = update.astype(np.float64) if total is None else np.add(total, update, out=total)
    assert total is not None, "a round was closed without updates"
    sums = Fit.of(total, layout)
    return replace(sums, point=model.point, before=model.before)


def has_risen(model: Fit, here: Fit) -> bool:
    """Whether the step to the model was too long. here: sums at it, which are compared with those
    before the step if they are of the same rows."""
    is_comparable = model.rows == here.rows and np.array_equal(model.totals, here.totals)
    return is_comparable and here.deviance > model.deviance + _ROUNDING * (abs(model.deviance) + 1)


def halved(model: Fit) -> Fit:
    """Shorten the last step from `before`; after MOST_HALVINGS go back to that point."""
    # Each time by more halves: a round may be slow.
    halvings = model.halvings + 1
    point = model.before + (model.point - model.before) / 2**halvings
    if halvings > MOST_HALVINGS:
        point = model.before
    return replace(model, point=point, halvings=halvings)


# --- equations ---
#
# Without products of matrices, whose sums a library adds in an order of its own: a model that is
# made again after a crash has the same bytes.


def factored(
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


def solved(lower: Array, kept: NDArray[np.intp], score: Array) -> Array:
    """Solve for the step (m,) whose product with the matrix is the score; 0 where none is kept."""
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
