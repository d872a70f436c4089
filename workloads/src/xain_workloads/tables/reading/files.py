"""Files with named columns, of each format, as one table of Arrow."""

import re
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import date, datetime, time
from pathlib import Path
from typing import Any, NamedTuple

from xain_foundation.settings.hints import hint
from xain_foundation.wheels import pip_install
from xain_workloads.errors import DataError
from xain_workloads.names import class_name, folded
from xain_workloads.tables.reading import texts
from xain_workloads.tables.reading.columns import is_text, known_texts
from xain_workloads.tables.reading.dialect import Dialect
from xain_workloads.tables.reading.errors import Problem, cells, reading
from xain_workloads.tables.reading.texts import title_lines
from xain_workloads.tables.schema import shown

EXCEL = (".xlsx", ".xls", ".xlsb", ".ods")
# Files of SAS, SPSS and Stata, by the function of pyreadstat.
STATISTICS_PROGRAMS = {
    ".sas7bdat": "read_sas7bdat",
    ".xpt": "read_xport",
    ".sav": "read_sav",
    ".zsav": "read_sav",
    ".dta": "read_dta",
}
SUFFIXES = (*texts.SUFFIXES, ".parquet", *EXCEL, *STATISTICS_PROGRAMS)

# Names of a last row that is no row of data.
_TOTALS = (
    *("total", "totals", "grand total", "sum", "summe", "gesamt", "gesamtsumme", "insgesamt"),
    *("somme", "totale", "suma", "totaal", "mean", "average", "mittelwert", "moyenne"),
)
_TOTAL = re.compile(rf"({'|'.join(_TOTALS)}) ?[:=]? ?([-+]?[\d.,' ]*\d)?")


class Cells(NamedTuple):
    """A file as it was read. infer: whether columns of text may be numbers.

    dialect: with what the file has told. problems: last rows of totals, which are left out.
    """

    table: Any
    infer: bool
    dialect: Dialect
    problems: Sequence[Problem]


def read_cells(path: Path, dialect: Dialect) -> Cells:
    """Read a file of any kind: its columns under normalised names, without a row of totals. Raises
    DataError if the file cannot be read."""
    suffix = path.suffix.lower()
    try:
        if suffix in texts.SUFFIXES:
            table, dialect = texts.read_texts(path, dialect)
        elif suffix == ".parquet":
            table = _read_parquet(path)
        elif suffix in EXCEL:
            table, dialect = _read_excel(path, dialect)
        else:
            table = _read_statistics_program(path, STATISTICS_PROGRAMS[suffix])
    except ModuleNotFoundError as missing:
        if missing.name == "python_calamine":
            install = pip_install("xain-participant", "excel")
        elif missing.name == "pyreadstat":
            install = pip_install("xain-participant", "readstat")
        else:
            raise
        raise DataError(
            f"{path}: {suffix} files are not read without {missing.name}: {install}"
        ) from missing
    infer = suffix in texts.SUFFIXES or suffix in EXCEL
    table, problems = _tidy(path, table, dialect, has_layout=infer)
    return Cells(table, infer, dialect, problems)


def _read_parquet(path: Path) -> Any:
    from pyarrow import parquet

    # Not read_table(), which takes folder names such as `year=2020` for columns.
    with reading(path, "Parquet file"), parquet.ParquetFile(path) as file:
        return file.read()


def _read_excel(path: Path, dialect: Dialect) -> tuple[Any, Dialect]:
    """Read a sheet: (Arrow table, dialect with the sheet's name and number of title lines)."""
    import pyarrow as pa
    import python_calamine

    with reading(path, "Excel file"), python_calamine.CalamineWorkbook.from_path(path) as book:
        sheets = book.sheet_names
        sheet = dialect.sheet or sheets[0]
        if sheet not in sheets:
            raise DataError(f"{path}: no sheet {sheet!r}; there are: {shown(sheets, 20)}")
        rows = book.get_sheet_by_name(sheet).to_python()
    skipped = title_lines(rows) if dialect.skip_lines is None else dialect.skip_lines
    found = dialect.model_copy(update={"sheet": sheet, "skip_lines": skipped})
    header, *data = rows[skipped:] or [[]]
    names = [class_name(cell) for cell in header]
    columns = [_of_one_type([row[at] for row in data]) for at in range(len(names))]
    return pa.Table.from_arrays(columns, names), found


