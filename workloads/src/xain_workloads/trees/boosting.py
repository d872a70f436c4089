"""Gradient-boosted trees by XGBoost.

A model is the JSON of a booster, as bytes. In the mode "histogram" a participant sends sums of
gradients in every round, and the coordinator grows the trees of all rows by one level (see
growing.py). In the modes "bagging" and "cyclic" a participant boosts the global booster by `epochs`
iterations on its own rows and sends the new trees alone. The coordinator appends the trees of all
participants, each scaled by the participant's share of rows (see trees.joined).
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from json import dumps
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from xain_workloads.class_weights import class_weights, row_weights
from xain_workloads.errors import DataError
from xain_workloads.measures.tallies import tally_classes, tally_numbers
from xain_workloads.model import Model
from xain_workloads.options import from_mapping, to_text
from xain_workloads.supervised import (
    Array,
    Measured,
    classes_of,
    classes_to_learn,
    coded_target,
    cross_entropy,
    epoch_seed,
    regression_metrics,
    require_training,
    require_width,
)
from xain_workloads.tables.dataset import Dataset
from xain_workloads.tables.preprocessing import preprocessing_of, target_center
from xain_workloads.tables.profile import DataProfile, union
from xain_workloads.tables.reading.statistics_json import from_json
from xain_workloads.trees import histograms, trees
from xain_workloads.trees.boosting_options import HISTOGRAM, BoostingOptions
from xain_workloads.trees.trees import BoosterKind
from xain_workloads.workload import TrainResult

_DEFAULTS = BoostingOptions()
_NOT_OF_XGBOOST = ("mode", "task", "class_weight")


@dataclass(frozen=True, slots=True)
class BoostingWorkload:
    """Gradient-boosted trees. The vector of a Model is bytes (uint8) without a layout; its metadata
    hold "classes" as those of the workload "sgd" do, and what all boosters have in common."""

    options: BoostingOptions = _DEFAULTS
    name: ClassVar[str] = "xgboost"
    scaling: ClassVar[str] = "none"  # a split depends on the order of values only
    missing: ClassVar[str] = "keep"  # a split has a direction for missing values
    needed: ClassVar[tuple[str, ...]] = ("xgboost",)

    @classmethod
    def from_options(cls, options: Mapping[str, object]) -> Self:
        """The workload with these options. Raises ValueError that names an option that is unknown
        or wrong."""
        return cls(from_mapping(BoostingOptions, options, workload=cls.name))

    def initial_model(
        self, profiles: Sequence[DataProfile], metadata: Mapping[str, str] | None = None
    ) -> Model:
        """A booster without trees, made without xgboost.

        It predicts what XGBoost starts from: the shares of the classes over all sites, or
        target_center() for regression. Without statistics these are equal shares, and 0.
        Classification needs two classes in all profiles.
        """
        given = metadata or {}
        profile = union(profiles)
        classes = classes_to_learn(self.options.task, profile)
        if trees.KEY in given:
            kind = BoosterKind.from_metadata(given)
        else:
            kind = _kind(classes, profile.num_features, profiles, given)
        made = {
            "workload": self.name,
            "options": to_text(self.options, later=("mode", "class_weight")),
            "classes": dumps(list(classes)),
            trees.KEY: kind.to_json(),
        }
        if self.options.mode == HISTOGRAM:
            made[histograms.KEY] = given.get(histograms.KEY) or self._fitted_bins(profiles, given)
        return Model(_vector(trees.empty_booster(kind)), (), made)

    def _fitted_bins(self, profiles: Sequence[DataProfile], given: Mapping[str, str]) -> str:
        known = [profile for profile in profiles if profile.num_samples > 0]
        return histograms.fit_bins(known, preprocessing_of(given), self.options).to_text()

    def train(
        self, model: Model, data: Dataset, *, epochs: int, epoch_base: int, seed: int
    ) -> TrainResult:
        """Add trees of the local rows; see Workload.train. The vector holds the new trees alone,
        `epochs` iterations, or in the mode "histogram" the histograms that one level of trees is
        grown from, float64 as bytes.

        Metrics: as of measure(), of the model with the new trees. In the mode "histogram" they are
        of the model that was given, since the coordinator grows the trees.
        """
        require_training(epochs, epoch_base, seed)
        xgboost = _xgboost()
        classes, kind = self._open(model)
        matrix, target = self._matrix(kind, classes, data)
        weights = row_weights(model.metadata, len(classes), target)
        if self.options.mode == HISTOGRAM:
            sums, predicted = self._sums(model, kind, data, matrix, target, weights, seed)
            metrics = self._metrics(predicted, target)
            return TrainResult(_vector(sums.astype("<f8").tobytes()), data.num_samples, metrics)
        options = asdict(self.options)
        parameters = {
            **{name: options[name] for name in options if name not in _NOT_OF_XGBOOST},
            "objective": kind.objective,
            "seed": epoch_seed(seed, epoch_base) >> 1,
            "tree_method": "hist",
            "nthread": 1,  # sums in one order: the same inputs give the same bytes
        }
        if kind.num_classes:
            parameters["num_class"] = kind.num_classes
        if weights is not None:
            matrix.set_weight(weights)
        booster = self._booster(model)
        num_before = booster.num_boosted_rounds()
        boosted = xgboost.train(parameters, matrix, num_boost_round=epochs, xgb_model=booster)
        added = boosted[num_before : num_before + epochs].save_raw("json")
        metrics = self._metrics(boosted.predict(matrix), target)
        return TrainResult(_vector(bytes(added)), data.num_samples, metrics)

    def _sums(
        self,
        model: Model,
        kind: BoosterKind,
        data: Dataset,
        matrix: Any,
        target: NDArray[Any],
        weights: Array | None,
        seed: int,
    ) -> tuple[Array, Array]:
        """Histograms of the rows for the level that is growing, and the model's predictions."""
        state = histograms.growing(model.vector.tobytes(), model.metadata)
        # An iteration_range that ends at 0 means all iterations.
        finished = model if state.iteration else Model(_vector(trees.empty_booster(kind)), ())
        margins = self._booster(finished).predict(
            matrix, output_margin=True, iteration_range=(0, state.iteration)
        )
        margins = np.asarray(margins, np.float64).reshape(-1, kind.trees_per_iteration)
        gradients, hessians = histograms.gradients_of(kind, margins, target)
        if weights is not None:
            gradients *= weights[:, np.newaxis]
            hessians *= weights[:, np.newaxis]
        if self.options.subsample < 1:  # the same rows for all levels of an iteration
            drawn = np.random.default_rng((seed, state.iteration)).random(data.num_samples)
            gradients[drawn >= self.options.subsample] = 0.0
            hessians[drawn >= self.options.subsample] = 0.0
        nodes = histograms.leaves(state, data.features)
        margins += histograms.values_of(state, nodes)
        sums = histograms.sums(state, data.features, nodes, gradients, hessians)
        return sums, histograms.predictions(kind, margins)

    def measure(self, model: Model, data: Dataset) -> Measured:
        """Metrics on data: "accuracy" and "loss", the mean cross-entropy, or "r2" and "mse"."""
        classes, kind = self._open(model)
        matrix, target = self._matrix(kind, classes, data)
        predicted = np.asarray(self._booster(model).predict(matrix), dtype=np.float64)
        if not classes:
            return Measured(self._metrics(predicted, target), tally_numbers(target, predicted))
        shares = _of_each(predicted)
        tallies = tally_classes(len(classes), target, _best(predicted), shares)
        return Measured(self._metrics(predicted, target), tallies)

    def predict(self, model: Model, features: ArrayLike) -> NDArray[Any]:
        """Predict class names or numbers, (n,). NaN stands for a missing value."""
        classes, predicted = self._predicted(model, features)
        if not classes:
            return predicted
        return np.array(classes, dtype=np.str_)[_best(predicted)]

    def probabilities(self, model: Model, features: ArrayLike) -> Array | None:
        """(n, k) probabilities of the classes; None for regression."""
        classes, predicted = self._predicted(model, features)
        if not classes:
            return None
        return _of_each(predicted)

    def _predicted(self, model: Model, features: ArrayLike) -> tuple[tuple[str, ...], Array]:
        """Predict rows: the classes; (n,) numbers or probabilities of the second class, or (n,
        k)."""
        classes, kind = self._open(model)
        try:
            rows = np.asarray(features, dtype=np.float64)
        except (TypeError, ValueError) as error:
            raise DataError(f"the features are not a matrix of numbers: {error}") from error
        predicted = self._booster(model).predict(_dmatrix(kind, rows))
        return classes, np.asarray(predicted, dtype=np.float64)

    def to_sklearn(self, model: Model) -> Any:
        """Convert a model to an XGBClassifier, which predicts positions in metadata "classes" since
        it knows no names, or to an XGBRegressor."""
        classes, _ = self._open(model)
        xgboost = _xgboost()
        estimator = xgboost.XGBClassifier() if classes else xgboost.XGBRegressor()
        estimator.load_model(bytearray(model.vector.tobytes()))
        return estimator

    def _open(self, model: Model) -> tuple[tuple[str, ...], BoosterKind]:
        """The classes of a model, and what its trees are. Raises ValueError if the model is none of
        this workload."""
        if model.vector.dtype != np.uint8:
            raise ValueError(f"a model of {model.vector.dtype} is no booster, which is bytes")
        classes = classes_of(self.options.task, model.metadata)
        return classes, BoosterKind.from_metadata(model.metadata)

    def _booster(self, model: Model) -> Any:
        """Load the booster in a model. Raises ValueError if the bytes are none."""
        xgboost = _xgboost()
        try:
            return xgboost.Booster({"nthread": 1}, model_file=bytearray(model.vector.tobytes()))
        except xgboost.core.XGBoostError as error:
            raise ValueError(f"the model is no booster: {error}") from error

    def _matrix(
        self, kind: BoosterKind, classes: tuple[str, ...], data: Dataset
    ) -> tuple[Any, NDArray[Any]]:
        """Rows as XGBoost takes them, and the target: positions in classes, or numbers."""
        target = coded_target(self.options.task, classes, data)
        return _dmatrix(kind, data.features, target), target

    def _metrics(self, predicted: Array, target: NDArray[Any]) -> dict[str, float]:
        """Accuracy and mean cross-entropy of probabilities, or regression_metrics() of numbers."""
        predicted = np.asarray(predicted, dtype=np.float64)
        if self.options.task == "regression":
            return regression_metrics(predicted, target)
        if predicted.ndim == 1:
            of_target = np.where(target == 1, predicted, 1 - predicted)
        else:
            of_target = predicted[np.arange(len(target)), target]
        return {
            "accuracy": float(np.mean(_best(predicted) == target)),
            "loss": cross_entropy(of_target),
        }


