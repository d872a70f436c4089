import io

import numpy as np
import pyarrow as pa
import pytest
import xxhash
from pyarrow import parquet

from xain_workloads.errors import DataError
from xain_workloads.sparse.rows import Rows, Source, batches_of


def plain(rows: Rows) -> list[tuple[float, dict[int, float]]]:
    """Rows as (target, values by key), zeros included."""
    found = []
    for i in range(rows.num_rows):
        where = slice(rows.features.indptr[i], rows.features.indptr[i + 1])
        keys = rows.keys[rows.features.indices[where]].tolist()
        found.append((rows.targets[i], dict(zip(keys, rows.features.data[where], strict=True))))
    return found


def all_rows(source: Source) -> list[tuple[float, dict[int, float]]]:
    return [row for rows in source.read(source.shares(1)[0]) for row in plain(rows)]


def hashed(text: str, num_columns: int, bound: int = 1 << 53) -> int:
    """The key of a category, as docs/parameter-server.md tells it."""
    return num_columns + xxhash.xxh3_64_intdigest(text.encode()) % (bound - num_columns)


def test_comments_queries_and_blank_lines_of_libsvm_are_skipped(tmp_path):
    (tmp_path / "x.svm").write_bytes(
        b"# made by hand\n\n+1 qid:3 1:0.5 7:-2e-1 # a row\r\n  \n-1\n0 2:1\n"
    )
    found = all_rows(Source(str(tmp_path / "x.svm")))
    assert found == [(1.0, {1: 0.5, 7: -0.2}), (-1.0, {}), (0.0, {2: 1.0})]


CSV = """clicked,age,site,zip
1,30,a.com,007
0,,b.com,7
1,0,,10115
"""


def test_numbers_of_a_csv_file_are_by_column_and_categories_are_hashed(tmp_path):
    """A value that is 0 or missing is not there. Categories are as they are written."""
    (tmp_path / "x.csv").write_text(CSV)
    found = all_rows(Source(str(tmp_path), target="clicked", categories=["zip"]))
    assert found == [
        (1.0, {1: 30.0, hashed("site=a.com", 4): 1.0, hashed("zip=007", 4): 1.0}),
        (0.0, {hashed("site=b.com", 4): 1.0, hashed("zip=7", 4): 1.0}),
        (1.0, {hashed("zip=10115", 4): 1.0}),
    ]
    found = all_rows(Source(str(tmp_path), target="clicked", bound=6))
    assert found[0] == (1.0, {1: 30.0, 3: 7.0, hashed("site=a.com", 4, 6): 1.0})


def test_parquet_has_the_rows_of_csv(tmp_path):
    """Columns of all kinds of numbers, of text, and of text with a dictionary."""
    for bound in (None, 100):
        for categories in ([], ["whole"]):
            table = pa.table(
                {
                    "whole": pa.array([1, None, 3], pa.int32()),
                    "text": pa.array(["x", "y", None]),
                    "coded": pa.array(["u", "v", "u"]).dictionary_encode(),
                    "fraction": pa.array([0.5, float("nan"), -1], pa.float32()),
                    "truth": [True, False, True],
                    "target": pa.array([1, -1, 1], pa.int8()),
                }
            )
            parquet.write_table(table, tmp_path / "x.parquet")
            (tmp_path / "x.csv").write_text(
                "whole,text,coded,fraction,truth,target\n1,x,u,0.5,1,1\n,y,v,,0,-1\n3,,u,-1,1,1\n"
            )
            one, other = (
                Source(str(tmp_path / f"x.{suffix}"), categories=categories, bound=bound)
                for suffix in ("csv", "parquet")
            )
            assert all_rows(one) == all_rows(other)
            assert one.encoding == other.encoding


def test_categories_with_one_key_are_added(tmp_path):
    """With three columns and a bound of 4 all categories have the key 3."""
    (tmp_path / "x.csv").write_text("a,b,target\nx,y,1\n")
    assert all_rows(Source(str(tmp_path), bound=4)) == [(1.0, {3: 2.0})]


def test_encoding_tells_other_columns_targets_and_categories(tmp_path):
    (tmp_path / "x.csv").write_text("a,b,c\n1,2,0\n")
    (tmp_path / "y.csv").write_text("a,c,b\n1,2,0\n")
    x, y = str(tmp_path / "x.csv"), str(tmp_path / "y.csv")
    encodings = {
        Source(x).encoding,
        Source(y).encoding,
        Source(x, target="b").encoding,
        Source(x, categories=["b"]).encoding,
        Source(x, bound=10).encoding,
    }
    assert len(encodings) == 5


@pytest.mark.parametrize(
    ("text", "settings", "why"),
    [
        ("a,b\n1,2\n", {"target": "c"}, "no column 'c'; there are: a, b"),
        ("a,b\n1,2\n", {"categories": ["c"]}, "no column 'c'"),
        ("a,b\n1,yes\n", {}, "the target 'b' is string, and it must be 0 and 1, or -1 and 1"),
        ("a,b\n1,1\n2,\n", {}, "a row has no target 'b'"),
        ("a,b\ninf,1\n", {}, "column 'a' has a value that is not finite"),
        ("a,b\n1,2\n", {"bound": 2}, "give a bound above 2"),
        ("a,b\n", {}, "has no rows"),
    ],
)
def test_tables_that_do_not_fit_are_refused(tmp_path, text, settings, why):
    (tmp_path / "x.csv").write_text(text)
    with pytest.raises(DataError, match=why):
        all_rows(Source(str(tmp_path), **settings))


def test_columns_of_parquet_that_are_neither_numbers_nor_text_are_refused(tmp_path):
    """Unless they are named as categories, and have a text."""
    file = io.BytesIO()
    days = pa.array([0, 1], pa.date32())
    parquet.write_table(pa.table({"day": days, "list": [[1], [2]], "target": [0, 1]}), file)
    (tmp_path / "x.parquet").write_bytes(file.getvalue())
    with pytest.raises(DataError, match=r"column 'day' is date32\[day\], neither numbers nor text"):
        Source(str(tmp_path))
    with pytest.raises(DataError, match="column 'list' is list"):
        all_rows(Source(str(tmp_path), categories=["day"]))


def test_libsvm_files_take_no_names_of_columns(tmp_path):
    (tmp_path / "x.svm").write_text("1 1:1\n")
    with pytest.raises(DataError, match="columns of libsvm files have numbers, and no names"):
        Source(str(tmp_path), target="a")


@pytest.mark.parametrize("block_bytes", [16, 100, 1 << 20])
def test_batches_are_the_same_wherever_blocks_end(tmp_path, block_bytes):
    """Batches of 7 rows, and the rest last, with the keys that occur in each."""
    path = tmp_path / "x.svm"
    path.write_text("".join(f"{i} {i % 5}:{i + 1} {i + 10}:0.5\n" for i in range(40)))
    source = Source(str(path))
    batches = list(batches_of(source.read(source.shares(1)[0], block_bytes), 7))
    assert [batch.num_rows for batch in batches] == [7, 7, 7, 7, 7, 5]
    assert [t for batch in batches for t in batch.targets] == list(range(40))
    for batch in batches:
        rows = batch.targets.astype(int)
        assert batch.keys.tolist() == sorted({*(rows % 5), *(rows + 10)})
        dense = batch.features.toarray()
        columns = np.searchsorted(batch.keys, rows % 5)
        assert (dense[np.arange(len(rows)), columns] == rows + 1).all()
        assert dense.sum() == (rows + 1.5).sum()
