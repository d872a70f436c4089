"""Histograms of gradients, which participants send in the mode "histogram" of boosted trees.

The values of a feature are cut into bins, at the same edges for all participants. In each round a
participant sends the sums of gradients and hessians of its rows, for each node that may be split
and each bin. Sums over all participants are those of all rows, so the trees that are grown from
them (see growing.py) do not depend on how rows are divided.

The metadata of a model have the edges, and an attribute of its booster tells how far it has grown.
"""

from base64 import b64decode, b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from xain_foundation.settings.hints import hint
from xain_workloads.errors import DataError, InvalidContent
from xain_workloads.tables.preprocessing import MAX_PREPROCESSING_BYTES, NumberColumn, Preprocessing
from xain_workloads.tables.profile import DataProfile
from xain_workloads.tables.reading.statistics_json import from_json
from xain_workloads.tables.statistics import NumberStatistics, merge
from xain_workloads.trees import trees
from xain_workloads.trees.boosting_options import BoostingOptions, options_of_model
from xain_workloads.trees.trees import MAX_UPDATE_BYTES, BoosterKind, Tree

Array = NDArray[np.float64]

KEY = "bins"  # in the metadata of a model
_LEVEL = "xain_level"  # attribute: levels of the iteration that is growing; absent if none is

_MAX_SUM = 1e30  # of gradients, so that the sum of all participants is finite
_BLOCK_VALUES = 1 << 21  # of features that are counted at a time
_SMALLEST_HESSIAN = 1e-16  # as in XGBoost


@dataclass(frozen=True, slots=True, eq=False)
class Bins:
    """Bins of the values of all features.

    edges: for each feature, in ascending order. A value is in bin number k if k edges are not above
        it, so that "in bins 0 to k" is "less than edge k". One more bin is for missing values.
    """

    edges: tuple[NDArray[np.float32], ...]

    @property
    def starts(self) -> NDArray[np.int64]:
        """(p + 1,) the position of each feature's first bin in a histogram, and their number."""
        sizes = [len(edges) + 2 for edges in self.edges]
        return np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)

    def positions(self, rows: Array) -> NDArray[np.int64]:
        """(n, p) values, NaN for missing ones, to (n, p) positions of their bins in a histogram."""
        found = np.empty(rows.shape, dtype=np.int64)
        values = rows.astype(np.float32)  # as XGBoost compares them
        for i, (edges, start) in enumerate(zip(self.edges, self.starts, strict=False)):
            column = values[:, i]
            codes = np.searchsorted(edges, column, side="right")
            found[:, i] = start + np.where(np.isnan(column), len(edges) + 1, codes)
        return found

    def to_text(self) -> str:
        """Encode the edges of all features as text for metadata[KEY]."""
        sizes = np.array([len(edges) for edges in self.edges], dtype="<u2")
        values = np.concatenate(self.edges).astype("<f4")
        return b64encode(sizes.tobytes() + values.tobytes()).decode()

    @classmethod
    def from_text(cls, text: str, num_features: int) -> Self:
        """Read bins from a model's metadata. Raises ValueError if the text is not that of bins of
        so many features."""
        data = b64decode(text, validate=True)
        sizes = np.frombuffer(data, "<u2", num_features).astype(np.int64)
        values = np.frombuffer(data, "<f4", offset=2 * num_features).astype(np.float32)
        if sizes.sum() != len(values):
            raise ValueError("the bins of the model have another length than they say")
        return cls(tuple(np.split(values, np.cumsum(sizes)[:-1])))


@dataclass(frozen=True, slots=True, eq=False)
class Growing:
    """State of a model that is being grown.

    iteration: finished boosting rounds. level: of the iteration that is growing; 0 if it has no
    trees. trees: those of this iteration; empty at level 0.
    open_nodes: for each tree of an iteration, the nodes that may be split.
    """

    kind: BoosterKind
    options: BoostingOptions
    bins: Bins
    iteration: int
    level: int
    trees: tuple[Tree, ...]
    open_nodes: tuple[tuple[int, ...], ...]

    @property
    def shape(self) -> tuple[int, int, int]:
        """Shape of the update of a participant: sums of gradients and of hessians, for each open
        node of each tree, for each bin of each feature."""
        num_nodes = sum(map(len, self.open_nodes))
        return 2, num_nodes, int(self.bins.starts[-1])


def growing(model: bytes, metadata: Mapping[str, str]) -> Growing:
    """Read where the growing of a model stands. Raises ValueError if it is no such model."""
    kind = BoosterKind.from_metadata(metadata)
    options = options_of_model(metadata)
    if KEY not in metadata:
        raise ValueError('the model has no bins, as one of another mode than "histogram"')
    bins = Bins.from_text(metadata[KEY], kind.num_features)
    level = int(trees.attributes_of(model).get(_LEVEL, "0"))
    iterations = trees.num_iterations(model, kind)
    if level == 0:
        roots = ((0,),) * kind.trees_per_iteration
        return Growing(kind, options, bins, iterations, 0, (), roots)
    grown = trees.last_iteration(model, kind)
    nodes = tuple(open_nodes(tree, level, options) for tree in grown)
    return Growing(kind, options, bins, iterations - 1, level, grown, nodes)


