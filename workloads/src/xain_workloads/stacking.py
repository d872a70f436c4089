"""Stacking: a linear model of the sites' votes and of the columns, trained over the federation.

With publish = true the features of a row are the mean votes of each site's estimators, the row's
columns, and 1. At the site that fitted them, estimators vote for a row only if it was out of their
bootstraps, so that none is judged by rows that it has seen. All other rows of the federation are
new to them. With publish = false no estimator votes at another site, so the features are the
columns and 1, and predictions are halfway between the mean of the votes and the linear model.

The linear model is trained by steps of Newton's method, a round each (see newton.py).
Sources: Wolpert 1992, "Stacked generalization"; Breiman 1996, "Stacked regressions".
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from struct import Struct

import numpy as np
from numpy.typing import NDArray

from xain_workloads import held, newton
from xain_workloads.bagging_options import options_of_model
from xain_workloads.ensembles import (
    Frame,
    InvalidEnsemble,
    added,
    num_features_of,
    pack,
    split,
)
from xain_workloads.held import Holding, listed, pack_holdings, split_holdings
from xain_workloads.preprocessing import target_scale
from xain_workloads.supervised import classes_of, softmax

Array = NDArray[np.float64]

MAX_NUMBERS = 2_000_000  # of the sums of a site: 16 MB
PENALTY = 10.0  # see docs/bagging.md

_MAGIC = b"XENSTACK"
_HEAD = Struct("<IIId")  # rounds that fitted estimators, features, scores, objective


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
    def num_scores(self) -> int:
        """Scores, and features that a site's votes are. The share of the first of two classes
        follows from that of the second."""
        return self.num_classes if self.num_classes > 2 else 1

    @property
    def coefficients(self) -> tuple[int, int]:
        """(features with the constant, scores)."""
        return self.num_sites * self.num_scores + self.num_columns + 1, self.num_scores

    @property
    def loss(self) -> newton.Loss:
        if not self.num_classes:
            return "squared"
        return "binomial" if self.num_classes == 2 else "multinomial"


def shape_of(num_sites: int, num_classes: int, num_columns: int) -> Shape | None:
    """The richest linear model whose sums are not too large; None if there is none, as with more
    than some 50 classes. num_sites: 0 if no estimator votes at another site."""
    shapes = [
        Shape(num_sites, num_classes, num_columns),
        Shape(min(num_sites, 1), num_classes, num_columns),
        Shape(num_sites, num_classes, 0),
        Shape(min(num_sites, 1), num_classes, 0),
    ]
    for shape in shapes if num_sites else shapes[:1]:
        if newton.num_numbers(shape.coefficients) <= MAX_NUMBERS:
            return shape
    return None


@dataclass(frozen=True, slots=True, eq=False)
class Stack:
    """An ensemble, and the linear model of stacked votes.

    frames: the estimators. holdings: those that stay at their participants.
    num_fitted: rounds that have fitted estimators. fit: of the linear model; None before its first
    step, when the votes count alone.
    """

    frames: tuple[Frame, ...] = ()
    holdings: tuple[Holding, ...] = ()
    num_fitted: int = 0
    fit: newton.Fit | None = None

    @classmethod
    def parse(cls, data: bytes) -> "Stack":
        """Read the vector of a model. Raises InvalidEnsemble."""
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
            raise InvalidEnsemble(f"{len(tail)} bytes that are no linear model follow the ensemble")
        num_fitted, d, k, objective = _HEAD.unpack_from(tail, len(_MAGIC))
        if len(tail) != start + 16 * d * k:
            raise InvalidEnsemble("the linear model of the ensemble has another size than it says")
        numbers = np.frombuffer(tail, "<f8", offset=start).astype(np.float64).reshape(2, d, k)
        fit = newton.Fit(numbers[0], numbers[1], objective) if d else None
        return cls(tuple(frames), tuple(holdings), num_fitted, fit)

    def to_bytes(self, *, is_held: bool) -> bytes:
        """The vector of a model, whose estimators stay at their participants or not. The linear
        model is behind them: its size, its objective, its coefficients and its last step."""
        body = pack_holdings(self.holdings) if is_held else pack(self.frames)
        if not self.num_fitted:
            return body
        if self.fit is None:
            return body + _MAGIC + _HEAD.pack(self.num_fitted, 0, 0, 0.0)
        d, k = self.fit.coefficients.shape
        numbers = np.stack([self.fit.coefficients, self.fit.step]).astype("<f8").tobytes()
        return body + _MAGIC + _HEAD.pack(self.num_fitted, d, k, self.fit.objective) + numbers

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
        """The linear model and its coefficients; None before its first step.

        Raises InvalidEnsemble if it is of another ensemble.
        """
        if self.fit is None:
            return None
        shape, coefficients = self.due(metadata), self.fit.coefficients
        if shape is None or coefficients.shape != shape.coefficients:
            raise InvalidEnsemble("the linear model of the ensemble is of other estimators")
        return shape, coefficients


def next_model(
    before: bytes, updates: Iterable[tuple[str, bytes, int]], metadata: Mapping[str, str]
) -> bytes:
    """The model after a round: with the estimators of all updates, or with the next step of the
    linear model.

    updates: participant, bytes and number of samples, in the order of the participants' names.
    metadata: of the model. Raises InvalidEnsemble.
    """
    stack = Stack.parse(before)
    options = options_of_model(metadata)
    is_held = not options.publish
    if (shape := stack.due(metadata)) is not None:
        fit = stack.fit or newton.Fit.start(shape.coefficients)
        sums = (parsed(data, shape) for _, data, _ in updates)
        fit = newton.stepped(fit, sums, PENALTY)
        return replace(stack, fit=fit).to_bytes(is_held=is_held)
    num_fitted = stack.num_fitted + 1 if options.is_stacked else 0
    if is_held:
        stack = Stack((), (*stack.holdings, *listed(updates)), num_fitted)
    else:
        frames = added((data, num_samples) for _, data, num_samples in updates)
        stack = Stack((*stack.frames, *frames), (), num_fitted)
        if options.is_stacked and not all(frame.owner for frame in stack.frames):
            raise InvalidEnsemble(
                "the ensemble has estimators of version 0.1, which do not tell whose they are, as a"
                ' linear model of votes must know: vote = "soft" goes on with them'
            )
    return stack.to_bytes(is_held=is_held)


def parsed(data: bytes, shape: Shape) -> newton.Sums:
    """The sums in an update. Raises InvalidEnsemble."""
    try:
        return newton.Sums.parse(data, shape.coefficients)
    except newton.InvalidSums as error:
        raise InvalidEnsemble(str(error)) from None


def features_of(votes: Array, rows: Array, shape: Shape) -> Array:
    """(n, d) features of the linear model.

    votes: (n, num_sites, k) mean votes, k classes, or 1 for regression. rows: (n, p).
    """
    told = votes[:, :, 1:] if shape.num_classes == 2 else votes
    columns = rows[:, : shape.num_columns]
    flat = told.reshape(len(rows), told.shape[1] * told.shape[2])
    return np.hstack([flat, columns, np.ones((len(rows), 1))])


def halfway(votes: Array, rows: Array, stack: Stack, metadata: Mapping[str, str]) -> Array:
    """Predictions halfway between votes and a linear model of the columns; the votes alone where
    there is no linear model.

    votes: (n, k) mean probabilities of k classes, or (n, 1) predictions. rows: (n, p).
    """
    linear = stack.linear(metadata)
    if linear is None:
        return votes
    shape, coefficients = linear
    scores = features_of(np.zeros((len(rows), 0, 1)), rows, shape) @ coefficients
    if shape.num_classes:
        return (votes + softmax(scores)) / 2
    scale = target_scale(metadata)
    return (votes + scores * scale.scale + scale.center) / 2
