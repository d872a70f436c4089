"""A table in memory: named columns of numbers and of categories, with gaps, and a target.

A table is what a file holds. A Dataset, which a workload trains on, is a matrix of numbers without
gaps: a table becomes one by preprocessing, or by to_dataset() if nothing has to be done.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from xain_foundation.settings.hints import hint, quoted
from xain_workloads.errors import DataError
from xain_workloads.tables.dataset import Dataset, Target, Task
from xain_workloads.tables.profile import DataProfile, sort_classes
from xain_workloads.tables.reading.dialect import DETECTED, Dialect
from xain_workloads.tables.reading.statistics_json import to_json
from xain_workloads.tables.schema import MAX_COLUMNS, Column
from xain_workloads.tables.statistics import (
    MAX_STATISTICS_BYTES,
    MIN_CATEGORY_COUNT,
    MIN_KNOWN,
    describe,
)


@dataclass(frozen=True, slots=True, eq=False)
class Table:
    """Rows with a known target.

    columns: the columns of features, at least one, in the order of the file.
    values: (n,) per column: float64 with NaN for a missing value in a column of type "number";
        object, str with None for a missing value, in a column of type "category".
    target: (n,), class names as class_name() writes them, or float64 for regression.
    target_name: name of the target's column.
    classes: all class names that the target may have, in canonical order: those that are declared,
        or else those of the whole file. A subset keeps them. Empty for regression.
    origin: how error messages call the table, such as the path of its file.
    dialect: of the file, with what the file has told. without_target: rows that were left out,
        because their target is missing.
    groups: (n,) uint64, equal in rows of one group, which are not divided; None without groups.
        Digests of values, which stay at the site; see data.py. group: name of the column.
    Raises DataError if shapes, types or labels disagree.
    """

    columns: tuple[Column, ...]
    values: Mapping[str, NDArray[Any]]
    target: Target
    target_name: str = "target"
    classes: tuple[str, ...] = ()
    origin: str = "data"
    dialect: Dialect = DETECTED
    without_target: int = 0
    groups: NDArray[np.uint64] | None = None
    group: str = ""

    def __post_init__(self) -> None:
        """Check names, shapes, types and values, and complete the classes. Raises DataError."""
        if not self.columns:
            raise DataError(f"{self.origin}: no column of features is left")
        names = Counter([*(column.name for column in self.columns), self.target_name])
        for name, number in names.items():
            if number > 1:
                raise DataError(f"{self.origin}: more than one column is called {name!r}")
        shape = np.shape(self.target)
        for column in self.columns:
            array = self.values[column.name]
            expected = "O" if column.type == "category" else "f"
            if array.shape != shape or array.dtype.kind != expected:
                raise DataError(
                    f"{self.origin}: column {column.name!r} is of shape {array.shape} and dtype"
                    f" {array.dtype}; a {column.type} column of this table needs {shape} and"
                    f" {'object' if column.type == 'category' else 'float64'}"
                )
            if column.type == "number" and np.isinf(array).any():
                row = int(np.flatnonzero(np.isinf(array))[0])
                raise DataError(
                    f"{self.origin}: column {column.name!r}, row {row + 1}:"
                    f" {array[row]} is not finite"
                )
        if self.task == "classification":
            object.__setattr__(self, "classes", self._all_classes())

    def _all_classes(self) -> tuple[str, ...]:
        """Sort the declared classes, or those of the rows. Raises DataError if one is
        undeclared."""
        present = np.unique(self.target).tolist()
        if not self.classes:
            return sort_classes(present)
        for label in present:
            if label not in self.classes:
                row = int(np.flatnonzero(self.target == label)[0])
                raise DataError(
                    f"{self.origin}: column {self.target_name!r}, row {row + 1}: label {label!r}"
                    f" is none of the declared classes: {', '.join(map(repr, self.classes))}"
                )
        return sort_classes(self.classes)

    @property
    def num_samples(self) -> int:
        """Rows, n."""
        return len(self.target)

    @property
    def task(self) -> Task:
        """The task that the type of the target stands for."""
        return "regression" if self.target.dtype.kind == "f" else "classification"

    @property
    def num_groups(self) -> int:
        """Groups of rows; 0 without them."""
        return 0 if self.groups is None else len(np.unique(self.groups))

    def profile(
        self, min_category_count: int = MIN_CATEGORY_COUNT, min_known: int = MIN_KNOWN
    ) -> DataProfile:
        """Sizes, names, types and statistics of this table, as a participant sends them. No rows.

        min_category_count, min_known: as describe() takes them.
        A table of more than MAX_COLUMNS columns has neither names nor statistics; then nothing is
        prepared for the session. Raises DataError if the statistics of others take more than
        MAX_STATISTICS_BYTES, as those of some 5000 columns.
        """
        columns = {column.name: self.values[column.name] for column in self.columns}
        described = describe(
            columns,
            self.target,
            min_category_count=min_category_count,
            min_known=min_known,
            without_target=self.without_target,
            group=self.group,
            num_groups=self.num_groups,
        )
        is_named = len(self.columns) <= MAX_COLUMNS
        statistics = to_json(described) if is_named else ""
        if (size := len(statistics.encode())) > MAX_STATISTICS_BYTES:
            raise DataError(
                f"{self.origin}: the statistics of its {len(self.columns)} columns take"
                f" {size} bytes, and at most {MAX_STATISTICS_BYTES} are taken; leave"
                " columns out that are not used, "
                + hint("xain-participant", 'data.drop = ["NAME"]')
            )
        return DataProfile(
            num_samples=self.num_samples,
            num_features=len(self.columns),
            classes=self.classes,
            columns=self.columns if is_named else (),
            target=self.target_name,
            task=self.task,
            statistics=statistics,
        )

    @classmethod
    def from_dataset(cls, dataset: Dataset) -> Self:
        """A table of number columns. Raises DataError if two features have the same name."""
        values = dict(zip(dataset.feature_names, dataset.features.T, strict=True))
        columns = tuple(map(Column, dataset.feature_names))
        return cls(columns, values, dataset.target, groups=dataset.groups)

    def subset(self, rows: ArrayLike) -> "Table":
        """Copy of the given rows, in the given order. rows: (m,) integers, 0 <= row < n."""
        index = np.asarray(rows, dtype=np.intp)
        return replace(
            self,
            values={name: values[index] for name, values in self.values.items()},
            target=self.target[index],
            groups=None if self.groups is None else self.groups[index],
        )

    def arranged(self, names: Sequence[str]) -> "Table":
        """Copy the table with these columns, in this order; other columns are left out. Raises
        DataError that names a column that the table has not."""
        columns = {column.name: column for column in self.columns}
        for name in names:
            if name not in columns:
                raise DataError(
                    f"{self.origin}: no column {name!r}; there are: {', '.join(map(repr, columns))}"
                )
        return replace(
            self,
            columns=tuple(columns[name] for name in names),
            values={name: self.values[name] for name in names},
        )

    def to_dataset(self) -> Dataset:
        """The table as a matrix of numbers, in the order of its columns. Raises DataError that
        names column and row if a column is a category or a value is missing."""
        for column in self.columns:
            values = self.values[column.name]
            if column.type == "category":
                row = next((i for i, cell in enumerate(values) if not _is_number(cell)), 0)
                cell = values[row] if len(values) else ""
                raise DataError(
                    f"{self.origin}: column {column.name!r}, row {row + 1}: {cell!r} is not a"
                    " number, the column is a category; correct the value, or leave the column"
                    " out: " + hint("xain-participant", f"data.drop = [{quoted(column.name)}]")
                )
            if np.isnan(values).any():
                row = int(np.flatnonzero(np.isnan(values))[0])
                raise DataError(
                    f"{self.origin}: column {column.name!r}, row {row + 1}: the value is missing;"
                    " fill it in, or leave the column out: "
                    + hint("xain-participant", f"data.drop = [{quoted(column.name)}]")
                )
        names = tuple(column.name for column in self.columns)
        features = np.column_stack([self.values[name] for name in names])
        return Dataset(features, self.target, names, self.groups)


def _is_number(cell: str | None) -> bool:
    try:
        float(cell or 0)
    except ValueError:
        return False
    return True