def _of_one_type(values: Sequence[Any]) -> Any:
    """Convert cells of Excel to an Arrow column, one of text if they are of several types."""
    import pyarrow as pa

    known = [None if cell == "" else cell for cell in values]
    types = {type(cell) for cell in known if cell is not None}
    if types <= {int, float}:
        return pa.array(known, pa.float64())
    if types <= {date, datetime}:
        return pa.array([None if cell is None else str(cell) for cell in known], pa.string())
    if types in ({bool}, {time}):
        return pa.array(known)
    as_text = [class_name(cell) if isinstance(cell, int | float) else cell for cell in known]
    return pa.array([None if cell is None else str(cell) for cell in as_text], pa.string())


def _read_statistics_program(path: Path, function: str) -> Any:
    """Read a file of SAS, SPSS or Stata; labels replace numbers if all of a column have one."""
    import pyarrow as pa
    import pyreadstat

    read: Callable[..., Any] = getattr(pyreadstat, function)
    with reading(path, "file of SAS, SPSS or Stata"):
        columns, about = read(str(path), output_format="dict")
        for name, labels in about.variable_value_labels.items():
            values = columns.get(name, ())
            if all(cell is None or cell in labels for cell in values):
                columns[name] = [None if cell is None else str(labels[cell]) for cell in values]
        return pa.table({name: pa.array(list(cells)) for name, cells in columns.items()})


def _tidy(
    path: Path, table: Any, dialect: Dialect, *, has_layout: bool
) -> tuple[Any, list[Problem]]:
    """Normalise names and decode columns: (the table, problems of last rows of totals).

    has_layout: blank rows and columns at the end are cut off, and totals are looked for.
    """
    import pyarrow as pa

    names = [folded(name) for name in table.column_names]
    columns = [_plain(column) for column in table.columns]
    while has_layout and names and not names[-1] and _is_blank(columns[-1]):
        names.pop(), columns.pop()  # a separator at the end of each line
    if not names:
        raise DataError(f"{path}: the file is empty; not even a header with column names is there")
    if twice := sorted(name for name, number in Counter(names).items() if number > 1):
        raise DataError(f"{path}: more than one column is called {', '.join(map(repr, twice))}")
    table = pa.Table.from_arrays(columns, names)
    problems: list[Problem] = []
    if not has_layout:
        return table, problems
    table = _without_blank_rows(table)
    while dialect.totals != "keep" and (total := _total(table, dialect)):
        name, word = total
        if not dialect.totals:
            drop = hint("xain-participant", 'data.totals = "drop"')
            keep = hint("xain-participant", 'data.totals = "keep"')
            text = (
                f"{cells(name, {word: table.num_rows - 1})} is rather a total than a row; {drop} to"
                f" leave it out, or {keep}"
            )
            problems.append(Problem(text, (drop,)))
        table = _without_blank_rows(table.slice(0, table.num_rows - 1))
    return table, problems


def _plain(column: Any) -> Any:
    """Decode a column of dictionaries, runs or views of text; convert its times to microseconds."""
    import pyarrow as pa
    from pyarrow import compute

    if pa.types.is_run_end_encoded(column.type):
        column = compute.run_end_decode(column)
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    if pa.types.is_string_view(column.type):
        column = column.cast(pa.large_string())
    if pa.types.is_timestamp(column.type):
        column = column.cast(pa.timestamp("us", column.type.tz), safe=False)
    if pa.types.is_time(column.type):
        column = column.cast(pa.time64("us"), safe=False)
    return column


def _is_blank(column: Any) -> bool:
    cells = column.to_pylist()
    return all(cell is None or not str(cell).strip() for cell in cells)


def _without_blank_rows(table: Any) -> Any:
    """Cut off the blank rows at the end of a table, which spreadsheets leave there."""
    kept = table.num_rows
    while kept and all(_is_blank(column.slice(kept - 1, 1)) for column in table.columns):
        kept -= 1
    return table.slice(0, kept)


def _total(table: Any, dialect: Dialect) -> tuple[str, str] | None:
    """(column, word) if the last row is one of totals; None if it is not."""
    from pyarrow import compute

    last = table.num_rows - 1
    for name, column in zip(table.column_names, table.columns, strict=True):
        word = column[last].as_py() if last > 0 and is_text(column) else None
        if word is None or not _TOTAL.fullmatch(folded(word).casefold()):
            continue
        # A category of this name has other rows too.
        texts = known_texts(name, column, dialect)
        if compute.sum(compute.equal(texts, texts[last])).as_py() == 1:
            return name, word
    return None
