"""Tallies of a script's own predictions."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xain.weights import as_array
from xain_workloads.measures.tallies import Tallies, tally_classes, tally_numbers

_SUM_TOLERANCE = 2.0**-8  # of probabilities in bfloat16: eight binary digits


def tallies_of(y_true: Any, y_pred: Any, classes: Sequence[Any] | None = None) -> Tallies:
    """Tallies of predictions for held-out rows.

    y_true: (n,). Whole numbers, truth values and texts are classes: positions from 0 on, or names
        out of `classes`, whose order must be the same at all participants. Floats are the numbers
        of a regression.
    y_pred: of a classification (n,) classes, (n,) probabilities of the second of two classes, or
        (n, k) probabilities; of a regression (n,) numbers. Both may be torch tensors.
    Raises ValueError that says what does not fit.
    """
    target, predicted = _array("y_true", y_true), _array("y_pred", y_pred)
    if target.ndim == 2 and target.shape[1] == 1:
        target = target[:, 0]
    if predicted.ndim == 2 and predicted.shape[1] == 1:
        predicted = predicted[:, 0]
    if target.ndim != 1 or predicted.ndim not in (1, 2) or len(target) != len(predicted):
        raise ValueError(
            f"round.evaluate() was given y_true of shape {target.shape} and y_pred of shape"
            f" {predicted.shape}; they must be (n,), and (n,) or (n, k)"
        )
    if not len(target):
        raise ValueError("round.evaluate() was given no rows")
    if target.dtype.kind == "f" and classes is None:
        return _of_numbers(target, predicted)
    return _of_classes(target, predicted, classes)


def _array(name: str, values: Any) -> NDArray[Any]:
    """Values as an array of numbers, truth values or texts. Raises ValueError."""
    array = as_array(values)
    if array.dtype.kind == "O":
        array = array.astype(np.str_)
    if array.dtype.kind not in "biufU":
        raise ValueError(f"round.evaluate() was given {name} of {array.dtype}")
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise ValueError(f"round.evaluate() was given {name} with a value that is not finite")
    return array


def _of_numbers(target: NDArray[Any], predicted: NDArray[Any]) -> Tallies:
    """Tallies of the predictions of a regression. Raises ValueError."""
    if predicted.ndim != 1:
        raise ValueError(
            "round.evaluate() was given floats as y_true, which are the numbers of a regression, "
            "and a matrix as y_pred; give classes as whole numbers or name them in classes=[...]"
        )
    tallies = tally_numbers(target.astype(np.float64), predicted.astype(np.float64))
    if tallies is None:
        raise ValueError("round.evaluate() was given predictions too large to be squared")
    return tallies


def _of_classes(
    target: NDArray[Any], predicted: NDArray[Any], classes: Sequence[Any] | None
) -> Tallies:
    """Tallies of predicted classes, or of probabilities. Raises ValueError."""
    names = None if classes is None else [str(name) for name in classes]
    codes = _codes("y_true", target, names)
    if predicted.dtype.kind != "f":
        guessed = _codes("y_pred", predicted, names)
        num_classes = max(2, len(names or ()), codes.max() + 1, guessed.max() + 1)
        return tally_classes(int(num_classes), codes, guessed)
    p = predicted.astype(np.float64)
    if p.ndim == 1:
        p = np.stack([1 - p, p], axis=1)
    num_classes = len(names) if names is not None else p.shape[1]
    if p.shape[1] != num_classes or codes.max() >= num_classes:
        raise ValueError(
            f"round.evaluate() was given probabilities of {p.shape[1]} classes, and y_true has "
            f"class {codes.max()} of {num_classes}; give y_true as floats for a regression"
        )
    if p.min() < 0 or np.abs(p.sum(axis=1) - 1).max() > _SUM_TOLERANCE:
        raise ValueError(
            "round.evaluate() was given y_pred that is no probability; apply softmax or the "
            "logistic function, or give the predicted classes as whole numbers"
        )
    p = p / p.sum(axis=1, keepdims=True)
    return tally_classes(num_classes, codes, p.argmax(axis=1), p)


def _codes(name: str, values: NDArray[Any], names: list[str] | None) -> NDArray[np.int64]:
    """Positions of classes: in `names`, or without names the whole numbers that they
    are. Raises ValueError."""
    if values.ndim != 1:
        raise ValueError(f"round.evaluate() was given classes as {name} of shape {values.shape}")
    if names is None:
        if values.dtype.kind == "U":
            raise ValueError(
                f"round.evaluate() was given texts as {name}; name all classes, in the same order "
                "at all participants: classes=[...]"
            )
        codes = values.astype(np.int64)
        if codes.min() < 0:
            raise ValueError(f"round.evaluate() was given class {codes.min()} in {name}")
        return codes
    position = {known: code for code, known in enumerate(names)}
    try:
        return np.array([position[str(value)] for value in values.tolist()], np.int64)
    except KeyError as error:
        raise ValueError(
            f"round.evaluate() was given {error.args[0]!r} in {name}, which is none of {names}"
        ) from None
