"""Figures of a model, derived from tallies: accuracy, AUC, log loss, R2 and others, each with its
95 % interval and with what the best constant prediction would have.

Sources of the intervals: Wilson 1927 for shares of rows; DeLong et al. 1988 for AUC, from counts by
bin; the normal approximation for means of losses and errors, and by the delta method for their
square root and for R2, which is a ratio of two means (Casella and Berger 2002, section 5.5.4); for
a mean over classes the limits of the classes are combined by their squares (Zou and Donner 2008).
F1 is 2 J / (1 + J) of the share J = TP / (TP + FP + FN), whose Wilson limits are taken.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import isfinite, log, sqrt
from typing import Any

from xain_workloads.measures.tallies import (
    Tallies,
    counts_by_class,
    does_vary,
    probability_at,
    records,
)

CLASS_FIGURES = (
    "accuracy",
    "balanced_accuracy",
    "sensitivity",
    "specificity",
    "precision",
    "f1",
    "auc",
    "log_loss",
    "brier",
    "calibration_error",
)
OF_PROBABILITIES = ("auc", "log_loss", "brier", "calibration_error")
NUMBER_FIGURES = ("r2", "rmse", "mse", "mae")
# For a line of text or a column of a table, of the many that there are.
SHOWN = ("accuracy", "auc", "log_loss", "r2", "rmse")
# Figures by which models are compared unless one is named: the first that there is.
LOSSES = ("log_loss", "mse")
DEFAULTS = (*LOSSES, "balanced_accuracy")
# The same of models whose rows weigh by their class. Their probabilities are those of classes of
# equal size, so that their log loss is too high on purpose.
OF_WEIGHED_CLASSES = ("auc", "balanced_accuracy")

_Z = 1.959963984540054  # of a 95 % interval
_GROUPS = 10  # of a calibration curve
_MAX_RATIO = 1e100  # of R2, so that its square is finite


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure of a model.

    low, high: limits of the 95 % interval; None if it cannot be told.
    baseline: the figure of always predicting the commonest class, with the shares of the classes as
        probabilities, or the mean; None if it has none.
    bound: by how much the figure may differ from that of the rows themselves, because rows of one
        bin count as equal; 0 but for AUC.
    """

    value: float
    low: float | None = None
    high: float | None = None
    baseline: float | None = None
    bound: float = 0.0


def figures(tallies: Tallies) -> dict[str, Figure]:
    """Figures over all rows, by name, in the order of CLASS_FIGURES or NUMBER_FIGURES.

    For two classes sensitivity, specificity, precision, f1 and auc are those of the second class,
    for more of them the means over classes, each against the rest. A target that varies by rounding
    alone has no r2.
    """
    found = _of_regression(tallies) if tallies.num_classes == 0 else _of_classification(tallies)
    order = CLASS_FIGURES + NUMBER_FIGURES
    return {name: found[name] for name in order if name in found}


def class_figures(tallies: Tallies) -> dict[int, dict[str, Figure]]:
    """Figures of each class against the rest, by its number; empty if classes were not counted."""
    counts = counts_by_class(tallies)
    commonest = max(counts, key=lambda number: counts[number][0], default=-1)  # the first of equal
    return {
        number: _of_class(tallies, number, of_class, number == commonest)
        for number, of_class in counts.items()
    }


def metric_names(task: str, *, has_probabilities: bool) -> tuple[str, ...]:
    """Names of figures of a model of this task, and of the mean loss of a classification."""
    if task == "regression":
        return NUMBER_FIGURES
    known = (name for name in CLASS_FIGURES if has_probabilities or name not in OF_PROBABILITIES)
    return (*known, "loss")


def is_better(value: float, baseline: float, *, is_minimised: bool) -> bool:
    """Whether a figure beats a baseline."""
    return value < baseline if is_minimised else value > baseline


def roc_curve(tallies: Tallies, number: int) -> list[tuple[float, float]]:
    """Points (1 - specificity, sensitivity) for each threshold between bins, from (0, 0) to (1, 1);
    empty without scores or without rows on both sides."""
    bins = _bins(tallies, number)
    rows, others = sum(p for _, p, _ in bins), sum(q for _, _, q in bins)
    if not rows or not others:
        return []
    points, at, of = [(0.0, 0.0)], 0, 0
    for _, p, q in reversed(bins):
        at, of = at + p, of + q
        points.append((of / others, at / rows))
    return points


