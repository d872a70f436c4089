"""Tables and data sets from files, and those that scikit-learn brings along."""

import zipfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from math import isfinite
from os import PathLike
from pathlib import Path
from types import MappingProxyType
from typing import Any, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from xain_foundation.settings.hints import hint
from xain_workloads.bundled import BUNDLED, read_bundled
from xain_workloads.errors import DataError
from xain_workloads.names import class_name, folded
from xain_workloads.tables.dataset import Dataset, Features, Target, Task, canonical_target
from xain_workloads.tables.reading.columns import (
    MISSING,
    Made,
    categories,
    is_text,
    known_texts,
    read_column,
    read_target,
    too_many_classes,
    without_outcome,
)
from xain_workloads.tables.reading.corrections import corrected, corrected_target
from xain_workloads.tables.reading.dates import names_of
from xain_workloads.tables.reading.dialect import DETECTED, Dialect
from xain_workloads.tables.reading.errors import DoesNotFit, Problem, reading
from xain_workloads.tables.reading.files import SUFFIXES as WITH_COLUMN_NAMES
from xain_workloads.tables.reading.files import Cells, read_cells
from xain_workloads.tables.reading.marks import has_marks, with_decimals, with_marks
from xain_workloads.tables.schema import MAX_COLUMNS, Column, ColumnType, shown
from xain_workloads.tables.table import Table

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

SUFFIXES = (*WITH_COLUMN_NAMES, ".libsvm", ".npz", ".svm", ".svmlight")
FOLDER_FILES = ("X_train.csv", "y_train.csv")  # of a folder: the features, and the target alone


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
    return _choose(_Arrays(features, target, feature_names, origin), task).to_dataset()


