"""Every format gives the same data set, and what is wrong with a file is told in one line."""

import re
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet

from support.learning import refused
from xain_workloads.errors import DataError
from xain_workloads.tables.data import Dataset, class_name, from_arrays, load, load_table
from xain_workloads.tables.profile import DataProfile
from xain_workloads.tables.reading.dialect import Dialect

Write = Callable[[str, str | bytes], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def _write(name: str, content: str | bytes) -> Path:
        path = tmp_path / name
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    return _write


def _parquet(path: Path, **columns: Any) -> Path:
    parquet.write_table(pa.table(columns), path)
    return path


# Formats


def test_every_format_reads_the_same_data(write, tmp_path):
    """Participants may keep their parts in different formats: rows and classes agree."""
    features = np.array([[1.0, 2.5], [0.0, -4.0], [3.0, 0.0]])
    np.savez(tmp_path / "long.npz", features=features, target=np.array([3, 10, 3]))
    np.savez(tmp_path / "short.npz", X=features.astype(np.float32), y=np.array([b"3", b"10", b"3"]))
    _parquet(tmp_path / "numbers.parquet", a=[1, 0, 3], b=[2.5, -4.0, 0.0], y=[3.0, 10.0, 3.0])
    _parquet(
        tmp_path / "coded.parquet",
        a=pa.array([1, 0, 3], pa.int8()),
        b=[Decimal("2.5"), Decimal("-4.0"), Decimal("0.0")],
        y=pa.array(["3", "10", "3"]).dictionary_encode(),
    )
    write("whole.csv", "a,b,y\n1,2.5,3\n0,-4,10\n3,0,3\n")
    write("text.csv", '"a","b",y\n1, 2.5,3.0\n0,-4.0,"10"\n3,0,3\n')
    write("one.svm", "3 1:1 2:2.5\n10 2:-4\n3 1:3\n")

    for path in sorted(tmp_path.iterdir()):
        dataset = load(path)
        np.testing.assert_array_equal(dataset.features, features, err_msg=path.name)
        assert dataset.target.tolist() == ["3", "10", "3"], path.name
        assert dataset.features.dtype == np.float64
        assert dataset.features.flags.c_contiguous
        assert dataset.profile() == DataProfile(3, 2, ("3", "10")), path.name


def test_scale_multiplies_features_alone():
    """Pixels of 0..16 become 0..1; the target stays."""
    scaled = load("digits", dialect=Dialect(scale=0.0625))
    assert (scaled.features.min(), scaled.features.max()) == (0.0, 1.0)
    diabetes = load("diabetes", task="regression", dialect=Dialect(scale=2.0))
    np.testing.assert_array_equal(diabetes.target, load("diabetes", task="regression").target)


def test_regression_target_is_float(write):
    """A regression target is numbers, and the profile lists no classes."""
    dataset = load(write("a.csv", "a,y\n1,2\n3,4.5\n"), task="regression")
    assert dataset.target.dtype == np.float64
    assert dataset.target.tolist() == [2.0, 4.5]
    assert dataset.profile() == DataProfile(2, 1, ())


def test_target_is_chosen_by_name(write):
    """The last column unless told otherwise; the others keep their order."""
    path = write("a.csv", "a,b,c\n1,2,3\n")
    assert load(path).feature_names == ("a", "b")
    chosen = load(path, target="b")
    assert chosen.feature_names == ("a", "c")
    assert chosen.target.tolist() == ["2"]
    assert chosen.features.tolist() == [[1.0, 3.0]]


def test_csv_types_do_not_depend_on_the_first_block(write):
    """A fraction after megabytes of whole numbers, and a name after numeric labels, are read."""
    text = "a,y\n" + "1,2\n" * 600_000 + "1.5,late\n"
    dataset = load(write("a.csv", text))
    assert dataset.features[-1, 0] == 1.5
    assert dataset.profile().classes == ("2", "late")


def test_libsvm_width_and_base_are_given_not_guessed(write):
    """Parts of one data set that lack the first or last feature still have the same columns."""
    part = write("a.svm", "1 2:5\n-1 2:6\n")
    assert load(part, num_features=4).features.tolist() == [[0, 5, 0, 0], [0, 6, 0, 0]]
    assert load(part, num_features=4, zero_based=True).features.tolist() == [
        [0, 0, 5, 0],
        [0, 0, 6, 0],
    ]
    with refused("line 1: there is a key 0, and the first feature is 1"):
        load(write("b.svm", "1 0:5\n"))
    with refused("line 1: there is a key 2, and with num_features 1 the last is 1"):
        load(part, num_features=1)


# Class names


@pytest.mark.parametrize(
    ("label", "name"),
    [
        (3, "3"),
        (np.int8(3), "3"),
        (3.0, "3"),
        ("3", "3"),
        (" 3.0 ", "3"),
        ("Ja", "yes"),
        ("A\u0302ge  1", "Âge 1"),
        (b"3", "3"),
        ("+3.", "3"),
        ("-0", "0"),
        (0.5, "0.5"),
        ("0.50", "0.5"),
        ("007", "007"),
        ("1e3", "1e3"),
        ("setosa", "setosa"),
        (True, "yes"),
        ("FALSE ", "no"),
        (str(2**60 + 1), str(2**60 + 1)),
        ("٣", "٣"),
    ],
)
def test_class_names_are_canonical(label, name):
    """One class has one name, whatever type a file stores it in."""
    assert class_name(label) == name


@given(st.one_of(st.text(), st.integers(), st.floats(allow_nan=False, allow_infinity=False)))
def test_class_names_are_stable(label):
    """The name of a name is the name: data written out and read again keep their classes."""
    assert class_name(class_name(label)) == class_name(label)


# Empty files


@pytest.mark.parametrize("text", ["a,b,y\n", "a,b,y", "a,b,y\n\n", '"a","b","y"\r\n'])
@pytest.mark.parametrize("task", ["classification", "regression"])
def test_csv_header_alone_is_a_dataset(write, text, task):
    """An empty partition is data without rows, not an error."""
    dataset = load(write("a.csv", text), task=task)
    assert dataset.profile() == DataProfile(0, 2)
    assert dataset.task == task
    assert dataset.feature_names == ("a", "b")


# Refusals


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("a,b,y\n1,2,x\n1,oops,x\n", "a.csv: column 'b', row 2: 'oops' is not a number"),
        ("a,b,y\n1,2,x\n1,,x\n", "a.csv: column 'b', row 2: the value is missing"),
        ("a,b,y\n1,NA,x\n1,2,x\n", "a.csv: column 'b', row 1: the value is missing"),
        ("a,b,y\n1,2,x\n-inf,2,x\n", "a.csv: column 'a', row 2: -inf is not finite"),
        ("a,b,y\n1,2,x\n1,2,\n", "a.csv: column 'y', row 2: the value is missing"),
        ("a,b,y\n1,2,x\n1,2\n", "a.csv: row 2 has 2 cells, and the header 3"),
        ("a,a,y\n1,2,x\n", "a.csv: more than one column is called 'a'"),
        ("a\n1\n", "a.csv: column 'a' is alone"),
        ("", "a.csv: the file is empty"),
        (b"\xff\xfe\x00", "a.csv: the file is no text in utf-16"),
    ],
)
def test_csv_errors_name_file_column_and_row(write, text, complaint):
    """Someone with a million rows finds the one that is wrong."""
    with refused(complaint):
        load(write("a.csv", text))


