"""Sums over held-out rows that add up over sites: what a site sends of a model's evaluation.

Counts by score are kept on a grid of log odds, on which rare classes keep their resolution. A bin
of one level is two bins of the level below, so that sites with coarse and with fine bins add up,
as in UDDSketch (Epicoco et al. 2020). Squares of targets are about the mean of their own rows, and
are moved to the mean of all rows when they are added (Chan, Golub and LeVeque 1983): nothing
cancels, and no centre must be agreed upon.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from functools import lru_cache
from math import exp, fsum, inf, log
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xain_workloads.tables.profile import MAX_CLASSES

Array = NDArray[np.float64]

MAX_BINS = 256  # of a class
MAX_NUMBERS = 10_000  # counts and positions together: below 64 KiB as text
MAX_BYTES = 64 * 1024  # on the wire, and as text
MAX_PAIRS = 1024  # of class and predicted class; with more the counts are by class
MAX_COUNTED = 1024  # classes that are counted one by one
MAX_LEVEL = 15  # at which there are two bins
MAX_ROWS = 2**40  # of a site: those of millions of sites add up in 64 bits

_BINS_PER_UNIT = 256  # of log odds, at level 0
_MAX_LOG_ODDS = 36.0
_LAST_BIN = int(_MAX_LOG_ODDS * _BINS_PER_UNIT)
# scikit-learn's log_loss() keeps float64 probabilities this far from 0 and 1.
SMALLEST = float(np.finfo(np.float64).eps)
_MAX_LOG_LOSS = -log(SMALLEST)

# Sums by name, each with the most that one row adds to it. A name with "2" at its end is the sum of
# squares, from which intervals follow.
CLASS_SUMS = {
    "brier": 2.0,
    "brier2": 4.0,
    "log_loss": _MAX_LOG_LOSS,
    "log_loss2": _MAX_LOG_LOSS**2,
}
# Each with the power of the target's unit that it is in, as the moments of a target are. The bound
# of a sum is _MAX_VALUE to this power, so that nothing overflows that is computed of many sites.
NUMBER_SUMS = {"absolute_error": 1, "squared_error": 2, "squared_error2": 4}
_MOMENTS = (1, 2, 3, 4, 3, 4)  # in the order of the fields of Target
_MAX_VALUE = 1e60
_MAX_LOSS = 1e130  # of many rows: above that of any model whose squared errors are within bounds


def are_sums(totals: Iterable[float], squares: Iterable[float]) -> bool:
    """Whether these can be sums over rows of differences in loss, and of their squares: so small
    that nothing overflows that is computed of those of many sites."""
    return all(abs(one) <= _MAX_LOSS for one in totals) and all(
        0 <= one <= _MAX_LOSS**2 for one in squares
    )


def log_odds_at(position: float, level: int) -> float:
    """The log odds at a position in the bins of a level: `k` is the lower edge of bin k."""
    odds: float = position * 2**level / _BINS_PER_UNIT
    return max(-_MAX_LOG_ODDS, min(_MAX_LOG_ODDS, odds))


def probability_at(position: float, level: int) -> float:
    """The probability at a position in the bins of a level, as log_odds_at() has it."""
    return 1 / (1 + exp(-log_odds_at(position, level)))


# Relative: what rounding leaves of the differences of equal numbers to their mean.
_ROUNDING = 16 * 2.0**-52


def does_vary(num_rows: int, mean: float, squares: float) -> bool:
    """Whether numbers vary by more than rounding. squares: sum of squared differences to the
    mean."""
    return squares > num_rows * (_ROUNDING * mean) ** 2


@dataclass(frozen=True, slots=True)
class Target:
    """Moments of the targets about their mean, and of squared errors with them.

    squares, cubes, fourths: sums of powers of the differences to the mean. linear, quadratic: sums
    of each row's squared error times its difference, and times the square of that.
    """

    mean: float
    squares: float
    cubes: float = 0.0
    fourths: float = 0.0
    linear: float = 0.0
    quadratic: float = 0.0


@dataclass(frozen=True, slots=True)
class Tallies:
    """Sums over the rows of one site, or of many.

    num_rows: 1 or more. num_classes: 0 for a regression.
    right: rows whose class was predicted.
    confusion: class, predicted class and rows, for each pair that occurs, in ascending order.
    counts: class, rows of it, rows predicted as it, and rows that are both; in the place of
        `confusion` where more than MAX_PAIRS pairs occur, and empty above MAX_COUNTED classes.
    level: of the bins; a bin is 2**level / 256 wide in log odds.
    scores: for each class bin, rows of the class and other rows, by score of the class, for each
        bin that occurs, in ascending order. Empty without probabilities or with too many classes;
        of two classes the first one has none, since its scores are those of the second, reversed.
    sums: of log losses, Brier scores and their squares, or of absolute and squared errors.
    target: of a regression.
    """

    num_rows: int
    num_classes: int = 0
    right: int = 0
    confusion: tuple[int, ...] = ()
    counts: tuple[int, ...] = ()
    level: int = 0
    scores: tuple[tuple[int, ...], ...] = ()
    sums: Mapping[str, float] = field(default_factory=dict)
    target: Target | None = None

    def __hash__(self) -> int:
        return hash((self.num_rows, self.confusion, self.scores, *self.sums.values()))

    @property
    def num_numbers(self) -> int:
        """Counts and positions together."""
        return len(self.confusion) + len(self.counts) + sum(map(len, self.scores))

    @property
    def wire_fields(self) -> dict[str, Any]:
        """Fields of the message Tallies; the number of rows travels beside it."""
        fields: dict[str, Any] = {
            "num_classes": self.num_classes,
            "right": self.right,
            "confusion": self.confusion,
            "counts": self.counts,
            "level": self.level,
            "scores": [{"counts": one} for one in self.scores],
            "sums": self.sums,
        }
        return fields if self.target is None else {**fields, "target": astuple(self.target)}


# --- tallying -------------------------------------------------------------------------------------


def tally_classes(
    num_classes: int,
    target: NDArray[Any],
    predicted: NDArray[Any],
    probabilities: Array | None = None,
) -> Tallies:
    """Tallies of a classification.

    target, predicted: (n,) positions of classes, n at least 1. probabilities: (n, k), or None.
    """
    pairs, rows = np.unique(target * num_classes + predicted, return_counts=True)
    confusion: tuple[int, ...] = ()
    counts: tuple[int, ...] = ()
    if len(pairs) <= MAX_PAIRS:
        confusion = _flat(pairs // num_classes, pairs % num_classes, rows)
    else:
        counts = _counts(num_classes, target, predicted)
    sums: dict[str, float] = {}
    level = 0
    scores: tuple[tuple[int, ...], ...] = ()
    if probabilities is not None:
        sums = _class_sums(target, probabilities)
        level, scores = _scores(target, probabilities, MAX_NUMBERS - len(confusion) - len(counts))
    right = int(np.count_nonzero(target == predicted))
    return Tallies(len(target), num_classes, right, confusion, counts, level, scores, sums)


def tally_numbers(target: Array, predicted: Array) -> Tallies | None:
    """Tallies of a regression; None if the squared errors are too large for a float64.

    target, predicted: (n,), in the unit of the target, n at least 1.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        errors = np.square(target - predicted)
        mean = fsum(target) / len(target)
        apart = target - mean
        sums = {
            "absolute_error": _sum(np.abs(target - predicted)),
            "squared_error": _sum(errors),
            "squared_error2": _sum(np.square(errors)),
        }
        moments = [_sum(apart**power) for power in (2, 3, 4)]
        moments += [_sum(errors * apart), _sum(errors * np.square(apart))]
    if _beyond_bounds(sums, Target(mean, *moments)):
        # Without the sums from which the intervals follow.
        del sums["squared_error2"]
        moments[1:] = [0.0] * 4
    of = Target(mean, *moments)
    return None if _beyond_bounds(sums, of) else Tallies(len(target), sums=sums, target=of)


