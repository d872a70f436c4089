"""Stacking: a linear model of the sites' votes and of the columns, trained over the federation.

With publish = true the features of a row are the mean votes of each site's estimators, the row's
columns, and 1. At the site that fitted them, estimators vote for a row only if it was out of their
bootstraps, so that none is judged by rows that it has seen. All other rows of the federation are
new to them. With publish = false no estimator votes at another site, so the features are the
columns and 1, and predictions are halfway between the mean of the votes and the linear model.

The linear model is trained by penalised steps of Newton's method, a round each (see newton.py).
Sources: Wolpert 1992, "Stacked generalization"; Breiman 1996, "Stacked regressions".
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from struct import Struct

import numpy as np
from numpy.typing import NDArray

from xain_workloads.ensembles import held
from xain_workloads.ensembles.bagging_options import options_of_model
from xain_workloads.ensembles.ensembles import (
    Frame,
    added,
    num_features_of,
    pack,
    split,
)
from xain_workloads.ensembles.held import Holding, listed, pack_holdings, split_holdings
from xain_workloads.errors import InvalidContent
from xain_workloads.linear.glm.families import num_totals
from xain_workloads.linear.glm.options import LINEAR, LOGISTIC
from xain_workloads.linear.newton import (
    Fit,
    check_sums,
    factored,
    halved,
    has_risen,
    layout_of,
    solved,
    summed,
)
from xain_workloads.model import Layout, Vector
from xain_workloads.supervised import classes_of, softmax
from xain_workloads.tables.preprocessing import target_scale

Array = NDArray[np.float64]

MAX_NUMBERS = 2_000_000  # of the sums of a site: 16 MB
PENALTY = 10.0  # see docs/bagging.md

_MAGIC = b"XENSTACK"
_HEAD = Struct("<II")  # rounds that fitted estimators, numbers of the linear model
_SUMS_MAGIC = b"XENSUMS2"
_LEAST_LEFT = 1e-14  # see newton.factored()


@dataclass(frozen=True, slots=True)
class Shape:
    """Features and scores of the linear model.

    num_sites: whose votes are features of their own; 1 for the votes of all estimators together, 0
        if no votes are features.
    num_classes: 0 for regression. num_columns: of a row; 0 if they are no features.
    """

    num_sites: int
    num_classes: int
    num_columns: int

    @property
    def num_votes(self) -> int:
        """Features that a site's votes are. The share of the first of two classes follows from that
        of the second."""
        return self.num_classes if self.num_classes > 2 else 1

    @property
    def num_features(self) -> int:
        """Votes and columns."""
        return self.num_sites * self.num_votes + self.num_columns

    @property
    def family(self) -> str:
        """Family of the linear model; see glm/families.py."""
        return LOGISTIC if self.num_classes else LINEAR

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Blocks of parameters, parameters of a block, and sums of the target."""
        blocks = max(self.num_classes - 1, 1)
        return blocks, self.num_features + 1, num_totals(self.family, self.num_classes)

    @property
    def layout(self) -> Layout:
        """Layout of the sums that a site sends."""
        return layout_of(*self.sizes)

    @property
    def num_numbers(self) -> int:
        """Numbers in the sums of a site."""
        return sum(spec.size for spec in self.layout)


@dataclass(frozen=True, slots=True, eq=False)
class Linear:
    """The linear model while it is trained. Its fit has no information matrix.

    penalties: (num_features + 1,) weights of half the squared parameters of a block beside the sum
    of losses, that of the constant is 0. They follow from the rows of the first step.
    """

    fit: Fit
    penalties: Array

    @classmethod
    def start(cls, shape: Shape) -> "Linear":
        """All parameters are zero."""
        blocks, width, totals = shape.sizes
        return cls(Fit.at(np.zeros((blocks, width)), totals), np.zeros(width))

    def to_array(self) -> Array:
        """Write the linear model as one array of numbers, float64."""
        fit = self.fit
        figures = [fit.rows, fit.deviance, fit.halvings]
        parts = fit.point.ravel(), fit.before.ravel(), self.penalties, fit.totals, figures
        return np.concatenate(parts)

    @classmethod
    def of(cls, numbers: Array, shape: Shape) -> "Linear":
        """Read the linear model from its numbers in a file. Raises InvalidContent if there are
        other numbers than the model has."""
        blocks, width, totals = shape.sizes
        m = blocks * width
        ends = np.cumsum([m, m, width, totals])
        if len(numbers) != ends[-1] + 3:
            raise InvalidContent("the linear model of the ensemble is of other estimators")
        point, before, penalties, of_target, figures = np.split(numbers, ends)
        rows, deviance, halvings = figures.tolist()
        fit = replace(
            Fit.at(point.reshape(blocks, width), totals),
            before=before.reshape(blocks, width),
            totals=of_target,
            rows=rows,
            deviance=deviance,
            halvings=halvings,
        )
        return cls(fit, penalties)

    def coefficients(self, num_classes: int) -> Array:
        """(num_features + 1, k) coefficients of the scores of k classes, or of one score for two
        classes and for regression; that of the constant comes last."""
        found = np.roll(self.fit.point, -1, axis=1).T
        if num_classes <= 2:
            return found
        return np.concatenate([np.zeros_like(found[:, :1]), found], axis=1)

    def stepped(self, layout: Layout, updates: Iterable[Vector]) -> "Linear":
        """Take a Newton step by the sums of all sites, or halve the last one if loss has risen."""
        model, penalties = self.fit, self.penalties
        here = summed(model, layout, updates)
        if not model.rows:
            penalties = _penalties(here)
        blocks = len(model.point)
        # The first of k classes has no block. The penalty is that of k blocks which add up to 0.
        shared = 1 / (blocks + 1) if blocks > 1 else 0.0
        pull = (model.point - shared * model.point.sum(axis=0)) * penalties
        here = replace(
            here,
            deviance=here.deviance + float(np.sum(model.point * pull)),
            score=here.score - pull.ravel(),
            information=here.information + np.kron(np.eye(blocks) - shared, np.diag(penalties)),
        )
        if has_risen(model, here):
            return Linear(halved(model), penalties)
        m = model.point.size
        lower, kept = factored(here.information, np.arange(m), _LEAST_LEFT, np.zeros(m))
        values = solved(lower, kept, here.score).reshape(model.point.shape)
        return Linear(replace(here, before=model.point, point=model.point + values), penalties)