def calibration_curve(tallies: Tallies, number: int) -> list[tuple[float, float, int]]:
    """Mean probability, share of the class and rows of ten groups of nearly equal size, in the
    order of the probability, which is that in the middle of a bin."""
    found: list[tuple[float, float, int]] = []
    group, total, done = [0.0, 0, 0], tallies.num_rows, 0
    for p, of_class, others in _by_probability(tallies, number):
        rows = of_class + others
        group = [group[0] + p * rows, group[1] + of_class, group[2] + rows]
        done += rows
        if done * _GROUPS >= total * (len(found) + 1):
            found.append((group[0] / group[2], group[1] / group[2], int(group[2])))
            group = [0.0, 0, 0]
    return found


# --- classes --------------------------------------------------------------------------------------


def _of_classification(tallies: Tallies) -> dict[str, Figure]:
    """Compute Figures of a classification by name, with limits and baselines; of two classes, those
    of the second."""
    n, counts = tallies.num_rows, counts_by_class(tallies)
    present = {number: rows for number, (rows, _, _) in counts.items() if rows}
    found: dict[str, Figure] = {}
    most = max(present.values()) / n if present else None
    found["accuracy"] = replace(share_of(tallies.right, n), baseline=most)
    if present:
        recalls = [share_of(counts[number][2], rows) for number, rows in present.items()]
        found["balanced_accuracy"] = replace(_mean_of(recalls), baseline=1 / len(present))
    of_each = class_figures(tallies)
    if tallies.num_classes == 2:
        found |= of_each.get(1, {})
    else:
        for name in ("sensitivity", "specificity", "precision", "f1", "auc"):
            known = [one[name] for one in of_each.values() if name in one]
            if known:
                found[name] = _mean_of(known)
    shares = [rows / n for rows in present.values()]
    entropy = sum(-share * log(share) for share in shares) if shares else None
    spread = sum(share * (1 - share) for share in shares) if shares else None
    if spread is not None and tallies.num_classes == 2:
        spread /= 2
    for name, baseline in (("log_loss", entropy), ("brier", spread)):
        if name in tallies.sums:
            mean = mean_figure(tallies.sums[name], tallies.sums.get(f"{name}2"), n)
            found[name] = replace(mean, baseline=baseline)
    curves = [curve for k in range(tallies.num_classes) if (curve := calibration_curve(tallies, k))]
    if curves:
        found["calibration_error"] = _mean_of([_calibration_error(curve) for curve in curves])
    return found


def _calibration_error(curve: Sequence[tuple[float, float, int]]) -> Figure:
    """Mean difference of probability and share, over the rows of the groups of a curve.

    Its interval is that of a sum of independent shares, each by the rule of succession, so that a
    group of one class alone is not taken for certain.
    """
    n = sum(rows for _, _, rows in curve)
    value = sum(rows * abs(p - share) for p, share, rows in curve) / n
    smoothed = [((share * rows + 1) / (rows + 2), rows) for _, share, rows in curve]
    reach = _Z * sqrt(sum(rows * share * (1 - share) for share, rows in smoothed)) / n
    return Figure(value, max(0.0, value - reach), min(1.0, value + reach))


def _of_class(
    tallies: Tallies, number: int, counts: tuple[int, int, int], is_commonest: bool
) -> dict[str, Figure]:
    """Figures of one class. counts: rows of it, rows predicted as it, rows that are both."""
    n, (rows, predicted, both) = tallies.num_rows, counts
    found = {
        "sensitivity": (both, rows, float(is_commonest)),
        "specificity": (n - rows - predicted + both, n - rows, float(not is_commonest)),
        "precision": (both, predicted, rows / n),
    }
    shares = {name: share_of(*part) for name, part in found.items() if part[1]}
    if not predicted:  # 0, as scikit-learn has it
        shares["precision"] = Figure(0.0, 0.0, 1.0, rows / n)
    jaccard = share_of(both, rows + predicted - both)
    always = 2 * rows / (n + rows) if is_commonest else 0.0
    shares["f1"] = replace(_mapped(jaccard, lambda j: 2 * j / (1 + j)), baseline=always)
    auc = _auc(tallies, number)
    return shares if auc is None else {**shares, "auc": auc}


def _bins(tallies: Tallies, number: int) -> list[tuple[int, ...]]:
    return list(records(tallies.scores[number], 3)) if tallies.scores else []


def _by_probability(tallies: Tallies, number: int) -> Iterator[tuple[float, int, int]]:
    for at, of_class, others in _bins(tallies, number):
        yield probability_at(at + 0.5, tallies.level), of_class, others


