"""The schema of a table: which columns there are, and of which type. Never rows."""

from dataclasses import dataclass
from typing import Literal

ColumnType = Literal["number", "category"]


@dataclass(frozen=True, slots=True)
class Column:
    """A column of features. unit: as its owner declares it, "" if not declared."""

    name: str
    type: ColumnType = "number"
    unit: str = ""
