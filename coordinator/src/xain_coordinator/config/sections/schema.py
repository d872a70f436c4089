"""The section [schema]: what the data of all participants have in common."""

from typing import Literal

from pydantic import Field

from xain_coordinator.core.vocabulary.values import Schema
from xain_foundation.settings.fields import Check, Conflicts, Section, Texts, WrongSetting
from xain_workloads.names import folded
from xain_workloads.tables.schema import Column, ColumnType, check_names


class SchemaSettings(Section):
    """[schema]"""

    columns: dict[str, ColumnType] = Field(default_factory=dict)
    units: dict[str, str] = Field(default_factory=dict)
    target: str = ""
    task: Literal["", "classification", "regression"] = ""
    classes: Texts = ()
    allow_extra: bool = False
    allow_missing: bool = False
    allow_new_classes: bool = False
    min_sites: int = Field(default=2, ge=1, le=100_000)

    @Check
    def _columns_fit(self) -> Conflicts:
        """Check that the names of columns are valid, and those of units and target fit them."""
        for name in self.units:
            if name not in self.columns:
                yield WrongSetting(f"units.{name}", "schema.columns has no column of this name")
        try:
            check_names(self._columns)
        except ValueError as error:
            yield WrongSetting("columns", str(error))
        if self.target and self.target in self.columns:
            yield WrongSetting("target", "schema.columns lists it as a column of features")

    @Check
    def _classes_are_of_a_classification(self) -> Conflicts:
        """Check that a classification has two classes or more, and a regression none."""
        if self.classes and self.task == "regression":
            yield WrongSetting("classes", 'a schema.task = "regression" has none')
        elif self.classes and len(set(self.classes)) < 2:
            yield WrongSetting("classes", "classification needs two classes or more")

    @property
    def _columns(self) -> tuple[Column, ...]:
        """The columns under folded names, with their types and units."""
        return tuple(
            Column(folded(name), kind, self.units.get(name, ""))
            for name, kind in self.columns.items()
        )

    def agreed(self, task: str) -> Schema:
        """The schema of a new session. task: of the workload, "" if it has none."""
        from xain_workloads.names import class_name
        from xain_workloads.tables.profile import sort_classes

        return Schema(
            self._columns,
            folded(self.target),
            self.task or task,
            sort_classes(map(class_name, self.classes)),
            self.allow_extra,
            self.allow_missing,
            self.allow_new_classes,
        )
