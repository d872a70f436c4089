"""Check whether a data profile fits the session.

The data of a session have one schema: that of the configuration, completed by the profile of the
first participant. Columns are compared by name, labels by their text. A profile without columns,
from an earlier version or of an array, is compared by its number of features alone.

Until a model is asked for, enrolled participants vote: where more of them have data alike than
there are members whose data are unlike theirs, they take the members' place.

Profiles determine the size of the initial model, before any training, so this size is bounded. The
largest model allowed takes 400 MB in float32.
"""

from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import asdict, replace
from typing import Any

from xain_coordinator.core.vocabulary.errors import ProfileMismatch
from xain_coordinator.core.vocabulary.values import DataProfile, Schema
from xain_foundation.settings.hints import hint, quoted
from xain_workloads.errors import DataError
from xain_workloads.tables.profile import MAX_CLASS_NAMES_BYTES, MAX_CLASSES, sort_classes
from xain_workloads.tables.profile import check_profile as check_alone
from xain_workloads.tables.reading.statistics_json import from_json
from xain_workloads.tables.schema import EMPTY, match, shown
from xain_workloads.tables.statistics import Statistics

MAX_WEIGHTS = 100_000_000  # features times classes


def described(profiles: Iterable[DataProfile], classes: list[str]) -> dict[str, Any] | None:
    """The profile that data must have to fit a model, for the file of the model: names and types,
    without statistics. profiles: those that the model was made from; None if none has rows."""
    known = next((one for one in profiles if one.num_samples), None)
    if known is None:
        return None
    return {
        "num_features": known.num_features,
        "classes": classes,
        "columns": [asdict(column) for column in known.columns],
        "target": known.target,
        "task": known.task,
    }


def check_profile(
    profile: DataProfile,
    others: Iterable[DataProfile],
    schema: Schema,
    *,
    needs_rows: bool,
    is_model_requested: bool,
    first: Callable[[], str],
) -> None:
    """Refuse a profile that does not fit the session, or that no honest data have.

    others: the profiles that the initial model is made from, then those of the members.
    schema: as it is configured.
    needs_rows: the initial model is made from profiles, for which data without rows are no use.
    is_model_requested: the classes of the model are known, and none can be added.
    first: finds the participant whose data complete the schema, for messages; "" if unknown.
    Raises ProfileMismatch.
    """
    samples, features = profile.num_samples, profile.num_features
    if profile.statistics:
        _check_statistics(profile)
    width: int | None = None
    configured, known_classes = schema, set(schema.classes)
    for other in others:
        if other.num_samples:
            if samples > 0 and _is_alike(profile, other):
                return  # an equal profile was accepted before
            if width is None:
                width = other.num_features
            known_classes.update(other.classes)
            schema = _completed(schema, other)
    try:
        check_alone(profile)
    except DataError as error:
        raise ProfileMismatch(str(error)) from None
    # The model is made for the classes of all profiles together.
    classes = known_classes.union(profile.classes)
    if needs_rows and samples == 0:
        raise ProfileMismatch("the data have no rows, so there is nothing to train on")
    if len(classes) > MAX_CLASSES:
        raise ProfileMismatch(
            f"there are {len(classes)} classes with those of the others; at most {MAX_CLASSES} are "
            "taken. Is it rather a regression?"
        )
    if features * len(classes) > MAX_WEIGHTS:
        raise ProfileMismatch(
            f"{features} features times {len(classes)} classes need a model of more than "
            f"{MAX_WEIGHTS} weights"
        )
    if sum(len(name.encode(errors="replace")) for name in classes) > MAX_CLASS_NAMES_BYTES:
        raise ProfileMismatch(
            f"the names of all classes take more than {MAX_CLASS_NAMES_BYTES} bytes"
        )
    if samples == 0:
        return  # types and labels are not known
    try:
        _compare(profile, schema, width, known_classes, is_model_requested)
    except ProfileMismatch as refusal:
        if not (name := first()):
            raise
        raise ProfileMismatch(
            f"{refusal}. What [schema] of the coordinator leaves open is as in the data of "
            f"{name!r}",
            is_unlike_others=_fits(profile, None, configured),
        ) from None