def _penalties(here: Fit) -> Array:
    """Penalties by the variances of the features in rows that all weigh the same, as they do at a
    model of zeros."""
    width = here.point.shape[1]
    block = here.information[:width, :width]
    weight = block[0, 0] or 1.0
    means, squares = block[0] / weight, np.diagonal(block) / weight
    variances = np.maximum(squares - np.square(means), 0.0)
    # A feature that is constant in these rows keeps the coefficient 0.
    is_constant = variances <= 1e-12 * np.maximum(squares, 1e-12)
    penalties = PENALTY * np.where(is_constant, 1.0, variances)
    penalties[0] = 0.0
    return penalties


def shape_of(num_sites: int, num_classes: int, num_columns: int) -> Shape | None:
    """The richest linear model whose sums are not too large; None if there is none, as with more
    than some 40 classes. num_sites: 0 if no estimator votes at another site."""
    shapes = [
        Shape(num_sites, num_classes, num_columns),
        Shape(min(num_sites, 1), num_classes, num_columns),
        Shape(num_sites, num_classes, 0),
        Shape(min(num_sites, 1), num_classes, 0),
    ]
    for shape in shapes if num_sites else shapes[:1]:
        if shape.num_numbers <= MAX_NUMBERS:
            return shape
    return None


@dataclass(frozen=True, slots=True, eq=False)
class Stack:
    """An ensemble, and the linear model of stacked votes.

    frames: the estimators. holdings: those that stay at their participants.
    num_fitted: rounds that have fitted estimators. numbers: of the linear model, see Linear; empty
    before its first step, when the votes count alone.
    """

    frames: tuple[Frame, ...] = ()
    holdings: tuple[Holding, ...] = ()
    num_fitted: int = 0
    numbers: Array = field(default_factory=lambda: np.zeros(0))

    @classmethod
    def parse(cls, data: bytes) -> "Stack":
        """Read the vector of a model. Raises InvalidContent."""
        frames: list[Frame] = []
        holdings: list[Holding] = []
        if held.is_list(data):
            holdings, tail = split_holdings(data)
        else:
            frames, tail = split(data)
        if not tail:
            return cls(tuple(frames), tuple(holdings))
        start = len(_MAGIC) + _HEAD.size
        if not tail.startswith(_MAGIC) or len(tail) < start:
            raise InvalidContent(f"{len(tail)} bytes that are no linear model follow the ensemble")
        num_fitted, length = _HEAD.unpack_from(tail, len(_MAGIC))
        if len(tail) != start + 8 * length:
            raise InvalidContent("the linear model of the ensemble has another size than it says")
        numbers = np.frombuffer(tail, "<f8", offset=start).astype(np.float64)
        return cls(tuple(frames), tuple(holdings), num_fitted, numbers)

    def to_bytes(self, *, is_held: bool) -> bytes:
        """The vector of a model, whose estimators stay at their participants or not. The linear
        model is behind them."""
        body = pack_holdings(self.holdings) if is_held else pack(self.frames)
        if not self.num_fitted:
            return body
        head = _MAGIC + _HEAD.pack(self.num_fitted, len(self.numbers))
        return body + head + self.numbers.astype("<f8").tobytes()

    @property
    def owners(self) -> tuple[int, ...]:
        """The participants that fitted `frames`, each once, in the order of the frames."""
        return tuple(dict.fromkeys(frame.owner for frame in self.frames))

    def due(self, metadata: Mapping[str, str]) -> Shape | None:
        """The linear model that the next round trains; None if the round fits estimators.

        metadata: of the model.
        """
        options = options_of_model(metadata)
        if not options.is_stacked or self.num_fitted < options.fit_rounds:
            return None
        num_classes = len(classes_of(options.task, metadata))
        return shape_of(len(self.owners), num_classes, num_features_of(metadata))

    def linear(self, metadata: Mapping[str, str]) -> tuple[Shape, Array] | None:
        """The linear model and its coefficients; None before its first step. Raises InvalidContent
        if it is of another ensemble."""
        if not len(self.numbers):
            return None
        shape = self.due(metadata)
        if shape is None:
            raise InvalidContent("the linear model of the ensemble is of other estimators")
        return shape, Linear.of(self.numbers, shape).coefficients(shape.num_classes)

    def training(self, shape: Shape) -> Linear:
        """The linear model that is trained. Raises InvalidContent if it is of another ensemble."""
        return Linear.of(self.numbers, shape) if len(self.numbers) else Linear.start(shape)