@pytest.mark.parametrize("num_rows", [2, 200_000])
def test_line_breaks_in_quotes_are_parts_of_a_cell(write, num_rows):
    """In files of any size: the second has several of the reader's blocks."""
    text = "a,note,y\n" + '1,"one\r\nor two, ""lines""\n",x\n' * num_rows
    table = load_table(write("a.csv", text), types={"note": "category"})
    assert len(table.target) == num_rows
    assert set(table.values["note"]) == {'one or two, "lines"'}


@pytest.mark.parametrize("num_rows", [2, 400_000])
def test_open_quotation_mark_is_named_with_its_row(write, num_rows):
    text = 'a,note,y\n1,2,x\n1,"open,x\n' + "1,two,x\n" * num_rows
    with pytest.raises(DataError, match=r"a\.csv: row 2 has .* is a quotation mark open there\?"):
        load_table(write("a.csv", text))


def test_columns_of_each_arrow_encoding_of_text_are_read(tmp_path):
    """As pyarrow and polars write them: views, dictionaries, large strings."""
    texts = pa.array(["1", "2", None])
    arrays = {
        "view": texts.cast(pa.string_view()),
        "large": texts.cast(pa.large_string()),
        "dictionary": texts.dictionary_encode(),
        "y": pa.array(["u", "v", "u"]).cast(pa.string_view()),
    }
    parquet.write_table(pa.table(arrays), tmp_path / "a.parquet")
    table = load_table(tmp_path / "a.parquet")
    assert table.target.tolist() == ["u", "v", "u"]
    for column in ("view", "large", "dictionary"):
        assert table.values[column].tolist() == ["1", "2", None]


