"""Preprocessing of tables: fitted once from the statistics of all sites, then part of the model.

fit() computes from data profiles what every column needs. A model carries the result as JSON in
metadata["preprocessing"], so each participant prepares its rows alike. The features of a prepared
Dataset are, in this order: all number columns, the indicators of missing numbers, and the
categories of each category column as zeros and ones (one-hot).
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from math import isclose, isnan, nan
from typing import TYPE_CHECKING, Any, Literal, Self

import msgspec
import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from xain_foundation.settings.hints import hint, quoted
from xain_workloads.errors import DataError
from xain_workloads.options import require_choice, require_range
from xain_workloads.tables.checks.fixes import multiplied
from xain_workloads.tables.checks.numbers import RATIOS
from xain_workloads.tables.dataset import Dataset
from xain_workloads.tables.profile import DataProfile
from xain_workloads.tables.reading.json_forms import (
    NotNegative,
    Number,
    Positive,
    read,
    twice,
    written,
)
from xain_workloads.tables.reading.scales import Scale, SiteScales, is_constant, scale_of
from xain_workloads.tables.reading.statistics_json import from_json
from xain_workloads.tables.schema import ColumnType
from xain_workloads.tables.statistics import (
    CategoryStatistics,
    ColumnStatistics,
    NumberStatistics,
    Statistics,
    describe,
    merge,
)
from xain_workloads.tables.table import Table

if TYPE_CHECKING:
    from sklearn.compose import ColumnTransformer

KEY = "preprocessing"  # in the metadata of a model
COLUMNS_KEY = "columns"  # in the metadata of a model without preprocessing
SCALINGS = ("standard", "robust", "site", "none")
# Chosen on sixteen real tables, see docs/decisions/0041: unspoilt none is worse by it, some that
# diverged converge, and one wrong cell or one site with another unit changes least with it.
CLIP = 5.0  # spreads
# Among real targets values beyond 5 spreads matter to the model, and beyond 10 none did.
TARGET_LIMITS = 2.0  # times clip
MAX_PREPROCESSING_BYTES = 1 << 20  # it travels to every participant


@dataclass(frozen=True, slots=True)
class PreprocessingOptions:
    """Options of [workload.preprocessing].

    scaling: "standard" subtracts the mean of a number column and divides by its standard
        deviation, "robust" takes the median and the distance of the quartiles, "site" does as
        "standard" by the statistics of each site alone, "none" leaves numbers as they are; ""
        chooses what the workload needs.
    missing: "median" or "mean", which replaces a missing number, or "keep", which leaves it NaN;
        "" chooses what the workload needs.
    indicate_missing: add a column of zeros and ones for each number column with missing values.
    clip: largest size of a scaled number; a larger one counts as it. A row whose target is further
        than TARGET_LIMITS times as many spreads from the centre is not trained on. 0: no limits;
        None chooses what the workload needs, in most cases CLIP.
    Raises ValueError that names the field.
    """

    scaling: str = ""
    missing: str = ""
    indicate_missing: bool = False
    clip: float | None = None

    def __post_init__(self) -> None:
        require_choice("scaling", self.scaling, ("", *SCALINGS))
        require_choice("missing", self.missing, ("", "median", "mean", "keep"))
        if self.clip is not None:
            require_range("clip", self.clip, at_least=0)


@dataclass(frozen=True, slots=True)
class NumberColumn:
    """A column of numbers. fill: replaces a missing value, before scaling; NaN keeps it missing.

    has_indicator: whether a column of zeros and ones tells where values are missing.
    unknown: share of the rows of all sites that had no value, to three digits.
    """

    name: str
    fill: float
    scale: Scale
    has_indicator: bool = False
    unknown: float = 0.0


@dataclass(frozen=True, slots=True)
class CategoryColumn:
    """A column of categories. A missing or unknown category is all zeros.

    unknown: share of the rows of all sites that had none of the categories, to three digits.
    """

    name: str
    categories: tuple[str, ...]
    unknown: float = 0.0


# --- as JSON in the metadata of a model; optional keys came later ---


class _Numbers(Struct, omit_defaults=True, kw_only=True, tag_field="type", tag="number"):
    name: str
    fill: Number | None
    center: Number
    scale: Positive
    indicate_missing: bool
    unknown: Number | None = None


class _Categories(Struct, omit_defaults=True, kw_only=True, tag_field="type", tag="category"):
    name: str
    categories: tuple[str, ...]
    unknown: Number | None = None


class _Preprocessing(Struct, omit_defaults=True, kw_only=True):
    version: Literal[1]
    columns: tuple[_Numbers | _Categories, ...]
    target: Scale | None = None
    location: Scale | None = None
    clip: NotNegative | None = None
    limit: NotNegative | None = None
    per_site: bool = False


@dataclass(frozen=True, slots=True)
class Preprocessing:
    """The steps that turn a Table into the Dataset that a model was made for.

    columns: in the order of the session's schema, which is that of to_sklearn()'s input.
    target: scale of a target of numbers, on which linear models and networks train; their
        predictions are in the target's own unit. None for classification, and without scaling.
    clip: largest size of a scaled number; 0 for no limit.
    location: where the targets of numbers of all sites lie, for any scaling. None for
        classification, and of models of earlier versions.
    limit: scales of `location` beyond which a target is not trained on; 0 for none.
    is_per_site: each site scales by its own statistics; see at_site().
    """

    columns: tuple[NumberColumn | CategoryColumn, ...]
    target: Scale | None = None
    clip: float = 0.0
    location: Scale | None = None
    limit: float = 0.0
    is_per_site: bool = False

    @property
    def numbers(self) -> tuple[NumberColumn, ...]:
        """Columns of numbers."""
        return tuple(column for column in self.columns if isinstance(column, NumberColumn))

    @property
    def categories(self) -> tuple[CategoryColumn, ...]:
        """Columns of categories, those without any known category among them."""
        return tuple(column for column in self.columns if isinstance(column, CategoryColumn))

    @property
    def types(self) -> dict[str, ColumnType]:
        """Types of the columns, by name."""
        return {
            column.name: "category" if isinstance(column, CategoryColumn) else "number"
            for column in self.columns
        }

    @property
    def feature_names(self) -> tuple[str, ...]:
        """Names of the prepared features, in order."""
        return (
            *(column.name for column in self.numbers),
            *(f"{column.name} is missing" for column in self.numbers if column.has_indicator),
            *(f"{column.name}={name}" for column in self.categories for name in column.categories),
        )

    @property
    def features_of_columns(self) -> dict[str, tuple[int, ...]]:
        """Positions of the prepared features that come of each column, by its name."""
        found = {column.name: [i] for i, column in enumerate(self.numbers)}
        at = len(self.numbers)
        for column in self.numbers:
            if column.has_indicator:
                found[column.name].append(at)
                at += 1
        for category in self.categories:
            found[category.name] = list(range(at, at + len(category.categories)))
            at += len(category.categories)
        return {column.name: tuple(found[column.name]) for column in self.columns}

    @property
    def num_features(self) -> int:
        """Number of prepared features."""
        num_indicators = sum(column.has_indicator for column in self.numbers)
        num_categories = sum(len(column.categories) for column in self.categories)
        return len(self.numbers) + num_indicators + num_categories

    def without_shares(self, names: Set[str]) -> Self:
        """The preprocessing that does not tell the share of unknown values of these columns."""
        columns = tuple(
            replace(column, unknown=0.0) if column.name in names else column
            for column in self.columns
        )
        return replace(self, columns=columns)

    def apply(self, table: Table, *, fill_absent: bool = False) -> Dataset:
        """Prepare the rows of a table. Columns are matched by name.

        fill_absent: a column that the table does not have counts as missing in all of its rows,
            which the schema of a session may allow; else it is an error.
        Raises DataError that names a column that is missing or of another type.
        """
        features = np.zeros((table.num_samples, self.num_features))
        found = {
            column.name: _values(table, column, fill_absent=fill_absent) for column in self.columns
        }
        for i, number in enumerate(self.numbers):
            values = found[number.name]
            known = np.where(np.isnan(values), number.fill, values)
            features[:, i] = (known - number.scale.center) / number.scale.scale
        if self.clip:
            scaled = features[:, : len(self.numbers)]
            np.clip(scaled, -self.clip, self.clip, out=scaled)
        at = len(self.numbers)
        for number in self.numbers:
            if number.has_indicator:
                features[:, at] = np.isnan(found[number.name])
                at += 1
        for category in self.categories:
            values = found[category.name]
            position = {name: at + i for i, name in enumerate(category.categories)}
            columns = np.array([position.get(value, -1) for value in values.tolist()], np.intp)
            rows = np.flatnonzero(columns >= 0)
            features[rows, columns[rows]] = 1.0
            at += len(category.categories)
        return Dataset(features, table.target, self.feature_names, table.groups)

    def to_sklearn(self) -> "ColumnTransformer":
        """The preprocessing as a fitted ColumnTransformer of scikit-learn's own transformers.

        Its input has the columns in the order of `columns`: a pandas.DataFrame, or an array of
        objects with NaN for missing numbers and None or NaN for missing categories.
        """
        # Imported here, because fit() and apply() run without scikit-learn.
        from sklearn.compose import ColumnTransformer
        from sklearn.impute import MissingIndicator, SimpleImputer
        from sklearn.pipeline import Pipeline
        from sklearn.preprocessing import MinMaxScaler, OneHotEncoder, StandardScaler

        position = {column.name: i for i, column in enumerate(self.columns)}
        indicated = [column for column in self.numbers if column.has_indicator]
        encoded = [column for column in self.categories if column.categories]
        steps = [("impute", SimpleImputer(keep_empty_features=True)), ("scale", StandardScaler())]
        if self.clip:
            bounds = (-self.clip, self.clip)
            steps.append(("clip", MinMaxScaler(feature_range=bounds, clip=True)))
        encoder = OneHotEncoder(
            categories=[np.array(column.categories, dtype=object) for column in encoded],
            handle_unknown="ignore",
            sparse_output=False,
        )
        parts = [
            ("numbers", Pipeline(steps), [position[column.name] for column in self.numbers]),
            (
                "missing",
                MissingIndicator(features="all"),
                [position[column.name] for column in indicated],
            ),
            ("categories", encoder, [position[column.name] for column in encoded]),
        ]
        transformer = ColumnTransformer([part for part in parts if part[2]], sparse_threshold=0)
        # fit() on one row sets all other attributes of the transformers; then the learnt ones are
        # replaced.
        row = np.empty((1, len(self.columns)), dtype=object)
        for i, column in enumerate(self.columns):
            row[0, i] = 0.0 if isinstance(column, NumberColumn) else "".join(column.categories[:1])
        transformer.fit(row)
        if self.numbers:
            fitted = transformer.named_transformers_["numbers"].named_steps
            imputer, scaler = fitted["impute"], fitted["scale"]
            scales = np.array([column.scale.scale for column in self.numbers])
            imputer.statistics_ = np.array([column.fill for column in self.numbers])
            scaler.mean_ = np.array([column.scale.center for column in self.numbers])
            scaler.scale_, scaler.var_ = scales, np.square(scales)
            if self.clip:  # which changes nothing but what lies beyond its bounds
                fitted["clip"].scale_, fitted["clip"].min_ = np.ones_like(scales), 0 * scales
        return transformer

    def to_json(self) -> str:
        """JSON text; the same preprocessing gives the same text."""
        return written(self._form())

    def to_readable_json(self) -> str:
        """JSON text with a line for each value, for people."""
        return msgspec.json.format(self.to_json(), indent=2) + "\n"

    def _form(self) -> _Preprocessing:
        """The form that to_json() encodes."""
        return _Preprocessing(
            version=1,
            columns=tuple(map(_form_of_column, self.columns)),
            target=self.target,
            location=self.location,
            clip=self.clip or None,
            limit=self.limit or None,
            per_site=self.is_per_site,
        )

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read the preprocessing of a model. Raises DataError that names what is wrong.

        The text comes from the network: every value is checked.
        """
        if len(text) > MAX_PREPROCESSING_BYTES:
            raise DataError(f"the preprocessing takes more than {MAX_PREPROCESSING_BYTES} bytes")
        form = read(text, _Preprocessing, "the model's preprocessing", version=1)
        columns = tuple(map(_column_of_form, form.columns))
        if len({column.name for column in columns}) < len(columns):
            name = twice(columns)
            raise DataError(f"the model's preprocessing has column {name!r} twice")
        clip, limit = form.clip or 0.0, form.limit or 0.0
        return cls(columns, form.target, clip, form.location, limit, form.per_site)