def outvoted(
    profile: DataProfile,
    members: Mapping[str, DataProfile],
    waiting: Iterable[DataProfile],
    schema: Schema,
) -> dict[str, str] | None:
    """The members that a participant whose data are unlike theirs replaces, each with the reason.

    profile, members, waiting: of that participant, of the members, and of others that wait for the
    same reason; all have rows. Returns None if no more of them have data alike than there are
    members: then it waits as well.
    """
    compared: list[tuple[DataProfile, bool]] = []  # a fleet has few kinds of data

    def agrees(other: DataProfile) -> bool:
        """Whether data are alike in both directions: each fits the schema that the other
        completes."""
        for known, is_agreed in compared:
            if _is_alike(other, known):
                return is_agreed
        is_agreed = _fits(other, profile, schema) and _fits(profile, other, schema)
        compared.append((other, is_agreed))
        return is_agreed

    num_alike = 1 + sum(map(agrees, waiting)) + sum(map(agrees, members.values()))
    if num_alike <= len(members):
        return None
    reasons = {}
    for name, other in members.items():
        try:
            _compare_with(other, profile, schema)
        except ProfileMismatch as refusal:
            reasons[name] = f"{num_alike} participants have other data than this one: {refusal}"
    return reasons


def _fits(profile: DataProfile, first: DataProfile | None, schema: Schema) -> bool:
    """Whether a profile fits the schema as `first` completes it."""
    try:
        _compare_with(profile, first, schema)
    except ProfileMismatch:
        return False
    return True


def _compare_with(profile: DataProfile, first: DataProfile | None, schema: Schema) -> None:
    """Check that a profile fits the schema as `first` completes it. Raises ProfileMismatch."""
    classes, width = set(schema.classes), None
    if first is not None:
        classes.update(first.classes)
        schema, width = _completed(schema, first), first.num_features
    _compare(profile, schema, width, classes, is_model_requested=False)


def _compare(
    profile: DataProfile,
    schema: Schema,
    width: int | None,
    classes: Set[str],
    is_model_requested: bool,
) -> None:
    """Check that a profile with rows fits the session. width, classes: features and known labels of
    the others; width is None without others. is_model_requested: no label can be added. Raises
    ProfileMismatch."""
    _check_columns(profile, schema, width)
    _check_target(profile, schema)
    if profile.task:
        _check_classes(profile, schema, classes, is_model_requested)


def _is_alike(profile: DataProfile, other: DataProfile) -> bool:
    """Whether two profiles have the same columns, classes, target and task."""
    return (
        profile.num_features == other.num_features
        and profile.classes == other.classes
        and profile.columns == other.columns
        and (profile.target, profile.task) == (other.target, other.task)
    )


def _completed(schema: Schema, profile: DataProfile) -> Schema:
    """The schema with its open parts taken from a profile, types of empty columns among them."""
    columns = schema.columns or profile.columns
    if any(column.type == EMPTY for column in columns):
        types = {column.name: column.type for column in profile.columns}
        columns = tuple(
            replace(column, type=types.get(column.name, EMPTY)) if column.type == EMPTY else column
            for column in columns
        )
    return replace(
        schema,
        columns=columns,
        target=schema.target or profile.target,
        task=schema.task or profile.task,
    )


def _check_columns(profile: DataProfile, schema: Schema, width: int | None) -> None:
    """Refuse columns of another type, unit or name than the schema's, or, where either has no
    names, another number of them. width: number of features of the others, None without others.
    Raises ProfileMismatch."""
    if schema.columns and profile.columns:
        try:
            match(schema, profile.columns)
        except DataError as error:
            raise ProfileMismatch(str(error)) from None
        return
    if schema.columns:
        width = len(schema.columns)
    if width is not None and profile.num_features != width:
        raise ProfileMismatch(
            f"the data have {profile.num_features} features, those of the session {width}; check "
            "the columns"
        )


def _check_target(profile: DataProfile, schema: Schema) -> None:
    """Check that task and name of the target are those of the schema, if both are known. Raises
    ProfileMismatch."""
    if profile.task and schema.task and profile.task != schema.task:
        raise ProfileMismatch(
            f"the data are for {profile.task}, the session for {schema.task}; "
            + hint("xain-participant", f'data.task = "{schema.task}"')
            + f", if the target {profile.target!r} is right for it; if the session is to be for "
            f"{profile.task}, the coordinator needs it: "
            + hint("xain-coordinator", f'workload.options.task = "{profile.task}"')
        )
    if profile.target and schema.target and profile.target != schema.target:
        raise ProfileMismatch(
            f"the target is called {profile.target!r}, in the session {schema.target!r}; "
            + hint("xain-participant", f'data.target = "{quoted(schema.target)[1:-1]}"')
            + ", or if it is the same, rename it, "
            + hint(
                "xain-participant",
                f'data.rename.{quoted(profile.target)} = "{quoted(schema.target)[1:-1]}"',
            )
        )