FORMS = {".csv": "a,b,y\n1,2,x\n", ".parquet": "PAR1", ".npz": "PK", ".svm": "1 1:0.5 2:1\n"}
# What pyarrow, numpy, scikit-learn and Python say of files that they cannot read.
WORDS = "arrow|block|pickle|parse|magic|footer|literal|convert|codec|errno|expected|object|index"


@pytest.mark.parametrize("suffix", FORMS)
@given(junk=st.binary(max_size=40), at=st.integers(0, 12))
def test_damaged_file_is_a_sentence_about_the_file(suffix, junk, at, tmp_path_factory):
    """No error of a library comes through, in class or in words."""
    path = tmp_path_factory.getbasetemp() / f"damaged{suffix}"
    whole = FORMS[suffix].encode()
    path.write_bytes(whole[:at] + junk + whole[at:])
    try:
        load_table(path)
    except DataError as error:
        said = str(error).replace(str(path), "damaged")
        assert said.startswith("damaged: ")
        quoted = re.sub(r"'[^']*'|\"[^\"]*\"", "", said)
        assert not re.search(WORDS, quoted, re.IGNORECASE), said


def test_regression_target_must_be_numbers(write):
    """Text, gaps and infinities in a regression target are named like those in features."""
    with refused("a.csv: column 'y', row 1: 'x' is not a number"):
        load(write("a.csv", "a,y\n1,x\n"), task="regression")
    with refused("a.csv: column 'y', row 2: inf is not finite"):
        load(write("a.csv", "a,y\n1,1\n1,inf\n"), task="regression")


@pytest.mark.parametrize(
    ("columns", "complaint"),
    [
        ({"a": [1, None], "y": [1, 2]}, "column 'a', row 2: the value is missing"),
        ({"a": ["1", "2"], "y": [1, 2]}, "column 'a', row 1: '1' is not a number"),
        ({"a": [1.0, float("nan")], "y": [1, 2]}, "column 'a', row 2: the value is missing"),
        ({"a": [1, 2], "y": [1.0, float("nan")]}, "column 'y', row 2: the value is missing"),
        ({"a": [1, 2], "y": [None, "x"]}, "column 'y', row 1: the value is missing"),
        ({"a": [1, 2], "y": [[1], [2]]}, "column 'y', row 1: [1] is no class name"),
    ],
)
def test_parquet_errors_name_column_and_row(tmp_path, columns, complaint):
    """Typed columns are held to the same rules as text."""
    with refused(f"a.parquet: {complaint}"):
        load(_parquet(tmp_path / "a.parquet", **columns))


def test_archive_of_other_arrays_is_refused(tmp_path):
    """Wrong names and shapes say what is there; an object array is not unpickled."""
    eye, cube = np.eye(2), np.ones((2, 2, 2))
    for arrays, complaint in (
        (
            {"X": eye, "y": np.array(["a", "b"], dtype=object)},
            "the file is no archive of arrays of numbers or text",
        ),
        (
            {"data": eye, "label": np.ones(2)},
            "neither arrays 'features' and 'target' nor 'X' and 'y'; there are: 'data'",
        ),
        ({"X": eye, "y": np.ones(3)}, "target has shape (3,), expected (2,)"),
        ({"X": cube, "y": np.ones(2)}, "features have shape (2, 2, 2), expected (n, p)"),
    ):
        np.savez(tmp_path / "a.npz", **arrays)
        with refused(f"a.npz: {complaint}"):
            load(tmp_path / "a.npz")


