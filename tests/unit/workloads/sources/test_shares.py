"""Shares of files of rows: each row is in exactly one, however many there are."""

import io
from collections.abc import Iterator, Sequence
from itertools import chain

import fsspec
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet

from xain_workloads.errors import DataError
from xain_workloads.sources.parts import Part, find
from xain_workloads.sources.reading import read, schema
from xain_workloads.sources.shares import Piece, shares

FOLDER = "/shares"


@pytest.fixture(autouse=True)
def _cleared() -> Iterator[None]:
    yield
    clear()


def clear() -> None:
    files = fsspec.filesystem("memory")
    if files.exists(FOLDER):
        files.rm(FOLDER, recursive=True)


def parts_of(*contents: bytes, suffix: str = "svm") -> list[Part]:
    """Parts of files of these contents, in their order."""
    clear()
    files = fsspec.filesystem("memory")
    for number, content in enumerate(contents):
        files.pipe(f"{FOLDER}/{number:03}.{suffix}", content)
    return find(f"memory://{FOLDER}")


def column(
    parts: Sequence[Part], num_shares: int, name: str, block_bytes: int = 64
) -> list[object]:
    """The values of a column in all shares, in their order."""
    columns = schema(parts)
    return [
        value
        for share in shares(parts, num_shares)
        for table in read(share, columns, block_bytes)
        for value in table.column(name).to_pylist()
    ]


# (text of a CSV file, values of its column "a")
ODD_CSV = {
    "a header alone": ("a,b\n", []),
    "a header without a newline": ("a,b", []),
    "no newline at the end": ("a,b\n1,2\n3,4", [1, 3]),
    "CRLF": ("a,b\r\n1,2\r\n\r\n3,4\r\n", [1, 3]),
    "blank lines": ("\n\n\r\na,b\n\n\n1,2\n\n3,4\n\n", [1, 3]),
    "a byte order mark": ("\ufeffa,b\n1,2\n3,4\n", [1, 3]),
    "a header that is longer than a share": (
        "a," + ",".join(f"column {i}" for i in range(200)) + "\n1" + 200 * "," + "\n2" + 200 * ",",
        [1, 2],
    ),
    "a line that is longer than a share": (f"a,b\n1,x\n2,{5_000 * 'y'}\n3,z\n", [1, 2, 3]),
    "quoted cells": ('"a","b"\n1,"x, y"\n2,"say ""no"""\n3,\n', [1, 2, 3]),
    "semicolons": ("a;b\n1;2,5\n3;4\n", [1, 3]),
}


@pytest.mark.parametrize("name", ODD_CSV)
def test_each_row_of_an_odd_csv_file_is_read_once(name):
    """The header is no row, and each share knows it."""
    text, values = ODD_CSV[name]
    header = text.lstrip("\r\n").splitlines()[0]
    separator = ";" if ";" in header else ","
    last = f"{header}\n9{header.count(separator) * separator}"
    parts = parts_of(text.encode(), last.encode(), suffix="csv")
    for num_shares in range(1, 51):
        assert column(parts, num_shares, "a") == [*values, 9]


