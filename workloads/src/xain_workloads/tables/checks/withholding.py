"""Withhold figures of too few sites, so that a model tells no other site of them.

A model carries means, spreads, names of categories and weights of classes to all who may read it. A
figure that fewer than min_sites sites tell would be known as theirs. It is taken out of the
statistics before the model is made: a column of numbers is then not scaled, and a category counts
as unknown.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from xain_foundation.settings.hints import hint
from xain_workloads.errors import DataError
from xain_workloads.tables.profile import DataProfile
from xain_workloads.tables.reading.statistics_json import from_json, to_json
from xain_workloads.tables.statistics import (
    CategoryStatistics,
    ColumnStatistics,
    Moments,
    NumberStatistics,
    Statistics,
)


@dataclass(frozen=True, slots=True)
class Shared:
    """Profiles without the figures of too few sites.

    shares: columns whose share of unknown values is of too few sites.
    classes: classes that too few sites have rows of.
    """

    profiles: Sequence[DataProfile]
    shares: frozenset[str] = frozenset()
    classes: frozenset[str] = frozenset()


def withhold(profiles: Sequence[DataProfile], min_sites: int) -> Shared:
    """Take out of the statistics of all sites what fewer than min_sites of them tell. Raises
    DataError if that is the mean of the target, without which no regression can be trained."""
    sites = [profile for profile in profiles if profile.num_samples and profile.statistics]
    if min_sites < 2 or not sites:
        return Shared(profiles)
    counts = _Counts()
    for profile in sites:
        counts.note(profile, from_json(profile.statistics))
    if 0 < counts.targets < min_sites:
        raise DataError(
            f"the mean of the target is told by {counts.targets} of {len(sites)} sites, and"
            f" schema.min_sites is {min_sites}: let more sites join that have rows enough, or "
            + hint("xain-coordinator", f"schema.min_sites = {counts.targets}")
        )

    def is_few(num: int) -> bool:
        return 0 < num < min_sites

    few = _Few(
        {name for name, num in counts.numbers.items() if is_few(num)},
        {name for name, num in counts.categories.items() if is_few(num)},
        {name for name, num in counts.told_classes.items() if is_few(num)},
    )
    known, unknown = Counter[str](), Counter[str]()
    changed = []
    names = dict.fromkeys(column.name for profile in sites for column in profile.columns)
    for profile in profiles:
        if not (profile.num_samples and profile.statistics):
            changed.append(profile)
            continue
        statistics = few.without(from_json(profile.statistics))
        for name in names:
            column = statistics.columns.get(name)
            has_known, has_unknown = _presence(column, statistics.rows)
            known[name] += has_known
            unknown[name] += has_unknown
        changed.append(replace(profile, statistics=to_json(statistics)) if few else profile)
    shares = frozenset(name for name in names if is_few(known[name]) or is_few(unknown[name]))
    classes = frozenset(name for name, num in counts.classes.items() if is_few(num))
    return Shared(changed, shares, classes)


def _presence(column: ColumnStatistics | None, rows: int) -> tuple[bool, bool]:
    """(Whether a site has rows whose value the model knows, whether it has others)."""
    if column is None:
        return False, True
    unknown = column.missing
    if isinstance(column, CategoryStatistics):
        unknown += column.infrequent
    return unknown < rows, unknown > 0


@dataclass(slots=True)
class _Counts:
    """Sites that tell of a column of numbers, of a category, of a class and of the target, and that
    have rows of a class."""

    numbers: Counter[str] = field(default_factory=Counter)
    categories: Counter[tuple[str, str]] = field(default_factory=Counter)
    told_classes: Counter[str] = field(default_factory=Counter)
    classes: Counter[str] = field(default_factory=Counter)
    targets: int = 0

    def note(self, profile: DataProfile, statistics: Statistics) -> None:
        """Count a site for the target, and each column, category and class that it tells of."""
        for name, column in statistics.columns.items():
            if isinstance(column, CategoryStatistics):
                self.categories.update((name, category) for category in column.counts)
            elif column.moments.count:
                self.numbers[name] += 1
        told = statistics.class_counts
        self.told_classes.update(told.keys())
        self.classes.update(told.keys())
        if sum(told.values()) < statistics.rows:  # the others have too few rows to be told of
            self.classes.update(name for name in profile.classes if name not in told)
        self.targets += statistics.target is not None and statistics.target.count > 0


@dataclass(frozen=True, slots=True)
class _Few:
    """Columns of numbers, categories of columns, and classes that too few sites tell of."""

    numbers: set[str]
    categories: set[tuple[str, str]]
    classes: set[str]

    def __bool__(self) -> bool:
        return bool(self.numbers or self.categories or self.classes)

    def without(self, statistics: Statistics) -> Statistics:
        """Copy a site's statistics without the figures that too few sites tell."""
        columns = {name: self._column(name, one) for name, one in statistics.columns.items()}
        counts = statistics.class_counts
        kept = {name: num for name, num in counts.items() if name not in self.classes}
        return replace(statistics, columns=columns, class_counts=kept)

    def _column(self, name: str, column: ColumnStatistics) -> ColumnStatistics:
        """Remove a withheld column's moments; count withheld categories as infrequent ones."""
        if isinstance(column, NumberStatistics):
            if name not in self.numbers:
                return column
            return NumberStatistics(column.missing, Moments())
        kept: Mapping[str, int] = {
            category: num
            for category, num in column.counts.items()
            if (name, category) not in self.categories
        }
        others = sum(column.counts.values()) - sum(kept.values())
        return replace(column, counts=kept, infrequent=column.infrequent + others)
