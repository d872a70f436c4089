"""Data profiles: sizes, names and statistics that a participant sends before training, no rows."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from xain_workloads.errors import DataError
from xain_workloads.tables.schema import MAX_NAME, Column, check_names

MAX_FEATURES = 1_000_000
MAX_CLASSES = 10_000
# Size of all class names together, which travel with every assignment.
MAX_CLASS_NAMES_BYTES = 256 * 1024
_TASKS = ("", "classification", "regression")


@dataclass(frozen=True, slots=True)
class DataProfile:
    """Sizes, names and types of a participant's data.

    num_samples: rows for training, 0 or more. num_features: columns, target excluded.
    classes: canonical label names in sorted order; empty for regression.
    columns: the columns of features in the order of the file; empty if not declared.
    target: name of the target's column.
    task: "classification", "regression", or "" if not declared.
    statistics: JSON of the statistics from which preprocessing is fitted; "" for none.
    """

    num_samples: int
    num_features: int
    classes: tuple[str, ...] = ()
    columns: tuple[Column, ...] = ()
    target: str = ""
    task: str = ""
    statistics: str = ""


def sort_classes(names: Iterable[str]) -> tuple[str, ...]:
    """Sort distinct class names, as numbers where all of them are numbers, so "10" follows "9"."""
    distinct = sorted(set(names))  # so that "nan", which has no order, has at least a place
    try:
        return tuple(sorted(distinct, key=lambda name: (float(name), name)))
    except ValueError:
        return tuple(distinct)


def check_profile(profile: DataProfile) -> None:
    """Raise DataError if no coordinator takes the profile, whatever data others have."""
    samples, features = profile.num_samples, profile.num_features
    if samples < 0 or features < 0:
        raise DataError("the numbers of samples and features must not be negative")
    if features > MAX_FEATURES or len(profile.classes) > MAX_CLASSES:
        raise DataError(
            f"{features} features and {len(profile.classes)} classes; at most {MAX_FEATURES} and"
            f" {MAX_CLASSES} are taken. Is it rather a regression?"
        )
    if sum(len(name.encode(errors="replace")) for name in profile.classes) > MAX_CLASS_NAMES_BYTES:
        raise DataError(f"the names of all classes take more than {MAX_CLASS_NAMES_BYTES} bytes")
    if not all(name.isprintable() for name in profile.classes):
        raise DataError("a class name contains characters that cannot be printed")
    if len(profile.target) > MAX_NAME or not profile.target.isprintable():
        raise DataError(f"the name of the target must have at most {MAX_NAME} printable characters")
    if profile.task not in _TASKS:
        raise DataError(
            f"the task is {profile.task[:40]!r}; it must be one of: {', '.join(_TASKS[1:])}"
        )
    if profile.columns and len(profile.columns) != features:
        raise DataError(f"{len(profile.columns)} columns are named, and there are {features}")
    check_names(profile.columns)


def union(profiles: Iterable[DataProfile]) -> DataProfile:
    """The profile of all data together: columns as in the first that names them, no statistics.

    Profiles without rows say nothing about the data and are passed over. Raises ValueError if none
    is left, or if they disagree on the number of features.
    """
    known = [profile for profile in profiles if profile.num_samples > 0]
    if not known:
        raise ValueError("no participant has any rows")
    widths = sorted({profile.num_features for profile in known})
    if len(widths) > 1:
        raise ValueError(f"participants disagree on the number of features: {widths}")
    named = next((profile for profile in known if profile.columns), known[0])
    return replace(
        named,
        num_samples=sum(profile.num_samples for profile in known),
        classes=sort_classes(name for profile in known for name in profile.classes),
        statistics="",
    )
