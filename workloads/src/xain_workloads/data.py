"""Data sets in memory, and the files they come from.

Two participants who read different parts of one data set must name its classes alike, whatever
their files' formats and whatever else is in their part. So a class name depends on the label alone,
never on a type inferred from the labels around it: see class_name().
"""

import re
import zipfile
from collections.abc import Sequence
from csv import Error as CsvError
from csv import reader as csv_reader
from dataclasses import dataclass
from math import isfinite
from os import PathLike
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from xain_workloads.errors import DataError
from xain_workloads.profile import DataProfile, sort_classes

Task = Literal["classification", "regression"]
Features = NDArray[np.float64]
Target = NDArray[np.str_] | NDArray[np.float64]

BUNDLED = ("breast_cancer", "diabetes", "digits", "iris", "wine")
SUFFIXES = (".csv", ".libsvm", ".npz", ".parquet", ".svm", ".svmlight")

# A label of digits, but not "007": a leading zero says that it is a code, not a number.
_NUMBER = re.compile(r"[+-]?(0|[1-9][0-9]*)(\.[0-9]*)?", re.ASCII)


@dataclass(frozen=True, slots=True, eq=False)
class Dataset:
    """Rows with a known target.

    features: (n, p) float64, C-contiguous; n may be 0, p is at least 1.
    target: (n,), class names (unicode, canonical as class_name() writes them) for classification,
        float64 for regression.
    feature_names: p names; x0, x1, ... unless given.
    Raises DataError if shapes or types disagree. from_arrays() converts other types.
    """

    features: Features
    target: Target
    feature_names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        features = np.ascontiguousarray(self.features, dtype=np.float64)
        if features.ndim != 2 or features.shape[1] == 0:
            raise DataError(
                f"features have shape {features.shape}, expected (n, p) with at least one column"
            )
        target = np.asarray(self.target)
        if target.shape != features.shape[:1]:
            raise DataError(f"target has shape {target.shape}, expected ({features.shape[0]},)")
        if target.dtype.kind == "O" and all(type(label) is str for label in target):
            target = target.astype(np.str_)
        if target.dtype.kind not in "Uf":
            raise DataError(f"target has dtype {target.dtype}, expected class names or float64")
        names = tuple(self.feature_names) or tuple(f"x{i}" for i in range(features.shape[1]))
        if len(names) != features.shape[1]:
            raise DataError(f"{len(names)} feature names for {features.shape[1]} columns")
        object.__setattr__(self, "features", features)
        object.__setattr__(
            self, "target", target.astype(np.float64) if target.dtype.kind == "f" else target
        )
        object.__setattr__(self, "feature_names", names)

    @property
    def num_samples(self) -> int:
        """Rows, n."""
        return int(self.features.shape[0])

    @property
    def num_features(self) -> int:
        """Columns, p, target excluded."""
        return int(self.features.shape[1])

    @property
    def task(self) -> Task:
        """What the target is good for, told by its type."""
        return "regression" if self.target.dtype.kind == "f" else "classification"

    def profile(self) -> DataProfile:
        """Sizes and classes of this data, as a participant tells them."""
        classes = () if self.task == "regression" else sort_classes(np.unique(self.target).tolist())
        return DataProfile(self.num_samples, self.num_features, classes)

    def subset(self, rows: ArrayLike) -> "Dataset":
        """Copy of the given rows, in the given order. rows: (m,) integers, 0 <= row < n."""
        index = np.asarray(rows, dtype=np.intp)
        return Dataset(self.features[index], self.target[index], self.feature_names)


