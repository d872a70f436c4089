import fsspec
import numpy as np
import pytest
from fsspec.implementations.local import LocalFileSystem
from hypothesis import given, settings
from hypothesis import strategies as st

from xain_workloads.errors import DataError, NoData
from xain_workloads.sparse.libsvm import LibsvmFiles, Rows, batches_of

rows_of_text = st.lists(
    st.tuples(
        st.sampled_from([-1, 1]),
        st.dictionaries(st.integers(0, 2**50), st.integers(-99, 99), max_size=5),
    ),
    min_size=1,
    max_size=30,
)


def line(target: int, values: dict[int, int]) -> str:
    return " ".join([str(target), *(f"{key}:{value}" for key, value in sorted(values.items()))])


def plain(rows: Rows) -> list[tuple[float, dict[int, float]]]:
    """Rows as (target, values by key), zeros included."""
    found = []
    for i in range(rows.num_rows):
        where = slice(rows.features.indptr[i], rows.features.indptr[i + 1])
        keys = rows.keys[rows.features.indices[where]].tolist()
        found.append((rows.targets[i], dict(zip(keys, rows.features.data[where], strict=True))))
    return found


@settings(deadline=None)
@given(rows_of_text, rows_of_text, st.integers(1, 9), st.integers(1, 200), st.booleans())
def test_each_line_is_read_exactly_once(first, second, num_parts, block_bytes, ends_with_newline):
    """However the bytes are divided, over two files, in blocks of any size."""
    files = fsspec.filesystem("memory")
    files.rm("/libsvm", recursive=True) if files.exists("/libsvm") else None
    for name, rows in (("a", first), ("b", second)):
        text = "\n".join(line(*row) for row in rows) + ("\n" if ends_with_newline else "")
        files.pipe(f"/libsvm/{name}.svm", text.encode())
    source = LibsvmFiles("memory:///libsvm/*.svm")
    found = []
    for index in range(num_parts):
        for rows in source.read(source.part(index, num_parts), block_bytes):
            found += plain(rows)
    assert found == [(target, values) for target, values in [*first, *second]]


def test_comments_queries_and_blank_lines_are_skipped(tmp_path):
    (tmp_path / "x.svm").write_bytes(
        b"# made by hand\n\n+1 qid:3 1:0.5 7:-2e-1 # a row\r\n  \n-1\n0 2:1\n"
    )
    source = LibsvmFiles(str(tmp_path / "x.svm"))
    (rows,) = source.read(source.part(0, 1))
    assert plain(rows) == [(1.0, {1: 0.5, 7: -0.2}), (-1.0, {}), (0.0, {2: 1.0})]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("1 2:x", "not a libsvm file"),
        ("1 2", "a line is not"),
        ("1 2:3 2:4", "ascend"),
        ("1 5:3 2:4", "ascend"),
        ("1 -2:3", "whole numbers"),
        ("1 2.5:3", "whole numbers"),
        ("1 2:nan", "not finite"),
        ("inf 2:1", "not finite"),
        ("a,b,c", "not a libsvm file"),
    ],
)
def test_a_wrong_line_is_named_with_its_file(tmp_path, text, why):
    (tmp_path / "x.svm").write_text(f"1 1:1\n{text}\n")
    source = LibsvmFiles(str(tmp_path))
    with pytest.raises(DataError, match=rf"x\.svm behind byte 0: .*{why}"):
        list(source.read(source.part(0, 1)))


def test_missing_and_empty_files_are_refused(tmp_path):
    with pytest.raises(DataError, match="there is no file"):
        LibsvmFiles(str(tmp_path / "no.svm"))
    (tmp_path / "empty.svm").touch()
    with pytest.raises(NoData, match="is empty"):
        LibsvmFiles(str(tmp_path))
    with pytest.raises(DataError, match="no driver for nowhere:// is installed"):
        LibsvmFiles("nowhere://x")


def test_batches_have_the_keys_that_occur_in_them(tmp_path):
    (tmp_path / "x.svm").write_text("1 1:1 9:2\n-1 9:3\n1 4:5\n")
    source = LibsvmFiles(str(tmp_path))
    (rows,) = source.read(source.part(0, 1))
    first, second = rows.batches(2)
    assert first.keys.tolist() == [1, 9]
    assert first.features.toarray().tolist() == [[1, 2], [0, 3]]
    assert second.keys.tolist() == [4]
    assert np.array_equal(second.targets, [1])


@pytest.mark.parametrize("block_bytes", [16, 100, 1 << 20])
def test_batches_are_the_same_wherever_blocks_end(tmp_path, block_bytes):
    """Batches of 7 rows, and the rest last, with the keys that occur in each."""
    path = tmp_path / "x.svm"
    path.write_text("".join(f"{i} {i % 5}:{i + 1} {i + 10}:0.5\n" for i in range(40)))
    source = LibsvmFiles(str(path))
    batches = list(batches_of(source.read(source.part(0, 1), block_bytes), 7))
    assert [batch.num_rows for batch in batches] == [7, 7, 7, 7, 7, 5]
    assert [t for batch in batches for t in batch.targets] == list(range(40))
    for batch in batches:
        rows = batch.targets.astype(int)
        assert batch.keys.tolist() == sorted({*(rows % 5), *(rows + 10)})
        dense = batch.features.toarray()
        columns = np.searchsorted(batch.keys, rows % 5)
        assert (dense[np.arange(len(rows)), columns] == rows + 1).all()
        assert dense.sum() == (rows + 1.5).sum()


def test_file_system_that_returns_other_bytes_than_asked_for_is_refused(tmp_path, monkeypatch):
    """As one without ranges does, which returns the whole file, or a file that is cut off."""
    path = tmp_path / "x.svm"
    path.write_text("".join(f"{i} 1:1\n" for i in range(100)))
    source = LibsvmFiles(str(path))
    whole = path.read_bytes()
    monkeypatch.setattr(LocalFileSystem, "cat_file", lambda self, path, start, end: whole)
    with pytest.raises(DataError, match=r"x\.svm: bytes \d+ to \d+ were asked for, and 690 came"):
        list(source.read(source.part(1, 3)))
    monkeypatch.undo()
    path.write_bytes(whole[:400])
    with pytest.raises(DataError, match=r"the file has changed"):
        list(source.read(source.part(0, 1)))