def open_nodes(tree: Tree, level: int, options: BoostingOptions) -> tuple[int, ...]:
    """The leaves of this level that have hessians enough for two children."""
    nodes = [0]
    for _ in range(level):
        lefts = [tree.left_children[node] for node in nodes]
        nodes = [child for left in lefts if left != -1 for child in (left, left + 1)]
    least = 2 * options.min_child_weight
    return tuple(node for node in nodes if tree.hessians[node] >= max(least, _SMALLEST_HESSIAN))


def attributes_for(level: int) -> dict[str, str]:
    """Attributes of a booster whose growing iteration has so many levels; 0 if none is growing."""
    return {_LEVEL: str(level)} if level else {}


# --- bins ---


def fit_bins(
    profiles: Sequence[DataProfile], preprocessing: Preprocessing | None, options: BoostingOptions
) -> Bins:
    """Bins of the prepared features of all sites, from their quantile sketches.

    A feature has at most options.max_bin bins for known values. Indicators and categories, which
    are zeros and ones, have two. Raises DataError if a site has sent no sketches, or if histograms
    would be larger than an update may be.
    """
    if preprocessing is None:
        raise DataError(
            'the mode "histogram" needs statistics of the columns, and a participant sent none (its'
            " table is too wide, or its version too old); "
            + hint("xain-coordinator", 'aggregation.options.mode = "bagging"')
        )
    names = [column.name for column in preprocessing.columns]
    # One site after the other, in an order of their own, as preprocessing.fit() merges them.
    merged = merge(map(from_json, sorted(profile.statistics for profile in profiles)), names)
    edges = []
    for column in preprocessing.numbers:
        statistics = merged.columns[column.name]
        assert isinstance(statistics, NumberStatistics), "preprocessing is fitted from the same"
        edges.append(_edges(column, statistics, options.max_bin))
    num_binary = preprocessing.num_features - len(edges)
    edges += [np.array([0.5], dtype=np.float32)] * num_binary
    if not any(map(len, edges)):
        raise DataError(
            'the mode "histogram" needs points of the distribution of a column, and no participant '
            "has rows enough to tell them; "
            + hint("xain-coordinator", 'aggregation.options.mode = "bagging"')
        )
    bins = Bins(tuple(edges))
    if len(bins.to_text()) > MAX_PREPROCESSING_BYTES:
        raise DataError(
            f"the bins of {len(edges)} features take more than {MAX_PREPROCESSING_BYTES} bytes;"
            " lower workload.options.max_bin, or drop columns"
        )
    num_classes = len({name for profile in profiles for name in profile.classes})
    num_rows = sum(profile.num_samples for profile in profiles)
    num_nodes = min(2 ** (options.max_depth - 1), num_rows) * (
        num_classes if num_classes > 2 else 1
    )
    size = num_nodes * int(bins.starts[-1]) * 16
    if size > MAX_UPDATE_BYTES:
        raise DataError(
            f"histograms of {num_nodes} nodes and {bins.starts[-1]} bins take {size} bytes; at most"
            f" {MAX_UPDATE_BYTES} are taken; lower workload.options.max_bin or max_depth, or "
            + hint("xain-coordinator", 'aggregation.options.mode = "bagging"')
        )
    return bins


def _edges(column: NumberColumn, statistics: NumberStatistics, max_bin: int) -> NDArray[np.float32]:
    """Edges at the points of the sketch and halfway between them, so that values that lie at two
    neighbouring points are told apart."""
    if not statistics.buckets:
        return np.zeros(0, dtype=np.float32)
    points = np.array([value for value, _ in statistics.buckets])
    rows = np.array([count for _, count in statistics.buckets], dtype=np.float64)
    points, inverse = np.unique(points, return_inverse=True)
    below = np.cumsum(np.bincount(inverse, rows))
    edges = np.unique(np.concatenate([points, (points[1:] + points[:-1]) / 2]))
    if len(edges) > max_bin - 1:  # those that cut off equal shares of the rows
        shares = np.linspace(0, below[-1], max_bin + 1)[1:-1]
        chosen = np.searchsorted(np.interp(edges, points, below), shares)
        edges = edges[np.unique(np.minimum(chosen, len(edges) - 1))]
    with np.errstate(over="ignore"):
        scaled = ((edges - column.scale.center) / column.scale.scale).astype(np.float32)
    return np.unique(scaled[np.isfinite(scaled)])


# --- sums ---


