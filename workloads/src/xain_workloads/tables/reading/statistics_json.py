"""The JSON text in which the statistics of a site travel. Its keys are those of version 1."""

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from xain_workloads.errors import DataError
from xain_workloads.tables.reading.json_forms import Count, Number, read, twice, written
from xain_workloads.tables.schema import MAX_NAME
from xain_workloads.tables.statistics import (
    MAX_ASSOCIATIONS,
    MAX_BUCKETS,
    MAX_CATEGORIES,
    MAX_STATISTICS_BYTES,
    CategoryStatistics,
    ColumnStatistics,
    Moments,
    NumberStatistics,
    Statistics,
)

_MAX_CLASSES = 10_000  # as many as a data profile may have

_Squares = Annotated[float, Meta(ge=0, le=1e300)]
_Share = Annotated[float, Meta(ge=-1, le=1)]
_Buckets = Annotated[tuple[Number, ...], Meta(max_length=MAX_BUCKETS)]


class _Column(Struct, omit_defaults=True, kw_only=True, tag_field="type"):
    name: str
    missing: Count
    distinct: Count | None = None
    association: Annotated[tuple[_Share | None, ...], Meta(max_length=MAX_ASSOCIATIONS)] = ()
    repeated: bool = False


class _Moments(Struct, omit_defaults=True, kw_only=True):
    count: Count
    mean: Number
    m2: _Squares
    buckets: _Buckets = ()


class _Numbers(_Column, tag="number", kw_only=True):
    count: Count
    mean: Number
    m2: _Squares
    buckets: _Buckets
    whole: bool | None = None


class _Categories(_Column, tag="category", kw_only=True):
    counts: Annotated[dict[str, Count], Meta(max_length=MAX_CATEGORIES)]
    infrequent: Count


class _Group(Struct):
    name: Annotated[str, Meta(min_length=1, max_length=MAX_NAME)]
    count: Count


class _Statistics(Struct, omit_defaults=True, kw_only=True):
    version: Literal[1]
    rows: Count
    columns: tuple[_Numbers | _Categories, ...]
    target: _Moments | None = None
    class_counts: Annotated[dict[str, Count], Meta(max_length=_MAX_CLASSES)] = {}
    without_target: Count = 0
    group: _Group | None = None


def to_json(statistics: Statistics) -> str:
    """Encode statistics as JSON text; the same statistics give the same text."""
    of = statistics
    target = None
    if of.target is not None:
        target = _Moments(**_told(of.target), buckets=_values(of.target_buckets))
    form = _Statistics(
        version=1,
        rows=of.rows,
        columns=tuple(_form(name, column) for name, column in of.columns.items()),
        target=target,
        class_counts=dict(of.class_counts),
        without_target=of.without_target,
        group=_Group(of.group, of.num_groups) if of.group else None,
    )
    return written(form)


def from_json(text: str) -> Statistics:
    """Read the statistics that a site sent. Raises DataError that names what is wrong."""
    if len(text.encode(errors="replace")) > MAX_STATISTICS_BYTES:
        raise DataError(f"the statistics take more than {MAX_STATISTICS_BYTES} bytes")
    form = read(text, _Statistics, "the statistics", version=1)
    columns = {column.name: _column(column) for column in form.columns}
    if len(columns) < len(form.columns):
        raise DataError(f"the statistics have column {twice(form.columns)!r} twice")
    if form.group is not None and not (
        form.group.name.isprintable() and form.group.count <= form.rows
    ):
        raise DataError("the 'group' of the statistics has too many groups, or no printable name")
    if form.target is not None and form.class_counts:
        raise DataError("the statistics have 'class_counts' and moments of a 'target' of numbers")
    return Statistics(
        form.rows,
        columns,
        None
        if form.target is None
        else Moments(form.target.count, form.target.mean, form.target.m2),
        () if form.target is None else _buckets(form.target),
        dict(sorted(form.class_counts.items())),
        form.without_target,
        "" if form.group is None else form.group.name,
        0 if form.group is None else form.group.count,
    )


def _told(moments: Moments) -> dict[str, Any]:
    return {"count": moments.count, "mean": moments.mean, "m2": moments.m2}


def _values(buckets: tuple[tuple[float, int], ...]) -> tuple[float, ...]:
    # Sizes of buckets differ by one at most and follow from their number, so they do not travel.
    return tuple(value for value, _ in buckets)


def _form(name: str, column: ColumnStatistics) -> _Numbers | _Categories:
    """Convert the statistics of a column to the form that is encoded as JSON."""
    about: dict[str, Any] = {
        "name": name,
        "missing": column.missing,
        "distinct": column.distinct,
        "association": column.association,
        "repeated": column.is_repeated,
    }
    if isinstance(column, CategoryStatistics):
        return _Categories(**about, counts=dict(column.counts), infrequent=column.infrequent)
    buckets = _values(column.buckets)
    return _Numbers(**about, **_told(column.moments), buckets=buckets, whole=column.whole)


def _column(form: _Numbers | _Categories) -> ColumnStatistics:
    """Convert the decoded form of a column to its statistics."""
    if isinstance(form, _Categories):
        counts = dict(sorted(form.counts.items()))
        return CategoryStatistics(
            form.missing,
            counts,
            form.infrequent,
            form.distinct,
            form.association,
            form.repeated,
        )
    return NumberStatistics(
        form.missing,
        Moments(form.count, form.mean, form.m2),
        _buckets(form),
        form.distinct,
        form.whole,
        form.association,
        form.repeated,
    )


def _buckets(form: _Moments | _Numbers) -> tuple[tuple[float, int], ...]:
    """Pair the value of each bucket with its rows, which are divided evenly. Raises DataError."""
    num_buckets = len(form.buckets)
    if num_buckets > form.count:
        raise DataError(f"{num_buckets} buckets for {form.count} values")
    size, more = divmod(form.count, num_buckets or 1)
    return tuple((value, size + (i < more)) for i, value in enumerate(form.buckets))
