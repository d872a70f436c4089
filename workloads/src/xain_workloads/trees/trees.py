"""Gradient-boosted trees as XGBoost's JSON: empty models, checked updates, and joined models.

A model is the JSON of a whole booster, as `Booster.save_raw("json")` writes it. An update is the
JSON of a booster that has only the trees that a participant has added. Nothing here needs xgboost.

Source of the format: XGBoost's documentation, "Introduction to Model IO", and its JSON schema.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import fsum
from struct import Struct
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from xain_workloads.errors import InvalidContent
from xain_workloads.tables.reading.json_forms import read, written

# Bytes of an update. A tree of depth 6 takes some 15 KB; checking it, 20 times as much memory.
MAX_UPDATE_BYTES = 64 << 20
ANY_NUMBER = 1 << 31  # of boosting rounds, for an update that was checked before
MAX_DEPTH = 64  # of a tree; XGBoost explains a prediction with recursion over the depth

KEY = "trees"  # in the metadata of a model

_ROOT_PARENT = 2**31 - 1  # XGBoost's parent of a root
_VERSION = (3, 2, 0)
_HEAD = b'{"learner":{"attributes":'
_HEAD_END = b',"feature_names":[],"feature_types":[],"gradient_booster":{"model":{"trees":['
_TREE_START = b'{"categories":[]'  # no other object in a model begins with it
_COUNT = b'"gbtree_model_param":{"num_parallel_tree":"1","num_trees":"'

_FLOAT32 = Struct("<f")


@dataclass(frozen=True, slots=True)
class BoosterKind:
    """Common properties of all boosters of a session; metadata[KEY] holds them as JSON.

    objective: XGBoost's name, such as "binary:logistic".
    num_features: columns, p. num_classes: 0 if one boosting round makes one tree.
    base_score: prediction without trees; a probability for "binary:logistic", a margin for each
        class for "multi:softprob", or one for all as in models of earlier versions.
    """

    objective: str
    num_features: int
    num_classes: int
    base_score: float | tuple[float, ...]

    @property
    def trees_per_iteration(self) -> int:
        """Trees that one boosting round makes: one for each class, if there are classes."""
        return max(self.num_classes, 1)

    def to_json(self) -> str:
        """JSON text for metadata[KEY]."""
        return written(self)

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, str]) -> "BoosterKind":
        """The kind of the trees of a model, as its metadata tell. Raises ValueError if the
        metadata are not those of a model of trees."""
        what = "the model's description of its trees"
        if KEY not in metadata:
            raise ValueError(f"{what} is missing: no workload of trees made it")
        return read(metadata[KEY], cls, what, ValueError)


@dataclass(frozen=True, slots=True)
class Tree:
    """A tree in breadth-first order: the children of a node are neighbours, the left one first.

    All tuples have one entry per node. left_children: -1 for a leaf. conditions: the value that
    a split compares with, or a leaf's value. values: what each node would predict as a leaf.
    hessians: sum of second derivatives of the loss over the rows of a node.
    """

    left_children: tuple[int, ...]
    features: tuple[int, ...]
    default_left: tuple[int, ...]
    conditions: tuple[float, ...]
    values: tuple[float, ...]
    gains: tuple[float, ...]
    hessians: tuple[float, ...]


# --- reading: the part of XGBoost's JSON that counts; it writes counts as text ---

_Count = Annotated[str, Meta(pattern=r"^[0-9]{1,10}\Z")]
_FLOAT_COLUMNS = ("split_conditions", "base_weights", "loss_changes", "sum_hessian")


class _TreeParam(msgspec.Struct):
    num_nodes: _Count
    size_leaf_vector: _Count


class _SentTree(msgspec.Struct):
    tree_param: _TreeParam
    left_children: list[int]
    right_children: list[int]
    split_indices: list[int]
    default_left: list[int]
    split_type: list[int]
    split_conditions: list[float]
    base_weights: list[float]
    loss_changes: list[float]
    sum_hessian: list[float]


_COLUMNS = [name for name in _SentTree.__struct_fields__ if name != "tree_param"]


class _Trees(msgspec.Struct):
    trees: list[_SentTree]
    tree_info: list[int]


class _Booster(msgspec.Struct):
    name: Literal["gbtree"]
    model: _Trees


class _LearnerParam(msgspec.Struct):
    num_feature: _Count
    num_class: _Count


class _Objective(msgspec.Struct):
    name: str


class _Learner(msgspec.Struct):
    learner_model_param: _LearnerParam
    objective: _Objective
    gradient_booster: _Booster


class _Sent(msgspec.Struct):
    learner: _Learner


def parse_update(data: bytes, kind: BoosterKind, max_iterations: int) -> tuple[Tree, ...]:
    """Read the trees that a participant has added: whole boosting rounds, at most max_iterations.

    Trees are rebuilt node by node from the root, so what is returned is a tree of finite numbers,
    whatever was sent. Raises InvalidContent.
    """
    if len(data) > MAX_UPDATE_BYTES:
        raise InvalidContent(
            f"an update of trees has {len(data)} bytes; at most {MAX_UPDATE_BYTES} are taken"
        )
    learner = read(data, _Sent, "the update", InvalidContent).learner
    parameters, booster = learner.learner_model_param, learner.gradient_booster
    for key, expected in (("num_feature", kind.num_features), ("num_class", kind.num_classes)):
        if int(found := getattr(parameters, key)) != expected:
            raise InvalidContent(f"the booster has {key} {found}, the model {expected}")
    if (objective := learner.objective.name) != kind.objective:
        raise InvalidContent(
            f"the booster has objective {objective!r}, the model {kind.objective!r}"
        )
    trees = booster.model.trees
    per_iteration = kind.trees_per_iteration
    if len(trees) % per_iteration or len(trees) > max_iterations * per_iteration:
        raise InvalidContent(
            f"the update adds {len(trees)} trees; {max_iterations} boosting rounds add at most "
            f"{max_iterations * per_iteration}, {per_iteration} each"
        )
    if booster.model.tree_info != [index % per_iteration for index in range(len(trees))]:
        raise InvalidContent(
            f"tree_info does not count the classes 0 to {per_iteration - 1} in each boosting round"
        )
    return tuple(_tree(tree, index, kind.num_features) for index, tree in enumerate(trees))


def _tree(sent: _SentTree, index: int, num_features: int) -> Tree:
    """A tree that a site has sent, with its nodes in breadth-first order. Raises InvalidContent for
    what XGBoost would not write."""
    where = f"tree {index}"
    size = int(sent.tree_param.num_nodes)
    if int(sent.tree_param.size_leaf_vector) > 1:
        raise InvalidContent(f"{where} has several values in a leaf, which cannot be joined")
    for key in _COLUMNS:
        if (length := len(getattr(sent, key))) != size or size == 0:
            raise InvalidContent(f"{where} has {length} entries in {key} for {size} nodes")
    if any(sent.split_type):
        raise InvalidContent(f"{where} splits by categories, which cannot be joined")
    order = _breadth_first(sent.left_children, sent.right_children, where)
    new_left, new_features = [], []
    next_child = 1
    for node in order:
        is_leaf = sent.left_children[node] == -1
        feature = (
            0
            if is_leaf
            else _index(sent.split_indices[node], num_features, where, "a split's feature")
        )
        new_features.append(feature)
        new_left.append(-1 if is_leaf else next_child)
        next_child += 0 if is_leaf else 2
    columns = {
        key: tuple(_float32(getattr(sent, key)[node], where, key) for node in order)
        for key in _FLOAT_COLUMNS
    }
    for key in ("sum_hessian", "loss_changes"):
        if min(columns[key]) < 0:
            raise InvalidContent(f"{where} has a negative value in {key}")
    return Tree(
        left_children=tuple(new_left),
        features=tuple(new_features),
        default_left=tuple(_index(sent.default_left[n], 2, where, "default_left") for n in order),
        conditions=columns["split_conditions"],
        values=columns["base_weights"],
        gains=columns["loss_changes"],
        hessians=columns["sum_hessian"],
    )


def _breadth_first(left: Sequence[int], right: Sequence[int], where: str) -> list[int]:
    """List the nodes that can be reached from the root, each once, level by level. Raises
    InvalidContent if one is reached twice, or the tree is too deep."""
    order, seen, level = [0], {0}, [0]
    for _ in range(MAX_DEPTH + 1):
        below: list[int] = []
        for node in level:
            if left[node] == -1 and right[node] == -1:
                continue
            for child in (left[node], right[node]):
                below.append(_index(child, len(left), where, "a child"))
                if child in seen:
                    raise InvalidContent(f"{where} reaches node {child} twice")
                seen.add(child)
        if not below:
            return order
        order += below
        level = below
    raise InvalidContent(f"{where} is deeper than {MAX_DEPTH}")


def _index(value: int, size: int, where: str, what: str) -> int:
    if not 0 <= value < size:
        raise InvalidContent(f"{where} has {value} for {what}; it must be 0 to {size - 1}")
    return value


def _float32(value: float, where: str, key: str) -> float:
    """Round a number that a site has sent to float32. Raises InvalidContent beyond its range."""
    try:
        return _rounded(value)
    except OverflowError:
        raise InvalidContent(
            f"{where} has {value} in {key}, which is not a finite float32"
        ) from None


# --- joining ---


def joined(model: bytes, updates: Sequence[tuple[Sequence[Tree], int]], kind: BoosterKind) -> bytes:
    """Append the trees of all updates to a model, in the order of the updates.

    model: as empty_booster() or this function has written it. updates: (trees, n_k) of each
    participant. Each tree's values are multiplied by n_k / n: all participants have taken the same
    step on their own rows, so the model takes the weighted average of their steps, not the sum.
    Every boosting round of every participant is an iteration of the joined booster.
    Raises ValueError if the model is not one that was written here.
    """
    num_trees = _num_trees(model, kind)
    total = fsum(num_samples for _, num_samples in updates)
    pieces = [model[: -len(_tail(kind, num_trees))]]
    for trees, num_samples in updates:
        share = num_samples / total if total else 1 / len(updates)
        for tree in trees:
            pieces.append(b"," if num_trees else b"")
            pieces.append(_tree_text(_scaled(tree, share), num_trees, kind).encode())
            num_trees += 1
    return b"".join([*pieces, _tail(kind, num_trees)])


def _num_trees(model: bytes, kind: BoosterKind) -> int:
    """The number of trees of a model. Raises ValueError if the model is not one that was written
    here."""
    digits = model[model.rfind(_COUNT) + len(_COUNT) :].partition(b'"')[0]
    num_trees = int(digits) if digits.isdigit() else 0
    if not model.startswith(_HEAD) or not model.endswith(_tail(kind, num_trees)):
        raise ValueError("the model is not a booster that was joined here")
    return num_trees


def _scaled(tree: Tree, factor: float) -> Tree:
    """Multiply the values of leaves, and those that nodes would have as leaves, by a factor."""
    if factor == 1:
        return tree
    return replace(
        tree,
        conditions=tuple(
            _rounded(condition * factor) if left == -1 else condition
            for condition, left in zip(tree.conditions, tree.left_children, strict=True)
        ),
        values=tuple(_rounded(value * factor) for value in tree.values),
    )


# --- growing ---


def attributes_of(model: bytes) -> dict[str, str]:
    """Text by name that a model carries beside its trees; XGBoost keeps it. Raises ValueError if
    the model is not one that was written here."""
    end = model.find(_HEAD_END)
    if not model.startswith(_HEAD) or end < 0:
        raise ValueError("the model is not a booster that was joined here")
    attributes: dict[str, str] = json.loads(model[len(_HEAD) : end])
    return attributes


def num_iterations(model: bytes, kind: BoosterKind) -> int:
    """Boosting rounds of a model that was written here. Raises ValueError of another one."""
    return _num_trees(model, kind) // kind.trees_per_iteration


def last_iteration(model: bytes, kind: BoosterKind) -> tuple[Tree, ...]:
    """The trees of the last boosting round of a model that was joined here, numbered from 0.
    Raises ValueError of any other model, and of one without trees."""
    num_trees = _num_trees(model, kind)
    start = _start_of_last(model, kind)
    text = b"[" + model[start : -len(_tail(kind, num_trees))] + b"]"
    trees = read(text, list[_SentTree], "the model", ValueError)
    return tuple(_tree(tree, index, kind.num_features) for index, tree in enumerate(trees))


def with_last_iteration(
    model: bytes,
    trees: Sequence[Tree],
    kind: BoosterKind,
    attributes: Mapping[str, str],
    *,
    is_new: bool,
) -> bytes:
    """Replace the trees of a model's last boosting round, or append a round if `is_new`. Raises
    ValueError if the model is not one that was written here."""
    num_trees = _num_trees(model, kind)
    if is_new:
        end = len(model) - len(_tail(kind, num_trees))
    else:
        end = _start_of_last(model, kind)
        num_trees -= kind.trees_per_iteration
    start = model.find(_HEAD_END)
    body = model[start:end].removesuffix(b",")
    pieces = [_head(attributes)[: -len(_HEAD_END)], body]
    for tree in trees:
        pieces.append(b"," if num_trees else b"")
        pieces.append(_tree_text(tree, num_trees, kind).encode())
        num_trees += 1
    return b"".join([*pieces, _tail(kind, num_trees)])


def _start_of_last(model: bytes, kind: BoosterKind) -> int:
    """Position of the last boosting round in a model's bytes. Raises ValueError without trees."""
    start = len(model)
    for _ in range(kind.trees_per_iteration):
        start = model.rfind(_TREE_START, 0, start)
        if start < 0:
            raise ValueError("the model has no trees")
    return start


