"""Table one: the data of a session, per site and together, from the sites' statistics.

The figures of all sites are merged as the sites are read, so that the memory does not grow with
them. Per site they are kept for MAX_SITES sites.
"""

import csv
import io
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import asdict, dataclass, field, replace
from json import dumps
from typing import Any, Self

import numpy as np
from pydantic import TypeAdapter, ValidationError

from xain_workloads.errors import DataError
from xain_workloads.tables.profile import DataProfile, sort_classes
from xain_workloads.tables.reading.statistics_json import from_json
from xain_workloads.tables.statistics import (
    CategoryStatistics,
    ColumnStatistics,
    Moments,
    NumberStatistics,
    Statistics,
    merge,
)

MAX_SITES = 200
SHOWN_SITES = 8  # in a table for people
MAX_CATEGORIES = 30  # of a column that are shown, the most frequent; the others are counted
_SHARES = np.array([0.05, 0.25, 0.5, 0.75, 0.95])
ALL = "all"
OF_TWO = "with two sites each can compute the other's figures from those of both"
_VERSION = 1


@dataclass(frozen=True, slots=True)
class Cell:
    """A column, or the target, at one site or at all.

    num_sites: that tell something of its values. known, missing: values; missing ones of the target
    are of rows that were left out. mean, spread: of numbers,
    the standard deviation of the sample. quantiles: 5, 25, 50, 75 and 95 %. counts: rows by
    category or class, the most frequent first; other: known rows of all others. telling: sites that
    tell of a category or class, of a cell of all sites. is_withheld: too few sites have missing
        values for their number to be told: known, missing and other are 0.
    """

    num_sites: int = 0
    known: int = 0
    missing: int = 0
    mean: float | None = None
    spread: float | None = None
    quantiles: tuple[float, ...] = ()
    counts: Mapping[str, int] = field(default_factory=dict)
    other: int = 0
    telling: Mapping[str, int] = field(default_factory=dict)
    is_withheld: bool = False


