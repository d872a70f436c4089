"""Tables and data sets from files, and those that scikit-learn brings along."""

import json
import zipfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite, nan
from os import PathLike
from pathlib import Path
from typing import Any, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from xain_foundation.hints import hint
from xain_workloads import csv_files
from xain_workloads.dataset import (
    Dataset,
    Features,
    Target,
    Task,
    canonical_target,
    class_name,
)
from xain_workloads.errors import DataError
from xain_workloads.reading.corrections import corrected
from xain_workloads.reading.dialect import DETECTED, Dialect
from xain_workloads.reading.errors import reading
from xain_workloads.schema import Column, ColumnType, shown
from xain_workloads.table import Table

__all__ = [
    "BUNDLED",
    "FOLDER_FILES",
    "MISSING",
    "SUFFIXES",
    "WITH_COLUMN_NAMES",
    "Dataset",
    "Features",
    "Rows",
    "Table",
    "Target",
    "Task",
    "class_name",
    "from_arrays",
    "is_folder",
    "load",
    "load_table",
]

BUNDLED = ("breast_cancer", "diabetes", "digits", "iris", "wine")
SUFFIXES = (*csv_files.SUFFIXES, ".libsvm", ".npz", ".parquet", ".svm", ".svmlight")
WITH_COLUMN_NAMES = (*csv_files.SUFFIXES, ".parquet")
FOLDER_FILES = ("X_train.csv", "y_train.csv")  # of a folder: the features, and the target alone

# Texts that stand for a missing value. Not "Na", "none" and the like, which may be categories.
MISSING = ("", "NA", "NaN", "nan", "null", "NULL", "?")


@dataclass(frozen=True, slots=True)
class _Source:
    """An open file that is read column by column, so that columns left out cannot fail.

    names: the columns of features. read: (name, declared type or None) -> (type, values).
    """

    origin: str
    names: Sequence[str]
    read: Callable[[str, ColumnType | None], tuple[ColumnType, NDArray[Any]]]
    target_name: str
    target: Target


def from_arrays(
    features: ArrayLike,
    target: ArrayLike,
    *,
    task: Task = "classification",
    feature_names: Sequence[str] = (),
    origin: str = "data",
) -> Dataset:
    """Data set from arrays of any numeric type; labels may be numbers, text or bytes.

    features: (n, p). target: (n,). origin: how error messages call the data.
    Raises DataError that names origin, column and first row if a value is missing, not a number
    or not finite. Rows are counted from 1, a file's header not among them.
    """
    source = _open_arrays(features, target, task, feature_names, origin)
    return _choose(
        source, select=(), drop=(), rename={}, types={}, units={}, classes=()
    ).to_dataset()


def load(source: str | PathLike[str], **arguments: Any) -> Dataset:
    """Load a data set of numbers without gaps. Arguments and errors are those of load_table().

    Raises DataError as well if a column is a category, or a value is missing.
    """
    return load_table(source, **arguments).to_dataset()


