"""The schema of a table: names, types and units of its columns, and its target. Never rows."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from xain_foundation.settings.hints import hint, quoted
from xain_workloads.errors import DataError

ColumnType = Literal["number", "category"]
COLUMN_TYPES: tuple[ColumnType, ...] = get_args(ColumnType)
# A column whose values are all missing may be of either type.
EMPTY: Literal["empty"] = "empty"

# A table with more columns is taken for an array: only the number of its columns is compared.
MAX_COLUMNS = 10_000
MAX_NAME = 200  # characters of a name or a unit
# Size of all names and units of a table together, in UTF-8.
MAX_NAMES_BYTES = 512 * 1024

_SHOWN = 5  # names in a message


@dataclass(frozen=True, slots=True)
class Column:
    """A column of features. unit: as its owner declares it, "" if not declared."""

    name: str
    type: ColumnType | Literal["empty"] = "number"
    unit: str = ""


@dataclass(frozen=True, slots=True)
class Schema:
    """The schema that the participants of a session agree on.

    columns, target, task, classes: empty where the first participant's data decide.
    allow_extra: columns that the schema does not have are ignored, instead of refused.
    allow_missing: a column that a participant does not have counts as missing in all of its rows.
    allow_new_classes: a participant may bring labels that the others do not have, until the model
        is made.
    """

    columns: tuple[Column, ...] = ()
    target: str = ""
    task: str = ""
    classes: tuple[str, ...] = ()
    allow_extra: bool = False
    allow_missing: bool = False
    allow_new_classes: bool = False


OPEN_SCHEMA = Schema()  # leaves everything to the first participant


def check_names(columns: Sequence[Column]) -> None:
    """Raise DataError that names the first column whose name, type or unit cannot be used."""
    if len(columns) > MAX_COLUMNS:
        raise DataError(f"there are {len(columns)} columns; at most {MAX_COLUMNS} are taken")
    seen: set[str] = set()
    num_bytes = 0
    for i, column in enumerate(columns, start=1):
        for what, text in (("name", column.name), ("unit", column.unit)):
            if len(text) > MAX_NAME or not text.isprintable():
                shown = repr(text[:40]) + ("..." if len(text) > 40 else "")
                raise DataError(
                    f"column {i} has the {what} {shown}; it must have at most {MAX_NAME}"
                    " printable characters"
                )
        if not column.name.strip():
            raise DataError(f"column {i} has no name; give it one in the file")
        if column.type not in (*COLUMN_TYPES, EMPTY):
            raise DataError(
                f"column {column.name!r} is of type {column.type[:40]!r}; it must be one of:"
                f" {', '.join(COLUMN_TYPES)}"
            )
        if column.name in seen:
            raise DataError(f"more than one column is called {column.name!r}")
        seen.add(column.name)
        num_bytes += len(column.name.encode(errors="replace")) + len(column.unit.encode())
    if num_bytes > MAX_NAMES_BYTES:
        raise DataError(f"the names of all columns take more than {MAX_NAMES_BYTES} bytes")


def match(schema: Schema, columns: Sequence[Column]) -> None:
    """Compare the columns of a table with those of a schema, by name and in any order. Raises
    DataError that names the columns, how they differ and what to do."""
    known = {column.name: column for column in schema.columns}
    names = {column.name for column in columns}
    extra = [] if schema.allow_extra else [c.name for c in columns if c.name not in known]
    missing = [] if schema.allow_missing else [name for name in known if name not in names]
    if missing and extra:
        raise DataError(
            f"{_columns(missing)} of the session's schema {_is(missing)} not in the data, and"
            f" {_columns(extra)} of the data {_is(extra)} not in the schema; if two of them are the"
            " same, rename it, "
            + hint("xain-participant", 'data.rename.NAME = "NAME"')
            + ", else correct the file"
        )
    if missing:
        raise DataError(
            f"{_columns(missing)} of the session's schema {_is(missing)} not in the data; add"
            f" {_it(missing)}, or at the coordinator "
            + hint("xain-coordinator", "schema.allow_missing = true")
        )
    if extra:
        raise DataError(
            f"{_columns(extra)} of the data {_is(extra)} not in the session's schema; leave"
            f" {_it(extra)} out, "
            + hint("xain-participant", 'data.drop = ["NAME"]')
            + ", or at the coordinator "
            + hint("xain-coordinator", "schema.allow_extra = true")
        )
    for column in columns:
        expected = known.get(column.name, column)
        if column.type != expected.type and EMPTY not in (column.type, expected.type):
            raise DataError(
                f"column {column.name!r} is of type {column.type!r}, in the session's schema of"
                f" type {expected.type!r}; correct its values, or "
                + hint("xain-participant", f'data.types.{quoted(column.name)} = "{expected.type}"')
            )
        if column.unit and expected.unit and column.unit != expected.unit:
            raise DataError(
                f"column {column.name!r} is in the unit {column.unit!r}, in the session's schema in"
                f" {expected.unit!r}; convert its values and "
                + hint("xain-participant", f'data.units.{quoted(column.name)} = "{expected.unit}"')
            )
    if not names & known.keys():
        raise DataError(
            f"no column of the data is in the session's schema; they have"
            f" {shown(column.name for column in columns)}, and it has {shown(known)}"
        )


def shown(names: Iterable[str], limit: int = _SHOWN) -> str:
    """Names for a message: the first few of them, and how many more there are."""
    texts = [repr(name) for name in names]
    more = f" and {len(texts) - limit} more" if len(texts) > limit else ""
    return ", ".join(texts[:limit]) + more


def _columns(names: Sequence[str]) -> str:
    return f"column{'s' if len(names) > 1 else ''} {shown(names)}"


def _is(names: Sequence[str]) -> str:
    return "are" if len(names) > 1 else "is"


def _it(names: Sequence[str]) -> str:
    return "them" if len(names) > 1 else "it"