def preprocessing_of(metadata: Mapping[str, str]) -> Preprocessing | None:
    """The preprocessing of a model; None if the model takes rows as they are. Raises DataError."""
    return Preprocessing.from_json(metadata[KEY]) if metadata.get(KEY) else None


def target_scale(metadata: Mapping[str, str]) -> Scale:
    """Scale of the target that a model was trained on. Raises DataError."""
    preprocessing = preprocessing_of(metadata)
    return (preprocessing.target if preprocessing else None) or Scale()


def target_center(metadata: Mapping[str, str]) -> float:
    """The mean of the target over all sites, or their median if one value or one site is far from
    the others; 0 for classification and without preprocessing. Raises DataError."""
    preprocessing = preprocessing_of(metadata)
    if preprocessing is None:
        return 0.0
    return (preprocessing.location or preprocessing.target or Scale()).center


def at_site(metadata: Mapping[str, str], table: Table) -> Mapping[str, str]:
    """The metadata of a model as they are for one site: with scaling = "site" numbers are scaled by
    the statistics of this table, which has at least MIN_KNOWN numbers of a column; else unchanged.

    Raises DataError if a number of the table is too large.
    """
    preprocessing = preprocessing_of(metadata)
    if preprocessing is None or not preprocessing.is_per_site:
        return metadata
    numbers = {
        column.name: table.values[column.name]
        for column in preprocessing.numbers
        if column.name in table.values and table.values[column.name].dtype.kind == "f"
    }
    own = describe(numbers, table.target).columns
    columns = tuple(
        _scaled_by(column, own[column.name])
        if isinstance(column, NumberColumn) and column.name in own
        else column
        for column in preprocessing.columns
    )
    whole = replace(preprocessing, columns=columns, is_per_site=False)
    return {**metadata, KEY: whole.to_json()}