def load_table(
    source: str | PathLike[str],
    *,
    target: str | None = None,
    task: Task = "classification",
    num_features: int | None = None,
    zero_based: bool = False,
    select: Sequence[str] = (),
    drop: Sequence[str] = (),
    types: Mapping[str, ColumnType] | None = None,
    units: Mapping[str, str] | None = None,
    classes: Sequence[str] = (),
    dialect: Dialect = DETECTED,
) -> Table:
    """Load a table from a file, or one that scikit-learn brings along.

    source: a name in BUNDLED, a path that ends in one of SUFFIXES, or a folder with the two
        FOLDER_FILES, whose rows belong together in their order. A CSV file has a header; an .npz
        file has the arrays `features` and `target`, or `X` and `y`.
    target: the target's column in CSV and Parquet files, by default the last.
    num_features: how many columns the file must have. LIBSVM files leave out zeros, so their parts
        agree on a width only if it is given here.
    zero_based: whether the first feature of a LIBSVM file is 0 instead of 1. It is not guessed,
        since parts of one data set could guess differently.
    select: the columns to keep, in this order; empty for all. drop: columns to leave out.
    types: types of columns. A column of a CSV file without one is of type "number" if all of its
        values are numbers, and a category if fewer than half of them are; one in between is an
        error. A column of a Parquet file has the type that the file gives it.
    units: units of columns, for comparison with other participants.
    classes: all labels that the target may have; empty for those in the file, and for all of those
        of a bundled set.
    dialect: how the file is written, and what its cells mean. Its names of columns, as those of all
        other arguments, are those in the file.
    A file without rows is a table without rows: an empty part must not stop a participant.
    Raises DataError that names the file and, where there is one, the column and the row.
    """
    if task not in get_args(Task):
        raise DataError(f"task is {task!r}; choose one of: {', '.join(get_args(Task))}")
    if isinstance(source, str) and source in BUNDLED:
        suffix, path = "", Path()
    elif is_folder(source):
        suffix, path = "folder", Path(source)
    else:
        path = Path(source)
        suffix = path.suffix.lower()
        if suffix not in SUFFIXES:
            raise DataError(
                f"unknown data source {str(source)!r}: neither a bundled set ({', '.join(BUNDLED)})"
                f" nor a file ending in {', '.join(SUFFIXES)}, nor a folder with"
                f" {' and '.join(FOLDER_FILES)}"
            )
        if not path.is_file():
            raise DataError(f"{path}: no such file")
    if target is not None and suffix not in WITH_COLUMN_NAMES:
        raise DataError(f"{source}: a target column can be chosen in CSV and Parquet files only")

    missing = (*MISSING, *dialect.missing)
    separator, decimal = dialect.separator, dialect.decimal
    match suffix:
        case "":
            opened = _open_bundled(str(source), task)
        case ".csv" | ".tsv":
            opened = _open_csv(path, target, task, missing, separator, decimal)
        case ".parquet":
            opened = _open_parquet(path, target, task, missing)
        case "folder":
            opened = _open_folder(path, task, missing, separator, decimal)
        case ".npz":
            opened = _open_npz(path, task)
        case _:
            opened = _open_libsvm(path, task, num_features, zero_based)

    if num_features is not None and len(opened.names) != num_features:
        raise DataError(
            f"{source}: {len(opened.names)} feature columns, but num_features is {num_features}"
        )
    table = _choose(
        opened,
        select=select,
        drop=drop,
        rename=dialect.rename,
        types=types or {},
        units=units or {},
        classes=classes,
        scale=dialect.scale,
    )
    return corrected(table, dialect)


