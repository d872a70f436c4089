"""Text files: their encoding, the lines above their header, their separator, and their cells.

Spreadsheets write what the country is used to: `;` between cells and commas in numbers, or tabs.
"""

import codecs
from collections.abc import Iterator, Sequence
from csv import Error as CsvError
from csv import reader as csv_reader
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from xain_foundation.settings.hints import hint
from xain_workloads.errors import DataError
from xain_workloads.tables.reading.dialect import Dialect
from xain_workloads.tables.reading.errors import reading

SUFFIXES = (".csv", ".tsv")
# Commas are last: a row of `;` and decimal commas may divide at both, and the opposite is rare.
SEPARATORS = (";", "\t", "|", ",")
MAX_ROW_BYTES = 4 << 20
_MAX_TITLE_LINES = 30
_BYTE_ORDER_MARKS = (  # longest first: UTF-32's begins like UTF-16's
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)


class Header(NamedTuple):
    """names: of the columns. has_rows: whether rows follow. lines: up to and with the header."""

    names: list[str]
    has_rows: bool
    lines: int


def read_texts(path: Path, dialect: Dialect) -> tuple[Any, Dialect]:
    """Read a text file as an Arrow table of text, and complete its dialect: encoding, separator and
    title lines. Raises DataError if the file cannot be read."""
    import pyarrow as pa
    from pyarrow import csv

    try:
        encoding = dialect.encoding or _encoding_of(path)
        header, separator = _read_header(path, encoding, dialect)
    except UnicodeDecodeError:
        raise _not_text(path, encoding) from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error
    titles = header.lines - 1 if header.names else 0
    found = dialect.model_copy(
        update={"encoding": encoding, "separator": separator, "skip_lines": titles}
    )
    # Arrow takes a name twice, and takes a header without a line break for an empty file.
    columns = [str(i) for i in range(len(header.names))]
    if not header.has_rows:
        texts: list[Any] = [pa.array([], pa.string()) for _ in columns]
        return pa.Table.from_arrays(texts, header.names), found
    form = f"text in {encoding} whose cells are separated by {separator!r}"
    with reading(path, form):
        try:
            table = csv.read_csv(
                path,
                read_options=csv.ReadOptions(
                    block_size=MAX_ROW_BYTES,
                    skip_rows=header.lines,
                    column_names=columns,
                    encoding="utf8" if encoding in ("utf-8", "utf-8-sig") else encoding,
                ),
                parse_options=csv.ParseOptions(delimiter=separator, newlines_in_values=True),
                # As text: Arrow infers types from the first block alone, and then fails on the
                # first fraction in a column that began with whole numbers.
                convert_options=csv.ConvertOptions(
                    column_types=dict.fromkeys(columns, pa.string())
                ),
            )
        except UnicodeDecodeError:
            raise _not_text(path, encoding) from None
        except pa.ArrowInvalid:
            _require_rows(path, encoding, header, separator)
            raise
    return table.rename_columns(header.names), found


def _encoding_of(path: Path) -> str:
    """The encoding that the file tells: by a byte order mark, or by what can be decoded."""
    with path.open("rb") as file:
        start = file.read(1 << 20)
    for mark, name in _BYTE_ORDER_MARKS:
        if start.startswith(mark):
            return name
    if b"\0" in start:  # ASCII in UTF-16 has one in every other byte
        return "utf-16-be" if start[::2].count(0) > start[1::2].count(0) else "utf-16-le"
    for name in ("utf-8", "cp1252"):
        decoder = codecs.getincrementaldecoder(name)()
        try:
            with path.open("rb") as file:
                while part := file.read(1 << 20):
                    decoder.decode(part)
                decoder.decode(b"", final=True)
        except UnicodeDecodeError:
            continue
        return name
    return "latin-1"  # which has no undefined byte


def _not_text(path: Path, encoding: str) -> DataError:
    """The error of a file that cannot be decoded in this encoding."""
    return DataError(
        f"{path}: the file is no text in {encoding}; save it in UTF-8, which Excel calls"
        ' "CSV UTF-8", or ' + hint("xain-participant", 'data.encoding = "utf-8"') + " or the like"
    )


