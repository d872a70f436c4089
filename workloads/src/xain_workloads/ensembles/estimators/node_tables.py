"""Nodes of many decision trees as a few arrays, and their checks.

scikit-learn follows the nodes of a tree in native code without looking where they lead. So a child
must be a node of its tree that comes later, which rules out cycles, and a split must be of a column
that the tree has. The checks are of all trees at once, and need numpy alone.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xain_workloads.errors import InvalidContent

Columns = Mapping[str, NDArray[Any]]


@dataclass(frozen=True, slots=True)
class Kind:
    """Names of the fields of nodes. leaf: the field that marks a leaf, or -1 in `left` if ""."""

    left: str
    right: str
    feature: str
    leaf: str = ""


TREE = Kind("left_child", "right_child", "feature")
PREDICTOR = Kind("left", "right", "feature_idx", "is_leaf")  # of histogram boosting
KINDS = (TREE, PREDICTOR)

# Columns with a number for each tree; all others have one for each node, but VALUES.
COUNT = "num_nodes"
NUM_FEATURES = "num_features"
NUM_CLASSES = "num_classes"
MAX_DEPTH = "max_depth"
VALUES = "values"  # float64, num_classes of each node

_MAX_NUMBER = np.iinfo(np.int64).max  # a larger uint64 would become a negative number


def check(nodes: Columns, counts: NDArray[Any], num_features: NDArray[Any], kind: Kind) -> None:
    """Raise InvalidContent unless every node leads on within its tree, to columns that there are.

    counts, num_features: of each tree.
    """
    fields = [kind.left, kind.right, kind.feature, *([kind.leaf] if kind.leaf else [])]
    for name in fields:
        if name not in nodes or nodes[name].dtype.kind not in "biu":
            raise InvalidContent(f"the nodes of trees have no whole numbers {name!r}")
        if (nodes[name] > _MAX_NUMBER).any():
            raise InvalidContent(f"the nodes of trees have too large numbers {name!r}")
    # Its numbers become uint8 in a node: 256 would be a leaf here and none there.
    if kind.leaf and ((nodes[kind.leaf] < 0) | (nodes[kind.leaf] > 1)).any():
        raise InvalidContent(f"the nodes of trees have other numbers than 0 and 1 in {kind.leaf!r}")
    for numbers in (counts, num_features):
        if numbers.ndim != 1 or numbers.dtype.kind not in "iu" or len(numbers) != len(counts):
            raise InvalidContent("a table of trees does not tell the nodes and columns of each")
        if (numbers > _MAX_NUMBER).any():
            raise InvalidContent("a table of trees has too large numbers of nodes or columns")
    # Before their sum is made, so that it cannot wrap around.
    total = len(nodes[kind.left])
    if ((counts < 1) | (counts > total)).any():
        raise InvalidContent("a tree has no nodes, or more than there are")
    counts = counts.astype(np.int64)
    if any(column.shape != (total,) for column in nodes.values()) or counts.sum() != total:
        raise InvalidContent("the trees have other numbers of nodes than are announced")
    here = np.arange(total) - np.repeat(np.cumsum(counts) - counts, counts)
    end = np.repeat(counts, counts)
    left, right, column = (nodes[name].astype(np.int64) for name in fields[:3])
    is_leaf = nodes[kind.leaf] != 0 if kind.leaf else left == -1
    for name, child in ((kind.left, left), (kind.right, right)):
        if not (is_leaf | ((child > here) & (child < end))).all():
            raise InvalidContent(f"a tree has a node whose {name} is none of the tree's")
    widths = np.repeat(num_features.astype(np.int64), counts)
    if not (is_leaf | ((column >= 0) & (column < widths))).all():
        raise InvalidContent("a tree has a node that splits none of the columns")


def columns_of(nodes: NDArray[Any]) -> Columns:
    """The fields of a structured array."""
    return {name: nodes[name] for name in nodes.dtype.names or ()}


# --- trees ---


def table_of(trees: Sequence[Any]) -> Columns:
    """Join the nodes of fitted Trees of scikit-learn, each with one output, to one table."""
    states = [tree.__getstate__() for tree in trees]
    table = _nodes_of([state["nodes"] for state in states])
    values = [state["values"].ravel() for state in states]
    return {
        COUNT: _narrow(np.array([len(state["nodes"]) for state in states])),
        NUM_FEATURES: _narrow(np.array([tree.n_features for tree in trees])),
        NUM_CLASSES: _narrow(np.array([tree.max_n_classes for tree in trees])),
        MAX_DEPTH: _narrow(np.array([tree.max_depth for tree in trees])),
        VALUES: np.concatenate(values),
        **table,
    }


def check_table(table: Columns) -> None:
    """Raise InvalidContent unless Trees can be made of a table."""
    own = {name: column for name, column in table.items() if name in _OF_TREES}
    if own.keys() != set(_OF_TREES):
        raise InvalidContent("a table of trees lacks columns")
    counts, classes, values = own[COUNT], own[NUM_CLASSES], own[VALUES]
    check(_without(table, _OF_TREES), counts, own[NUM_FEATURES], TREE)
    for column in (classes, own[MAX_DEPTH]):
        if column.shape != counts.shape or column.dtype.kind not in "iu":
            raise InvalidContent("a table of trees has columns of other sizes")
    if values.dtype != np.float64 or values.ndim != 1:
        raise InvalidContent("the values of trees are no float64 numbers")
    if ((classes < 1) | (classes > len(values))).any() or (own[NUM_FEATURES] < 1).any():
        raise InvalidContent("a tree has no values, or no columns")
    if int(counts.astype(np.int64) @ classes.astype(np.int64)) != len(values):
        raise InvalidContent("the trees have other numbers of values than are announced")


def trees_of(table: Columns) -> list[Any]:
    """Make the Trees of a table that has been checked. Raises ValueError if this version of
    scikit-learn knows other nodes."""
    from sklearn.tree._tree import NODE_DTYPE, Tree

    nodes = _structured(_without(table, _OF_TREES), NODE_DTYPE)
    made, at, value_at = [], 0, 0
    heads = (table[name].tolist() for name in (COUNT, NUM_FEATURES, NUM_CLASSES, MAX_DEPTH))
    for count, num_features, num_classes, max_depth in zip(*heads, strict=True):
        tree = Tree(num_features, np.array([num_classes], np.intp), 1)
        values = table[VALUES][value_at : value_at + count * num_classes]
        state = {
            "max_depth": max_depth,
            "node_count": count,
            "nodes": nodes[at : at + count],
            "values": values.reshape(count, 1, num_classes),
        }
        tree.__setstate__(state)
        made.append(tree)
        at += count
        value_at += count * num_classes
    return made


# --- trees of histogram boosting ---


def predictor_table_of(predictors: Sequence[Any]) -> Columns:
    """Join the nodes of TreePredictors, which split no categories, to one table."""
    nodes = [predictor.nodes for predictor in predictors]
    return {
        COUNT: _narrow(np.array([len(one) for one in nodes])),
        NUM_FEATURES: _narrow(np.array([_width(one) for one in nodes])),
        **_nodes_of(nodes),
    }


def check_predictor_table(table: Columns) -> None:
    """Raise InvalidContent unless TreePredictors can be made of a table."""
    if not {COUNT, NUM_FEATURES} <= table.keys():
        raise InvalidContent("a table of trees lacks columns")
    check(_without(table, _OF_PREDICTORS), table[COUNT], table[NUM_FEATURES], PREDICTOR)
    if table.get("is_categorical", np.zeros(0)).any():
        raise InvalidContent("a tree splits categories, and columns are numbers")


def predictors_of(table: Columns) -> list[Any]:
    """Make the TreePredictors of a table that has been checked. Raises ValueError as trees_of()."""
    from sklearn.ensemble._hist_gradient_boosting.common import PREDICTOR_RECORD_DTYPE
    from sklearn.ensemble._hist_gradient_boosting.predictor import TreePredictor

    nodes = _structured(_without(table, _OF_PREDICTORS), PREDICTOR_RECORD_DTYPE)
    ends = np.cumsum(table[COUNT].astype(np.int64))[:-1]
    none = np.zeros((0, 8), np.uint32)
    return [TreePredictor(one.copy(), none, none) for one in np.split(nodes, ends)]


_OF_TREES = (COUNT, NUM_FEATURES, NUM_CLASSES, MAX_DEPTH, VALUES)
_OF_PREDICTORS = (COUNT, NUM_FEATURES)


def _without(table: Columns, names: Sequence[str]) -> Columns:
    return {name: column for name, column in table.items() if name not in names}


def _width(nodes: NDArray[Any]) -> int:
    """Columns that the nodes of a TreePredictor split, up to the last one."""
    splits = nodes["feature_idx"][nodes["is_leaf"] == 0]
    return int(splits.max()) + 1 if len(splits) else 1


def _nodes_of(nodes: Sequence[NDArray[Any]]) -> Columns:
    whole = np.concatenate(nodes)
    return {name: _narrow(column) for name, column in columns_of(whole).items()}


def _structured(columns: Columns, dtype: np.dtype[Any]) -> NDArray[Any]:
    """Nodes of the columns. Raises ValueError for a column that the type of its field changes,
    since the numbers that were checked would be others than those that are used."""
    if columns.keys() != set(dtype.names or ()):
        raise ValueError("this version of scikit-learn has other nodes of trees")
    made = np.zeros(len(next(iter(columns.values()))), dtype)
    for name, column in columns.items():
        with np.errstate(invalid="ignore", over="ignore"):
            made[name] = column
        if not np.array_equal(made[name], column, equal_nan=column.dtype.kind == "f"):
            raise InvalidContent(f"the nodes of trees have numbers {name!r} that do not fit")
    return made


def _narrow(column: NDArray[Any]) -> NDArray[Any]:
    """The column in the smallest type of whole numbers that holds its values as they are."""
    if column.dtype.kind == "f":
        with np.errstate(invalid="ignore"):
            whole = column.astype(np.int64)
        # Minus zero is no whole number.
        if not (np.array_equal(whole, column) and not np.signbit(column[whole == 0]).any()):
            return np.ascontiguousarray(column)
        column = whole
    if column.dtype.kind not in "iu" or not len(column):
        return np.ascontiguousarray(column)
    ends = (np.min_scalar_type(column.min()), np.min_scalar_type(column.max()))
    return column.astype(np.result_type(*ends))
