"""Keys of [data] of a participant and of [evaluate] of a coordinator: what of a file is the table,
and how the file is written."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import AfterValidator, Field

from xain_foundation.settings.fields import Allowed, Conflicts, Texts, WrongSetting
from xain_workloads.tables.reading.dialect import Dialect
from xain_workloads.tables.schema import ColumnType

if TYPE_CHECKING:
    from xain_workloads.tables.table import Table

# numpy and Arrow are imported where they are needed: --help need not wait for them.
_MAX_FEATURES = 1_000_000  # a coordinator takes no more


def _check_condition(condition: str) -> str:
    """Return a condition as it is. Raises ValueError if it cannot be parsed."""
    if condition.strip():
        from xain_workloads.tables.reading.where import parse

        parse(condition)
    return condition


Condition = Annotated[
    str,
    AfterValidator(_check_condition),
    Allowed("a condition such as age >= 18 and sex == 'f', or \"\""),
]


class TableSettings(Dialect):
    """Arguments of load_table() as keys, which say what they mean, and rows that are taken."""

    target: str | None = None
    task: Literal["classification", "regression"] = "classification"
    num_features: int | None = Field(default=None, ge=1, le=_MAX_FEATURES)
    zero_based: bool = False
    columns: Texts = ()
    drop: Texts = ()
    types: dict[str, ColumnType] = Field(default_factory=dict)
    units: dict[str, str] = Field(default_factory=dict)
    classes: Texts = ()
    group: str = ""
    where: Condition = ""

    def source_conflicts(self, section: str, key: str, source: str) -> Conflicts:
        """Yield settings that the source, which `key` names, cannot have; the file is not read."""
        from xain_workloads.tables.data import (
            BUNDLED,
            FOLDER_FILES,
            SUFFIXES,
            WITH_COLUMN_NAMES,
            is_folder,
        )

        has_no_suffix = source in BUNDLED or is_folder(source)
        suffix = "" if has_no_suffix else Path(source).suffix.lower()
        if (not has_no_suffix and suffix not in SUFFIXES) or "://" in source:
            yield WrongSetting(
                key,
                f"it must be one of: {', '.join(BUNDLED)}, a file that ends in one of: "
                f"{', '.join(SUFFIXES)}, or a folder with {' and '.join(FOLDER_FILES)}",
            )
        elif self.target is not None and suffix not in WITH_COLUMN_NAMES:
            yield WrongSetting(
                "target",
                f"only files that end in one of: {', '.join(WITH_COLUMN_NAMES)}, have a column to "
                "choose",
            )
        elif self.group and suffix not in WITH_COLUMN_NAMES and not is_folder(source):
            yield WrongSetting(
                "group",
                f"only files that end in one of: {', '.join(WITH_COLUMN_NAMES)}, have a column of "
                "groups",
            )
        if self.classes and self.task == "regression":
            yield WrongSetting("classes", f'there are none with {section}.task = "regression"')
        if source == "diabetes" and self.task == "classification":
            yield WrongSetting(
                "task", 'it must be "regression": the target of diabetes is a measurement'
            )

    def table(self, source: str, known_types: Mapping[str, ColumnType] | None = None) -> "Table":
        """Read the table.

        known_types: of columns, by their names in the session, unless `types` has them.
        Raises DataError that names the file, and column and row if possible.
        """
        from xain_workloads.tables.data import load_table
        from xain_workloads.tables.reading.where import filtered

        table = load_table(
            source,
            target=self.target,
            task=self.task,
            num_features=self.num_features,
            zero_based=self.zero_based,
            select=self.columns,
            drop=self.drop,
            types=self.types,
            known_types=known_types,
            units=self.units,
            classes=self.classes,
            group=self.group,
            dialect=Dialect.of(self),
        )
        return filtered(table, self.where)