def _scaled_by(column: NumberColumn, own: ColumnStatistics) -> NumberColumn:
    """The column with the scale of one site; as it is if the site tells too little of it."""
    assert isinstance(own, NumberStatistics)
    if not own.moments.count:
        return column
    scale = scale_of(own, SiteScales([own]), "standard")
    if is_constant(own.moments):
        scale = replace(scale, scale=column.scale.scale)
    return replace(column, scale=scale, fill=nan if isnan(column.fill) else own.quantile(0.5))


def prepare(
    metadata: Mapping[str, str],
    data: Table | Dataset,
    *,
    fill_absent: bool = False,
    to_train: bool = False,
) -> Dataset:
    """The rows of a site as the model of these metadata takes them. fill_absent: as in apply().
    to_train: without rows whose target lies beyond the limit of the preprocessing.

    Raises DataError if the data do not fit the model, if they need preprocessing and the model has
    none, or if the targets of all rows to train on lie beyond the limit.
    """
    preprocessing = preprocessing_of(metadata)
    if isinstance(data, Dataset):
        if preprocessing is None:
            return data
        data = Table.from_dataset(data)
    if preprocessing is None:
        names = _column_names(metadata)
        table = data.arranged(names) if names else data
        for column in table.columns:
            # Unlike that of to_dataset(), this message quotes no value: it may travel.
            if column.type == "category":
                raise DataError(
                    f"column {column.name!r} is a category, and the model has no preprocessing,"
                    " because a participant sent no statistics; leave the column out, "
                    + hint("xain-participant", f"data.drop = [{quoted(column.name)}]")
                    + ", or see the coordinator's warning no_preprocessing"
                )
        return table.to_dataset()
    prepared = preprocessing.apply(data, fill_absent=fill_absent)
    location, limit = preprocessing.location, preprocessing.limit
    if not to_train or location is None or not limit or prepared.task != "regression":
        return prepared
    distances = np.abs(np.asarray(prepared.target, np.float64) - location.center)
    rows = np.flatnonzero(distances <= limit * location.scale)
    if len(rows) == data.num_samples:
        return prepared
    if not len(rows):
        raise DataError(_another_unit(data, location.center))
    return prepared.subset(rows)


