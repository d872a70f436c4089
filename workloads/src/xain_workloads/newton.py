"""Newton's method over a federation: sums over rows that add up over sites, and the next step.

The model is linear: the scores of a row are its features times the coefficients. A site sends the
loss, its gradient and its information matrix (the second derivatives) at the coefficients that it
was given, summed over its rows. The step from the sums of all sites is that of all rows in one
place, however rows are divided. For squared errors the first step is the solution.

Source: Bishop 2006, Pattern Recognition and Machine Learning, sections 4.3.3 and 4.3.4.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import inf
from struct import Struct
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray

from xain_workloads.losses import binomial_loss, multinomial_loss, squared_loss
from xain_workloads.supervised import softmax

Array = NDArray[np.float64]
Loss = Literal["squared", "binomial", "multinomial"]

_MAGIC = b"XENSUMS1"
_HEAD = Struct("<QII")  # rows, features, scores
# Objectives of steps that are this close are equal: what rounding leaves of a sum.
_ROUNDING = 1e-12


class InvalidSums(ValueError):
    """Bytes are no sums that fit the model. The message says what is wrong."""


@dataclass(frozen=True, slots=True, eq=False)
class Sums:
    """Sums over rows at coefficients (d, k).

    loss: of the rows. gradient: (d, k). squares: (d,), of each feature. information: (b, d, d), a
    block for each pair of scores, (0, 0), (0, 1) to (k - 1, k - 1): of both orders the first.
    """

    num_rows: int
    loss: float
    gradient: Array
    totals: Array
    squares: Array
    information: Array

    def to_bytes(self) -> bytes:
        """Sums as an update; parse() reads them. Of a symmetric block a half is written."""
        d, k = self.gradient.shape
        upper = self.information[:, *np.triu_indices(d)]
        numbers = (np.array([self.loss]), self.gradient, self.totals, self.squares, upper)
        flat = np.concatenate([part.ravel() for part in numbers])
        return _MAGIC + _HEAD.pack(self.num_rows, d, k) + flat.astype("<f8").tobytes()

    @classmethod
    def parse(cls, data: bytes, shape: tuple[int, int]) -> Self:
        """Read sums at coefficients of this shape. Raises InvalidSums."""
        d, k = shape
        start = len(_MAGIC) + _HEAD.size
        if not data.startswith(_MAGIC) or len(data) < start:
            raise InvalidSums("the bytes are no sums of gradients")
        num_rows, *found = _HEAD.unpack_from(data, len(_MAGIC))
        if found != [d, k]:
            raise InvalidSums(
                f"the sums are of {found[0]} features and {found[1]} scores, and the model has {d} "
                f"and {k}"
            )
        if len(data) != (expected := start + 8 * num_numbers(shape)):
            raise InvalidSums(f"the sums have {len(data)} bytes, expected were {expected}")
        flat = np.frombuffer(data, "<f8", offset=start).astype(np.float64)
        if not np.isfinite(flat).all():
            raise InvalidSums("the sums are not all finite")
        loss, rest = float(flat[0]), flat[1:]
        gradient, rest = rest[: d * k].reshape(d, k), rest[d * k :]
        totals, squares, upper = rest[:d], rest[d : 2 * d], rest[2 * d :]
        information = np.zeros((num_blocks(k), d, d))
        rows, columns = np.triu_indices(d)
        information[:, rows, columns] = upper.reshape(num_blocks(k), -1)
        information[:, columns, rows] = information[:, rows, columns]
        if loss < 0 or (squares < 0).any():
            raise InvalidSums("a sum of losses or squares is negative")
        return cls(num_rows, loss, gradient, totals, squares, information)


def num_blocks(num_scores: int) -> int:
    """Blocks of an information matrix that are sent."""
    return num_scores * (num_scores + 1) // 2


def _pairs(num_scores: int) -> Iterator[tuple[int, int]]:
    """The scores of each block, in their order."""
    return ((a, b) for a in range(num_scores) for b in range(a, num_scores))


def num_numbers(shape: tuple[int, int]) -> int:
    """Numbers in the sums at coefficients of this shape."""
    d, k = shape
    return 1 + d * k + 2 * d + num_blocks(k) * d * (d + 1) // 2


def sums_of(
    loss: Loss,
    features: Array,
    target: NDArray[Any],
    coefficients: Array,
    rows_weigh: Array | None = None,
) -> Sums:
    """Sums over the rows of a site.

    features: (n, d). target: (n,) numbers for "squared", positions of classes for the others.
    coefficients: (d, k), k = 1 but for "multinomial".
    rows_weigh: (n,) in the loss; None: 1 each.
    """
    scores = features @ coefficients
    match loss:
        case "squared":
            losses, derivatives = squared_loss(scores, target)
            weights = np.ones((1, len(features)))
        case "binomial":
            losses, derivatives = binomial_loss(scores, target)
            second = softmax(scores)
            weights = np.prod(second, axis=1)[np.newaxis]
        case "multinomial":
            losses, derivatives = multinomial_loss(scores, target)
            shares = softmax(scores)
            pairs = _pairs(shares.shape[1])
            weights = np.stack([shares[:, a] * ((a == b) - shares[:, b]) for a, b in pairs])
    if rows_weigh is not None:
        losses, derivatives = losses * rows_weigh, derivatives * rows_weigh[:, np.newaxis]
        weights = weights * rows_weigh
    return Sums(
        len(features),
        float(losses.sum()),
        features.T @ derivatives,
        features.sum(axis=0),
        np.square(features).sum(axis=0),
        np.stack([(features.T * weight) @ features for weight in weights]),
    )


@dataclass(frozen=True, slots=True, eq=False)
class Fit:
    """Coefficients (d, k) of a linear model that is being fitted. step: that led to them.

    objective: penalised loss of a row before the step; infinite before the first one.
    """

    coefficients: Array
    step: Array
    objective: float = inf

    @classmethod
    def start(cls, shape: tuple[int, int]) -> Self:
        """All coefficients are zero."""
        return cls(np.zeros(shape), np.zeros(shape))


def stepped(fit: Fit, sums: Iterable[Sums], penalty: float) -> Fit:
    """The fit after the next step, from the sums of all sites at its coefficients.

    penalty: weight of half the squared coefficients of features in units of their standard
        deviation, beside the sum of losses. The last feature is the constant 1, which has none.
    A step after which the objective was larger is halved instead.
    """
    total = _added(sums)
    d, k = fit.coefficients.shape
    n = max(total.num_rows, 1)
    variances = np.maximum(total.squares / n - np.square(total.totals / n), 0.0)
    # A feature that is constant in these rows keeps the coefficient 0.
    is_constant = variances <= 1e-12 * np.maximum(total.squares / n, 1e-12)
    penalties = penalty * np.where(is_constant, 1.0, variances)
    penalties[-1] = 1e-8 * n
    objective = total.loss + float(penalties @ np.square(fit.coefficients).sum(axis=1)) / 2
    objective /= n
    if objective > fit.objective + _ROUNDING * abs(fit.objective):
        half = fit.step / 2
        return Fit(fit.coefficients - half, half, fit.objective)
    gradient = total.gradient + penalties[:, np.newaxis] * fit.coefficients
    hessian = np.zeros((k, d, k, d))
    for (a, b), block in zip(_pairs(k), total.information, strict=True):
        hessian[a, :, b, :] = hessian[b, :, a, :] = block
    for a in range(k):
        hessian[a, range(d), a, range(d)] += penalties
    flat = np.linalg.solve(hessian.reshape(k * d, k * d), -gradient.T.ravel())
    step = np.asarray(flat.reshape(k, d).T, np.float64)
    return Fit(fit.coefficients + step, step, objective)


def _added(sums: Iterable[Sums]) -> Sums:
    """The sums one after the other, in the order given, so that one is in memory at a time."""
    parts = iter(sums)
    total = next(parts)
    for part in parts:
        total = Sums(
            total.num_rows + part.num_rows,
            total.loss + part.loss,
            total.gradient + part.gradient,
            total.totals + part.totals,
            total.squares + part.squares,
            total.information + part.information,
        )
    return total
