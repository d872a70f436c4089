"""The columns of a design matrix: what each parameter of a model stands for.

A block has a parameter for the intercept and one for each prepared feature. A category column has a
feature for each category; in rows without any of them all are 0. The parameter of the reference
category comes last: if all rows have a category, it follows from the others and is left out.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from json import loads
from typing import Self

import numpy as np
from numpy.typing import NDArray

from xain_workloads.tables.preprocessing import COLUMNS_KEY, Preprocessing, preprocessing_of

Array = NDArray[np.float64]

KEY = "references"  # in the metadata of a model
OTHER = "other or missing"  # level of the rows that have none of the categories

# Share of the size of a value. A column that varies by less is constant but for rounding.
_ROUNDING = 1e-10


@dataclass(frozen=True, slots=True, eq=False)
class Term:
    """A term of the model as it is told: a column in its own unit, or a level of a category column.

    at: its parameter in a block. column: "" for the intercept. level: "" for a number. against: the
    level that it is compared with, "" for a number. weights: (p + 1,) of the parameters of a block,
    whose weighted sum is the coefficient.
    """

    at: int
    column: str
    level: str
    against: str
    weights: Array

    @property
    def name(self) -> str:
        """The term in words."""
        if not self.column:
            return "intercept"
        return f"{self.column} = {self.level}" if self.level else self.column


@dataclass(frozen=True, slots=True, eq=False)
class Design:
    """The parameters of one block, the intercept first.

    columns, levels: (p + 1,) the column of each parameter, "" for the intercept, and its category,
    "" for a number. preprocessing: None if rows are taken as they are. references: by category
    column, the parameter of its reference.
    """

    columns: tuple[str, ...]
    levels: tuple[str, ...]
    preprocessing: Preprocessing | None = None
    references: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, metadata: Mapping[str, str], num_features: int) -> Self:
        """List column and level of each parameter of a model's block. Raises ValueError if the
        metadata are not of so many features."""
        preprocessing = preprocessing_of(metadata)
        if preprocessing is None:
            named = loads(metadata.get(COLUMNS_KEY, "{}")).get("names")
            names = named or [f"x{i}" for i in range(num_features)]
            return cls(("", *names), ("",) * (num_features + 1))
        columns, levels = [""], [""]
        for number in preprocessing.numbers:
            columns.append(number.name)
            levels.append("")
        for number in preprocessing.numbers:
            if number.has_indicator:
                columns.append(number.name)
                levels.append("missing")
        references = {}
        chosen = loads(metadata.get(KEY, "{}"))
        for category in preprocessing.categories:
            for name in category.categories:
                if chosen.get(category.name) == name:
                    references[category.name] = len(columns)
                columns.append(category.name)
                levels.append(name)
        if len(columns) != num_features + 1:
            raise ValueError(
                f"the model has {num_features} features, its preprocessing {len(columns) - 1}"
            )
        return cls(tuple(columns), tuple(levels), preprocessing, references)

    @property
    def filled(self) -> Mapping[str, float]:
        """Share of missing values by column of numbers, where there were some."""
        numbers = () if self.preprocessing is None else self.preprocessing.numbers
        return {number.name: number.unknown for number in numbers if number.unknown}

    @property
    def order(self) -> NDArray[np.intp]:
        """Order in which parameters are taken in; the references are the last of their columns."""
        last = {at: self.columns[at] for at in self.references.values()}
        ends = {column: at for at, column in enumerate(self.columns)}
        keys = [ends[last[at]] + 0.5 if at in last else at for at in range(len(self.columns))]
        return np.argsort(keys, kind="stable")

    @property
    def smallest(self) -> Array:
        """(p + 1,) the mean square of a feature at which its column is constant, but for rounding
        of its values."""
        least = np.zeros(len(self.columns))
        if self.preprocessing is not None:
            for at, number in enumerate(self.preprocessing.numbers, start=1):
                least[at] = (_ROUNDING * abs(number.scale.center) / number.scale.scale) ** 2
        return least

    def words(self, at: int) -> str:
        """The column of a parameter, for a message."""
        column, level = self.columns[at], self.levels[at]
        if not column:
            return "the intercept"
        if at <= len(self.preprocessing.numbers if self.preprocessing else self.columns):
            return f"column {column!r}"
        return f"column {column!r} ({level})"

    def terms(self, left_out: Collection[int]) -> list[Term]:
        """Terms that are told of a block, in the order of the features.

        left_out: parameters without a value of their own, which count as 0.
        """
        found = [Term(0, "", "", "", self._intercept())]
        numbers = () if self.preprocessing is None else self.preprocessing.numbers
        for at in range(1, len(self.columns)):
            column = self.columns[at]
            if at in self.references.values():
                continue
            weights = np.zeros(len(self.columns))
            weights[at] = 1 / numbers[at - 1].scale.scale if at <= len(numbers) else 1.0
            against = ""
            if column in self.references:
                weights[self.references[column]] = -1.0
                against = self.levels[self.references[column]]
            found.append(Term(at, column, self.levels[at], against, weights))
        for column, reference in self.references.items():
            if reference not in left_out:
                weights = np.zeros(len(self.columns))
                weights[reference] = -1.0
                found.append(Term(reference, column, OTHER, self.levels[reference], weights))
        position = {column: at for at, column in enumerate(dict.fromkeys(self.columns))}
        return sorted(found, key=lambda term: position[term.column])

    def _intercept(self) -> Array:
        """Weights of the intercept where all numbers are 0 and all categories the references."""
        weights = np.zeros(len(self.columns))
        weights[0] = 1.0
        if self.preprocessing is not None:
            for at, number in enumerate(self.preprocessing.numbers, start=1):
                weights[at] = -number.scale.center / number.scale.scale
        weights[list(self.references.values())] = 1.0
        return weights