def _another_unit(data: Table, center: float) -> str:
    """The message for a site whose targets are all far from the others, its own remedy first.

    Unlike messages of files it quotes no value: it may travel.
    """
    name = data.target_name
    own = float(np.median(np.asarray(data.target, np.float64)))
    ratio = center / own if own else 0.0
    known = (each for one in RATIOS for each in (one, 1 / one))
    factor = next((one for one in known if isclose(one, ratio, rel_tol=0.5)), None)
    mend = (
        multiplied(name, factor)
        if factor
        else hint("xain-participant", f"data.factors.{quoted(name)} = VALUE")
    )
    return (
        f"all values of the target {name!r} are far from those of the other sites, probably in"
        f" another unit; {mend}. If they are right, the coordinator can take them as they are: "
        + hint("xain-coordinator", "workload.preprocessing.clip = 0")
    )


def features_of_columns(metadata: Mapping[str, str]) -> dict[str, tuple[int, ...]]:
    """Positions of the features that a model has of each column, by the column's name; empty if it
    knows no names. Raises DataError."""
    preprocessing = preprocessing_of(metadata)
    if preprocessing is not None:
        return preprocessing.features_of_columns
    return {name: (i,) for i, name in enumerate(_column_names(metadata))}


def _column_names(metadata: Mapping[str, str]) -> list[str]:
    """Names of the columns that a model without preprocessing takes, in order.

    [] if its metadata have none. Raises DataError.
    """
    text = metadata.get(COLUMNS_KEY) or "{}"
    return read(text, dict[str, list[str]], "the model's columns").get("names", [])