def _xgboost() -> Any:
    """Import xgboost. Raises ModuleNotFoundError that says how to install it."""
    try:
        import xgboost
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            'the workload "xgboost" needs the package xgboost: pip install xgboost',
            name=error.name,
        ) from error
    return xgboost


def _dmatrix(kind: BoosterKind, rows: Array, target: NDArray[Any] | None = None) -> Any:
    """The rows as XGBoost takes them. Raises DataError if the rows have another width than the
    model, or a value is infinite."""
    require_width(kind.num_features, rows)
    if np.isinf(rows).any():
        raise DataError("the features are not all finite; only NaN stands for a missing value")
    return _xgboost().DMatrix(rows, target, nthread=1)


def _best(probabilities: Array) -> NDArray[np.intp]:
    """(n,) of the second class or (n, k) of each to (n,) positions of classes."""
    if probabilities.ndim == 1:
        return (probabilities > 0.5).astype(np.intp)
    best: NDArray[np.intp] = np.argmax(probabilities, axis=1)
    return best


def _of_each(probabilities: Array) -> Array:
    """(n,) of the second class or (n, k) of each to (n, k) of each, whose sum is 1 in float64."""
    if probabilities.ndim == 2:
        return np.asarray(probabilities / probabilities.sum(axis=1, keepdims=True))
    return np.stack([1 - probabilities, probabilities], axis=1)


def _vector(data: bytes) -> Any:
    return np.frombuffer(data, dtype=np.uint8)


def _kind(
    classes: tuple[str, ...],
    num_features: int,
    profiles: Sequence[DataProfile],
    metadata: Mapping[str, str],
) -> BoosterKind:
    """The objective of a training, and where it starts: from the classes of all sites, or the mean
    of the target."""
    if not classes:
        return BoosterKind("reg:squarederror", num_features, 0, target_center(metadata))
    told: Counter[str] = Counter()
    for profile in profiles:
        if profile.statistics:
            told.update(from_json(profile.statistics).class_counts)
    # A class that is too rare to be told of counts as one row: a score of -inf learns nothing.
    counts = np.array([max(told[name], 1) for name in classes], np.float64)
    weights = class_weights(metadata, len(classes))
    if weights is not None:
        counts *= weights
    if len(classes) == 2:
        return BoosterKind("binary:logistic", num_features, 0, float(counts[1] / counts.sum()))
    logarithms = np.log(counts)
    scores = tuple((logarithms - logarithms.mean()).tolist())
    return BoosterKind("multi:softprob", num_features, len(classes), scores)