def load(source: str | PathLike[str], **arguments: Any) -> Dataset:
    """Load a data set of numbers without gaps. Arguments and errors are those of load_table().
    Raises DataError as well if a column is a category, or a value is missing."""
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
    known_types: Mapping[str, ColumnType] | None = None,
    units: Mapping[str, str] | None = None,
    classes: Sequence[str] = (),
    group: str = "",
    dialect: Dialect = DETECTED,
) -> Table:
    """Load a table from a file, or one that scikit-learn brings along.

    source: a name in BUNDLED, a path that ends in one of SUFFIXES, or a folder with the two
        FOLDER_FILES, whose rows belong together in their order. An .npz file has the arrays
        `features` and `target`, or `X` and `y`; other files than LIBSVM's have names of columns.
    target: the target's column in files with names of columns, by default the last.
    num_features: how many columns the file must have. LIBSVM files leave out zeros, so their parts
        agree on a width only if it is given here.
    zero_based: whether the first feature of a LIBSVM file is 0 instead of 1. It is not guessed,
        since parts of one data set could guess differently.
    select: the columns to keep, in this order; empty for all. drop: columns to leave out.
    types: types of columns. A column of a text file without one is of type "number" if all of its
        values are numbers, and a category if fewer than half of them are; one in between is an
        error. A column of a Parquet file has the type that the file gives it.
    known_types: of columns by their names in the session, for those that have none in types.
    units: units of columns, for comparison with other participants.
    classes: all labels that the target may have; empty for those in the file, and for all of those
        of a bundled set.
    group: the column whose value rows of one group share, in files with names of columns; it is no
        feature, and rows without a value are one group. "" for none.
    dialect: how the file is written, and what its cells mean. Its names of columns, as those of all
        other arguments, are those in the file.
    A file without rows is a table without rows: an empty part must not stop a participant.
    Raises DataError that names the file and, where there is one, the column and the row; DoesNotFit
    with all columns whose values do not fit.
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
        raise DataError(f"{source}: a target column can be chosen in {_NAMED} files only")
    if group and suffix not in (*WITH_COLUMN_NAMES, "folder"):
        raise DataError(f"{source}: a column of groups can be chosen in {_NAMED} files only")

    opened: _Arrays | _File
    dialect = _with_folded_names(dialect)
    select, drop = tuple(map(folded, select)), tuple(map(folded, drop))
    kinds = {folded(name): kind for name, kind in (types or {}).items()}
    if suffix in WITH_COLUMN_NAMES or suffix == "folder":
        if suffix == "folder":
            cells, chosen = _read_folder(path, dialect)
        else:
            cells = read_cells(path, dialect)
            chosen = _choose_target(path, cells.table.column_names, target)
        opened = _File(path, cells, chosen)
    elif suffix == "":
        opened = _open_bundled(str(source), task, dialect)
    elif suffix == ".npz":
        opened = _open_npz(path, dialect)
    else:
        opened = _open_libsvm(path, num_features, zero_based, dialect)
    for name in opened.names:
        new = folded(dialect.rename.get(name, name))
        if known_types and new in known_types and name not in dialect.dates:
            kinds.setdefault(name, known_types[new])
    if num_features is not None and len(opened.names) != num_features:
        raise DataError(
            f"{source}: {len(opened.names)} feature columns, but num_features is {num_features}"
        )
    table = _choose(
        opened,
        task,
        select=select,
        drop=drop,
        types=kinds,
        units={folded(name): unit for name, unit in (units or {}).items()},
        classes=tuple(map(class_name, classes)),
        group=folded(group),
        missing_target=dialect.missing_target,
    )
    if len(table.columns) > MAX_COLUMNS and isinstance(opened, _File):
        raise DataError(
            f"{source}: there are {len(table.columns)} columns, and at most {MAX_COLUMNS} are"
            " compared by name; choose some, " + hint("xain-participant", 'data.columns = ["NAME"]')
        )
    return corrected(table, dialect)


_NAMED = ", ".join(WITH_COLUMN_NAMES)


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
    """Load rows that are to be predicted from a file with names of columns.

    types: types of the columns to take, in this order; empty for all columns but the target and
        the ids.
    target: the target's column, which the file need not have, or only for some rows.
    id_column: identifies the rows; "" for none.
    dialect: of the site whose file it is, from the model that it has trained. Columns may have
        their names in the file or those in the session.
    Raises DataError that names the file, and the column that is missing or of another type.
    """
    path = Path(source)
    if path.suffix.lower() not in WITH_COLUMN_NAMES:
        raise DataError(f"{path}: rows to predict are read from {_NAMED} files only")
    if not path.is_file():
        raise DataError(f"{path}: no such file")
    dialect = _with_folded_names(dialect)
    cells = read_cells(path, dialect)
    names = cells.table.column_names
    columns: dict[str, str] = {}  # of the file, by the names that the model has
    for name in names:
        columns |= dict.fromkeys(_names_in_session(name, dialect), name)
    for name in types:
        if name not in columns:
            raise DataError(f"{path}: no column {name!r}; there are: {shown(columns, 20)}")
    if id_column and (id_column := folded(id_column)) not in names:
        raise DataError(f"{path}: no column {id_column!r}; there are: {shown(names, 20)}")
    ids = list(map(str, range(1, cells.table.num_rows + 1)))
    if id_column:
        given = cells.table.column(id_column).to_pylist()
        ids = ["" if cell is None else _id_of(cell) for cell in given]
    file = _File(path, cells, columns.get(folded(target), ""))
    kinds = {columns[name]: kind for name, kind in types.items()}
    used = tuple(kinds) or tuple(name for name in file.names if name != id_column)
    taken, values, problems = _read(file, used, kinds)
    if problems:
        raise DoesNotFit(problems, str(path))
    truth = np.full(file.num_rows, None, dtype=object)
    if file.target_name:
        labels, missing = file.read_target(task)
        truth[~missing] = canonical_target(labels[~missing], task, f"{path}: column {target!r}")
    unknown = np.full(file.num_rows, np.nan)
    table = Table(tuple(taken), values, unknown, "", (), str(path), file.dialect)
    table = table.arranged(tuple(types)) if types else table
    here = dialect.model_copy(
        update={
            key: {name: one for name, one in getattr(dialect, key).items() if name in table.values}
            for key in ("factors", "offsets", "replace")
        }
    )
    known = np.array([one is not None for one in truth], dtype=np.bool_)
    truth[known] = corrected_target(truth[known], target, dialect)
    return Rows(corrected(table, here), truth, ids)


def _id_of(cell: object) -> str:
    return class_name(cell) if isinstance(cell, float) else str(cell)  # 7.0 of a workbook is 7


def _with_folded_names(dialect: Dialect) -> Dialect:
    """Copy a dialect with normalised names of columns."""
    return dialect.model_copy(
        update={
            key: {folded(name): value for name, value in getattr(dialect, key).items()}
            for key in ("missing_in", "marks", "dates", "rename", "factors", "offsets", "replace")
        }
    )


def _names_in_session(name: str, dialect: Dialect) -> tuple[str, ...]:
    """The names of what a column of a file becomes."""
    return names_of(folded(dialect.rename.get(name, name)), dialect.dates.get(name))


def _choose(
    source: "_Arrays | _File",
    task: Task,
    *,
    select: Sequence[str] = (),
    drop: Collection[str] = (),
    types: Mapping[str, ColumnType] = MappingProxyType({}),
    units: Mapping[str, str] = MappingProxyType({}),
    classes: Sequence[str] = (),
    group: str = "",
    missing_target: str = "",
) -> Table:
    """The chosen columns of a source under their new names, and its target. Raises DataError,
    DoesNotFit with all that does not."""
    features, target = set(source.names), source.target_name
    dialect = source.dialect
    for key, names, may_be_target in (
        ("columns", select, True),
        ("drop", drop, False),
        ("group", (group,) if group else (), False),
        ("rename", dialect.rename, True),
        ("types", types, False),
        ("units", units, False),
        ("missing_in", dialect.missing_in, True),
        ("marks", dialect.marks, True),
        ("dates", dialect.dates, True),
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
    left_out = {target, group, *drop}
    chosen = [name for name in select or source.names if name not in left_out]
    columns, values, problems = _read(source, chosen, types)
    labels: NDArray[Any] = np.empty(0)
    missing = np.zeros(source.num_rows, np.bool_)
    try:
        labels, missing = source.read_target(task)
    except DoesNotFit as error:
        problems += error.problems
    if missing.any() and not missing_target:
        problems.append(without_outcome(target, missing))
    if problems:
        raise DoesNotFit(problems, source.origin)
    labels = canonical_target(labels[~missing], task, f"{source.origin}: column {target!r}")
    is_listed = task == "regression" or classes
    if not is_listed and (problem := too_many_classes(target, labels)):
        raise DoesNotFit([problem], source.origin)
    new_units = {
        new: unit for name, unit in units.items() for new in _names_in_session(name, dialect)
    }
    groups = source.groups(group)[~missing] if group and isinstance(source, _File) else None
    return Table(
        tuple(replace(column, unit=new_units.get(column.name, "")) for column in columns),
        {name: array[~missing] for name, array in values.items()},
        labels,
        folded(dialect.rename.get(target, target)),
        tuple(classes),
        source.origin,
        source.dialect,
        int(missing.sum()),
        groups,
        folded(dialect.rename.get(group, group)),
    )


def _read(
    source: "_Arrays | _File", names: Sequence[str], types: Mapping[str, ColumnType]
) -> tuple[list[Column], dict[str, NDArray[Any]], list[Problem]]:
    """The columns under their new names, their values, and what does not fit."""
    problems: list[Problem] = []
    columns: list[Column] = []
    values: dict[str, NDArray[Any]] = {}
    dialect = source.dialect
    if isinstance(source, _File):
        problems += source.problems
        problems += source.find_marks([*names, source.target_name], types)
    for name in names:
        try:
            made = source.read(name, types.get(name))
        except DoesNotFit as error:
            problems += error.problems
            continue
        for new, (column, array) in zip(_names_in_session(name, dialect), made, strict=True):
            columns.append(Column(new, column.type))
            is_scaled = column.type == "number" and dialect.scale != 1.0
            values[new] = array * dialect.scale if is_scaled else array
    return columns, values, problems


# Arrays


class _Arrays:
    """A matrix of numbers and its labels. Raises DataError if shapes or types disagree."""

    def __init__(
        self,
        features: ArrayLike,
        target: ArrayLike,
        feature_names: Sequence[str],
        origin: str,
        dialect: Dialect = DETECTED,
    ) -> None:
        """Check shapes and types, and name features that have no names. Raises DataError."""
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
        labels = np.asarray(target)
        if labels.shape != matrix.shape[:1]:
            raise DataError(
                f"{origin}: target has shape {labels.shape}, expected ({matrix.shape[0]},)"
            )
        self.origin, self.names, self.target_name = origin, names, "target"
        self.dialect, self.num_rows = dialect, len(labels)
        self._matrix, self._labels = matrix, labels
        self._position = {name: i for i, name in enumerate(names)}

    def read(self, name: str, kind: ColumnType | None) -> Made:
        """Convert a column of the matrix to numbers, or to categories if its kind is "category"."""
        column = self._matrix[:, self._position[name]]
        if kind == "category":
            names = categories([None if cell != cell else cell for cell in column.tolist()])
            return [(Column(name, "category"), names)]
        return [(Column(name), column.astype(np.float64))]

    def read_target(self, task: Task) -> tuple[NDArray[Any], NDArray[np.bool_]]:
        """The target, and where it is missing."""
        return self._labels, np.zeros(self.num_rows, np.bool_)


def _open_bundled(name: str, task: Task, dialect: Dialect) -> _Arrays:
    """Open a data set of scikit-learn; class names take the place of codes. Raises DataError."""
    features, target, names, class_names = read_bundled(name)
    if task == "classification":
        if class_names is None:
            raise DataError(
                f"{name}: the target is a measurement, not a class; set task='regression'"
            )
        target = class_names[target]  # "setosa" instead of "0"
    return _Arrays(features, target, names, name, dialect)


def _open_npz(path: Path, dialect: Dialect) -> _Arrays:
    """Open an archive of `features` and `target`, or `X` and `y`. Raises DataError."""
    if not zipfile.is_zipfile(path):  # numpy's own error would suggest pickle
        raise DataError(f"{path}: not an archive as numpy.savez writes it")
    with (
        reading(path, "archive of arrays of numbers or text"),
        np.load(path, allow_pickle=False) as archive,  # a pickled array is code waiting to run
    ):
        for features, target in (("features", "target"), ("X", "y")):
            if features in archive and target in archive:
                return _Arrays(archive[features], archive[target], (), str(path), dialect)
        raise DataError(
            f"{path}: neither arrays 'features' and 'target' nor 'X' and 'y';"
            f" there are: {', '.join(map(repr, archive.files)) or 'none'}"
        )


def _open_libsvm(
    path: Path, num_features: int | None, zero_based: bool, dialect: Dialect
) -> _Arrays:
    """Read a LIBSVM file as a dense matrix and labels. Raises DataError that names a line."""
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
    return _Arrays(matrix, labels, (), str(path), dialect)


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


# Files with names of columns


class _File:
    """Cells of a file, one column of which is the target; "" if none is."""

    def __init__(self, path: Path, cells: Cells, target: str) -> None:
        self.origin, self.target_name = str(path), target
        self.names = [name for name in cells.table.column_names if name != target]
        self.dialect, self.num_rows = cells.dialect, cells.table.num_rows
        self.problems = cells.problems
        self._cells = cells
        self._unclear: Collection[str] = ()  # columns whose marks are not known

    def find_marks(
        self, names: Sequence[str], types: Mapping[str, ColumnType]
    ) -> Sequence[Problem]:
        """Find the marks in the numbers of these columns. Returns what keeps them unclear."""
        if not self._cells.infer:
            return ()
        columns = {
            name: column
            for name in names
            if name and types.get(name) != "category" and name not in self.dialect.dates
            if is_text(column := self._cells.table.column(name))
        }
        # The fractions of one column tell the marks of another.
        is_looked_at = any(has_marks(one, self.dialect.separator) for one in columns.values())
        texts = {
            name: known_texts(name, column, self.dialect)
            for name, column in columns.items()
            if is_looked_at
        }
        try:
            self.dialect = with_marks(self.dialect, texts, self.dialect.separator)
        except DoesNotFit as error:
            self._unclear = with_decimals(texts)
            return error.problems
        return ()

    def read(self, name: str, kind: ColumnType | None) -> Made:
        """Read a column. kind: declared, or None. Raises DoesNotFit; without a problem of its own
        if find_marks() has told it."""
        if name in self._unclear:
            raise DoesNotFit([], self.origin)
        column = self._cells.table.column(name)
        made, self.dialect = read_column(name, column, kind, self.dialect, infer=self._cells.infer)
        return made

    def groups(self, name: str) -> NDArray[np.uint64]:
        """(n,) a digest of each row's value in the column.

        Whoever tries all values finds the value again, so digests stay in memory at the site.
        """
        column = self._cells.table.column(name)
        if is_text(column):
            column = known_texts(name, column, self.dialect)
        values = column.to_pylist()
        digests = {value: _digest(value) for value in set(values)}
        return np.array([digests[value] for value in values], np.uint64)

    def read_target(self, task: Task) -> tuple[NDArray[Any], NDArray[np.bool_]]:
        """Convert the target: (labels or numbers, True where one is missing). Raises DoesNotFit."""
        if task == "regression" and self.target_name in self._unclear:
            raise DoesNotFit([], self.origin)
        column = self._cells.table.column(self.target_name)
        return read_target(self.target_name, column, task, self.dialect, infer=self._cells.infer)


def _digest(value: object) -> int:
    """The digest of a value: that of 7, "7" and 7.0 is one, and so is that of missing values."""
    text = "" if value is None or value != value else class_name(value)
    return int.from_bytes(blake2b(text.encode(errors="replace"), digest_size=8).digest(), "big")


def _read_folder(path: Path, dialect: Dialect) -> tuple[Cells, str]:
    """The features of a folder with its target, and the name of the target."""
    features, labels = (path / name for name in FOLDER_FILES)
    if not labels.is_file():
        raise DataError(f"{labels}: no such file; {features.name} is there and needs it")
    cells = read_cells(features, dialect)
    form = {"encoding": dialect.encoding, "skip_lines": dialect.skip_lines}
    labelled = read_cells(labels, cells.dialect.model_copy(update=form))
    target = labelled.table
    if target.num_columns != 1:
        raise DataError(f"{labels}: the target is one column, and there are {target.num_columns}")
    if target.num_rows != cells.table.num_rows:
        raise DataError(
            f"{labels}: {target.num_rows} rows, but {features.name} has {cells.table.num_rows}; the"
            " files belong together row by row"
        )
    (name,) = target.column_names
    if name in cells.table.column_names:
        raise DataError(f"{labels}: column {name!r} is in {features.name} too; rename one of them")
    table = cells.table.append_column(name, target.column(0))
    return cells._replace(table=table, problems=[*cells.problems, *labelled.problems]), name


def _choose_target(path: Path, columns: Sequence[str], target: str | None) -> str:
    """The name of the target's column: the given one, or else the last. Raises DataError."""
    target = None if target is None else folded(target)
    if target is not None and target not in columns:
        raise DataError(f"{path}: no column {target!r}; there are: {', '.join(map(repr, columns))}")
    if len(columns) < 2:
        raise DataError(f"{path}: column {columns[0]!r} is alone; features need a column too")
    return columns[-1] if target is None else target
