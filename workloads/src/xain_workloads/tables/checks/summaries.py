"""The profiles of all sites as arrays: what the checks look at, a few hundred bytes a column.

Thousands of sites may send half a megabyte each. They are read one after the other, and of each
column a row of numbers is kept.
"""

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from sys import intern

import numpy as np
from numpy.typing import NDArray

from xain_workloads.tables.profile import DataProfile
from xain_workloads.tables.reading.statistics_json import from_json
from xain_workloads.tables.statistics import (
    MAX_ASSOCIATIONS,
    CategoryStatistics,
    Moments,
    NumberStatistics,
    Statistics,
)

SHARES = np.array([0.05, 0.1, 0.25, 0.4, 0.5, 0.6, 0.75, 0.9, 0.95])

# Values that stand for a missing one.
_SIZES: tuple[float, ...] = (
    7.0,
    8.0,
    9.0,
    88.0,
    98.0,
    99.0,
    99.9,
    99.99,
    888.0,
    998.0,
    999.0,
    999.9,
)
_SIZES += (8888.0, 9998.0, 9999.0, 99999.0, 999999.0)
CODES = frozenset(sign * size for size in _SIZES for sign in (1.0, -1.0)) | {-1.0, -2.0}

_FIELDS = (
    *("site", "rows", "missing", "count", "mean", "deviation", "spread"),
    *("low", "high", "distinct", "whole", "repeated", "mass", "mass_rows", "gap", "bend"),
    *(f"q{i}" for i in range(len(SHARES))),
)


@dataclass(slots=True)
class Numbers:
    """A column of numbers: a row for each site that has it, of _FIELDS.

    count: of values that the site tells of; 0 if it tells nothing. spread: as of a normal
    distribution with the quartiles; it does not depend on a few cells. low, high: the smallest and
    largest bucket. mass: value of the lone mass at one end that the sketch and the variance stand
    for, mass_rows: its rows, gap: its distance from the others in widths of theirs. bend: the
    largest distance of the sketch from that of a uniform distribution, in widths. distinct: -1 if
    not told. whole: 1, 0 or -1. repeated: 1 if values tell units with several rows.
    """

    name: str
    rows: "array[float]" = field(default_factory=lambda: array("d"))
    is_target: bool = False

    def add(self, site: int, num_rows: int, column: NumberStatistics) -> None:
        """Add the column of a site."""
        moments = column.moments
        row = [float(site), num_rows, column.missing, moments.count, moments.mean]
        if not moments.count:
            self.rows.extend([*row, *[0.0] * (len(_FIELDS) - len(row))])
            return
        quantiles = column.quantiles(SHARES)
        deviation = float(np.sqrt(moments.variance))
        values = np.array([value for value, _ in column.buckets] or [moments.mean])
        sizes = np.array([size for _, size in column.buckets] or [moments.count], np.float64)
        mass, mass_rows, gap = _lone_mass(values, sizes, moments)
        self.rows.extend(
            [
                *row,
                deviation,
                _spread(quantiles, deviation),
                float(values[0]),
                float(values[-1]),
                -1 if column.distinct is None else column.distinct,
                -1 if column.whole is None else float(column.whole),
                float(column.is_repeated),
                *(mass, mass_rows, gap),
                _bend(values, sizes),
                *quantiles.tolist(),
            ]
        )

    def table(self) -> dict[str, NDArray[np.float64]]:
        """(k,) by field, and (k, len(SHARES)) "quantiles": the rows of k sites."""
        rows = np.array(self.rows).reshape(-1, len(_FIELDS))
        table = {name: rows[:, i] for i, name in enumerate(_FIELDS)}
        table["quantiles"] = rows[:, len(_FIELDS) - len(SHARES) :]
        return table


def _spread(quantiles: NDArray[np.float64], deviation: float) -> float:
    """0 for a constant column."""
    width = float(quantiles[6] - quantiles[2])
    return min(width / 1.349, deviation) if width > 0 else deviation


_SOME_GAP = 6.0  # of which nothing is known: enough if other sites have no such cell