def _auc(tallies: Tallies, number: int) -> Figure | None:
    """Area under the ROC curve, as the share of pairs that are in order, and a half of those whose
    scores are in one bin."""
    bins = _bins(tallies, number)
    rows, others = sum(p for _, p, _ in bins), sum(q for _, _, q in bins)
    if not rows or not others:
        return None
    pairs, ties, below, below_of = 0, 0, 0, 0
    placements: list[tuple[int, float, int, float]] = []
    for _, p, q in bins:
        pairs += p * (2 * below + q)
        ties += p * q
        placements.append((p, (below + q / 2) / others, q, (rows - below_of - p / 2) / rows))
        below, below_of = below + q, below_of + p
    value, bound = pairs / (2 * rows * others), ties / (2 * rows * others)
    if rows == 1 or others == 1:
        return Figure(value, baseline=0.5, bound=bound)
    of_rows = sum(p * (v - value) ** 2 for p, v, _, _ in placements) / (rows - 1) / rows
    of_others = sum(q * (v - value) ** 2 for _, _, q, v in placements) / (others - 1) / others
    reach = _Z * sqrt(of_rows + of_others) + bound
    return Figure(value, max(0.0, value - reach), min(1.0, value + reach), 0.5, bound)


# --- numbers --------------------------------------------------------------------------------------


def _of_regression(tallies: Tallies) -> dict[str, Figure]:
    """Figures of a regression by name."""
    n, sums, target = tallies.num_rows, tallies.sums, tallies.target
    if target is None:
        return {}
    total = sums["squared_error"]
    spread = target.squares / n
    mse = replace(mean_figure(total, sums.get("squared_error2"), n), baseline=spread)
    mae = mean_figure(sums["absolute_error"], total, n)
    found = {"rmse": _mapped(mse, lambda x: sqrt(max(x, 0.0))), "mse": mse, "mae": mae}
    if does_vary(n, target.mean, target.squares):
        ratio = total / target.squares
        if ratio > _MAX_RATIO:
            return found
        reach = None
        if "squared_error2" in sums and n > 1:
            # Variance of (error - ratio * square of the difference to the mean), over n.
            apart = sums["squared_error2"] - 2 * ratio * target.quadratic
            apart += ratio * ratio * target.fourths
            reach = _Z * sqrt(max(apart, 0.0)) / target.squares
        low, high = (
            (1 - ratio - reach, min(1.0, 1 - ratio + reach))
            if reach is not None and isfinite(reach)
            else (None, None)
        )
        found["r2"] = Figure(1 - ratio, low, high, 0.0)
    return found


# --- intervals ------------------------------------------------------------------------------------


def share_of(successes: int, rows: int, baseline: float | None = None) -> Figure:
    """A share of rows with Wilson's interval. rows: above 0."""
    p = successes / rows
    middle = (successes + _Z**2 / 2) / (rows + _Z**2)
    reach = _Z / (rows + _Z**2) * sqrt(rows * p * (1 - p) + _Z**2 / 4)
    # Exact at the ends, where the terms cancel but for rounding.
    low, high = middle - reach if successes else 0.0, middle + reach if successes < rows else 1.0
    return Figure(p, low, high, baseline)


def mean_figure(total: float, squares: float | None, rows: int, *, least: float = 0.0) -> Figure:
    """A mean over rows by its normal approximation. squares: sum of squares; None: no interval.
    least: value that the mean cannot be below."""
    value = total / rows
    if squares is None or rows < 2:
        return Figure(value)
    variance = max(0.0, squares / rows - value**2) / (rows - 1)
    reach = _Z * sqrt(variance)
    return Figure(value, max(least, value - reach), value + reach)


def _mean_of(known: Sequence[Figure]) -> Figure:
    """The mean of figures of different classes."""
    k = len(known)
    value = sum(one.value for one in known) / k
    reach: list[float | None] = []
    for edge in ("low", "high"):
        squares = [(e - one.value) ** 2 for one in known if (e := getattr(one, edge)) is not None]
        reach.append(sqrt(sum(squares)) / k if len(squares) == k else None)
    low, high = reach
    baselines = [one.baseline for one in known if one.baseline is not None]
    return Figure(
        value,
        None if low is None else max(0.0, value - low),
        None if high is None else min(1.0, value + high),
        sum(baselines) / k if len(baselines) == k else None,
        sum(one.bound for one in known) / k,
    )


def _mapped(figure: Figure, function: Callable[[float], float]) -> Figure:
    """A figure, its limits and its baseline under a function that rises."""
    parts: dict[str, Any] = {
        name: None if (value := getattr(figure, name)) is None else function(value)
        for name in ("value", "low", "high", "baseline")
    }
    return Figure(**parts)
