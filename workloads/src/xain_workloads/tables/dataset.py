"""Data sets in memory: a matrix of numbers without gaps, and a target.

Two participants with different parts of one data set must name its classes alike, whatever the
formats of their files. So a class name depends on the label alone, never on a type inferred from
other labels: see names.class_name().
"""

from dataclasses import dataclass
from math import isfinite
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from xain_workloads.errors import DataError
from xain_workloads.names import class_name
from xain_workloads.tables.profile import DataProfile, sort_classes

Task = Literal["classification", "regression"]
Features = NDArray[np.float64]
Target = NDArray[np.str_] | NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Dataset:
    """Rows with a known target.

    features: (n, p) float64, C-contiguous; n may be 0, p is at least 1.
    target: (n,), class names (unicode, canonical as class_name() writes them) for classification,
        float64 for regression.
    feature_names: p names; x0, x1, ... unless given.
    groups: (n,) uint64, equal in rows of one group, which are not divided; None without groups.
    Raises DataError if shapes or types disagree. data.from_arrays() converts other types.
    """

    features: Features
    target: Target
    feature_names: tuple[str, ...] = ()
    groups: NDArray[np.uint64] | None = None

    def __post_init__(self) -> None:
        """Convert types, name features that have no names, and check shapes. Raises DataError."""
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
        """The task that the type of the target stands for."""
        return "regression" if self.target.dtype.kind == "f" else "classification"

    def profile(self) -> DataProfile:
        """Sizes and classes of this data, as a participant tells them."""
        classes = () if self.task == "regression" else sort_classes(np.unique(self.target).tolist())
        return DataProfile(self.num_samples, self.num_features, classes)

    def subset(self, rows: ArrayLike) -> "Dataset":
        """Copy of the given rows, in the given order. rows: (m,) integers, 0 <= row < n."""
        index = np.asarray(rows, dtype=np.intp)
        groups = None if self.groups is None else self.groups[index]
        return Dataset(self.features[index], self.target[index], self.feature_names, groups)


def canonical_target(labels: NDArray[Any], task: str, where: str) -> Target:
    """The target of a task: class names for classification, float64 for regression.

    labels: (n,). where: name of the target for messages.
    Raises DataError that names the row if a label is empty or not finite.
    """
    if task not in get_args(Task):
        raise DataError(f"task is {task!r}; choose one of: {', '.join(get_args(Task))}")
    _require_finite(labels, where)
    if task == "regression":
        if labels.dtype.kind not in "biuf":
            raise DataError(f"{where} has dtype {labels.dtype}, regression needs numbers")
        return labels.astype(np.float64)
    if labels.dtype.kind not in "biufUSO":
        raise DataError(f"{where} has dtype {labels.dtype}, expected numbers or text")
    values = labels.tolist()
    names = {value: class_name(value) for value in set(values)}
    canonical = np.array([names[value] for value in values], dtype=np.str_)
    if not canonical.all():  # an empty string is false
        row = int(np.flatnonzero(canonical == "")[0])
        raise DataError(f"{where}, row {row + 1}: the label is empty")
    return canonical


def _require_finite(labels: NDArray[Any], where: str) -> None:
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
