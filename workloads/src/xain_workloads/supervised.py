"""Common parts of workloads for classification and regression: classes, targets and metrics."""

from collections.abc import Mapping
from dataclasses import dataclass
from json import JSONDecodeError, loads
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from xain_foundation.settings.hints import hint
from xain_workloads.errors import DataError
from xain_workloads.measures.tallies import Tallies, does_vary, tally_classes, tally_numbers
from xain_workloads.options import require_range
from xain_workloads.tables.dataset import Dataset
from xain_workloads.tables.preprocessing import target_scale
from xain_workloads.tables.profile import DataProfile
from xain_workloads.tables.reading.scales import Scale

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Measured:
    """Scores of a model on data. metrics: finite numbers by name, of these rows alone.
    tallies: None if the predictions are too far off to be squared."""

    metrics: dict[str, float]
    tallies: Tallies | None


# Larger scores are taken for divergence that has not reached infinity yet, since those of one
# participant would spoil the average of all.
DIVERGED_SCORE = 1e11
_LARGE = (
    100.0  # features and targets of this size make steps that were chosen for scaled ones too long
)
_SMALLEST_PROBABILITY = 1e-15  # so that the loss of a wrong certainty is finite


def classes_to_learn(task: str, profile: DataProfile) -> tuple[str, ...]:
    """The classes of a model for all data together; none for regression. Raises DataError if there
    are fewer than two classes."""
    if task == "regression":
        return ()
    if len(profile.classes) < 2:
        raise DataError(
            f"classification needs two classes or more; all participants together have"
            f" {len(profile.classes)}: {list(profile.classes)}"
        )
    return profile.classes


def classes_of(task: str, metadata: Mapping[str, str]) -> tuple[str, ...]:
    """The classes in the metadata of a model, none for regression. Raises ValueError."""
    try:
        classes = loads(metadata.get("classes", "null"))
    except JSONDecodeError as error:
        raise ValueError(f"the classes in the model's metadata are not JSON: {error}") from error
    if not isinstance(classes, list) or not all(isinstance(name, str) for name in classes):
        raise ValueError("the classes in the model's metadata are not a JSON list of names")
    if (task == "classification") != (len(classes) >= 2):
        raise ValueError(f"a model of {len(classes)} classes is none for {task}")
    return tuple(classes)


def num_outputs(classes: tuple[str, ...]) -> int:
    """Outputs of a model: one per class, but one for two classes and for regression."""
    return len(classes) if len(classes) > 2 else 1


def require_training(epochs: int, epoch_base: int, seed: int) -> None:
    """Raise ValueError unless the arguments of Workload.train() are in range."""
    require_range("epochs", epochs, at_least=1)
    require_range("epoch_base", epoch_base, at_least=0)
    require_range("seed", seed, at_least=0)


def epoch_seed(seed: int, epoch: int) -> int:
    """The seed of an epoch, 32 bits. Without one of its own, each epoch would walk through the rows
    in the same order."""
    return int(np.random.SeedSequence((seed, epoch)).generate_state(1)[0])


def rows_of_gradient(batch_size: int, num_rows: int, seed: tuple[int, int]) -> Any:
    """Index of the rows of a gradient: all, or a mini-batch that is drawn without repetition."""
    if not 0 < batch_size < num_rows:
        return slice(None)
    return np.random.default_rng(seed).choice(num_rows, batch_size, replace=False)


def coded_target(task: str, classes: tuple[str, ...], data: Dataset) -> NDArray[Any]:
    """(n,) positions in classes, int64, or float64 for regression.

    Raises DataError without rows, or if the data are for another task or have a label that is none
    of the classes.
    """
    if data.num_samples == 0:
        raise DataError("there are no rows")
    if data.task != task:
        raise DataError(f"the data are for {data.task}, the workload for {task}")
    if not classes:
        return data.target
    position = {name: code for code, name in enumerate(classes)}
    try:
        return np.array([position[label] for label in data.target.tolist()], dtype=np.int64)
    except KeyError as error:
        raise DataError(
            f"label {error.args[0]!r} is none of the model's classes: {list(classes)}"
        ) from None


def cause_of_divergence(metadata: Mapping[str, str], data: Dataset) -> str:
    """The column that has likely made a training diverge, and what to do; "" if none is known."""
    sizes = dict(zip(data.feature_names, np.abs(data.features).max(axis=0).tolist(), strict=True))
    if data.task == "regression":
        scale = target_scale(metadata)
        target = np.asarray(data.target, dtype=np.float64)
        sizes["the target"] = float(np.abs((target - scale.center) / scale.scale).max())
    name = max(sizes, key=lambda one: sizes[one])
    if not sizes[name] > _LARGE:
        return ""
    named = name if name == "the target" else f"column {name!r}"
    return f"likely because of {named}, whose numbers are large and not scaled: " + hint(
        "xain-coordinator", 'workload.preprocessing.scaling = "standard"'
    )