def _check_classes(
    profile: DataProfile, schema: Schema, known: Set[str], is_model_requested: bool
) -> None:
    """Refuse labels that the session does not know, unless classes may still be added. A profile
    may lack known labels, as a part of a data set may. Raises ProfileMismatch."""
    new = [name for name in profile.classes if name not in known]
    if not new or not known:
        return
    if not is_model_requested:
        # A single label may be all that the first part of a data set has.
        is_longer_list = len(known) < 2 and not schema.classes and known <= {*profile.classes}
        if schema.allow_new_classes or is_longer_list:
            return
    are_numbers = all(name.lstrip("-").replace(".", "", 1).isdecimal() for name in new)
    raise ProfileMismatch(
        f"label{'s' if len(new) > 1 else ''} {shown(new)} of the target {profile.target!r}"
        f" {'are' if len(new) > 1 else 'is'} unknown to the session, whose classes are"
        f" {shown(sort_classes(known), 10)}; correct these rows or leave them out. If it is"
        " another word for one of these, "
        + hint(
            "xain-participant",
            f'data.replace.{quoted(profile.target)}.{quoted(new[0])} = "NAME"',
        )
        + ". If it is a class, all participants must know it: list all of them in [schema] classes"
        " of the coordinator, or in [data] classes of the first participant"
        + (
            ". If it is a quantity, the task is regression: at the coordinator "
            + hint("xain-coordinator", 'workload.options.task = "regression"')
            + ", at all participants "
            + hint("xain-participant", 'data.task = "regression"')
            if are_numbers
            else ""
        )
    )


def fitted(profiles: Iterable[DataProfile], schema: Schema) -> tuple[DataProfile, ...]:
    """The profiles with which the initial model is made. A profile with columns gets the columns of
    the session's schema, in its order, and its classes."""
    profiles = tuple(profiles)
    classes = schema.classes
    for profile in profiles:
        if profile.num_samples:
            schema = _completed(schema, profile)
    return tuple(
        replace(
            profile,
            num_features=len(schema.columns),
            columns=schema.columns,
            target=schema.target,
            classes=sort_classes({*profile.classes, *classes}),
        )
        if profile.columns and profile.num_samples
        else profile
        for profile in profiles
    )


def _check_statistics(profile: DataProfile) -> None:
    """Refuse statistics that no preprocessing can be fitted from: of other rows or columns than the
    profile has, or with a wrong target. Raises ProfileMismatch."""
    try:
        statistics = from_json(profile.statistics)
    except DataError as error:
        raise ProfileMismatch(str(error)) from None
    columns = statistics.columns
    # The number of rows is a site's weight in means and variances.
    most = max(column.num_rows for column in columns.values()) if columns else 0
    if statistics.target is not None:
        most = max(most, statistics.target.count)
    if statistics.rows != profile.num_samples or most > profile.num_samples:
        raise ProfileMismatch(
            f"the statistics are of {max(statistics.rows, most)} rows; the data have "
            f"{profile.num_samples}"
        )
    if len(columns) != profile.num_features:
        raise ProfileMismatch(
            f"the statistics are of {len(columns)} columns; the data have {profile.num_features}"
        )
    _check_target_statistics(profile, statistics)
    declared = {column.name: column.type for column in profile.columns}
    for name, column in columns.items():
        if declared.get(name) == EMPTY and column.missing == statistics.rows:
            continue
        if declared and declared.get(name) != column.type:
            raise ProfileMismatch(
                f"the statistics have a {column.type} column {name!r}, which the data do not have"
            )


def _check_target_statistics(profile: DataProfile, statistics: Statistics) -> None:
    """Refuse statistics of a target of another task, of unknown classes, or of more rows than there
    are. Raises ProfileMismatch."""
    counts = statistics.class_counts
    if statistics.target is not None and profile.task == "classification":
        raise ProfileMismatch("the statistics have moments of the target of a classification")
    if counts and profile.task == "regression":
        raise ProfileMismatch("the statistics count the classes of a regression")
    if unknown := sorted(counts.keys() - set(profile.classes)):
        raise ProfileMismatch(
            f"the statistics count {shown(unknown)}, of which the data have no class"
        )
    if (total := sum(counts.values())) > profile.num_samples:
        raise ProfileMismatch(
            f"the statistics count {total} rows of classes; the data have {profile.num_samples}"
        )