def sums(
    state: Growing, rows: Array, nodes: NDArray[np.int64], gradients: Array, hessians: Array
) -> Array:
    """Histograms of the rows of one participant, of the shape that the state has.

    rows: (n, p). nodes: (n, t) as leaves() finds them. gradients, hessians: (n, t) at the model
    without the iteration that is growing.
    """
    num_sums, num_nodes, num_bins = state.shape
    result = np.zeros((num_sums, num_nodes, num_bins))
    block = max(1, _BLOCK_VALUES // max(rows.shape[1], 1))
    for first in range(0, len(rows), block):
        part = slice(first, first + block)
        positions = state.bins.positions(rows[part])
        start = 0
        for tree, open_ in enumerate(state.open_nodes):
            slots = _slots(nodes[part, tree], open_)
            within = slots >= 0
            at = (positions[within] + (slots[within] * num_bins)[:, None]).ravel()
            end = start + len(open_)
            for values, histogram in zip((gradients, hessians), result, strict=True):
                weights = np.repeat(values[part, tree][within], rows.shape[1])
                counted = np.bincount(at, weights, minlength=len(open_) * num_bins)
                histogram[start:end] += counted.reshape(len(open_), num_bins)
            start = end
    return result


def _slots(nodes: NDArray[np.int64], open_: Sequence[int]) -> NDArray[np.int64]:
    """Position of each row's node among the open nodes; -1 for a row of another node."""
    position = np.full(max([*open_, int(nodes.max(initial=0))]) + 1, -1, dtype=np.int64)
    position[list(open_)] = np.arange(len(open_))
    return position[nodes]


def leaves(state: Growing, rows: Array) -> NDArray[np.int64]:
    """(n, t) the leaf of each row in each tree of the growing iteration; 0 if there is none."""
    found = np.zeros((len(rows), len(state.open_nodes)), dtype=np.int64)
    values = rows.astype(np.float32)  # as XGBoost compares them
    for i, tree in enumerate(state.trees):
        lefts, features = np.array(tree.left_children), np.array(tree.features)
        conditions = np.array(tree.conditions, dtype=np.float32)
        default_left = np.array(tree.default_left, dtype=np.bool_)
        nodes = found[:, i]
        for _ in range(state.level):
            value = values[np.arange(len(rows)), features[nodes]]
            goes_left = np.where(np.isnan(value), default_left[nodes], value < conditions[nodes])
            nodes = np.where(lefts[nodes] == -1, nodes, lefts[nodes] + 1 - goes_left)
        found[:, i] = nodes
    return found


def values_of(state: Growing, nodes: NDArray[np.int64]) -> Array:
    """(n, t) the values of leaves, which the growing iteration adds to the margins of rows."""
    values = np.zeros(nodes.shape)
    for i, tree in enumerate(state.trees):
        values[:, i] = np.array(tree.conditions)[nodes[:, i]]
    return values


def predictions(kind: BoosterKind, margins: Array) -> Array:
    """(n, t) margins to predictions as XGBoost has them: (n,) numbers or probabilities of the
    second class, or (n, t) probabilities."""
    if kind.objective == "reg:squarederror":
        return margins[:, 0]
    if kind.objective == "binary:logistic":
        with np.errstate(over="ignore"):
            probabilities: Array = 1 / (1 + np.exp(-margins[:, 0]))
        return probabilities
    exponentials = np.exp(margins - margins.max(axis=1, keepdims=True))
    shares: Array = exponentials / exponentials.sum(axis=1, keepdims=True)
    return shares


def gradients_of(kind: BoosterKind, margins: Array, target: NDArray[Any]) -> tuple[Array, Array]:
    """First and second derivatives of the loss, as XGBoost has them, each (n, t).

    margins: (n, t). target: (n,) numbers, or positions of classes.
    """
    predicted = predictions(kind, margins).reshape(margins.shape)
    if kind.objective == "reg:squarederror":
        return predicted - target[:, None], np.ones_like(margins)
    hessians = predicted * (1 - predicted)
    if kind.objective == "binary:logistic":
        wanted = target[:, None]
    else:
        wanted = target[:, None] == np.arange(margins.shape[1])
        hessians *= 2
    return predicted - wanted, np.maximum(hessians, _SMALLEST_HESSIAN)


def parse_sums(data: bytes, state: Growing) -> Array:
    """Read the histograms that a participant sent, of the shape that the state has. Raises
    InvalidContent if they are of another size, or have a number that is not possible."""
    num_sums, num_nodes, num_bins = state.shape
    size = num_sums * num_nodes * num_bins * 8
    if len(data) != size:
        raise InvalidContent(
            f"the update has {len(data)} bytes; histograms of {num_nodes} nodes and {num_bins} bins"
            f" have {size}"
        )
    values = np.frombuffer(data, "<f8").reshape(state.shape)
    if not np.isfinite(values).all():
        raise InvalidContent("the histograms have a value that is not finite")
    if (values[1] < 0).any():
        raise InvalidContent("the histograms have a negative sum of hessians")
    if max(-values.min(initial=0), values.max(initial=0)) > _MAX_SUM:
        raise InvalidContent(f"the histograms have a sum above {_MAX_SUM:g}")
    return values