def require_width(num_features: int, features: Array) -> None:
    """Raise DataError unless the features are a matrix of this width."""
    if features.ndim != 2 or features.shape[1] != num_features:
        raise DataError(
            f"the features have shape {features.shape}, the model needs (n, {num_features})"
        )


def rows_to_predict(num_features: int, features: ArrayLike) -> Array:
    """A finite float64 matrix of this width. Raises DataError if the features are none."""
    try:
        matrix = np.asarray(features, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise DataError(f"the features are not a matrix of numbers: {error}") from error
    require_width(num_features, matrix)
    if not np.isfinite(matrix).all():
        raise DataError("the features are not all finite")
    return matrix


def best_class(scores: Array) -> NDArray[np.intp]:
    """(n, k) scores to (n,) positions of classes; of equal scores the first wins."""
    if scores.shape[1] == 1:
        return (scores[:, 0] > 0).astype(np.intp)
    best: NDArray[np.intp] = np.argmax(scores, axis=1)
    return best


def softmax(scores: Array) -> Array:
    """(n, k) scores to (n, k) probabilities; one score is the log odds of the second class of two.

    Neither overflows, and a small probability keeps its digits where the other one is close to 1.
    """
    if scores.shape[1] == 1:
        scores = np.concatenate([np.zeros_like(scores), scores], axis=1)
    exponentials = np.exp(scores - scores.max(axis=1, keepdims=True))
    return np.asarray(exponentials / exponentials.sum(axis=1, keepdims=True))


def predictions(
    scores: Array, classes: tuple[str, ...], metadata: Mapping[str, str]
) -> NDArray[Any]:
    """(n, k) scores to (n,) class names, or numbers in the unit of the target.

    metadata: of the model, which say how the target was scaled for training.
    """
    if classes:
        return np.array(classes, dtype=np.str_)[best_class(scores)]
    scale = target_scale(metadata)
    return np.asarray(scores[:, 0] * scale.scale + scale.center)


def cross_entropy(probabilities: Array) -> float:
    """The mean loss of the probabilities, (n,), that a model gave the classes of the rows."""
    return float(-np.log(np.maximum(probabilities, _SMALLEST_PROBABILITY)).mean())


def regression_metrics(predicted: Array, target: Array) -> dict[str, float]:
    """ "mse" and "r2". r2: 1 - (sum of squared errors) / (sum of squares around the mean); if the
    target does not vary, 1 for perfect predictions and 0 for others, as scikit-learn has it."""
    squared_errors = np.square(target - predicted)
    mean = float(target.mean())
    spread = float(np.square(target - mean).sum())
    total = float(squared_errors.sum())
    constant = 1.0 if total == 0 else 0.0
    return {
        "mse": float(squared_errors.mean()),
        "r2": 1 - total / spread if does_vary(len(target), mean, spread) else constant,
    }


def score_tallies(
    num_classes: int,
    scores: Array,
    target: NDArray[Any],
    scale: Scale,
    probabilities: Array | None,
) -> Tallies | None:
    """Tallies of (n, k) scores. target: (n,), as coded_target() gives it. probabilities: (n,
    classes), None if the model has none."""
    if num_classes:
        return tally_classes(num_classes, target, best_class(scores), probabilities)
    return tally_numbers(target, scores[:, 0] * scale.scale + scale.center)


def score_metrics(task: str, scores: Array, target: NDArray[Any], scale: Scale) -> dict[str, float]:
    """ "accuracy" and "loss", the mean cross-entropy, or regression_metrics() in the target's unit.

    scores: (n, k) outputs before softmax or logistic function. target: (n,), as coded_target()
    gives it.
    """
    if task == "regression":
        return regression_metrics(scores[:, 0] * scale.scale + scale.center, target)
    if scores.shape[1] == 1:
        losses = np.logaddexp(0.0, np.where(target == 1, -1.0, 1.0) * scores[:, 0])
    else:
        largest = scores.max(axis=1)
        log_sums = largest + np.log(np.exp(scores - largest[:, np.newaxis]).sum(axis=1))
        losses = log_sums - scores[np.arange(len(target)), target]
    return {
        "accuracy": float(np.mean(best_class(scores) == target)),
        "loss": float(losses.mean()),
    }
