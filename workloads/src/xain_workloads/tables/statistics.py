"""Statistics of the columns of one site, from which the preprocessing of all sites is fitted.

A site sends the statistics as JSON text in its data profile. Statistics of several sites merge to
the statistics of all their rows. No row travels, and no minimum or maximum of a column. A column
with fewer than MIN_KNOWN numbers has no moments, unless the site says otherwise: the mean of one
number is the number.

For checks and descriptions there is more, which merge() does not need and leaves out: the number
of distinct values, whether all are whole, how each column goes with the target, which column tells
units with several rows, and the number of groups of rows.
"""

from array import array
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import fsum
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from xain_workloads.errors import DataError
from xain_workloads.tables.reading.json_forms import MAX_VALUE
from xain_workloads.tables.repeated import repeated

MIN_CATEGORY_COUNT = 5
MAX_CATEGORIES = 1000  # of a column; the others count as infrequent
MAX_NAME_BYTES = 200  # of a category; free text counts as infrequent
# Size of the whole text. A data profile travels in one message and is kept in the journal.
MAX_STATISTICS_BYTES = 512 << 10

# A bucket of the quantile sketch has at least MIN_BUCKET rows, so its mean is not one row's value.
MAX_BUCKETS = 64
MIN_BUCKET = 5
MIN_KNOWN = MIN_BUCKET  # values of a column, for anything of them to travel, by default

MIN_OF_CLASS = 10  # rows of a class, and of all others, for its associations to travel
_FEW = 12  # distinct numbers
# Classes times columns up to which associations travel: a number of 5 bytes each.
MAX_ASSOCIATIONS = 20_000
_BUCKET_BYTES = 24  # a float as JSON writes it, and a comma


@dataclass(frozen=True, slots=True)
class Moments:
    """Count, mean and M2, the sum of squared differences from the mean, of known values.

    A site with fewer of them than its min_known tells none: count is 0 then.
    """

    count: int = 0
    mean: float = 0.0
    m2: float = 0.0

    @property
    def variance(self) -> float:
        """Population variance, as scikit-learn's StandardScaler has it; 0 without values."""
        return self.m2 / self.count if self.count else 0.0


@dataclass(frozen=True, slots=True)
class NumberStatistics:
    """Statistics of a column of numbers.

    buckets: (value, rows) pairs in ascending order: the sorted values are cut into buckets of
        nearly equal size, and each bucket tells its mean. Empty if a table is too wide for them.
    distinct, whole: number of distinct values, and whether all are whole; None if not told.
    association: see associations(); empty if not told.
    is_repeated: whether values tell units with several rows; see repeated().
    """

    missing: int
    moments: Moments
    buckets: tuple[tuple[float, int], ...] = ()
    distinct: int | None = None
    whole: bool | None = None
    association: tuple[float | None, ...] = ()
    is_repeated: bool = False
    type: ClassVar[str] = "number"

    @property
    def num_rows(self) -> int:
        """Rows that the statistics are of, as far as they tell."""
        in_buckets = sum(count for _, count in self.buckets)
        return self.missing + max(self.moments.count, in_buckets)

    def quantile(self, share: float) -> float:
        """The value below which a share of the rows lies, 0 <= share <= 1; 0 without values, the
        mean without buckets.

        Interpolated linearly between the middles of the buckets. The share of rows that are really
        below it differs from `share` by at most one bucket of each site: 1/64 of the site's rows,
        or MIN_BUCKET rows if the site has fewer than 320 (twice that at most with ties). Joined
        buckets, see merge(), add 1/100 of all rows at most for 2,000 sites and 250 columns.
        """
        return float(self.quantiles(np.array([share]))[0])

    def quantiles(self, shares: NDArray[np.float64]) -> NDArray[np.float64]:
        """The values below which these shares of the rows lie; see quantile()."""
        if not self.buckets:
            return np.full(shares.shape, self.moments.mean)
        values = np.array([value for value, _ in self.buckets])
        rows = np.array([count for _, count in self.buckets], dtype=np.float64)
        middles = np.cumsum(rows) - rows / 2
        found: NDArray[np.float64] = np.interp(shares * rows.sum(), middles, values)
        return found