def next_model(
    stack: Stack, updates: Iterable[tuple[str, bytes, int]], metadata: Mapping[str, str]
) -> bytes:
    """The model after a round: with the estimators of all updates, or with the next step of the
    linear model.

    stack: the model before. updates: participant, bytes and number of samples, in the order of the
    participants' names. metadata: of the model. Raises InvalidContent for an update.
    """
    options = options_of_model(metadata)
    is_held = not options.publish
    if (shape := stack.due(metadata)) is not None:
        sums = (unpack_sums(data, shape) for _, data, _ in updates)
        linear = stack.training(shape).stepped(shape.layout, sums)
        return replace(stack, numbers=linear.to_array()).to_bytes(is_held=is_held)
    num_fitted = stack.num_fitted + 1 if options.is_stacked else 0
    if is_held:
        stack = Stack((), (*stack.holdings, *listed(updates)), num_fitted)
    else:
        frames = added((data, num_samples) for _, data, num_samples in updates)
        stack = Stack((*stack.frames, *frames), (), num_fitted)
        if options.is_stacked and not all(frame.owner for frame in stack.frames):
            raise InvalidContent(
                "the ensemble has estimators of version 0.1, which do not tell whose they are, as a"
                ' linear model of votes must know: vote = "soft" goes on with them'
            )
    return stack.to_bytes(is_held=is_held)


def pack_sums(sums: Fit) -> bytes:
    """Sums as an update; unpack_sums() reads them."""
    return _SUMS_MAGIC + sums.to_vector().astype("<f8").tobytes()


def unpack_sums(data: bytes, shape: Shape) -> Vector:
    """Read the sums in an update. Raises InvalidContent if no rows could have them."""
    start = len(_SUMS_MAGIC)
    if not data.startswith(_SUMS_MAGIC):
        raise InvalidContent("the bytes are no sums of gradients")
    if len(data) != (expected := start + 8 * shape.num_numbers):
        raise InvalidContent(f"the sums have {len(data)} bytes, expected were {expected}")
    vector = np.frombuffer(data, "<f8", offset=start).astype(np.float64)
    try:
        check_sums(vector, shape.layout, least_rows=0)
    except InvalidContent as error:
        raise InvalidContent(str(error)) from None
    return vector


def features_of(votes: Array, rows: Array, shape: Shape) -> Array:
    """(n, num_features) features of the linear model.

    votes: (n, num_sites, k) mean votes, k classes, or 1 for regression. rows: (n, p).
    """
    told = votes[:, :, 1:] if shape.num_classes == 2 else votes
    columns = rows[:, : shape.num_columns]
    flat = told.reshape(len(rows), told.shape[1] * told.shape[2])
    return np.hstack([flat, columns])


def scores_of(features: Array, coefficients: Array) -> Array:
    """(n, k) scores of the linear model, whose constant is the last of its coefficients."""
    return np.asarray(features @ coefficients[:-1] + coefficients[-1])


def halfway(votes: Array, rows: Array, stack: Stack, metadata: Mapping[str, str]) -> Array:
    """Average votes and the predictions of a linear model of the columns; the votes alone where
    there is no linear model.

    votes: (n, k) mean probabilities of k classes, or (n, 1) predictions. rows: (n, p).
    """
    linear = stack.linear(metadata)
    if linear is None:
        return votes
    shape, coefficients = linear
    scores = scores_of(features_of(np.zeros((len(rows), 0, 1)), rows, shape), coefficients)
    if shape.num_classes:
        return (votes + softmax(scores)) / 2
    scale = target_scale(metadata)
    return (votes + scores * scale.scale + scale.center) / 2