@dataclass(frozen=True, slots=True)
class Row:
    """A column. sites: by site. together: of all sites."""

    name: str
    type: str
    unit: str
    together: Cell
    sites: Mapping[str, Cell] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TableOne:
    """The data of all sites.

    num_samples: by site. num_sites: all sites, of which `rows` may tell a part. target: a row.
    min_sites: sites that a figure of all must have where sites see it; 0: it is for the operator.
    groups: groups of rows, known ones; its name is that of the column which tells them, at the
    first site that declares one. None without groups.
    """

    num_sites: int
    num_samples: Mapping[str, int]
    task: str
    target: Row
    rows: tuple[Row, ...]
    min_sites: int = 0
    groups: Row | None = None

    @classmethod
    def of(cls, sites: Iterable[tuple[str, DataProfile]]) -> Self:
        """Compute the table from all sites' profiles, read one by one. Raises DataError."""
        kept = _Kept()
        merged = merge(kept.noting(sites))
        rows = []
        for name, column in merged.columns.items():
            together = kept.telling(name, _cell(column, merged.rows))
            cells = kept.cells.get(name, {})
            rows.append(Row(name, column.type, kept.units.get(name, ""), together, cells))
        about = kept.telling("", _target(merged, kept.classes))
        kind = "category" if merged.target is None else "number"
        target = Row(kept.target, kind, "", about, kept.cells.get("", {}))
        table = cls(kept.num_sites, kept.num_samples, kept.task, target, tuple(rows))
        if not kept.group:
            return table
        together = Cell(kept.tells_groups, kept.num_groups)
        return replace(table, groups=Row(kept.group, "groups", "", together, kept.groups))

    def for_sites(self, min_sites: int) -> Self:
        """Copy the table without figures of single sites, or of fewer sites than min_sites.

        That holds of each category and class, of all others together, and of missing values: from
        the figures of all sites but one, those of the one could be computed.
        """
        sites = self.target.sites.keys()

        def shown(row: Row) -> Row:
            return replace(row, sites={}, together=_shown(row, sites, min_sites))

        return replace(
            self,
            num_samples={},
            groups=None
            if self.groups is None or self.groups.together.num_sites < min_sites
            else replace(self.groups, sites={}),
            target=shown(self.target),
            rows=tuple(map(shown, self.rows)),
            min_sites=min_sites,
        )

    # --- forms ---

    def to_json(self) -> str:
        """JSON text."""
        return dumps({"version": _VERSION, **asdict(self)}, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read what to_json() wrote. Raises DataError."""
        try:
            return TypeAdapter(cls).validate_json(text)
        except ValidationError as error:
            raise DataError(f"table one cannot be read: {error!r:.100}") from None

    def to_csv(self) -> str:
        """Lines of column, site, figure and value; a spreadsheet or R makes any table of them."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(("column", "site", "figure", "value"))
        for name, number in self.num_samples.items():
            writer.writerow(("", name, "rows", number))
        if self.groups is not None:
            for site, cell in self.groups.sites.items():
                writer.writerow((self.groups.name, site, "groups", cell.known))
        for row in (self.target, *self.rows):
            for site, cell in (*row.sites.items(), (ALL, row.together)):
                writer.writerows((row.name, site, *pair) for pair in _figures(cell))
        return text.getvalue()

    def cells(self) -> list[list[str]]:
        """The table for people, the heading first: name, what is told of it, a cell for each of the
        first sites and one for all together."""
        shown = list(self.num_samples)[:SHOWN_SITES]
        lines = [["", "", *shown, ALL]]
        told = [f"{self.num_samples[name]:,}" for name in shown]
        lines.append(["rows", "n", *told, f"{sum(self.num_samples.values()):,}"])
        if not self.num_samples:
            lines[-1][-1] = f"of {self.num_sites} sites"
        if self.groups is not None and self.groups.together.num_sites:
            here = [self.groups.sites.get(name, Cell()).known for name in shown]
            told = [f"{number:,}" if number else "" for number in here]
            of = self.groups.together
            some = f" of {of.num_sites} sites" if of.num_sites < self.num_sites else ""
            lines.append([self.groups.name, "groups of rows", *told, f"{of.known:,}{some}"])
        for row in (self.target, *self.rows):
            unit = f" ({row.unit})" if row.unit else ""
            cells = [row.sites.get(name, Cell()) for name in shown] + [row.together]
            label = f"{row.name}{unit}" + (", target" if row is self.target else "")
            for what, values in _lines(cells, self.min_sites):
                lines.append([label, what, *values])
                label = ""
        return lines

    def to_text(self) -> str:
        """Format the table for people as aligned text of the first SHOWN_SITES sites."""
        lines = self.cells()
        widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
        text = [
            "  ".join(
                cell.ljust(width) if i < 2 else cell.rjust(width)
                for i, (cell, width) in enumerate(zip(line, widths, strict=True))
            ).rstrip()
            for line in lines
        ]
        return "\n".join([*text, *self.remarks])

    @property
    def remarks(self) -> list[str]:
        """Sentences on what the table for people leaves out."""
        found = []
        if (more := len(self.num_samples) - SHOWN_SITES) > 0:
            found.append(f"and {more} more sites, see --csv")
        if self.min_sites:
            found.append(
                f"figures are of schema.min_sites, {self.min_sites}, or more sites; what fewer tell"
                " is withheld, or among others"
            )
        if self.num_sites == 2:
            found.append(OF_TWO)
        return found


@dataclass(slots=True)
class _Kept:
    """Figures of each site, which are kept while all are merged."""

    num_sites: int = 0
    num_samples: dict[str, int] = field(default_factory=dict)
    target: str = ""
    task: str = ""
    group: str = ""
    groups: dict[str, Cell] = field(default_factory=dict)
    num_groups: int = 0
    tells_groups: int = 0  # sites that tell their number
    classes: set[str] = field(default_factory=set)
    units: dict[str, str] = field(default_factory=dict)
    types: dict[str, str] = field(default_factory=dict)  # of columns that no schema has
    tells: dict[str, int] = field(default_factory=dict)  # sites by column; "" for the target
    names: dict[str, Counter[str]] = field(default_factory=dict)  # sites by column and category
    cells: dict[str, dict[str, Cell]] = field(default_factory=dict)

    def noting(self, sites: Iterable[tuple[str, DataProfile]]) -> Iterator[Statistics]:
        """Yield the statistics of each site, and keep the figures that table one needs."""
        for name, profile in sites:
            if not profile.num_samples:
                continue
            self.num_sites += 1
            self.target, self.task = self.target or profile.target, self.task or profile.task
            self.classes.update(profile.classes)
            for column in profile.columns:
                if column.unit:
                    self.units.setdefault(column.name, column.unit)
            is_kept = self.num_sites <= MAX_SITES
            if is_kept:
                self.num_samples[name] = profile.num_samples
            if not profile.statistics:
                continue
            statistics = from_json(profile.statistics)
            self.group = self.group or statistics.group
            if statistics.num_groups:
                self.num_groups += statistics.num_groups
                self.tells_groups += 1
                if is_kept:
                    self.groups[name] = Cell(1, statistics.num_groups)
            columns = self._alike(profile, statistics.columns)
            statistics = replace(statistics, columns=columns)
            cells = {key: _cell(one, statistics.rows) for key, one in columns.items()}
            cells[""] = _target(statistics, profile.classes)
            for key, cell in cells.items():
                self.tells[key] = self.tells.get(key, 0) + cell.num_sites
                if cell.counts:
                    self.names.setdefault(key, Counter()).update(cell.counts.keys())
                if is_kept:
                    self.cells.setdefault(key, {})[name] = cell
            yield statistics

    def _alike(
        self, profile: DataProfile, columns: Mapping[str, ColumnStatistics]
    ) -> dict[str, ColumnStatistics]:
        """The columns of a site without those of [schema] allow_extra that were of another type at
        an earlier site."""
        own = {column.name for column in profile.columns}
        return {
            name: one
            for name, one in columns.items()
            if name in own or self.types.setdefault(name, one.type) == one.type
        }

    def telling(self, key: str, cell: Cell) -> Cell:
        """Add to the cell of all sites how many sites tell of it, and of each of its categories."""
        names: Mapping[str, int] = self.names.get(key, {})
        telling = {name: names[name] for name in cell.counts if name in names}
        return replace(cell, num_sites=self.tells.get(key, 0), telling=telling)


def _cell(column: ColumnStatistics, rows: int) -> Cell:
    """Make the cell of a column from its statistics, of one site or of all."""
    known = rows - column.missing
    if isinstance(column, CategoryStatistics):
        told = bool(column.counts) or column.distinct is not None
        return Cell(int(told), known, column.missing, **_counts(column.counts, known))
    return _numbers(column.moments, column, known, column.missing)


def _numbers(moments: Moments, column: NumberStatistics, known: int, missing: int) -> Cell:
    """Make the cell of numbers: mean, standard deviation and quantiles, if they are told."""
    if not moments.count:
        return Cell(0, known, missing)
    spread = None
    if moments.count > 1:
        spread = float(np.sqrt(moments.m2 / (moments.count - 1)))
    quantiles = tuple(column.quantiles(_SHARES).tolist()) if column.buckets else ()
    return Cell(1, known, missing, moments.mean, spread, quantiles)


def _target(statistics: Statistics, classes: Iterable[str]) -> Cell:
    """Make the cell of the target: figures of numbers, or rows by class."""
    if statistics.target is not None:
        column = NumberStatistics(0, statistics.target, statistics.target_buckets)
        return _numbers(statistics.target, column, statistics.rows, statistics.without_target)
    counts = {name: statistics.class_counts.get(name, 0) for name in sort_classes(classes)}
    known = {name: count for name, count in counts.items() if count}
    missing = statistics.without_target
    return Cell(int(bool(known)), statistics.rows, missing, **_counts(known, statistics.rows))


def _counts(counts: Mapping[str, int], known: int) -> dict[str, Any]:
    frequent = sorted(counts.items(), key=lambda pair: (-pair[1], pair[0]))[:MAX_CATEGORIES]
    return {"counts": dict(frequent), "other": known - sum(count for _, count in frequent)}


def _shown(row: Row, sites: Set[str], min_sites: int) -> Cell:
    """Remove what fewer than min_sites tell from a row's cell of all sites. sites: all names."""
    cell, own = row.together, row.sites.values()
    if cell.num_sites < min_sites:
        return Cell(cell.num_sites)
    counts = {k: n for k, n in cell.counts.items() if cell.telling.get(k, 0) >= min_sites}
    num_missing = len(sites - row.sites.keys()) + sum(one.missing > 0 for one in own)
    is_withheld = 0 < num_missing < min_sites

    def rest(one: Cell) -> int:
        return one.known - sum(one.counts.get(name, 0) for name in counts)

    num_resting = sum(rest(one) > 0 for one in own)
    if counts and num_resting < min_sites and (num_resting or is_withheld):
        # Otherwise the rows that are not told would follow from those that are.
        del counts[min(counts, key=lambda name: (counts[name], name))]
    other = cell.known - sum(counts.values())
    cell = replace(cell, counts=counts, other=other, telling={}, is_withheld=is_withheld)
    return replace(cell, known=0, missing=0, other=0) if is_withheld else cell


def _figures(cell: Cell) -> Iterator[tuple[str, Any]]:
    """Yield the name and value of each figure of a cell, for the CSV file."""
    yield "sites", cell.num_sites
    if not cell.is_withheld:
        yield "known", cell.known
        yield "missing", cell.missing
    if cell.mean is not None:
        yield "mean", cell.mean
    if cell.spread is not None:
        yield "spread", cell.spread
    for share, value in zip(_SHARES, cell.quantiles, strict=False):
        yield f"quantile {share:g}", value
    for name, count in cell.counts.items():
        yield f"rows of {name}", count
    if cell.other:
        yield "rows of others", cell.other


def _lines(cells: Sequence[Cell], min_sites: int) -> Iterator[tuple[str, list[str]]]:
    """Yield the label of each line of a row of the table for people, and a text for each cell."""
    if len(cells) == 1 and 0 < cells[0].num_sites < min_sites:
        yield "withheld", [f"{cells[0].num_sites} of {min_sites} sites"]
        return
    if any(cell.mean is not None for cell in cells):
        yield "mean (spread)", [_mean(cell) for cell in cells]
        yield "median (quartiles)", [_quartiles_text(cell) for cell in cells]
    names = dict.fromkeys(name for cell in reversed(cells) for name in cell.counts)
    for name in names:
        yield name, [_share(cell, cell.counts.get(name)) for cell in cells]
    if names and any(cell.other for cell in cells):
        yield "others", [_share(cell, cell.other or None) for cell in cells]
    if not names and all(cell.mean is None for cell in cells):
        yield "not told", ["" for _ in cells]
    if any(cell.missing or cell.is_withheld for cell in cells):
        yield "missing", ["withheld" if c.is_withheld else f"{c.missing:,}" for c in cells]


def _mean(cell: Cell) -> str:
    if cell.mean is None:
        return ""
    return _number(cell.mean) + (f" ({_number(cell.spread)})" if cell.spread is not None else "")


def _quartiles_text(cell: Cell) -> str:
    if not cell.quantiles:
        return ""
    low, middle, high = (_number(value) for value in cell.quantiles[1:4])
    return f"{middle} ({low} to {high})"


def _share(cell: Cell, count: int | None) -> str:
    if count is None or not (cell.known or cell.is_withheld):
        return ""
    return f"{count:,} ({100 * count / cell.known:.1f} %)" if cell.known else f"{count:,}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if 1e4 <= abs(value) < 1e12 else f"{value:.4g}"