@dataclass(frozen=True, slots=True)
class CategoryStatistics:
    """Statistics of a column of categories.

    counts: rows by category, for categories with at least the site's minimum count.
    infrequent: rows of all other categories.
    distinct: number of distinct categories; None if not told.
    association: see associations(); empty if not told.
    is_repeated: whether values tell units with several rows; see repeated().
    """

    missing: int
    counts: Mapping[str, int] = field(default_factory=dict)
    infrequent: int = 0
    distinct: int | None = None
    association: tuple[float | None, ...] = ()
    is_repeated: bool = False
    type: ClassVar[str] = "category"

    @property
    def num_rows(self) -> int:
        """Rows that the statistics are of."""
        return self.missing + sum(self.counts.values()) + self.infrequent


ColumnStatistics = NumberStatistics | CategoryStatistics


@dataclass(frozen=True, slots=True)
class Statistics:
    """Statistics of a table, by column name in the order of the table.

    rows: of the table. target: moments of a target of numbers; None for classification.
    target_buckets: of a target of numbers, as of a column.
    class_counts: rows by class, for classes with at least the site's minimum, in the order of
        their names as text.
    without_target: rows that were left out, because their target is missing; 0 if they are fewer
        than the site's minimum.
    group: name of the column whose value rows of one group share; "" without groups. num_groups: 0
        if they are fewer than the site's minimum.
    """

    rows: int
    columns: Mapping[str, ColumnStatistics]
    target: Moments | None = None
    target_buckets: tuple[tuple[float, int], ...] = ()
    class_counts: Mapping[str, int] = field(default_factory=dict)
    without_target: int = 0
    group: str = ""
    num_groups: int = 0