def _read_header(path: Path, encoding: str, dialect: Dialect) -> tuple[Header, str]:
    """Read the header of a text file, and find the separator of its cells.

    The separator is the one of SEPARATORS that divides header and first row into equally many
    cells; of several the one that makes the most of them, and of equal ones the first.
    """
    found: list[tuple[tuple[bool, bool, bool, int], Header, str]] = []
    for mark in (dialect.separator,) if dialect.separator else SEPARATORS:
        try:
            with path.open(encoding=encoding, newline="") as file:
                header, first = _header(file, mark, dialect.skip_lines)
        except LookupError:
            raise DataError(
                f"{path}: there is no encoding {encoding!r}; "
                + hint("xain-participant", 'data.encoding = "utf-8"')
                + ' or "cp1252", "utf-16" and the like'
            ) from None
        except CsvError:  # such as a header that is one cell of more than 128 KiB
            continue
        fits = first is None or len(first) == len(header.names)
        rank = (len(header.names) > 1, fits, header.lines == 1, len(header.names))
        found.append((rank, header, mark))
    if not found:
        raise DataError(f"{path}: the header or the first row has a cell of more than 128 KiB")
    _, header, mark = max(found, key=lambda one: one[0])  # the first of equal ones
    return header, mark if dialect.separator or len(header.names) > 1 else ","


def _header(file: Any, separator: str, skip_lines: int | None) -> tuple[Header, list[str] | None]:
    """Read the header of an open file, divided at a separator, and its first row or None."""
    for _ in range(skip_lines or 0):
        file.readline()
    lines = csv_reader(file, delimiter=separator)
    start: list[tuple[list[str], int]] = []
    try:
        for cells in lines:
            if cells:  # Arrow skips blank lines, too
                start.append((cells, lines.line_num + (skip_lines or 0)))
            if len(start) > _MAX_TITLE_LINES:
                break
    except CsvError:
        if len(start) < 2:
            raise
    titles = title_lines([cells for cells, _ in start]) if skip_lines is None else 0
    if not start:
        return Header([], False, 0), None
    (names, at), *rows = start[titles:]
    return Header(names, bool(rows), at), rows[0][0] if rows else None


def title_lines(rows: Sequence[Sequence[object]]) -> int:
    """How many rows stand above the header: those with a first cell alone, if a header follows.

    A header is text: rows of numbers below a single cell are a table with a wrong header.
    """
    for at, row in enumerate(rows):
        if any(cell not in ("", None) for cell in row[1:]):
            return at if all(map(_is_title, row)) else 0
    return 0


def _is_title(cell: object) -> bool:
    return isinstance(cell, str) and not cell.strip().replace(".", "", 1).isdecimal()


def _rows(path: Path, encoding: str, header: Header, separator: str) -> Iterator[list[str]]:
    """Yield the cells of each row below the header; blank lines are passed over."""
    with path.open(encoding=encoding, newline="") as file:
        for _ in islice(file, header.lines):
            pass
        yield from (line for line in csv_reader(file, delimiter=separator) if line)


def _require_rows(path: Path, encoding: str, header: Header, separator: str) -> None:
    """Raise DataError with the first row of another number of cells than the header, or with one
    that is too large."""
    row = 0
    try:
        for row, cells in enumerate(_rows(path, encoding, header, separator), start=1):
            if len(cells) != len(header.names):
                why = "; is a quotation mark open there?" if "\n" in cells[-1] else ""
                if row == 1 and len(cells) > len(header.names):
                    why += "; if a line stands above the header, "
                    why += hint("xain-participant", "data.skip_lines = 1")
                raise DataError(
                    f"{path}: row {row} has {len(cells)} cells, and the header"
                    f" {len(header.names)}{why}"
                )
    except CsvError:
        raise DataError(
            f"{path}: row {row + 1} has a cell of more than 128 KiB; is a quotation mark open"
            " there?"
        ) from None