@pytest.mark.parametrize("num_groups", [1, 3, 20])
def test_each_row_group_of_parquet_files_is_read_once(num_groups):
    """Two files, one of which has a row group without a row."""
    table = pa.table({"a": list(range(60)), "b": [str(i) * 10 for i in range(60)]})
    contents = []
    for rows in (table, table.slice(0, 7)):
        file = io.BytesIO()
        parquet.write_table(rows, file, row_group_size=60 // num_groups)
        contents.append(file.getvalue())
    empty = io.BytesIO()
    parquet.write_table(table.slice(0, 0), empty)
    parts = parts_of(contents[0], empty.getvalue(), contents[1], suffix="parquet")
    for num_shares in range(1, 51):
        assert column(parts, num_shares, "a") == [*range(60), *range(7)]
    one, other = shares(parts[:1], 2)
    if num_groups == 20:  # the halves have about as many
        halves = [sum(table.num_rows for table in read(share)) for share in (one, other)]
        assert min(halves) >= 24


lines = st.lists(
    st.one_of(
        st.just(""),
        st.just("  "),
        st.just("# a comment"),
        st.integers(0, 9).map(lambda n: "{} " + " ".join(f"{key}:1" for key in range(n * n))),
    ),
    max_size=20,
)


@given(
    st.lists(st.tuples(lines, st.booleans()), min_size=1, max_size=3),
    st.sampled_from(["\n", "\r\n"]),
    st.integers(1, 50),
    st.integers(1, 300),
)
def test_each_line_is_read_once(files, line_end, num_shares, block_bytes):
    """However the bytes are divided, over several files, in blocks of any size."""
    number, contents = 0, [b"0\n"]
    for texts, ends_with_newline in files:
        numbered = []
        for text in texts:
            if "{}" in text:
                number += 1
                text = text.format(number)
            numbered.append(text)
        content = line_end.join(numbered) + (line_end if ends_with_newline else "")
        contents.append(content.encode())
    found = column(parts_of(*contents), num_shares, "target", block_bytes)
    assert found == list(range(number + 1))


cells = st.text(st.characters(exclude_categories=["Cc", "Cs"], exclude_characters='"'), max_size=20)


@given(
    st.lists(cells, min_size=1, max_size=30),
    st.sampled_from(["\n", "\r\n", "\n\n"]),
    st.booleans(),
    st.integers(1, 50),
    st.integers(1, 300),
)
def test_each_row_of_a_csv_file_is_read_once(
    texts, line_end, ends_with_newline, num_shares, block_bytes
):
    """Cells of all kinds of letters, between quotation marks."""
    rows = ["number,text", *(f'{number},"{text}"' for number, text in enumerate(texts))]
    content = line_end.join(rows) + (line_end if ends_with_newline else "")
    parts = parts_of(content.encode(), suffix="csv")
    assert column(parts, num_shares, "number", block_bytes) == list(range(len(texts)))


@given(st.lists(st.integers(1, 40), min_size=1, max_size=8), st.integers(1, 50))
def test_shares_are_of_equal_size_and_have_all_bytes(sizes, num_shares):
    """In the order of the files, without a gap; a share has at most a byte more than another."""
    parts = [Part("x", str(number), size, "csv") for number, size in enumerate(sizes)]
    found = shares(parts, num_shares)
    assert len(found) == num_shares
    bytes_of = [sum(piece.stop - piece.start for piece in share) for share in found]
    assert max(bytes_of) - min(bytes_of) <= 1
    pieces = [piece for share in found for piece in share]
    joined = []
    for piece in pieces:
        if joined and joined[-1].part == piece.part:
            assert joined[-1].stop == piece.start
            joined[-1] = Piece(piece.part, joined[-1].start, piece.stop)
        else:
            joined.append(piece)
    assert joined == [Piece(part, 0, part.size) for part in parts]


@pytest.mark.parametrize(
    ("suffix", "text", "why"),
    [
        ("svm", "1 2:x", "not a libsvm file"),
        ("svm", "1 2", "a line is not"),
        ("svm", "1 2:3 2:4", "ascend"),
        ("svm", "1 5:3 2:4", "ascend"),
        ("svm", "1 -2:3", "whole numbers"),
        ("svm", "1 2.5:3", "whole numbers"),
        ("svm", "1 2:nan", "not finite"),
        ("svm", "inf 2:1", "not finite"),
        ("svm", "a,b,c", "not a libsvm file"),
        ("csv", "1,2,3", "a row has 3 cells, and the header 2"),
        ("csv", 'x,"begun', "a quotation mark stays open; cells with line breaks"),
        ("csv", "x,\xff", "UTF-8"),
    ],
)
def test_wrong_line_is_named_with_its_file(tmp_path, suffix, text, why):
    path = tmp_path / f"x.{suffix}"
    begin = "a,b\n1,1\n" if suffix == "csv" else "1 1:1\n"
    path.write_bytes(f"{begin}{text}\n".encode("latin-1"))
    parts = find(str(path))
    with pytest.raises(DataError, match=rf"x\.{suffix}.*behind byte \d+.*{why}"):
        list(read(shares(parts, 1)[0]))


def test_cell_with_a_line_break_is_refused_wherever_shares_begin(tmp_path):
    path = tmp_path / "x.csv"
    path.write_text('a,b\n1,"one\nline, and\nanother"\n2,x\n')
    parts = find(str(path))
    for num_shares in range(1, 30):
        with pytest.raises(DataError, match="a quotation mark stays open"):
            list(chain(*map(read, shares(parts, num_shares))))


@pytest.mark.parametrize(
    ("second", "why"),
    [
        ("b,a\n1,2\n", "a column 'b' where the first file has 'a'"),
        ("a\n1\n", "1 columns, and the first file has 2"),
        ("a,b\n1,x\n", "column 'b' has 'x', and its first rows have numbers; add --categories b"),
    ],
)
def test_csv_files_with_different_columns_are_refused(second, why):
    parts = parts_of(b"a,b\n1,2\n", second.encode(), suffix="csv")
    columns = schema(parts)
    with pytest.raises(DataError, match=rf"001\.csv.*{why}"):
        list(read(shares(parts, 1)[0], columns))


def test_parquet_files_with_different_columns_are_refused():
    contents = []
    for table in (pa.table({"a": [1]}), pa.table({"a": ["x"]})):
        file = io.BytesIO()
        parquet.write_table(table, file)
        contents.append(file.getvalue())
    parts = parts_of(*contents, suffix="parquet")
    columns = schema(parts)
    with pytest.raises(DataError, match=r"001\.parquet: column 'a' is string, and int64"):
        list(read(shares(parts, 1)[0], columns))


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("a,a\n1,2\n", "more than one column is called 'a'"),
        ("a,b\r1,2\r", "lines end with a line feed"),
        ('"a,b\n1,2\n', "a quotation mark stays open"),
        ("1,2.5\n3,4\n", "numbers, and no names of columns"),
        (f"{200_000 * 'a'},b\n1,2\n", "the header has a cell of more than 128 KiB"),
    ],
)
def test_header_that_names_no_columns_is_refused(text, why):
    with pytest.raises(DataError, match=why):
        schema(parts_of(text.encode(), suffix="csv"))
    with pytest.raises(DataError, match="UTF-8"):
        schema(parts_of(text.encode("utf-16"), suffix="csv"))


def test_damaged_parquet_file_is_refused():
    with pytest.raises(DataError, match=r"000\.parquet: no Parquet file"):
        schema(parts_of(b"PAR1 but not really", suffix="parquet"))


def test_line_without_an_end_takes_bounded_memory():
    """A file of one line that is longer than any row."""
    parts = parts_of(b"1 " + b" " * (70 << 20))
    with pytest.raises(DataError, match=r"a line behind byte \d+ has more than 67108864 bytes"):
        list(read(shares(parts, 1)[0]))


def test_large_row_group_is_read_in_bounded_tables():
    rows = 200_000
    file = io.BytesIO()
    parquet.write_table(pa.table({"a": list(range(rows))}), file, row_group_size=rows)
    parts = parts_of(file.getvalue(), suffix="parquet")
    tables = list(read(shares(parts, 1)[0], block_bytes=80_000))
    assert len(tables) > 10
    assert max(table.nbytes for table in tables) < 200_000
    assert sum(table.num_rows for table in tables) == rows