def class_name(label: object) -> str:
    """Canonical name of a class.

    3, 3.0, "3" and "3.0" are "3"; 0.5 is "0.5"; text that is no plain decimal number, "007"
    among it, stays as it is, without the blanks around it.
    """
    match label:
        case bool() | np.bool_():
            return str(bool(label))
        case int() | np.integer():
            return str(int(label))
        case float() | np.floating():
            number = float(label)
            return str(int(number)) if number.is_integer() else repr(number)
        case bytes():
            return class_name(label.decode())
    text = str(label).strip()
    if not _NUMBER.fullmatch(text):
        return text
    whole, _, fraction = text.partition(".")
    if not fraction.strip("0"):
        return str(int(whole))  # not through float, which would merge ids beyond 2**53
    return class_name(float(text))


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
    _require_task(task)
    matrix = np.asarray(features)
    if matrix.ndim != 2 or matrix.shape[1] == 0:
        raise DataError(
            f"{origin}: features have shape {matrix.shape}, expected (n, p) with p at least 1"
        )
    if matrix.dtype.kind not in "biuf":
        raise DataError(f"{origin}: features have dtype {matrix.dtype}, expected numbers")
    names = tuple(feature_names) or tuple(f"x{i}" for i in range(matrix.shape[1]))
    matrix = np.ascontiguousarray(matrix, dtype=np.float64)
    finite = np.isfinite(matrix)
    if not finite.all():
        column = int(np.flatnonzero(~finite.all(axis=0))[0])
        row = int(np.flatnonzero(~finite[:, column])[0])
        raise DataError(
            f"{origin}: column {names[column]!r}, row {row + 1}:"
            f" {matrix[row, column]} is not finite"
        )
    labels = np.asarray(target)
    if labels.shape != matrix.shape[:1]:
        raise DataError(f"{origin}: target has shape {labels.shape}, expected ({matrix.shape[0]},)")
    canonical = (
        _class_names(labels, origin) if task == "classification" else _floats(labels, origin)
    )
    return Dataset(matrix, canonical, names)


def load(
    source: str | PathLike[str],
    *,
    target: str | None = None,
    task: Task = "classification",
    scale: float = 1.0,
    num_features: int | None = None,
    zero_based: bool = False,
) -> Dataset:
    """Load a data set from a file, or one that scikit-learn brings along.

    source: a name in BUNDLED, or a path that ends in one of SUFFIXES. A CSV file has a header and
        commas; an .npz file has the arrays `features` and `target`, or `X` and `y`.
    target: the target's column in CSV and Parquet files, by default the last.
    scale: factor on all features; the pixels of digits are 0..16, so 0.0625 brings them to 0..1.
    num_features: how many columns there must be. LIBSVM files leave out zeros, so their parts
        agree on a width only if it is given here.
    zero_based: whether the first feature of a LIBSVM file is 0 instead of 1. It is not guessed,
        since parts of one data set could guess differently.
    A file without rows is a data set without rows: an empty part must not stop a participant.
    Raises DataError that names the file and, where there is one, the column and the row.
    """
    _require_task(task)
    if not isfinite(scale) or scale == 0:
        raise DataError(f"scale is {scale}; it must be finite and not 0")
    if isinstance(source, str) and source in BUNDLED:
        suffix, path = "", Path()
    else:
        path = Path(source)
        suffix = path.suffix.lower()
        if suffix not in SUFFIXES:
            raise DataError(
                f"unknown data source {str(source)!r}: neither a bundled set ({', '.join(BUNDLED)})"
                f" nor a file ending in {', '.join(SUFFIXES)}"
            )
        if not path.is_file():
            raise DataError(f"{path}: no such file")
    if target is not None and suffix not in {".csv", ".parquet"}:
        raise DataError(f"{source}: a target column can be chosen in CSV and Parquet files only")

    match suffix:
        case "":
            dataset = _load_bundled(str(source), task)
        case ".csv":
            dataset = _load_csv(path, target, task)
        case ".parquet":
            dataset = _load_parquet(path, target, task)
        case ".npz":
            dataset = _load_npz(path, task)
        case _:
            dataset = _load_libsvm(path, task, num_features, zero_based)

    if num_features is not None and dataset.num_features != num_features:
        raise DataError(
            f"{source}: {dataset.num_features} feature columns, but num_features is {num_features}"
        )
    if scale == 1.0:
        return dataset
    return Dataset(dataset.features * scale, dataset.target, dataset.feature_names)


def _load_bundled(name: str, task: Task) -> Dataset:
    from sklearn import datasets  # here, because it takes a second and files do not need it

    if name == "diabetes" and task == "classification":
        raise DataError("diabetes: the target is a measurement, not a class; set task='regression'")
    bunch = getattr(datasets, f"load_{name}")()
    target = bunch.target
    if task == "classification":
        target = np.asarray(bunch.target_names)[target]  # "setosa" instead of "0"
    return from_arrays(
        bunch.data,
        target,
        task=task,
        feature_names=[str(feature) for feature in bunch.feature_names],
        origin=name,
    )


