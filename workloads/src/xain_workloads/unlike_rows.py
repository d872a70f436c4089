"""Made-up rows of no class, from which estimators learn to tell rows that are unlike their site's.

A made-up row is a row of the site with a random share of its columns replaced. Replacements are
points of the column's distribution over all sites. So the values of a made-up row are as plausible
as those of other sites, and the estimators have to learn how the columns of their site go together.

The metadata of a model have the points, which the coordinator takes from the statistics of all
sites.
Source: Diao, Li and He 2023, "Towards addressing label skews in one-shot federated learning"
(FedOV), whose outliers are distorted images; here for tables.
"""

from base64 import b64decode, b64encode
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xain_workloads.errors import DataError
from xain_workloads.preprocessing import Preprocessing, preprocessing_of
from xain_workloads.profile import DataProfile
from xain_workloads.statistics import CategoryStatistics, NumberStatistics, from_json, merge

Array = NDArray[np.float64]

KEY = "points"  # in the metadata of a model
MAX_POINTS = 32  # of a column
_MAX_BYTES = 512 << 10  # of all points; a wide table has fewer of each column


def fit_points(profiles: Sequence[DataProfile], preprocessing: Preprocessing) -> str:
    """Text for metadata[KEY]: equally likely points of each prepared feature, over all sites.

    profiles: with statistics. Raises DataError if there are too many features.
    """
    num_points = min(MAX_POINTS, _MAX_BYTES // (4 * preprocessing.num_features))
    if num_points < 2:
        raise DataError(
            f"vote = 'open' needs points of the distribution of {preprocessing.num_features} "
            "features, which are too many; drop columns, or raise min_category_count"
        )
    names = [column.name for column in preprocessing.columns]
    # One site after the other, in an order of their own, as preprocessing.fit() merges them.
    merged = merge(map(from_json, sorted(profile.statistics for profile in profiles)), names)
    shares = (np.arange(num_points) + 0.5) / num_points
    found = []
    for number in preprocessing.numbers:
        statistics = merged.columns[number.name]
        assert isinstance(statistics, NumberStatistics), "preprocessing is fitted from the same"
        points = (statistics.quantiles(shares) - number.scale.center) / number.scale.scale
        limit = preprocessing.clip or np.inf
        found.append(np.clip(points, -limit, limit))
    for number in preprocessing.numbers:
        if number.has_indicator:
            statistics = merged.columns[number.name]
            share = statistics.missing / max(statistics.num_rows, 1)
            found.append(_zeros_and_ones(share, num_points))
    for category in preprocessing.categories:
        counts = merged.columns[category.name]
        assert isinstance(counts, CategoryStatistics), "preprocessing is fitted from the same"
        for name in category.categories:
            share = counts.counts[name] / max(counts.num_rows, 1)
            found.append(_zeros_and_ones(share, num_points))
    largest = np.finfo("<f4").max
    points = np.clip(np.column_stack(found), -largest, largest)
    return b64encode(points.astype("<f4").tobytes()).decode()


def points_of(metadata: Mapping[str, str], num_features: int) -> Array:
    """(m, num_features) points of the model, equally likely.

    Raises DataError if the model has none, and ValueError if they are of other features.
    """
    if KEY not in metadata and preprocessing_of(metadata) is not None:
        raise DataError(
            'this model has no points of the columns, which vote = "open" needs: it was made by an '
            "earlier version; begin a new session"
        )
    if KEY not in metadata:
        raise DataError('vote = "open" needs statistics of all sites, and one has sent none')
    points = np.frombuffer(b64decode(metadata[KEY], validate=True), "<f4")
    return points.reshape(-1, num_features).astype(np.float64)


def with_unlike_rows(
    rows: Array, target: NDArray[Any], unlike: int, points: Array, drawn: np.random.Generator
) -> tuple[Array, NDArray[Any]]:
    """The rows and as many made-up ones of the class `unlike`.

    rows: (n, p). target: (n,) positions of classes. points: (m, p); see points_of().
    """
    made = rows[drawn.integers(0, len(rows), len(rows))]
    chosen = drawn.integers(0, len(points), made.shape)
    other = np.take_along_axis(points, chosen, axis=0)
    is_replaced = drawn.random(made.shape) < drawn.random((len(made), 1))
    made = np.where(is_replaced, other, made)
    return np.vstack([rows, made]), np.concatenate([target, np.full(len(made), unlike)])


def _zeros_and_ones(share: float, num_points: int) -> Array:
    """Points of a feature that is 1 in a share of the rows; both values occur."""
    num_ones = min(max(round(share * num_points), 1), num_points - 1)
    return (np.arange(num_points) < num_ones).astype(np.float64)
