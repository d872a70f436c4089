"""CSV files: their separator and their decimal mark, and their cells as text.

Spreadsheets write what the country is used to: `;` between cells and commas in numbers, or tabs.
"""

from csv import Error as CsvError
from csv import reader as csv_reader
from pathlib import Path
from typing import Any

from xain_foundation.hints import hint
from xain_workloads.errors import DataError
from xain_workloads.reading.errors import reading

SUFFIXES = (".csv", ".tsv")
# Commas are last: a row of `;` and decimal commas may divide at both, and the opposite is rare.
SEPARATORS = (";", "\t", "|", ",")
DECIMALS = (".", ",")
MAX_ROW_BYTES = 4 << 20


def read_header(path: Path, separator: str = "") -> tuple[list[str], bool, str]:
    """Names of the columns, whether rows follow, and the separator.

    separator: "" for the one of SEPARATORS that divides header and first row into equally many
        cells; of several the one that makes the most of them, and of equal ones the first.
    Raises DataError if the file cannot be read.
    """
    found: list[tuple[tuple[bool, bool, int], list[str], bool, str]] = []
    for mark in (separator,) if separator else SEPARATORS:
        try:
            with path.open(encoding="utf-8-sig", newline="") as file:
                # Arrow skips blank lines, too.
                lines = (line for line in csv_reader(file, delimiter=mark) if line)
                header, first = next(lines, []), next(lines, None)
        except UnicodeDecodeError:
            raise _not_utf8(path) from None
        except OSError as error:
            raise DataError(f"{path}: cannot be read: {error.strerror}") from error
        except CsvError:  # such as a header that is one cell of more than 128 KiB
            continue
        fits = first is None or len(first) == len(header)
        rank = (len(header) > 1, fits, len(header))
        found.append((rank, header, first is not None, mark))
    if not found:
        raise DataError(f"{path}: the header or the first row has a cell of more than 128 KiB")
    _, header, has_rows, mark = max(found, key=lambda one: one[0])  # the first of equal ones
    return header, has_rows, mark if separator or len(header) > 1 else ","


def read_cells(path: Path, separator: str = "", decimal: str = "") -> tuple[Any, str]:
    """All columns as an Arrow table of text, and the decimal mark of the file's numbers.

    separator: see read_header(). decimal: "" to tell it by the numbers, see decimal_mark().
    Raises DataError.
    """
    import pyarrow as pa
    from pyarrow import csv

    header, has_rows, separator = read_header(path, separator)
    # Everything is read as text: Arrow infers types from the first block alone, and then fails on
    # the first fraction in a column that began with whole numbers.
    types = {name: pa.string() for name in header}
    if not has_rows:  # Arrow takes a header without a line break for an empty file
        return pa.schema(types).empty_table(), decimal or "."
    with reading(path, f"CSV file whose cells are separated by {separator!r}"):
        try:
            table = csv.read_csv(
                path,
                read_options=csv.ReadOptions(block_size=MAX_ROW_BYTES),
                parse_options=csv.ParseOptions(delimiter=separator, newlines_in_values=True),
                convert_options=csv.ConvertOptions(column_types=types),
            )
        except pa.ArrowInvalid as error:
            if "invalid UTF8" in str(error):
                raise _not_utf8(path) from None
            _require_rows(path, len(header), separator)
            raise
    return table, decimal or decimal_mark(path, table, separator)


def _require_rows(path: Path, num_cells: int, separator: str) -> None:
    """Raise DataError with the first row of another number of cells than the header, or with one
    that is too large."""
    row = 0
    with path.open(encoding="utf-8-sig", newline="") as file:
        lines = (line for line in csv_reader(file, delimiter=separator) if line)
        try:
            for row, cells in enumerate(lines):
                if len(cells) != num_cells:
                    quoted = "; is a quotation mark open there?" if "\n" in cells[-1] else ""
                    raise DataError(
                        f"{path}: row {row} has {len(cells)} cells, and the header {num_cells}"
                        + quoted
                    )
        except CsvError:
            raise DataError(
                f"{path}: row {row + 1} has a cell of more than 128 KiB; is a quotation mark open"
                " there?"
            ) from None


def decimal_mark(path: Path, table: Any, separator: str) -> str:
    """The decimal mark, which is a point where commas separate cells.

    Elsewhere the numbers tell: 3,5 has a decimal comma and 3.5 a point; 1,234 and 1.234 may be
    fractions or thousands. Raises DataError if both marks are there, or only such as the latter.
    """
    if separator == ",":
        return "."
    commas, points = _cell_like(table, _FRACTION, ","), _cell_like(table, _FRACTION, ".")
    told = hint("xain-participant", 'data.decimal = ","') + ' or "."'
    if commas and points:
        raise DataError(
            f"{path}: numbers have decimal commas, {commas}, and points, {points}; {told}"
        )
    if commas or points:
        return "," if commas else "."
    unclear = _cell_like(table, _UNCLEAR, ",") or _cell_like(table, _UNCLEAR, ".")
    if unclear:
        raise DataError(f"{path}: a number may be a fraction or have thousands, {unclear}; {told}")
    return "."


# Numbers with the mark in place of MARK. A fraction does not look like a number with a mark
# between thousands: it begins with 0, has no or more than three digits before the mark, or another
# number of digits than three behind it.
_FRACTION = r"^\s*[-+]?((0|\d{4,})?MARK\d+|\d+MARK(\d{1,2}|\d{4,}))([eE][-+]?\d+)?\s*$"
_UNCLEAR = r"^\s*[-+]?[1-9]\d{0,2}MARK\d{3}\s*$"


def _cell_like(table: Any, pattern: str, mark: str) -> str:
    """Description of the first cell that matches; "" if none does."""
    from pyarrow import compute

    pattern = pattern.replace("MARK", f"[{mark}]")
    for name, cells in zip(table.column_names, table.columns, strict=True):
        row = compute.index(compute.match_substring_regex(cells, pattern), True).as_py()
        if row >= 0:
            return f"{cells[row].as_py()!r} in column {name!r}, row {row + 1}"
    return ""


def _not_utf8(path: Path) -> DataError:
    return DataError(
        f"{path}: the file is not UTF-8 text; save it in that encoding, which Excel calls"
        ' "CSV UTF-8"'
    )
