"""Growth of boosted trees by one level, from the histograms of all participants.

Source of the formulas: Chen and Guestrin 2016, "XGBoost: A Scalable Tree Boosting System", sections
2.2 and 3.4, and XGBoost's treatment of reg_alpha.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import copysign

import numpy as np
from numpy.typing import NDArray

from xain_workloads.trees import trees
from xain_workloads.trees.boosting_options import BoostingOptions
from xain_workloads.trees.histograms import Bins, Growing, attributes_for, growing, open_nodes
from xain_workloads.trees.trees import Tree

Array = NDArray[np.float64]

_LEAST_GAIN = 1e-6  # XGBoost's kRtEps: a split that gains less is rounding
# Share of the scores whose difference a gain is. Gains that are closer than this are equal, so that
# the order of sums, which depends on how rows are divided, does not choose the split.
_TIE = 1e-9
_LARGEST = float(np.finfo(np.float32).max)


def grown(model: bytes, metadata: Mapping[str, str], updates: Iterable[Array]) -> bytes:
    """Grow one more level of the trees that are growing, or the first one, and return the model.

    updates: of the participants, in the order of their names, as parse_sums() reads them. The
    iteration ends if its trees have options.max_depth levels or no node can be split further.
    Raises ValueError if the model is not one that grows by histograms.
    """
    state = growing(model, metadata)
    options = state.options
    total = np.zeros(state.shape)
    for update in updates:
        total += update
    splits = _best_splits(total[0], total[1], state)
    new, start = [], 0
    for tree, nodes in enumerate(state.open_nodes):
        if state.level == 0:
            before = _root(total[:, start], state.bins, options)
        else:
            before = state.trees[tree]
        new.append(_split(before, nodes, splits[start : start + len(nodes)], options))
        start += len(nodes)
    level = state.level + 1
    if level >= options.max_depth or not any(open_nodes(tree, level, options) for tree in new):
        level = 0
    attributes = attributes_for(level)
    is_new = state.level == 0
    return trees.with_last_iteration(model, new, state.kind, attributes, is_new=is_new)


@dataclass(frozen=True, slots=True)
class _Split:
    """The best split of a node; gain is 0 if there is none. left, right: (gradient, hessian)."""

    gain: float = 0.0
    feature: int = 0
    condition: float = 0.0
    default_left: bool = False
    left: tuple[float, float] = (0.0, 0.0)
    right: tuple[float, float] = (0.0, 0.0)


def _best_splits(gradients: Array, hessians: Array, state: Growing) -> list[_Split]:
    """Find the best split of each open node, one without gain if none is good enough.

    gradients, hessians: (m, bins) of all open nodes.
    """
    options = state.options
    best = [_Split() for _ in gradients]
    allowed = _columns_of_nodes(state)
    starts = state.bins.starts
    for feature, edges in enumerate(state.bins.edges):
        columns = slice(starts[feature], starts[feature + 1])
        candidates = _Candidates.of(gradients[:, columns], hessians[:, columns], options)
        for node in np.flatnonzero(candidates.gains.max(axis=1) > 0).tolist():
            gains, tie = candidates.gains[node], candidates.ties[node]
            if allowed[node, feature] and gains.max() > best[node].gain + tie:
                chosen = int(np.argmax(gains >= gains.max() - tie))
                best[node] = candidates.split(node, chosen, feature, edges)
    least = max(options.gamma, _LEAST_GAIN)
    return [split if split.gain >= least else _Split() for split in best]


def _columns_of_nodes(state: Growing) -> NDArray[np.bool_]:
    """(m, p) whether a node may be split by a feature: the columns drawn for its tree."""
    num_features = len(state.bins.edges)
    num_drawn = max(1, int(state.options.colsample_bytree * num_features))
    allowed = np.zeros((sum(map(len, state.open_nodes)), num_features), dtype=np.bool_)
    start = 0
    for tree, nodes in enumerate(state.open_nodes):
        drawn = np.random.default_rng((state.iteration, tree)).permutation(num_features)
        allowed[start : start + len(nodes), drawn[:num_drawn]] = True
        start += len(nodes)
    return allowed


@dataclass(frozen=True, slots=True)
class _Candidates:
    """All splits of m nodes by one feature.

    gains: (m, 2e + 1) for e edges: known values below each edge go left, missing ones right; all
        known values left; and as the first e, with missing ones left. -inf if not allowed.
    ties: (m,) the difference below which gains are equal.
    left, right: (m, 2, 2e + 1) gradients and hessians of the children.
    """

    gains: Array
    ties: Array
    left: Array
    right: Array

    @classmethod
    def of(cls, gradients: Array, hessians: Array, options: BoostingOptions) -> "_Candidates":
        """Compute gain and children of all splits by a feature. gradients, hessians: (m, e + 2)."""
        both = np.stack([gradients, hessians], axis=1)  # (m, 2, e + 2)
        known = np.cumsum(both[:, :, :-1], axis=2)
        missing = both[:, :, -1:]
        total = known[:, :, -1:] + missing
        left = np.concatenate([known, known[:, :, :-1] + missing], axis=2)
        right = total - left
        parent = _scores(total, options)
        children = _scores(left, options) + _scores(right, options)
        # A child without rows has a sum of hessians that is 0 but for rounding.
        least = np.maximum(options.min_child_weight, 1e-9 * total[:, 1])
        is_allowed = (left[:, 1] >= least) & (right[:, 1] >= least) & (left[:, 1] > 0)
        gains = np.where(is_allowed, children - parent, -np.inf)
        return cls(gains, _TIE * np.where(is_allowed, children, parent).max(axis=1), left, right)

    def split(self, node: int, chosen: int, feature: int, edges: NDArray[np.float32]) -> _Split:
        """The split of a node by the candidate at position `chosen`."""
        num_edges = len(edges)
        default_left = chosen > num_edges
        edge = chosen - num_edges - 1 if default_left else chosen
        return _Split(
            gain=float(self.gains[node, chosen]),
            feature=feature,
            condition=float(edges[edge]) if edge < num_edges else _LARGEST,
            default_left=default_left,
            left=(float(self.left[node, 0, chosen]), float(self.left[node, 1, chosen])),
            right=(float(self.right[node, 0, chosen]), float(self.right[node, 1, chosen])),
        )


def _scores(sums: Array, options: BoostingOptions) -> Array:
    """(m, 2, c) sums to (m, c): how much a leaf with these sums lowers the loss, times two."""
    gradients, hessians = sums[:, 0], sums[:, 1]
    shrunk = np.maximum(np.abs(gradients) - options.reg_alpha, 0)
    weights = np.maximum(hessians + options.reg_lambda, np.finfo(np.float64).tiny)
    with np.errstate(over="ignore"):
        scores: Array = np.minimum(np.square(shrunk) / weights, _LARGEST)
    return scores


def _weight(gradient: float, hessian: float, options: BoostingOptions) -> float:
    """Value of a leaf, before it is multiplied by eta."""
    shrunk = copysign(max(abs(gradient) - options.reg_alpha, 0.0), gradient)
    below = hessian + options.reg_lambda
    return -shrunk / below if below > 0 else 0.0


def _root(sums: Array, bins: Bins, options: BoostingOptions) -> Tree:
    """A tree of one leaf. sums: (2, bins) of all rows."""
    gradient, hessian = sums[:, : bins.starts[1]].sum(axis=1).tolist()
    value = _float32(options.eta * _weight(gradient, hessian, options))
    return Tree((-1,), (0,), (0,), (value,), (value,), (0.0,), (_float32(hessian),))


def _split(
    tree: Tree, nodes: Iterable[int], splits: Iterable[_Split], options: BoostingOptions
) -> Tree:
    """Copy a tree with two more leaves for each node that has a split."""
    lefts, features = list(tree.left_children), list(tree.features)
    default_left, conditions = list(tree.default_left), list(tree.conditions)
    values, gains, hessians = list(tree.values), list(tree.gains), list(tree.hessians)
    for node, split in zip(nodes, splits, strict=True):
        if split.gain == 0:
            continue
        lefts[node], features[node] = len(lefts), split.feature
        default_left[node], conditions[node] = int(split.default_left), split.condition
        gains[node] = _float32(split.gain)
        gradient, hessian = np.add(split.left, split.right).tolist()
        values[node] = _float32(_weight(gradient, hessian, options))
        for gradient, hessian in (split.left, split.right):
            value = _float32(options.eta * _weight(gradient, hessian, options))
            lefts.append(-1)
            features.append(0)
            default_left.append(0)
            conditions.append(value)
            values.append(value)
            gains.append(0.0)
            hessians.append(_float32(hessian))
    return Tree(
        left_children=tuple(lefts),
        features=tuple(features),
        default_left=tuple(default_left),
        conditions=tuple(conditions),
        values=tuple(values),
        gains=tuple(gains),
        hessians=tuple(hessians),
    )


def _float32(value: float) -> float:
    """The nearest number that float32 has."""
    return float(np.float32(min(max(value, -_LARGEST), _LARGEST)))