def fit(profiles: Sequence[DataProfile], options: PreprocessingOptions) -> Preprocessing:
    """Fit the preprocessing of all sites from their data profiles, each with rows and statistics.

    The columns are those of the first profile, in its order. A column that another site does not
    have is missing in all of its rows.
    Raises DataError if the sites' columns do not fit together.
    """
    names = [column.name for column in profiles[0].columns]
    # In an order of their own, so that the result does not depend on the order of joining.
    texts = sorted(profile.statistics for profile in profiles)
    sites: dict[str | None, SiteScales] = defaultdict(SiteScales)
    merged = merge(_noting(map(from_json, texts), sites), names)
    columns: list[NumberColumn | CategoryColumn] = []
    for name, column in merged.columns.items():
        rows = max(merged.rows, 1)
        if isinstance(column, CategoryStatistics):
            unknown = round((column.missing + column.infrequent) / rows, 3)
            columns.append(CategoryColumn(name, tuple(sorted(column.counts)), unknown))
            continue
        scale = scale_of(column, sites[name], options.scaling)
        match options.missing:
            case "keep":
                fill = nan
            case "mean":
                fill = scale_of(column, sites[name], "standard").center
            case _:
                fill = column.quantile(0.5)
        has_indicator = options.indicate_missing and column.missing > 0
        unknown = round(column.missing / rows, 3)
        columns.append(NumberColumn(name, fill, scale, has_indicator, unknown))
    location = None
    if merged.target is not None and merged.target.count:
        known = NumberStatistics(0, merged.target, merged.target_buckets)
        location = scale_of(known, sites[None], "standard")
    is_scaled = options.scaling != "none"
    clip = CLIP if options.clip is None else options.clip
    fitted = Preprocessing(
        tuple(columns),
        location if is_scaled else None,
        clip if is_scaled else 0.0,
        location,
        TARGET_LIMITS * clip if location else 0.0,
        options.scaling == "site",
    )
    if fitted.num_features == 0:
        raise DataError("no column is left: there is no number column, and no frequent category")
    if len(fitted.to_json()) > MAX_PREPROCESSING_BYTES:
        raise DataError(
            f"the preprocessing of {len(columns)} columns and {fitted.num_features} features takes "
            f"more than {MAX_PREPROCESSING_BYTES} bytes; drop columns, or raise min_category_count"
        )
    return fitted


