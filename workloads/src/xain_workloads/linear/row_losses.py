"""Losses of single rows, by which two models are compared on the same rows.

The mean of the rows' differences is the difference of the two figures, and their variance that of a
paired comparison. AUC and balanced accuracy, by which models with class weights are compared, are
no means over rows; their rows have pseudo-values, whose mean is the figure, and whose variance is
that of DeLong et al. 1988, or of a mean of shares.
"""

import numpy as np
from numpy.typing import NDArray

from xain_workloads.class_weights import KEY as CLASS_WEIGHTS_KEY
from xain_workloads.measures.tallies import SMALLEST
from xain_workloads.model import Model
from xain_workloads.supervised import Array, classes_of, coded_target
from xain_workloads.tables.dataset import Dataset
from xain_workloads.workload import Workload

_MIN_ROWS = 2  # of a class, and of all others, so that they have a variance


def row_losses(workload: Workload, model: Model, rows: Dataset) -> Array | None:
    """(n,) losses of the rows; None if too few of them are of a class. rows: prepared.

    Squared errors in the target's unit, log losses, or, without probabilities, 1 for each row whose
    class is not predicted. Of a model whose rows weigh by their class: 1 less AUC, or less the
    balanced accuracy without probabilities.
    """
    if CLASS_WEIGHTS_KEY not in model.metadata:
        return single_losses(workload, model, rows)
    shares = workload.probabilities(model, rows.features)
    codes = _codes(model, rows)
    if shares is None:
        return _by_recall(_is_right(workload, model, rows), codes)
    return _by_auc(shares, codes)


def single_losses(workload: Workload, model: Model, rows: Dataset) -> Array:
    """(n,) losses, each of which depends on no other row: squared errors in the target's unit, log
    losses, or, without probabilities, 1 for each row whose class is not predicted."""
    if rows.task == "regression":
        return np.asarray(np.square(rows.target - workload.predict(model, rows.features)))
    shares = workload.probabilities(model, rows.features)
    if shares is None:
        return 1 - _is_right(workload, model, rows)
    codes = _codes(model, rows)
    of_target = np.clip(shares[np.arange(len(codes)), codes], SMALLEST, 1 - SMALLEST)
    return np.asarray(-np.log(of_target))


def _codes(model: Model, rows: Dataset) -> NDArray[np.int64]:
    classes = classes_of("classification", model.metadata)
    return np.asarray(coded_target("classification", classes, rows), np.int64)


def _is_right(workload: Workload, model: Model, rows: Dataset) -> Array:
    return np.asarray(workload.predict(model, rows.features) == rows.target, np.float64)


def _by_auc(shares: Array, codes: NDArray[np.int64]) -> Array | None:
    """(n,) pseudo-values of 1 less AUC, the mean over classes against the rest if they are more
    than two; None if no class has rows enough. shares: (n, k)."""
    num_classes = shares.shape[1]
    values = []
    for number in range(1, 2) if num_classes == 2 else range(num_classes):
        is_of = codes == number
        if min(np.count_nonzero(is_of), np.count_nonzero(~is_of)) < _MIN_ROWS:
            continue
        of_class, of_others = shares[is_of, number], shares[~is_of, number]
        in_order = np.empty(len(codes))  # shares of the rows on the other side that are in order
        in_order[is_of] = _share_below(of_others, of_class)
        in_order[~is_of] = 1 - _share_below(of_class, of_others)
        values.append(_pseudo(in_order, is_of))
    return None if not values else np.asarray(1 - np.mean(values, axis=0))


def _by_recall(is_right: Array, codes: NDArray[np.int64]) -> Array | None:
    """(n,) pseudo-values of 1 less the balanced accuracy; None if no class has rows enough."""
    n, found = len(codes), []
    for number in np.unique(codes):
        is_of = codes == number
        if (rows := np.count_nonzero(is_of)) < _MIN_ROWS:
            continue
        recall = is_right[is_of].mean()
        found.append(recall + is_of * (n / rows) * (is_right - recall))
    return None if not found else np.asarray(1 - np.mean(found, axis=0))


def _pseudo(in_order: Array, is_of: NDArray[np.bool_]) -> Array:
    auc, n = in_order[is_of].mean(), len(in_order)
    weights = np.where(is_of, n / np.count_nonzero(is_of), n / np.count_nonzero(~is_of))
    return np.asarray(auc + weights * (in_order - auc))


def _share_below(values: Array, limits: Array) -> Array:
    """For each limit the share of the values below it, and half of those that are equal."""
    values = np.sort(values)
    below = np.searchsorted(values, limits, "left") + np.searchsorted(values, limits, "right")
    return np.asarray(below / (2 * len(values)))