def _rounded(value: float) -> float:
    number: float = _FLOAT32.unpack(_FLOAT32.pack(value))[0]
    return number


# --- writing ---


def empty_booster(kind: BoosterKind) -> bytes:
    """A model without trees."""
    return _head({}) + _tail(kind, 0)


def _head(attributes: Mapping[str, str]) -> bytes:
    return _HEAD + _compact(dict(attributes)).encode() + _HEAD_END


def _tail(kind: BoosterKind, num_trees: int) -> bytes:
    """Write all that stands behind the trees; it depends on their number only."""
    per_iteration = kind.trees_per_iteration
    model = {
        "cats": {"enc": [], "feature_segments": [], "sorted_idx": []},
        "iteration_indptr": [*range(0, num_trees + 1, per_iteration)],
        "tree_info": [index % per_iteration for index in range(num_trees)],
    }
    scores = kind.base_score
    parameters = {
        "base_score": f"[{','.join(map(_float_text, scores))}]"
        if isinstance(scores, tuple)
        else _float_text(scores),
        "boost_from_average": "0",  # else each participant would start from a score of its own
        "num_class": str(kind.num_classes),
        "num_feature": str(kind.num_features),
        "num_target": "1",
    }
    objective: dict[str, Any] = {"name": kind.objective}
    if kind.num_classes:
        objective["softmax_multiclass_param"] = {"num_class": str(kind.num_classes)}
    else:
        objective["reg_loss_param"] = {"scale_pos_weight": "1"}
    inner = _compact(model)[1:-1]
    return (
        f'],{inner},{_COUNT.decode()}{num_trees}"}}}},"name":"gbtree"}},'
        f'"learner_model_param":{_compact(parameters)},"objective":{_compact(objective)}}},'
        f'"version":{_compact(_VERSION)}}}'
    ).encode()


