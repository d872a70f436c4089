"""Files of rows at a path: their order, sizes and formats."""

import pytest
from fsspec.implementations.local import LocalFileSystem

from xain_workloads.errors import DataError
from xain_workloads.sources.parts import find, fingerprint, read_bytes


def test_files_of_a_folder_are_found_with_their_sizes(tmp_path):
    """Linked files are among them. Hidden and empty ones are left out."""
    (tmp_path / "elsewhere").mkdir()
    for name, content in {
        "elsewhere/b.csv": "a\n1\n",
        "a.csv": "a\n",
        "_SUCCESS": "x",
        ".x.csv": "x",
    }.items():
        (tmp_path / name).write_text(content)
    (tmp_path / "b.csv").symlink_to(tmp_path / "elsewhere" / "b.csv")
    (tmp_path / "empty.csv").touch()
    (tmp_path / "folder").mkdir()
    for source in (str(tmp_path), f"{tmp_path}/*", f"{tmp_path}/*.csv"):
        found = find(source)
        assert [(part.name, part.size, part.format) for part in found] == [
            ("a.csv", 2, "csv"),
            ("b.csv", 4, "csv"),
        ]
        assert {part.source for part in found} == {source}
    (one,) = find(str(tmp_path / "b.csv"))
    assert one.size == 4


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("x.csv", "csv"),
        ("X.TSV", "csv"),
        ("x.parquet", "parquet"),
        ("x.pq", "parquet"),
        ("x.svm", "libsvm"),
        ("part-00000", "libsvm"),
    ],
)
def test_format_is_that_of_the_name_or_the_one_that_is_given(tmp_path, name, expected):
    (tmp_path / name).write_text("x")
    (part,) = find(str(tmp_path))
    assert part.format == expected
    (part,) = find(str(tmp_path), "parquet")
    assert part.format == "parquet"


def test_missing_empty_packed_and_mixed_files_are_refused(tmp_path):
    with pytest.raises(DataError, match="there is no file"):
        find(str(tmp_path / "no.svm"))
    with pytest.raises(DataError, match="there is no file"):
        find(str(tmp_path / "*.svm"))
    (tmp_path / "empty.svm").touch()
    with pytest.raises(DataError, match="is empty"):
        find(str(tmp_path))
    with pytest.raises(DataError, match="no driver for nowhere:// is installed; no extra has one"):
        find("nowhere://x")
    (tmp_path / "x.csv.gz").write_text("x")
    with pytest.raises(DataError, match=r"x\.csv\.gz: a packed file .* write Parquet"):
        find(str(tmp_path))
    (tmp_path / "x.csv.gz").unlink()
    (tmp_path / "x.csv").write_text("x")
    (tmp_path / "x.svm").write_text("x")
    with pytest.raises(DataError, match="several formats: csv, libsvm"):
        find(str(tmp_path))


def test_fingerprint_tells_other_names_sizes_and_formats(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    for folder in ("a", "b"):
        (tmp_path / folder / "x.csv").write_text("a\n1\n")
    one, other = (find(str(tmp_path / folder)) for folder in ("a", "b"))
    assert fingerprint(one) == fingerprint(other)
    (tmp_path / "b" / "x.csv").write_text("a\n12\n")
    assert fingerprint(one) != fingerprint(find(str(tmp_path / "b")))
    assert fingerprint(one) != fingerprint(find(str(tmp_path / "a"), "libsvm"))


def test_file_system_that_returns_other_bytes_than_asked_for_is_refused(tmp_path, monkeypatch):
    """As one without ranges does, which returns the whole file, or a file that is cut off."""
    path = tmp_path / "x.svm"
    whole = b"".join(b"%d 1:1\n" % i for i in range(100))
    path.write_bytes(whole)
    (part,) = find(str(path))
    monkeypatch.setattr(LocalFileSystem, "cat_file", lambda self, path, start, end: whole)
    with pytest.raises(DataError, match=r"x\.svm: bytes 9 to 99 were asked for, and 690 came"):
        read_bytes(part, 9, 99)
    monkeypatch.undo()
    path.write_bytes(whole[:400])
    with pytest.raises(DataError, match="the file has changed"):
        read_bytes(part, 0, 690)