def _lone_mass(
    values: NDArray[np.float64], sizes: NDArray[np.float64], moments: Moments
) -> tuple[float, float, float]:
    """The value, rows and distance of the mass at the end that lies further outside.

    The variance that the buckets do not account for is taken for that within the bucket where the
    mass meets the others. With m rows of the value c in a bucket of b rows around r, of mean t:
    t - r = m (c - r) / b, and the unaccounted squares are m (b - m) / b (c - r)^2.
    """
    if len(values) < 4:
        return _lone_cell(values, sizes, moments)
    if (coded := _code(values, sizes)) is not None:
        return coded
    between = float((sizes * np.square(values - moments.mean)).sum())
    within = max(moments.m2 - between, 0.0)
    best = (moments.mean, 0.0, 0.0)
    for sign in (1.0, -1.0):
        ordered, rows = (sign * values)[:: int(sign)], sizes[:: int(sign)]
        # Full buckets of the mass, at most two fifths of the rows.
        most = int(len(ordered) * 0.4)
        full = min(int((ordered == ordered[-1]).sum()), most)
        if full > 1 or (full == 1 and ordered[-1] - ordered[-2] > 0):
            inner = ordered[: len(ordered) - full - 1]
            if len(inner) >= 2:
                found = (sign * ordered[-1], float(rows[-full:].sum()))
                best = max(best, (*found, _distance(ordered[-1], inner)), key=lambda one: one[2])
        inner = ordered[:-1]
        edge, top, size = float(inner[-1]), float(ordered[-1]), float(rows[-1])
        if top > edge:
            # One cell at least, which explains no more than the bucket's mean.
            lift = size * (top - edge)
            value = edge + min(top - edge + within / lift, lift)
            found = (sign * value, min(lift / (value - edge), size))
            best = max(best, (*found, _distance(value, inner)), key=lambda one: one[2])
    return best


def _code(
    values: NDArray[np.float64], sizes: NDArray[np.float64]
) -> tuple[float, float, float] | None:
    """The value, rows and distance of the lowest mass if it is exactly a negative code and no other
    value is negative; else None. Such a column may be so wide that the code is not far outside."""
    code = float(values[0])
    same = int((values == code).sum())
    if code not in CODES or code >= 0 or same + 1 >= len(values) or values[same + 1] < 0:
        return None
    return code, float(sizes[:same].sum()), float("inf")


def _lone_cell(
    values: NDArray[np.float64], sizes: NDArray[np.float64], moments: Moments
) -> tuple[float, float, float]:
    """The furthest value that one of few rows can have, by mean and variance; 1 row; _SOME_GAP."""
    count = moments.count
    reach = float(np.sqrt(moments.m2 * (count - 1) / count))
    far = moments.mean + (reach if moments.mean >= 0 else -reach)
    return far, 1.0, _SOME_GAP


def _distance(value: float, inner: NDArray[np.float64]) -> float:
    """Distance of a value above others, in widths of nine tenths of these; inf if all are equal."""
    low = inner[int(len(inner) * 0.1)]
    width = float(inner[-1] - low)
    if width <= 0:
        width = float(inner[-1] - inner[0])
    return (value - float(inner[-1])) / width if width > 0 else float("inf")


def _bend(values: NDArray[np.float64], sizes: NDArray[np.float64]) -> float:
    """The largest distance of a sketch from a straight line, in widths; 1.0 if it is too short."""
    width = float(values[-1] - values[0])
    if len(values) < 4 or width <= 0:
        return 1.0
    middles = np.cumsum(sizes) - sizes / 2
    line = (middles - middles[0]) / (middles[-1] - middles[0])
    return float(np.abs((values - values[0]) / width - line).max())


@dataclass(slots=True)
class Categories:
    """A column of categories, or the classes.

    sites: for each name the site and its rows, one after the other. rows: of each site that has
    the column: site, rows, missing, distinct (-1: not told), infrequent, and 1 if values tell units
    with several rows.
    """

    name: str
    sites: "dict[str, array[int]]" = field(default_factory=dict)
    rows: "array[int]" = field(default_factory=lambda: array("q"))
    is_target: bool = False

    def add(self, site: int, num_rows: int, column: CategoryStatistics) -> None:
        """Add the column of a site."""
        distinct = -1 if column.distinct is None else column.distinct
        about = (column.missing, distinct, column.infrequent, int(column.is_repeated))
        self.rows.extend((site, num_rows, *about))
        for name, count in column.counts.items():
            self.sites.setdefault(intern(name), array("q")).extend((site, count))

    def table(self) -> NDArray[np.int64]:
        """(k, 6) the rows of k sites."""
        return np.array(self.rows, np.int64).reshape(-1, 6)