def _load_csv(path: Path, target: str | None, task: Task) -> Dataset:
    import pyarrow as pa
    from pyarrow import csv

    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            lines = (line for line in csv_reader(file) if line)  # Arrow skips blank lines too
            header = next(lines, [])
            has_rows = next(lines, None) is not None
    except (UnicodeDecodeError, OSError, CsvError) as error:
        raise DataError(f"{path}: {error}") from error
    chosen = _choose_target(path, header, target)
    # Types are set, not inferred: Arrow infers them from the first block alone, and then fails on
    # the first fraction in a column that began with whole numbers.
    types = {name: pa.float64() for name in header}
    if task == "classification":
        types[chosen] = pa.string()
    if not has_rows:  # Arrow takes a header without a line break for an empty file
        return _from_table(path, pa.schema(types).empty_table(), chosen, task)
    try:
        table = csv.read_csv(
            path,
            convert_options=csv.ConvertOptions(column_types=types, strings_can_be_null=True),
        )
    except pa.ArrowInvalid as error:
        complaint = _first_text_in_csv(
            path, [name for name in header if types[name] != pa.string()]
        )
        raise DataError(complaint or f"{path}: {error}") from error
    return _from_table(path, table, chosen, task)


def _first_text_in_csv(path: Path, numeric: Sequence[str]) -> str | None:
    """Where the first text stands in columns that must be numeric; None if it is something else."""
    import pyarrow as pa
    from pyarrow import csv

    types = {name: pa.string() for name in numeric}
    options = csv.ConvertOptions(
        column_types=types, strings_can_be_null=True, include_columns=numeric
    )
    try:
        table = csv.read_csv(path, convert_options=options)
    except pa.ArrowInvalid:
        return None
    for name in numeric:
        for row, cell in enumerate(table.column(name).to_pylist(), start=1):
            try:
                float(cell or 0)
            except ValueError:
                return f"{path}: column {name!r}, row {row}: {cell!r} is not a number"
    return None


def _load_parquet(path: Path, target: str | None, task: Task) -> Dataset:
    import pyarrow as pa
    from pyarrow import parquet

    try:
        # Not read_table(), which takes folder names such as `year=2020` for columns.
        with parquet.ParquetFile(path) as file:
            table = file.read()
    except (pa.ArrowInvalid, OSError) as error:
        raise DataError(f"{path}: {error}") from error
    return _from_table(path, table, _choose_target(path, table.column_names, target), task)


def _choose_target(path: Path, columns: Sequence[str], target: str | None) -> str:
    if not columns:
        raise DataError(f"{path}: the file is empty; not even a header with column names is there")
    duplicates = sorted({name for name in columns if columns.count(name) > 1})
    if duplicates:
        raise DataError(
            f"{path}: more than one column is called {', '.join(map(repr, duplicates))}"
        )
    if target is not None and target not in columns:
        raise DataError(f"{path}: no column {target!r}; there are: {', '.join(map(repr, columns))}")
    if len(columns) < 2:
        raise DataError(f"{path}: column {columns[0]!r} is alone; features need a column too")
    return columns[-1] if target is None else target


def _from_table(path: Path, table: Any, target: str, task: Task) -> Dataset:
    names = [name for name in table.column_names if name != target]
    features = np.empty((table.num_rows, len(names)), dtype=np.float64)
    for i, name in enumerate(names):
        features[:, i] = _numbers_in(path, name, table.column(name))
    labels: NDArray[Any]
    if task == "regression":
        labels = _numbers_in(path, target, table.column(target))
    else:
        labels = _labels_in(path, target, table.column(target))
    _require_finite_target(labels, f"{path}: column {target!r}")
    return from_arrays(features, labels, task=task, feature_names=names, origin=str(path))


def _numbers_in(path: Path, name: str, column: Any) -> NDArray[np.float64]:
    import pyarrow as pa

    column = _complete(path, name, column)
    is_number = (
        pa.types.is_integer(column.type)
        or pa.types.is_floating(column.type)
        or pa.types.is_decimal(column.type)
        or pa.types.is_boolean(column.type)
    )
    if len(column) == 0:
        return np.empty(0, dtype=np.float64)
    if not is_number:
        raise DataError(
            f"{path}: column {name!r}, row 1: {column[0].as_py()!r} is not a number,"
            f" the column is of type {column.type}"
        )
    # Unsafe casts lose only digits beyond float64, in integers above 2**53 and in decimals.
    if pa.types.is_boolean(column.type):
        column = column.cast(pa.uint8())
    numbers: NDArray[np.float64] = column.cast(pa.float64(), safe=False).to_numpy()
    return numbers