def _tree_text(tree: Tree, index: int, kind: BoosterKind) -> str:
    """Write a tree in XGBoost's JSON."""
    size = len(tree.left_children)
    zeros = [0] * size
    parents = [_ROOT_PARENT] * size
    for node, left in enumerate(tree.left_children):
        if left != -1:
            parents[left] = parents[left + 1] = node
    integers = {
        "categories": [],
        "categories_nodes": [],
        "categories_segments": [],
        "categories_sizes": [],
        "default_left": tree.default_left,
        "id": index,
        "left_children": tree.left_children,
        "parents": parents,
        "right_children": [-1 if left == -1 else left + 1 for left in tree.left_children],
        "split_indices": tree.features,
        "split_type": zeros,
        "tree_param": {
            "num_deleted": "0",
            "num_feature": str(kind.num_features),
            "num_nodes": str(size),
            "size_leaf_vector": "1",
        },
    }
    floats = {
        "base_weights": tree.values,
        "loss_changes": tree.gains,
        "split_conditions": tree.conditions,
        "sum_hessian": tree.hessians,
    }
    texts = (f'"{key}":[{",".join(map(_float_text, column))}]' for key, column in floats.items())
    return f"{_compact(integers)[:-1]},{','.join(texts)}}}"


def _float_text(value: float) -> str:
    """A float32 as text: nine digits, which are exact, and a point."""
    text = f"{value:.9g}"
    return text if "." in text or "e" in text else f"{text}.0"


def _compact(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))