@dataclass(slots=True)
class Summary:
    """All sites.

    names, profiles: by site, without statistics. associations: by site, (columns, classes) with
    NaN for what is not told, in the order of `order`; None if there are none. labels: by site the
    classes of its associations. groups: by site the column of its groups of rows; "" without them.
    """

    names: list[str] = field(default_factory=list)
    num_rows: list[int] = field(default_factory=list)
    classes: list[tuple[str, ...]] = field(default_factory=list)
    has_statistics: list[bool] = field(default_factory=list)
    tells: list[bool] = field(default_factory=list)
    targets: list[str] = field(default_factory=list)
    tasks: list[str] = field(default_factory=list)
    columns: dict[str, Numbers | Categories] = field(default_factory=dict)
    target: Numbers | None = None
    class_counts: Categories = field(default_factory=lambda: Categories("", is_target=True))
    associations: list[NDArray[np.float32] | None] = field(default_factory=list)
    labels: list[tuple[str, ...]] = field(default_factory=list)
    groups: list[str] = field(default_factory=list)

    @property
    def target_name(self) -> str:
        """Name of the target's column, as the first site has it."""
        return next((name for name in self.targets if name), "")


def summarise(sites: Iterable[tuple[str, DataProfile]]) -> Summary:
    """Summarise the profiles of all sites with rows, read one after the other. Raises DataError."""
    summary = Summary()
    shared: dict[tuple[str, ...], tuple[str, ...]] = {}  # classes, which most sites have in common
    for name, profile in sites:
        if profile.num_samples == 0:
            continue
        at = len(summary.names)
        summary.names.append(name)
        summary.num_rows.append(profile.num_samples)
        summary.classes.append(shared.setdefault(profile.classes, profile.classes))
        summary.targets.append(profile.target)
        summary.tasks.append(profile.task)
        summary.has_statistics.append(bool(profile.statistics))
        if not profile.statistics:
            summary.associations.append(None)
            summary.labels.append(())
            summary.tells.append(False)
            summary.groups.append("")
            continue
        _add(summary, at, from_json(profile.statistics), profile.target)
    return summary


def _add(summary: Summary, at: int, statistics: Statistics, target: str) -> None:
    """Add the statistics of the site at this position to the summary."""
    tells = False
    found: dict[str, Sequence[float | None]] = {}
    for name, column in statistics.columns.items():
        kept = summary.columns.get(name)
        if kept is None:
            is_number = isinstance(column, NumberStatistics)
            kept = Numbers(intern(name)) if is_number else Categories(intern(name))
            summary.columns[kept.name] = kept
        if isinstance(kept, Numbers) and isinstance(column, NumberStatistics):
            kept.add(at, statistics.rows, column)
            tells |= column.moments.count > 0
        elif isinstance(kept, Categories) and isinstance(column, CategoryStatistics):
            kept.add(at, statistics.rows, column)
            tells |= bool(column.counts)
        if column.association:
            found[name] = column.association
    summary.tells.append(tells)
    summary.groups.append(statistics.group)
    classes = tuple(statistics.class_counts)
    summary.labels.append(classes)
    width = len(classes) or 1
    # A site that tells nothing of pairs, or of too many, would cost columns times classes.
    if found and len(summary.columns) * width <= MAX_ASSOCIATIONS:
        matrix = np.full((len(summary.columns), width), np.nan, np.float32)
        for i, name in enumerate(summary.columns):
            values = found.get(name, ())
            if len(values) == width:
                matrix[i] = [np.nan if value is None else value for value in values]
        summary.associations.append(matrix)
    else:
        summary.associations.append(None)
    if statistics.target is not None:
        if summary.target is None:
            summary.target = Numbers(target, is_target=True)
        about = NumberStatistics(0, statistics.target, statistics.target_buckets)
        summary.target.add(at, statistics.rows, about)
    else:
        counts = CategoryStatistics(0, statistics.class_counts, 0)
        summary.class_counts.add(at, statistics.rows, counts)