def is_folder(source: str | PathLike[str]) -> bool:
    """Whether the path is a folder with the features of a table, X_train.csv."""
    try:
        return (Path(source) / FOLDER_FILES[0]).is_file()
    except OSError:  # the name is too long for a file
        return False


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Rows that are to be predicted.

    table: without a target, which is NaN. truth: (n,) object, the target of each row as a class
    name or a number; None where the file has none. ids: (n,) texts as in the file; row numbers,
    from 1, without a column of ids.
    """

    table: Table
    truth: NDArray[Any]
    ids: Sequence[str]


def load_rows(
    source: str | PathLike[str],
    types: Mapping[str, ColumnType],
    *,
    target: str = "",
    task: Task = "classification",
    id_column: str = "",
    dialect: Dialect = DETECTED,
) -> Rows:
    """Load rows that are to be predicted from a CSV or Parquet file.

    types: types of the columns to take, in this order; empty for all columns but the target and
        the ids.
    target: the target's column, which the file need not have, or only for some rows.
    id_column: identifies the rows; "" for none.
    dialect: of the site whose file it is, from the model that it has trained. Columns may have
        their names in the file or those in the session.
    Raises DataError that names the file, and the column that is missing or of another type.
    """
    path = Path(source)
    suffix = path.suffix.lower()
    if suffix not in WITH_COLUMN_NAMES:
        raise DataError(
            f"{path}: rows to predict are read from {', '.join(WITH_COLUMN_NAMES)} files only"
        )
    if not path.is_file():
        raise DataError(f"{path}: no such file")
    if suffix == ".parquet":
        arrow, decimal = _read_parquet(path), "."
    else:
        arrow, decimal = csv_files.read_cells(path, dialect.separator, dialect.decimal)
        _require_columns(path, arrow.column_names)
    missing = (*MISSING, *dialect.missing)
    names = [dialect.rename.get(name, name) for name in arrow.column_names]
    _require_columns(path, names)
    for name in types:
        if name not in names:
            raise DataError(f"{path}: no column {name!r}; there are: {shown(names, 20)}")
    if id_column and id_column not in arrow.column_names:
        raise DataError(
            f"{path}: no column {id_column!r}; there are: {shown(arrow.column_names, 20)}"
        )
    ids = list(map(str, range(1, arrow.num_rows + 1)))
    if id_column:
        cells = _plain(arrow.column(id_column)).to_pylist()
        ids = ["" if cell is None else str(cell) for cell in cells]
    arrow = arrow.rename_columns(names)
    truth = np.full(arrow.num_rows, None, dtype=object)
    if target in arrow.column_names:
        truth = _read_truth(path, target, arrow.column(target), task, missing, decimal)
    if not types:
        others = {target, dialect.rename.get(id_column, id_column)}
        arrow = arrow.select([name for name in names if name not in others])
    opened = _open_arrow(path, arrow, None, task, missing, decimal)
    table = _choose(
        opened,
        select=tuple(types),
        drop=(),
        rename={},
        types=types,
        units={},
        classes=(),
        scale=dialect.scale,
    )
    return Rows(corrected(table, dialect), truth, ids)


def _read_truth(
    path: Path, name: str, column: Any, task: Task, missing: Sequence[str], decimal: str
) -> NDArray[Any]:
    """(n,) class names or numbers, None where a value is missing."""
    if task == "classification":
        labels = _read_labels(path, name, column, missing).tolist()
        return _categories([None if label != label else label for label in labels])
    infer = path.suffix.lower() != ".parquet"
    _, numbers = _read_column(path, name, column, "number", missing, infer, decimal)
    truth = numbers.astype(object)
    truth[np.isnan(numbers)] = None
    return truth


def _choose(
    source: _Source,
    *,
    select: Sequence[str],
    drop: Sequence[str],
    rename: Mapping[str, str],
    types: Mapping[str, ColumnType],
    units: Mapping[str, str],
    classes: Sequence[str],
    scale: float = 1.0,
) -> Table:
    """The chosen columns of a source under their new names."""
    features, target = set(source.names), source.target_name
    for key, names, may_be_target in (
        ("columns", select, True),
        ("drop", drop, False),
        ("rename", rename, True),
        ("types", types, False),
        ("units", units, False),
    ):
        for name in names:
            if name == target and not may_be_target:
                raise DataError(
                    f"{source.origin}: [data] {key} names {name!r}, which is the target; leave it"
                    " out, or choose another target"
                )
            if name not in features and name != target:
                raise DataError(
                    f"{source.origin}: [data] {key} names {name!r}, which is no column of the"
                    f" file; there are: {shown(source.names, 20)}"
                )
    dropped = set(drop)
    columns: list[Column] = []
    values: dict[str, NDArray[Any]] = {}
    for name in select or source.names:
        if name == target or name in dropped:
            continue
        kind, array = source.read(name, types.get(name))
        new_name = rename.get(name, name)
        columns.append(Column(new_name, kind, units.get(name, "")))
        values[new_name] = array * scale if kind == "number" and scale != 1.0 else array
    return Table(
        tuple(columns),
        values,
        source.target,
        rename.get(target, target),
        tuple(class_name(name) for name in classes),
        source.origin,
    )


# Arrays


def _open_arrays(
    features: ArrayLike,
    target: ArrayLike,
    task: Task,
    feature_names: Sequence[str],
    origin: str,
) -> _Source:
    matrix = np.asarray(features)
    if matrix.ndim != 2 or matrix.shape[1] == 0:
        raise DataError(
            f"{origin}: features have shape {matrix.shape}, expected (n, p) with p at least 1"
        )
    if matrix.dtype.kind not in "biuf":
        raise DataError(f"{origin}: features have dtype {matrix.dtype}, expected numbers")
    names = tuple(feature_names) or tuple(f"x{i}" for i in range(matrix.shape[1]))
    if len(names) != matrix.shape[1]:
        raise DataError(f"{origin}: {len(names)} feature names for {matrix.shape[1]} columns")
    position = {name: i for i, name in enumerate(names)}

    def read(name: str, kind: ColumnType | None) -> tuple[ColumnType, NDArray[Any]]:
        column = matrix[:, position[name]]
        if kind == "category":
            return "category", _categories(
                [None if cell != cell else cell for cell in column.tolist()]
            )
        return "number", column.astype(np.float64)

    labels = np.asarray(target)
    if labels.shape != matrix.shape[:1]:
        raise DataError(f"{origin}: target has shape {labels.shape}, expected ({matrix.shape[0]},)")
    return _Source(
        origin, names, read, "target", canonical_target(labels, task, f"{origin}: target")
    )


def _open_bundled(name: str, task: Task) -> _Source:
    from sklearn import datasets  # here, because it takes a second and files do not need it

    if name == "diabetes" and task == "classification":
        raise DataError("diabetes: the target is a measurement, not a class; set task='regression'")
    bunch = getattr(datasets, f"load_{name}")()
    target = bunch.target
    if task == "classification":
        target = np.asarray(bunch.target_names)[target]  # "setosa" instead of "0"
    names = [str(feature) for feature in bunch.feature_names]
    return _open_arrays(bunch.data, target, task, names, name)


def _open_npz(path: Path, task: Task) -> _Source:
    if not zipfile.is_zipfile(path):  # numpy's own error would suggest pickle
        raise DataError(f"{path}: not an archive as numpy.savez writes it")
    with (
        reading(path, "archive of arrays of numbers or text"),
        np.load(path, allow_pickle=False) as archive,  # a pickled array is code waiting to run
    ):
        for features, target in (("features", "target"), ("X", "y")):
            if features in archive and target in archive:
                return _open_arrays(archive[features], archive[target], task, (), str(path))
        raise DataError(
            f"{path}: neither arrays 'features' and 'target' nor 'X' and 'y';"
            f" there are: {', '.join(map(repr, archive.files)) or 'none'}"
        )


def _open_libsvm(path: Path, task: Task, num_features: int | None, zero_based: bool) -> _Source:
    from sklearn.datasets import load_svmlight_file

    with reading(path, "LIBSVM file"):
        try:
            features, labels = load_svmlight_file(
                str(path), n_features=num_features, zero_based=zero_based
            )
        except ValueError:
            _require_lines(path, num_features, zero_based)
            raise
    matrix = features.toarray()
    if num_features is None and not len(labels):
        # The width is unknown, and not needed: profiles without rows are passed over.
        matrix = np.empty((0, 1))
    return _open_arrays(matrix, labels, task, (), str(path))


def _require_lines(path: Path, num_features: int | None, zero_based: bool) -> None:
    """Raise DataError with the first line of a LIBSVM file that cannot be read."""
    first = 0 if zero_based else 1
    last = None if num_features is None else first + num_features - 1
    for number, line in enumerate(path.read_text(errors="replace").splitlines(), start=1):
        words = line.partition("#")[0].split()
        try:
            _ = [float(word) for word in words[:1]]
            pairs = [word.split(":") for word in words[1:] if not word.startswith("qid:")]
            keys = [int(key) for key, value in pairs if isfinite(float(value))]
        except ValueError:
            raise DataError(
                f"{path}: line {number} is not 'target key:value key:value ...', keys whole numbers"
            ) from None
        if keys != sorted(set(keys)):
            raise DataError(f"{path}: line {number}: keys ascend, each once")
        if keys and keys[0] < first:
            raise DataError(
                f"{path}: line {number}: there is a key {keys[0]}, and the first feature is"
                f" {first}; if it is 0 in all parts of the data "
                + hint("xain-participant", "data.zero_based = true")
            )
        if keys and last is not None and keys[-1] > last:
            raise DataError(
                f"{path}: line {number}: there is a key {keys[-1]}, and with num_features"
                f" {num_features} the last is {last}"
            )


# Tables


def _open_csv(
    path: Path,
    target: str | None,
    task: Task,
    missing: Sequence[str],
    separator: str,
    decimal: str,
) -> _Source:
    header, _, separator = csv_files.read_header(path, separator)
    chosen = _choose_target(path, header, target)
    cells, decimal = csv_files.read_cells(path, separator, decimal)
    return _open_arrow(path, cells, chosen, task, missing, decimal)


def _open_folder(
    path: Path, task: Task, missing: Sequence[str], separator: str, decimal: str
) -> _Source:
    features, labels = (path / name for name in FOLDER_FILES)
    if not labels.is_file():
        raise DataError(f"{labels}: no such file; {features.name} is there and needs it")
    header, _, separator = csv_files.read_header(features, separator)
    _require_columns(features, header)
    table, decimal = csv_files.read_cells(features, separator, decimal)
    target, _ = csv_files.read_cells(labels, separator, decimal)
    if target.num_columns != 1:
        raise DataError(f"{labels}: the target is one column, and there are {target.num_columns}")
    if target.num_rows != table.num_rows:
        raise DataError(
            f"{labels}: {target.num_rows} rows, but {features.name} has {table.num_rows}; the files"
            " belong together row by row"
        )
    (name,) = target.column_names
    if name in table.column_names:
        raise DataError(f"{labels}: column {name!r} is in {features.name} too; rename one of them")
    return _open_arrow(
        path, table.append_column(name, target.column(0)), name, task, missing, decimal
    )


def _open_parquet(path: Path, target: str | None, task: Task, missing: Sequence[str]) -> _Source:
    table = _read_parquet(path)
    chosen = _choose_target(path, table.column_names, target)
    return _open_arrow(path, table, chosen, task, missing)


def _read_parquet(path: Path) -> Any:
    from pyarrow import parquet

    # Not read_table(), which takes folder names such as `year=2020` for columns.
    with reading(path, "Parquet file"), parquet.ParquetFile(path) as file:
        table = file.read()
    _require_columns(path, table.column_names)
    return table


def _require_columns(path: Path, columns: Sequence[str]) -> None:
    if not columns:
        raise DataError(f"{path}: the file is empty; not even a header with column names is there")
    duplicates = sorted(name for name, number in Counter(columns).items() if number > 1)
    if duplicates:
        raise DataError(
            f"{path}: more than one column is called {', '.join(map(repr, duplicates))}"
        )


def _choose_target(path: Path, columns: Sequence[str], target: str | None) -> str:
    _require_columns(path, columns)
    if target is not None and target not in columns:
        raise DataError(f"{path}: no column {target!r}; there are: {', '.join(map(repr, columns))}")
    if len(columns) < 2:
        raise DataError(f"{path}: column {columns[0]!r} is alone; features need a column too")
    return columns[-1] if target is None else target


def _open_arrow(
    path: Path,
    table: Any,
    target: str | None,
    task: Task,
    missing: Sequence[str],
    decimal: str = ".",
) -> _Source:
    """target: None if the table has none; it is NaN then. decimal: the mark in texts of numbers."""
    infer = path.suffix.lower() != ".parquet"  # columns of CSV files are all of text

    def read(name: str, kind: ColumnType | None) -> tuple[ColumnType, NDArray[Any]]:
        return _read_column(path, name, table.column(name), kind, missing, infer, decimal)

    if target is None:
        return _Source(str(path), table.column_names, read, "", np.full(table.num_rows, np.nan))
    column = table.column(target)
    labels: NDArray[Any]
    if task == "regression":
        _, labels = _read_column(path, target, column, "number", missing, infer, decimal)
        gaps = np.isnan(labels)
    else:
        labels = _read_labels(path, target, column, missing)
        gaps = np.array([label is None or label != label for label in labels], dtype=np.bool_)
    if gaps.any():
        row = int(np.flatnonzero(gaps)[0])
        raise DataError(
            f"{path}: column {target!r}, row {row + 1}: the value is missing, and the target needs"
            " one in every row; take the row out of the file"
        )
    names = [name for name in table.column_names if name != target]
    labels = canonical_target(labels, task, f"{path}: column {target!r}")
    return _Source(str(path), names, read, target, labels)


def _read_column(
    path: Path,
    name: str,
    column: Any,
    kind: ColumnType | None,
    missing: Sequence[str],
    infer: bool,
    decimal: str,
) -> tuple[ColumnType, NDArray[Any]]:
    """Type and values of an Arrow column. infer: tell the type of a column of text by its values.

    Raises DataError if a value does not fit the type.
    """
    import pyarrow as pa

    column = _plain(column)
    if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
        texts = _without_missing(column, missing)
        if kind is None:
            kind = None if infer else "category"
        if kind != "category":
            numbers, strays = _numbers_in(texts, decimal)
            if not len(strays):
                return "number", numbers
            stray = texts[strays[0]].as_py()
            other = next(mark for mark in csv_files.DECIMALS if mark != decimal)
            if other in stray and not len(_numbers_in(texts, other)[1]):
                raise DataError(
                    f"{path}: column {name!r}, row {strays[0] + 1}: {stray!r} is not a number where"
                    f" the decimal mark is {decimal!r}; "
                    + hint("xain-participant", f'data.decimal = "{other}"')
                    + " if that is the file's, take marks between thousands out, or "
                    + hint("xain-participant", f'data.types.{json.dumps(name)} = "category"')
                )
            num_present = len(texts) - texts.null_count
            # A column of numbers with a few texts is rather one with mistakes than a category.
            if kind == "number" or 2 * len(strays) <= num_present:
                raise DataError(
                    f"{path}: column {name!r}, row {strays[0] + 1}: {stray!r} is"
                    f" not a number, {num_present - len(strays)} of the column's {num_present}"
                    " values are; correct it, or "
                    + hint("xain-participant", f"data.missing = [{json.dumps(stray)}]")
                    + " if it stands for a missing value, or "
                    + hint("xain-participant", f'data.types.{json.dumps(name)} = "category"')
                )
        return "category", _categories(texts.to_pylist())
    if not (
        pa.types.is_integer(column.type)
        or pa.types.is_floating(column.type)
        or pa.types.is_decimal(column.type)
        or pa.types.is_boolean(column.type)
        or pa.types.is_null(column.type)
    ):
        raise DataError(
            f"{path}: column {name!r} is of type {column.type}, which is neither a number nor"
            " text; convert it, or leave it out: "
            + hint("xain-participant", f"data.drop = [{json.dumps(name)}]")
        )
    if kind == "category":
        return "category", _categories(column.to_pylist())
    if pa.types.is_boolean(column.type):
        column = column.cast(pa.uint8())
    # Unsafe casts lose only digits beyond float64, in integers above 2**53 and in decimals.
    cast = column.cast(pa.float64(), safe=False)
    return "number", cast.fill_null(nan).to_numpy().astype(np.float64)


def _plain(column: Any) -> Any:
    """A column without the encodings that save memory: dictionaries, runs and views of text."""
    import pyarrow as pa
    from pyarrow import compute

    if pa.types.is_run_end_encoded(column.type):
        column = compute.run_end_decode(column)
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    if pa.types.is_string_view(column.type):
        column = column.cast(pa.large_string())
    return column


def _without_missing(column: Any, missing: Sequence[str]) -> Any:
    """A column of text without blanks around its cells, and null where a value is missing."""
    import pyarrow as pa
    from pyarrow import compute

    texts = compute.utf8_trim_whitespace(column)
    is_missing = compute.is_in(texts, value_set=pa.array(missing, texts.type))
    return compute.if_else(is_missing, pa.scalar(None, texts.type), texts)


def _numbers_in(texts: Any, decimal: str) -> tuple[NDArray[np.float64], Sequence[int]]:
    """(the numbers, with NaN for a missing value; the rows of texts that are no numbers)."""
    import pyarrow as pa
    from pyarrow import compute

    if decimal == ",":  # and a point is no part of a number
        texts = compute.replace_substring(texts, ".", ";")
        texts = compute.replace_substring(texts, ",", ".")
    try:
        return texts.cast(pa.float64()).fill_null(nan).to_numpy().astype(np.float64), ()
    except pa.ArrowInvalid:
        cells = texts.to_pylist()
        others = {cell for cell in set(cells) if cell is not None and not _is_number(cell)}
        return np.empty(0), [row for row, cell in enumerate(cells) if cell in others]


def _is_number(text: str) -> bool:
    import pyarrow as pa

    try:
        pa.scalar(text).cast(pa.float64())
    except pa.ArrowInvalid:
        return False
    return True


def _read_labels(path: Path, name: str, column: Any, missing: Sequence[str]) -> NDArray[Any]:
    import pyarrow as pa

    column = _plain(column)
    if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
        column = _without_missing(column, missing)
    values = column.to_pylist()
    for row, value in enumerate(values, start=1):
        if value is not None and not isinstance(value, str | int | float):  # bool is an int
            raise DataError(
                f"{path}: column {name!r}, row {row}: {value!r} is no class name,"
                f" the column is of type {column.type}"
            )
    labels = np.empty(len(values), dtype=object)
    labels[:] = values
    return labels


def _categories(cells: Sequence[object]) -> NDArray[Any]:
    """Names of categories as those of classes, so that 3, "3" and "3.0" are one; None stays."""
    names = {cell: None if cell is None else class_name(cell) for cell in set(cells)}
    categories = np.empty(len(cells), dtype=object)
    categories[:] = [names[cell] for cell in cells]
    return categories