def _beyond_bounds(sums: Mapping[str, float], target: Target) -> list[float]:
    """Sums and moments of a regression that are too large, or not finite."""
    found = [(value, NUMBER_SUMS[name]) for name, value in sums.items()]
    found += zip(astuple(target), _MOMENTS, strict=True)
    return [value for value, power in found if not abs(value) <= _MAX_VALUE**power]


def _sum(values: Array) -> float:
    return float(np.sum(values))


def _flat(*columns: NDArray[Any]) -> tuple[int, ...]:
    return tuple(np.stack(columns, axis=1).ravel().tolist())


def _counts(num_classes: int, target: NDArray[Any], predicted: NDArray[Any]) -> tuple[int, ...]:
    """Count rows of each class, rows predicted as it and both; () above MAX_COUNTED classes."""
    of_class = np.bincount(target, minlength=num_classes)
    as_class = np.bincount(predicted, minlength=num_classes)
    both = np.bincount(target[target == predicted], minlength=num_classes)
    known = np.flatnonzero(of_class + as_class)
    if len(known) > MAX_COUNTED:
        return ()
    return _flat(known, of_class[known], as_class[known], both[known])


def _class_sums(target: NDArray[Any], probabilities: Array) -> dict[str, float]:
    """Sum the log losses and Brier scores of the rows, and their squares."""
    rows = np.arange(len(target))
    of_target = np.clip(probabilities[rows, target], SMALLEST, 1 - SMALLEST)
    losses = -np.log(of_target)
    differences = np.array(probabilities)
    differences[rows, target] -= 1
    # One of two classes is counted, as scikit-learn's brier_score_loss() does.
    counted = differences[:, 1:] if differences.shape[1] == 2 else differences
    brier = np.square(counted).sum(axis=1)
    return {
        "brier": _sum(brier),
        "brier2": _sum(np.square(brier)),
        "log_loss": _sum(losses),
        "log_loss2": _sum(np.square(losses)),
    }