def _labels_in(path: Path, name: str, column: Any) -> NDArray[Any]:
    column = _complete(path, name, column)
    values = column.to_pylist()
    for row, value in enumerate(values, start=1):
        if not isinstance(value, str | int | float):  # bool is an int
            raise DataError(
                f"{path}: column {name!r}, row {row}: {value!r} is no class name,"
                f" the column is of type {column.type}"
            )
    labels = np.empty(len(values), dtype=object)
    labels[:] = values
    return labels


def _complete(path: Path, name: str, column: Any) -> Any:
    """The column, decoded if it is a dictionary. Raises DataError if a value is missing."""
    import pyarrow as pa

    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    if column.null_count:
        row = int(np.flatnonzero(column.is_null().to_numpy())[0])
        raise DataError(f"{path}: column {name!r}, row {row + 1}: the value is missing")
    return column


def _load_npz(path: Path, task: Task) -> Dataset:
    if not zipfile.is_zipfile(path):  # for which numpy would suggest to try pickle
        raise DataError(f"{path}: not an archive as numpy.savez writes it")
    try:
        with np.load(path, allow_pickle=False) as archive:  # a pickled array is code waiting to run
            for features, target in (("features", "target"), ("X", "y")):
                if features in archive and target in archive:
                    return from_arrays(
                        archive[features], archive[target], task=task, origin=str(path)
                    )
            raise DataError(
                f"{path}: neither arrays 'features' and 'target' nor 'X' and 'y';"
                f" there are: {', '.join(map(repr, archive.files)) or 'none'}"
            )
    except DataError:
        raise
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise DataError(f"{path}: {error}") from error


def _load_libsvm(path: Path, task: Task, num_features: int | None, zero_based: bool) -> Dataset:
    from sklearn.datasets import load_svmlight_file

    try:
        features, labels = load_svmlight_file(
            str(path), n_features=num_features, zero_based=zero_based
        )
    except (ValueError, OSError) as error:
        raise DataError(f"{path}: {error}") from error
    if num_features is None and not len(labels):
        # The width is unknown, and nobody asks: union() passes over profiles without rows.
        return Dataset(
            np.empty((0, 1)), _class_names(labels, "") if task == "classification" else labels
        )
    return from_arrays(features.toarray(), labels, task=task, origin=str(path))


def _class_names(labels: NDArray[Any], origin: str) -> NDArray[np.str_]:
    _require_finite_target(labels, f"{origin}: target")
    if labels.dtype.kind not in "biufUSO":
        raise DataError(f"{origin}: target has dtype {labels.dtype}, expected numbers or text")
    values = labels.tolist()
    names = {value: class_name(value) for value in set(values)}
    canonical = np.array([names[value] for value in values], dtype=np.str_)
    if not canonical.all():  # an empty string is false
        row = int(np.flatnonzero(canonical == "")[0])
        raise DataError(f"{origin}: target, row {row + 1}: the label is empty")
    return canonical


def _floats(labels: NDArray[Any], origin: str) -> NDArray[np.float64]:
    if labels.dtype.kind not in "biuf":
        raise DataError(f"{origin}: target has dtype {labels.dtype}, regression needs numbers")
    _require_finite_target(labels, f"{origin}: target")
    return labels.astype(np.float64)


def _require_finite_target(labels: NDArray[Any], where: str) -> None:
    if labels.dtype.kind == "f":
        finite = np.isfinite(labels)
    elif labels.dtype.kind == "O":
        finite = np.array(
            [not isinstance(label, float) or isfinite(label) for label in labels], dtype=np.bool_
        )
    else:
        return
    if not finite.all():
        row = int(np.flatnonzero(~finite)[0])
        raise DataError(f"{where}, row {row + 1}: {labels[row]} is not finite")


def _require_task(task: str) -> None:
    if task not in get_args(Task):
        raise DataError(f"task is {task!r}; choose one of: {', '.join(get_args(Task))}")