def describe(
    values: Mapping[str, NDArray[Any]],
    target: NDArray[Any],
    *,
    min_category_count: int = MIN_CATEGORY_COUNT,
    min_known: int = MIN_KNOWN,
    without_target: int = 0,
    group: str = "",
    num_groups: int = 0,
) -> Statistics:
    """Compute the statistics of a table's columns.

    values: by column, (n,) float64 with NaN for missing, or (n,) objects: str, None for missing.
    target: (n,); moments are computed if it is float64.
    min_category_count: rows that a category must have for its name to travel, 1 or more.
    min_known: known values that a column or a class must have for anything of them to travel, 1 or
        more. Below MIN_KNOWN it takes the place of a min_category_count that is not above that.
    without_target: rows that were left out, because their target is missing.
    group, num_groups: name of the column of groups, "" without them, and their number.
    Raises DataError that names the column if one of its numbers is above MAX_VALUE.
    """
    num_numbers = sum(column.dtype.kind == "f" for column in values.values())
    # A wide table has coarser sketches; one of more than some 5000 columns has none.
    room = MAX_STATISTICS_BYTES // 2 // max(num_numbers, 1)
    max_buckets = min(MAX_BUCKETS, room // _BUCKET_BYTES)
    if min_category_count <= MIN_CATEGORY_COUNT:  # a site that has raised it keeps it
        min_category_count = min(min_category_count, min_known)
    is_number = target.dtype.kind == "f"
    class_counts = {} if is_number else _class_counts(target, min_known)
    told = max(len(class_counts), 1) * len(values) <= MAX_ASSOCIATIONS
    codes = _codes(target, class_counts) if told and not is_number else None
    columns: dict[str, ColumnStatistics] = {}
    for name, column in values.items():
        described: ColumnStatistics
        if column.dtype.kind == "f":
            described = _describe_numbers(f"column {name!r}", column, max_buckets, min_known)
            described = replace(described, **_about_numbers(column, min_known))
        else:
            described = _describe_categories(column, min_category_count, min_known)
        if told:
            found = associations(column, target if codes is None else codes, len(class_counts))
            described = replace(described, association=found)
        columns[name] = described
    if not group and (name := repeated(values, target)):
        columns[name] = replace(columns[name], is_repeated=True)
    without_target = without_target if without_target >= min_known else 0
    told_of = Statistics(
        len(target),
        columns,
        class_counts=class_counts,
        without_target=without_target,
        group=group,
        num_groups=num_groups if num_groups >= min_known else 0,
    )
    if not is_number:
        return told_of
    about = _describe_numbers("the target", target, MAX_BUCKETS, min_known)
    return replace(told_of, target=about.moments, target_buckets=about.buckets)


def _class_counts(target: NDArray[Any], min_known: int) -> dict[str, int]:
    names, counts = np.unique(target, return_counts=True)
    found = zip(names.tolist(), counts.tolist(), strict=True)
    return {str(name): count for name, count in found if count >= min_known}


def _codes(target: NDArray[Any], class_counts: Mapping[str, int]) -> NDArray[np.intp]:
    """(n,) position of each row's class in class_counts; -1 for a class that is not told."""
    position = {name: code for code, name in enumerate(class_counts)}
    return np.array([position.get(str(label), -1) for label in target.tolist()], np.intp)


def _describe_numbers(
    where: str, column: NDArray[Any], max_buckets: int, min_known: int
) -> NumberStatistics:
    """Count missing values, and compute moments and the means of buckets of sorted values."""
    known = np.sort(column[~np.isnan(column)])
    num_buckets = min(max_buckets, len(known) // MIN_BUCKET)
    buckets: tuple[tuple[float, int], ...] = ()
    moments = _moments(where, known, min_known)
    if num_buckets > 1:  # one bucket would repeat the mean
        pieces = np.array_split(known, num_buckets)
        buckets = tuple((_shortened(float(piece.mean())), len(piece)) for piece in pieces)
    elif moments.count:
        buckets = ((_shortened(moments.mean), moments.count),)
    if not moments.count:
        buckets = ()
    return NumberStatistics(len(column) - len(known), moments, buckets)


def _about_numbers(column: NDArray[Any], min_known: int) -> dict[str, Any]:
    """Number of distinct values and whether all are whole; {} below min_known values."""
    known = column[~np.isnan(column)]
    if len(known) < min_known or not len(known):
        return {}
    is_whole = bool((known == np.trunc(known)).all())
    return {"distinct": len(np.unique(known)), "whole": is_whole}


def _shortened(value: float) -> float:
    """A value of a sketch, to nine digits: all sketches of a session are in memory at a time."""
    return float(f"{value:.9g}")


def _describe_categories(
    column: NDArray[Any], min_count: int, min_known: int
) -> CategoryStatistics:
    """Count rows by category; rows of categories below min_count rows are counted together."""
    counts = Counter(value for value in column.tolist() if value is not None)
    frequent = sorted(
        (-count, name)
        for name, count in counts.items()
        if count >= min_count and len(name.encode(errors="replace")) <= MAX_NAME_BYTES
    )[:MAX_CATEGORIES]
    kept = {name: -count for count, name in sorted(frequent, key=lambda pair: pair[1])}
    num_known = sum(counts.values())
    infrequent = num_known - sum(kept.values())
    distinct = len(counts) if num_known >= min_known else None
    return CategoryStatistics(len(column) - num_known, kept, infrequent, distinct)


def associations(
    column: NDArray[Any], target: NDArray[Any], num_classes: int
) -> tuple[float | None, ...]:
    """How a column goes with the target, to three digits.

    target: (n,) codes from 0 to num_classes - 1, or -1 for none of the classes; or float64.
    For classes: by class the probability that a row of the class has a larger value than a row of
    another class (AUC), None for a class with fewer than MIN_OF_CLASS known rows or others. For a
    target of numbers: Pearson's r, with MIN_OF_CLASS known rows or more.
    A category counts as the mean of the target, or the share of the class, in its rows; those of
    fewer than MIN_KNOWN rows count as one. Then the figure is on the side of 0.5, or 0, on which
    the order of the names would be. So do numbers with few values if there are more than two
    classes. Returns () without figures.
    """
    is_number = column.dtype.kind == "f"
    known = ~np.isnan(column) if is_number else np.array([v is not None for v in column], bool)
    if target.dtype.kind == "f":
        if known.sum() < MIN_OF_CLASS:
            return ()
        y = target[known]
        x = column[known] if is_number else _category_codes(column[known])
        if is_number:
            r = _pearson(x, y)
        else:
            r = _pearson(_means_of(x, y), y)
            r = None if r is None else float(np.copysign(r, _pearson(x, y) or 1.0))
        return () if r is None else (_rounded(r),)
    known &= target >= 0
    codes = target[known]
    x = column[known] if is_number else _category_codes(column[known])
    # Codes of three classes and more decide those in the middle, too.
    is_few = is_number and num_classes > 2 and len(np.unique(x)) <= _FEW
    found: list[float | None] = []
    for code in range(num_classes):
        of_class = codes == code
        if min(of_class.sum(), len(codes) - of_class.sum()) < MIN_OF_CLASS:
            found.append(None)
            continue
        if is_number and not is_few:
            found.append(_rounded(_auc(x, of_class)))
            continue
        strength = abs(_auc(_means_of(x, of_class.astype(np.float64)), of_class) - 0.5)
        found.append(_rounded(0.5 + float(np.copysign(strength, _auc(x, of_class) - 0.5))))
    return tuple(found) if any(one is not None for one in found) else ()


def _rounded(value: float) -> float:
    return round(value, 3)


def _category_codes(column: NDArray[Any]) -> NDArray[np.float64]:
    """(n,) the position of each category among those of the column; -1 for a rare one."""
    counts = Counter(column.tolist())
    frequent = sorted(name for name, count in counts.items() if count >= MIN_KNOWN)
    position = {name: float(i) for i, name in enumerate(frequent)}
    return np.array([position.get(value, -1.0) for value in column.tolist()], np.float64)


def _means_of(x: NDArray[np.float64], y: NDArray[np.float64]) -> NDArray[np.float64]:
    """(n,) the mean of y over the rows with the same x."""
    _, codes = np.unique(x, return_inverse=True)
    sums, counts = np.bincount(codes, weights=y), np.bincount(codes)
    means: NDArray[np.float64] = (sums / counts)[codes] if len(x) else x
    return means


def _auc(x: NDArray[np.float64], of_class: NDArray[np.bool_]) -> float:
    """The share of pairs in which the row of the class has the larger value; equal ones: a half."""
    _, codes, counts = np.unique(x, return_inverse=True, return_counts=True)
    ranks = np.cumsum(counts) - (counts - 1) / 2
    n1 = int(of_class.sum())
    above = float(ranks[codes][of_class].sum()) - n1 * (n1 + 1) / 2
    return above / (n1 * (len(x) - n1))


def _pearson(x: NDArray[np.float64], y: NDArray[np.float64]) -> float | None:
    """The correlation; None if one of them does not vary."""
    x, y = x - x.mean(), y - y.mean()
    # Scaled, so that squares of large values stay finite.
    x, y = x / (np.abs(x).max() or 1.0), y / (np.abs(y).max() or 1.0)
    spread = float(np.sqrt(np.square(x).sum() * np.square(y).sum()))
    return float((x * y).sum()) / spread if spread > 0 else None


def _moments(where: str, known: NDArray[Any], min_known: int) -> Moments:
    """Moments of known values; empty below min_known. Raises DataError for one above MAX_VALUE."""
    if not len(known):
        return Moments()
    largest = float(np.abs(known).max())
    if not largest <= MAX_VALUE:
        raise DataError(f"{where} has a value of {largest:g}; at most {MAX_VALUE:g} is taken")
    if len(known) < min_known:
        return Moments()
    mean = float(known.mean())
    return Moments(len(known), mean, float(np.square(known - mean).sum()))


def merge(parts: Iterable[Statistics], names: Sequence[str] = ()) -> Statistics:
    """Merge the statistics of several sites into those of all their rows.

    Reads one site after the other and keeps sums and merged sketches only, so that the memory does
    not grow with the sites. The result does not depend on the order of the sites: sums are
    correctly rounded (fsum). Quantiles do where neighbouring buckets are joined, because there are
    too many of them: that may be from 25 sites on.
    names: of the columns, in their order; by default those of all sites. A column that a site does
        not have is missing in all of its rows; one that no site has is left out. A column without a
        known value at a site has no type there.
    Raises DataError that names a column of numbers at some sites and of categories at others.
    Source: Chan, Golub and LeVeque 1979, for the moments.
    """
    merged: dict[str, _Numbers | _Categories] = {}
    targets, has_target = _Numbers(_MERGED_BUCKETS), False
    rows = without_target = most = 0
    classes: Counter[str] = Counter()
    empty: dict[str, bool] = {}  # whether a site says that it would hold numbers
    known = dict.fromkeys(names)
    for part in parts:
        if not names:
            known |= dict.fromkeys(part.columns)
        most = most or _MERGED_BUCKETS // max(len(known), 1)
        rows += part.rows
        without_target += part.without_target
        classes.update(part.class_counts)
        if part.target is not None:
            has_target = True
            targets.add(NumberStatistics(0, part.target, part.target_buckets), part.rows)
        for name, column in part.columns.items():
            if name not in known:
                continue
            if part.rows and column.missing == part.rows:
                empty[name] = empty.get(name, False) or isinstance(column, NumberStatistics)
                continue
            if name not in merged:
                is_number = isinstance(column, NumberStatistics)
                merged[name] = _Numbers(most) if is_number else _Categories()
            if merged[name].type != column.type:
                raise DataError(
                    f"column {name!r} holds numbers at some sites and categories at others"
                )
            merged[name].add(column, part.rows)
    for name, is_number in empty.items():
        merged.setdefault(name, _Numbers(most) if is_number else _Categories())
    columns = {name: merged[name].total(rows) for name in known if name in merged}
    counts = dict(sorted(classes.items()))
    if not has_target:
        return Statistics(rows, columns, class_counts=counts, without_target=without_target)
    target = targets.total(rows)
    return Statistics(rows, columns, target.moments, target.buckets, counts, without_target)


# Numbers of columns times buckets that are kept while sites are merged; 16 bytes each.
_MERGED_BUCKETS = 1 << 21
_MOST_BUCKETS = 1 << 14  # of one column
_JOINED = 8  # buckets that are joined to one, where there are too many


class _MomentSums:
    """Moments of the sites of a column, as arrays of numbers: there may be thousands of sites."""

    def __init__(self) -> None:
        self._counts = array("q")
        self._means = array("d")
        self._m2 = array("d")

    def add(self, moments: Moments) -> None:
        if moments.count:
            self._counts.append(moments.count)
            self._means.append(moments.mean)
            self._m2.append(moments.m2)

    def total(self) -> Moments:
        """Moments of the rows of all sites."""
        if not self._counts:
            return Moments()
        count = sum(self._counts)
        # Around a value that is close to all means, so that a large common offset loses no digits.
        centre = min(self._means)
        sites = list(zip(self._counts, self._means, strict=True))
        mean = centre + fsum(n * (one - centre) for n, one in sites) / count
        between = fsum(n * (one - mean) ** 2 for n, one in sites)
        return Moments(count, mean, fsum((*self._m2, between)))


class _Numbers:
    """A column of numbers while the sites are merged. most: buckets that are kept of it."""

    type = NumberStatistics.type

    def __init__(self, most: int) -> None:
        self._most = min(max(most, MAX_BUCKETS), _MOST_BUCKETS)
        self._missing = 0
        self._rows = 0  # of sites that have the column
        self._moments = _MomentSums()
        self._values = array("d")
        self._sizes = array("d")  # rows of the buckets; whole numbers below 2**53
        self._has_buckets = True

    def add(self, column: ColumnStatistics, rows: int) -> None:
        """Add a site's statistics, and join buckets when there are too many. rows: of the site."""
        assert isinstance(column, NumberStatistics)
        self._rows += rows
        self._missing += column.missing
        self._moments.add(column.moments)
        if not column.moments.count:
            return
        self._has_buckets &= bool(column.buckets)  # else some sites would not count in a quantile
        self._values.extend(value for value, _ in column.buckets)
        self._sizes.extend(size for _, size in column.buckets)
        if len(self._values) > self._most:
            values, sizes = self._joined()
            self._values, self._sizes = array("d", values.tobytes()), array("d", sizes.tobytes())

    def total(self, rows: int) -> NumberStatistics:
        """Statistics of the column. rows: of all sites."""
        missing = self._missing + rows - self._rows
        buckets: tuple[tuple[float, int], ...] = ()
        if self._has_buckets:
            values, sizes = self._joined()
            buckets = tuple(zip(values.tolist(), map(int, sizes.tolist()), strict=True))
        return NumberStatistics(missing, self._moments.total(), buckets)

    def _joined(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Values and sizes of the buckets in ascending order. Neighbours are joined where there are
        more than can be kept: the rank of each of their rows changes by a joined bucket at most."""
        values, sizes = np.array(self._values), np.array(self._sizes)
        order = np.lexsort((sizes, values))
        values, sizes = values[order], sizes[order]
        kept = self._most // _JOINED
        if len(values) <= kept:
            return values, sizes
        middles = np.cumsum(sizes) - sizes / 2
        group = np.floor(middles * (kept / sizes.sum())).astype(np.intp)
        first = np.flatnonzero(np.diff(group, prepend=-1))
        joined = np.add.reduceat(sizes, first)
        # From the first value of each group, so that equal values keep theirs.
        start = np.repeat(values[first], np.diff(first, append=len(values)))
        means = values[first] + np.add.reduceat((values - start) * sizes, first) / joined
        return means, joined


class _Categories:
    """A column of categories while the sites are merged."""

    type = CategoryStatistics.type

    def __init__(self) -> None:
        self._missing = 0
        self._rows = 0  # of sites that have the column
        self._counts: Counter[str] = Counter()
        self._infrequent = 0

    def add(self, column: ColumnStatistics, rows: int) -> None:
        assert isinstance(column, CategoryStatistics)
        self._rows += rows
        self._missing += column.missing
        self._infrequent += column.infrequent
        self._counts.update(column.counts)

    def total(self, rows: int) -> CategoryStatistics:
        """Statistics of the column. rows: of all sites."""
        missing = self._missing + rows - self._rows
        return CategoryStatistics(missing, dict(sorted(self._counts.items())), self._infrequent)