def _noting(
    parts: Iterable[Statistics], sites: Mapping[str | None, SiteScales]
) -> Iterator[Statistics]:
    """Yield the same statistics, and note columns of numbers in `sites`, the target under None."""
    for part in parts:
        for name, column in part.columns.items():
            if isinstance(column, NumberStatistics):
                sites[name].note(column)
        if part.target is not None:
            sites[None].note(NumberStatistics(0, part.target, part.target_buckets))
        yield part


def _values(
    table: Table, column: NumberColumn | CategoryColumn, *, fill_absent: bool
) -> NDArray[Any]:
    """(n,) values of a column, or all missing if fill_absent and it is absent. Raises DataError."""
    is_number = isinstance(column, NumberColumn)
    values = table.values.get(column.name)
    if values is None:
        if not fill_absent:
            raise DataError(f"the model needs column {column.name!r}, which the data do not have")
        return np.full(table.num_samples, np.nan if is_number else None)
    if (values.dtype.kind == "f") != is_number:
        if all(value is None or value != value for value in values):  # of no type here
            return np.full(table.num_samples, np.nan if is_number else None)
        found, expected = ("categories", "numbers") if is_number else ("numbers", "categories")
        raise DataError(f"column {column.name!r} holds {found}; the model takes {expected}")
    return values


def _form_of_column(column: NumberColumn | CategoryColumn) -> _Numbers | _Categories:
    """Convert a column to its form for JSON; later keys are left out at their defaults."""
    # Keys that came later are left out where they say nothing new.
    unknown = column.unknown or None
    if isinstance(column, CategoryColumn):
        return _Categories(name=column.name, categories=column.categories, unknown=unknown)
    return _Numbers(
        name=column.name,
        fill=None if isnan(column.fill) else column.fill,
        center=column.scale.center,
        scale=column.scale.scale,
        indicate_missing=column.has_indicator,
        unknown=unknown,
    )


def _column_of_form(form: _Numbers | _Categories) -> NumberColumn | CategoryColumn:
    """Convert a decoded form to a column. Raises DataError for a category that is there twice."""
    unknown = form.unknown or 0.0
    if isinstance(form, _Categories):
        if len(set(form.categories)) < len(form.categories):
            raise DataError(f"column {form.name!r} has a category twice")
        return CategoryColumn(form.name, form.categories, unknown)
    fill = nan if form.fill is None else form.fill
    scale = Scale(form.center, form.scale)
    return NumberColumn(form.name, fill, scale, form.indicate_missing, unknown)