@pytest.mark.parametrize(
    ("source", "more", "complaint"),
    [
        (
            "mnist",
            {},
            "unknown data source 'mnist': neither a bundled set (breast_cancer, diabetes",
        ),
        ("a.docx", {}, "nor a file ending in .csv, .tsv, .parquet, .xlsx"),
        ("gone.csv", {}, "gone.csv: no such file"),
        ("a.csv", {"target": "z"}, "no column 'z'; there are: 'a', 'y'"),
        ("iris", {"target": "species"}, "a target column can be chosen in .csv, .tsv"),
        ("iris", {"task": "clustering"}, "task is 'clustering'"),
        ("diabetes", {}, "set task='regression'"),
        ("iris", {"num_features": 5}, "4 feature columns, but num_features is 5"),
    ],
)
def test_unknown_source_says_what_there_is(write, source, more, complaint):
    file = write("a.csv", "a,y\n1,2\n").with_name(source)
    if source == "a.docx":
        file.touch()
    with refused(complaint):
        load(file if "." in source else source, **more)


# Datasets


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (lambda: Dataset(np.ones(2), np.ones(2)), "features have shape (2,)"),
        (lambda: Dataset(np.ones((2, 0)), np.ones(2)), "features have shape (2, 0)"),
        (lambda: Dataset(np.ones((2, 1)), np.ones(3)), "target has shape (3,), expected (2,)"),
        (lambda: Dataset(np.ones((2, 1)), np.ones(2, np.int64)), "target has dtype int64"),
        (lambda: Dataset(np.ones((2, 2)), np.ones(2), ("a",)), "1 feature names for 2 columns"),
        (
            lambda: from_arrays([[1.0, 2.0], [3.0, 4.0], [5.0, np.nan]], [0, 1, 0]),
            "data: column 'x1', row 3: the value is missing",
        ),
        (
            lambda: from_arrays([[1], [2]], ["a", " "]),
            "data: column 'target', row 2: the label is empty",
        ),
        (lambda: from_arrays([["a"]], [1]), "data: features have dtype"),
    ],
)
def test_arrays_that_make_no_data_set_are_refused(make, complaint):
    """A Dataset that exists is consistent, wherever it came from."""
    with refused(complaint):
        make()


def test_subset_keeps_order_and_copies():
    """A part of a data set is its own: changing it leaves the whole alone."""
    whole = from_arrays([[0.0], [1.0], [2.0]], ["a", "b", "c"], feature_names=["f"])
    part = whole.subset([2, 0])
    assert part.features.tolist() == [[2.0], [0.0]]
    part.features[:] = 9
    assert part.target.tolist() == ["c", "a"]
    assert part.feature_names == ("f",)
    assert whole.features.tolist() == [[0.0], [1.0], [2.0]]
    assert whole.subset([]).profile() == DataProfile(0, 1)


# Folders


@pytest.fixture
def ward(tmp_path: Path) -> Path:
    (tmp_path / "X_train.csv").write_text("age,ward\n61,a\n47,b\n30,a\n")
    (tmp_path / "y_train.csv").write_text("outcome\nyes\nno\nyes\n")
    return tmp_path


def test_folder_gives_the_table_of_one_file(ward):
    """Features and target of two files are those of one file with all columns."""
    (ward / "both.csv").write_text("age,ward,outcome\n61,a,yes\n47,b,no\n30,a,yes\n")
    folder, file = load_table(ward), load_table(ward / "both.csv")
    assert (folder.columns, folder.target_name) == (file.columns, file.target_name)
    assert folder.target.tolist() == file.target.tolist()
    for name in ("age", "ward"):
        assert folder.values[name].tolist() == file.values[name].tolist()


@pytest.mark.parametrize(
    ("labels", "complaint"),
    [
        (None, "y_train.csv: no such file"),
        ("outcome\nyes\n", "y_train.csv: 1 rows, but X_train.csv has 3"),
        ("id,outcome\n1,yes\n2,no\n3,no\n", "the target is one column, and there are 2"),
        ("age\nyes\nno\nno\n", "column 'age' is in X_train.csv too"),
    ],
)
def test_folder_whose_files_do_not_fit(ward, labels, complaint):
    (ward / "y_train.csv").unlink()
    if labels is not None:
        (ward / "y_train.csv").write_text(labels)
    with refused(complaint):
        load_table(ward)