def _binned(num_classes: int) -> range:
    """Classes whose scores are counted."""
    return range(1, 2) if num_classes == 2 else range(num_classes)


def have_probabilities(tallies: Tallies) -> bool:
    """Whether tallies of classes have all that a model with probabilities gives: sums of losses,
    and scores unless there is no room for them."""
    left = MAX_NUMBERS - len(tallies.confusion) - len(tallies.counts)
    has_room = left // (3 * len(_binned(tallies.num_classes))) >= 2
    return CLASS_SUMS.keys() <= tallies.sums.keys() and (bool(tallies.scores) or not has_room)


def _scores(
    target: NDArray[Any], probabilities: Array, num_left: int
) -> tuple[int, tuple[tuple[int, ...], ...]]:
    """(level, scores) with as many bins as there is room for: num_left numbers."""
    num_classes = probabilities.shape[1]
    binned = _binned(num_classes)
    most = min(MAX_BINS, num_left // (3 * len(binned)))
    if most < 2:
        return 0, ()
    bins = {}
    for number in binned:
        scores = np.clip(probabilities[:, number], 1e-300, 1 - SMALLEST)
        odds = np.log(scores) - np.log1p(-scores)
        at = np.floor(np.clip(odds, -_MAX_LOG_ODDS, _MAX_LOG_ODDS) * _BINS_PER_UNIT)
        bins[number] = at.astype(np.int64)
    level = 0
    while max(len(np.unique(at >> level)) for at in bins.values()) > most:
        level += 1
    found: list[tuple[int, ...]] = [()] * num_classes
    for number, at in bins.items():
        occupied, position = np.unique(at >> level, return_inverse=True)
        total = np.bincount(position)
        of_class = np.bincount(position, weights=target == number).astype(np.int64)
        found[number] = _flat(occupied, of_class, total - of_class)
    return level, tuple(found)


# --- adding ---------------------------------------------------------------------------------------


def add(tallies: Iterable[Tallies]) -> Tallies | None:
    """The tallies of all rows together, in whatever order the sites come; None without any.

    Tallies of the other task than that of most rows are left out. Sums are rounded once.
    """
    sites = tuple(tallies)
    rows = Counter[bool]()
    for one in sites:
        rows[one.num_classes == 0] += one.num_rows
    sites = tuple(one for one in sites if (one.num_classes == 0) == (rows[True] > rows[False]))
    return _added(sites) if len(sites) > 1 else next(iter(sites), None)


# A session and its history ask for the same sum. One alone, as it keeps the tallies of all sites.
@lru_cache(maxsize=1)
def _added(sites: tuple[Tallies, ...]) -> Tallies:
    """The tallies of all sites together; what one of them lacks is left out, and finer scores are
    made as coarse as the coarsest."""
    num_rows = sum(one.num_rows for one in sites)
    names = set(sites[0].sums).intersection(*(one.sums for one in sites))
    sums = {name: fsum(one.sums[name] for one in sites) for name in sorted(names)}
    if sites[0].num_classes == 0:
        return Tallies(num_rows, sums=sums, target=_together(sites))
    num_classes = max(one.num_classes for one in sites)
    confusion: tuple[int, ...] = ()
    counts: tuple[int, ...] = ()
    if all(one.confusion for one in sites):
        confusion = _merged((one.confusion for one in sites), 2, 3)
    elif all(one.confusion or one.counts for one in sites):
        counts = _merged((_by_class(one) for one in sites), 1, 4)
    level = max(one.level for one in sites)
    scores: tuple[tuple[int, ...], ...] = ()
    if all(one.scores and one.num_classes == num_classes for one in sites):
        scores = tuple(
            _merged((_coarser(one.scores[k], level - one.level) for one in sites), 1, 3)
            for k in range(num_classes)
        )
    right = sum(one.right for one in sites)
    return Tallies(num_rows, num_classes, right, confusion, counts, level, scores, sums)


def records(flat: Sequence[int], width: int) -> Iterator[tuple[int, ...]]:
    """A flat tuple as tuples of `width` numbers each."""
    return zip(*(flat[at::width] for at in range(width)), strict=True)


def _merged(parts: Iterable[Sequence[int]], num_keys: int, width: int) -> tuple[int, ...]:
    """Add up records of the same keys; ascending order of the keys."""
    flat = np.array([number for part in parts for number in part], np.int64).reshape(-1, width)
    if not len(flat):
        return ()
    keys, position = np.unique(flat[:, :num_keys], axis=0, return_inverse=True)
    sums = np.zeros((len(keys), width - num_keys), np.int64)
    np.add.at(sums, position.ravel(), flat[:, num_keys:])
    return _flat(*keys.T, *sums.T)


def _coarser(scores: Sequence[int], levels: int) -> list[int]:
    """The same counts by bins that are 2**levels times as wide; bins may come twice."""
    return [n >> levels if at % 3 == 0 else n for at, n in enumerate(scores)]


def _by_class(tallies: Tallies) -> tuple[int, ...]:
    """Counts by class of tallies, computed from the confusion matrix if there is one."""
    if not tallies.confusion:
        return tallies.counts
    counts: dict[int, list[int]] = {}
    for of_class, as_class, rows in records(tallies.confusion, 3):
        counts.setdefault(of_class, [0, 0, 0])[0] += rows
        counts.setdefault(as_class, [0, 0, 0])[1] += rows
        counts[of_class][2] += rows if of_class == as_class else 0
    return tuple(n for number in sorted(counts) for n in (number, *counts[number]))


def counts_by_class(tallies: Tallies) -> dict[int, tuple[int, int, int]]:
    """Rows of each class, rows predicted as it, and rows that are both; classes without rows are
    left out. Empty if the classes were not counted."""
    return {of: (rows, as_, both) for of, rows, as_, both in records(_by_class(tallies), 4)}


def _together(sites: Sequence[Tallies]) -> Target:
    """Compute moments about the mean of all rows from those of the sites."""
    known = [(one.num_rows, one.sums["squared_error"], one.target) for one in sites if one.target]
    mean = fsum(n * target.mean for n, _, target in known) / sum(n for n, _, _ in known)
    terms: list[list[float]] = [[] for _ in range(5)]
    for n, errors, of in known:
        d = of.mean - mean  # each row's difference grows by it
        terms[0] += [of.squares, n * d**2]
        terms[1] += [of.cubes, 3 * d * of.squares, n * d**3]
        terms[2] += [of.fourths, 4 * d * of.cubes, 6 * d**2 * of.squares, n * d**4]
        terms[3] += [of.linear, d * errors]
        terms[4] += [of.quadratic, 2 * d * of.linear, d**2 * errors]
    return Target(mean, *(fsum(parts) for parts in terms))


# --- checking -------------------------------------------------------------------------------------


def check(tallies: Tallies) -> None:
    """Raise ValueError unless tallies from the network are such as one site may send, and agree
    with their number of rows."""
    n, k = tallies.num_rows, tallies.num_classes
    if (
        not 1 <= n <= MAX_ROWS
        or not 0 <= k <= MAX_CLASSES
        or k == 1
        or not 0 <= tallies.level <= MAX_LEVEL
    ):
        raise ValueError(f"tallies of {n} rows, {k} classes and level {tallies.level} are none")
    if tallies.num_numbers > MAX_NUMBERS:
        raise ValueError(
            f"tallies have {tallies.num_numbers} counts; at most {MAX_NUMBERS} are taken"
        )
    known = NUMBER_SUMS if k == 0 else CLASS_SUMS
    for name, value in tallies.sums.items():
        if name not in known or not 0 <= value < inf:
            raise ValueError(f"the sum {name[:40]!r} of tallies is {value}")
    if k == 0:
        _check_numbers(tallies)
        return
    if tallies.target is not None:
        raise ValueError("tallies of classes have moments of a target")
    for name, value in tallies.sums.items():
        if value > n * CLASS_SUMS[name] * (1 + 1e-9):
            raise ValueError(f"the sum {name!r} of tallies is {value} for {n} rows")
    _check_records(tallies.confusion, 2, 3, 0, k)
    _check_records(tallies.counts, 1, 4, 0, k)
    counts = counts_by_class(tallies)
    totals = [sum(column) for column in zip(*counts.values(), strict=True)]
    if (totals and totals != [n, n, tallies.right]) or not 0 <= tallies.right <= n:
        raise ValueError(f"the counts of tallies add up to {totals}, not to {n} rows")
    for number, (rows, as_class, both) in counts.items():
        if not rows + as_class - n <= both <= min(rows, as_class):
            raise ValueError(
                f"of {n} rows {rows} are of class {number} and {as_class} predicted as it, but"
                f" {both} are both in tallies"
            )
    if len(tallies.scores) not in (0, k):
        raise ValueError(f"tallies have scores of {len(tallies.scores)} of {k} classes")
    last = (_LAST_BIN >> tallies.level) + 1
    for number, scores in enumerate(tallies.scores):
        _check_records(scores, 1, 3, -last, last)
        of_class = sum(scores[1::3])
        is_left_out = k == 2 and number == 0 and not scores
        expected = counts.get(number, (0, 0, 0))[0] if counts else of_class
        if not is_left_out and (of_class + sum(scores[2::3]) != n or of_class != expected):
            raise ValueError(f"the scores of class {number} are not those of {n} rows")
        if len(scores) > 3 * MAX_BINS:
            raise ValueError(f"class {number} has more than {MAX_BINS} bins")


def _check_numbers(tallies: Tallies) -> None:
    of = tallies.target
    if of is None or tallies.num_numbers or tallies.right:
        raise ValueError("tallies of numbers have moments of a target, and no counts of classes")
    if beyond := _beyond_bounds(tallies.sums, of):
        raise ValueError(f"sums or moments of tallies are too large: {beyond}")
    if of.squares < 0 or not {"squared_error", "absolute_error"} <= set(tallies.sums):
        raise ValueError("tallies of numbers lack sums of errors")


def _check_records(flat: Sequence[int], num_keys: int, width: int, first: int, end: int) -> None:
    """Raise ValueError unless the keys of records ascend and lie from `first` to below `end`, and
    no count is negative."""
    if len(flat) % width:
        raise ValueError(f"{len(flat)} counts of tallies are no records of {width}")
    before: tuple[int, ...] | None = None
    for record in records(flat, width):
        keys, numbers = record[:num_keys], record[num_keys:]
        if not all(first <= key < end for key in keys) or (before is not None and keys <= before):
            raise ValueError(f"{keys} follows {before} in tallies")
        if min(numbers) < 0 or max(numbers) < 1:
            raise ValueError(f"{keys} has the counts {numbers} in tallies")
        before = keys
