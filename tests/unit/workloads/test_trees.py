"""Boosters as JSON: joining them, and refusing updates that are none."""

import json
import math
import re
from collections.abc import Callable
from functools import cache
from random import Random
from typing import Any

import numpy as np
import pytest
import xgboost
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from xain_workloads.errors import InvalidContent
from xain_workloads.trees import trees
from xain_workloads.trees.trees import BoosterKind, empty_booster, joined, parse_update

Array = NDArray[Any]

NUM_FEATURES = 5
BINARY = BoosterKind("binary:logistic", NUM_FEATURES, 0, 0.5)
MULTICLASS = BoosterKind("multi:softprob", NUM_FEATURES, 3, 0.5)
REGRESSION = BoosterKind("reg:squarederror", NUM_FEATURES, 0, 7.25)
MODEL = ("learner", "gradient_booster", "model")
KINDS = {"binary": BINARY, "multiclass": MULTICLASS, "regression": REGRESSION}


def load(model: bytes) -> xgboost.Booster:
    return xgboost.Booster({"nthread": 1}, model_file=bytearray(model))


@cache
def rows(kind: BoosterKind, seed: int = 0) -> tuple[Array, Array]:
    """60 rows, some values of them missing."""
    chance = np.random.default_rng(seed)
    features = chance.normal(size=(60, NUM_FEATURES))
    score = features[:, 0] + features[:, 1] ** 2
    features[chance.random(features.shape) < 0.1] = np.nan
    if kind is REGRESSION:
        return features, 5 + 3 * score
    borders = [0.5] if kind is BINARY else [0.0, 1.0]
    return features, np.digitize(score, borders).astype(np.float64)


def matrix(kind: BoosterKind, seed: int = 0) -> xgboost.DMatrix:
    features, target = rows(kind, seed)
    return xgboost.DMatrix(features, target, nthread=1)


def boosted(kind: BoosterKind, model: bytes, iterations: int, seed: int = 0) -> xgboost.Booster:
    """Boost a model on one participant's rows; the model's own trees are included."""
    parameters = {"objective": kind.objective, "max_depth": 3, "nthread": 1, "tree_method": "hist"}
    if kind.num_classes:
        parameters["num_class"] = kind.num_classes
    return xgboost.train(
        parameters, matrix(kind, seed), num_boost_round=iterations, xgb_model=load(model)
    )


@cache
def update(kind: BoosterKind, model: bytes, iterations: int, seed: int = 0) -> bytes:
    """Boost a model on one participant's rows; the new trees alone."""
    before = load(model).num_boosted_rounds()
    booster = boosted(kind, model, iterations, seed)
    return bytes(booster[before : before + iterations].save_raw("json"))


def margins(model: bytes, data: xgboost.DMatrix) -> Array:
    return np.asarray(load(model).predict(data, output_margin=True), np.float64)


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_empty_booster_predicts_base_score(kind):
    predicted = load(empty_booster(kind)).predict(matrix(kind))
    expected = 1 / 3 if kind is MULTICLASS else kind.base_score
    np.testing.assert_allclose(predicted, np.full(predicted.shape, expected), rtol=1e-6)


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_one_participant_makes_the_booster_that_xgboost_makes(kind):
    """Three rounds of two iterations are the same as six, to the last byte that XGBoost saves."""
    model = empty_booster(kind)
    for _ in range(3):
        added = parse_update(update(kind, model, 2), kind, 2)
        model = joined(model, [(added, 60)], kind)
    whole = boosted(kind, empty_booster(kind), 6)
    assert json.loads(bytes(load(model).save_raw("json"))) == json.loads(
        bytes(whole.save_raw("json"))
    )
    assert load(model).num_boosted_rounds() == 6


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@settings(deadline=None, max_examples=6)
@given(
    num_samples=st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=4),
    iterations=st.integers(1, 2),
)
def test_joined_margin_is_weighted_average_of_steps(kind, num_samples, iterations):
    """The joined model's margin is the model's, and n_k / n of each participant's step."""
    start = joined(
        empty_booster(kind),
        [(parse_update(update(kind, empty_booster(kind), 1), kind, 1), 1)],
        kind,
    )
    sent = [update(kind, start, iterations, seed) for seed in range(len(num_samples))]
    parts = [
        (parse_update(data, kind, iterations), n) for data, n in zip(sent, num_samples, strict=True)
    ]
    model = joined(start, parts, kind)
    data = matrix(kind, 99)
    total = sum(num_samples)
    before = margins(start, data)
    expected = before.copy()
    for data_sent, n in zip(sent, num_samples, strict=True):
        share = n / total if total else 1 / len(num_samples)
        step = margins(data_sent, data) - margins(empty_booster(kind), data)
        expected += share * step
    np.testing.assert_allclose(margins(model, data), expected, rtol=1e-4, atol=1e-4)
    assert load(model).num_boosted_rounds() == 1 + iterations * len(num_samples)


def test_classes_keep_their_trees_when_joined():
    """One tree a class and iteration, in turn, so that slices of iterations are whole."""
    empty = empty_booster(MULTICLASS)
    parts = [(parse_update(update(MULTICLASS, empty, 2, s), MULTICLASS, 2), 10) for s in (0, 1)]
    saved = json.loads(bytes(load(joined(empty, parts, MULTICLASS)).save_raw("json")))
    model = saved["learner"]["gradient_booster"]["model"]
    assert model["tree_info"] == [0, 1, 2] * 4
    assert model["iteration_indptr"] == [0, 3, 6, 9, 12]
    assert model["gbtree_model_param"]["num_trees"] == "12"
    assert [tree["id"] for tree in model["trees"]] == list(range(12))


def test_update_without_new_trees_changes_nothing():
    model = empty_booster(BINARY)
    assert joined(model, [((), 5)], BINARY) == model


def test_model_that_was_not_joined_here_is_not_extended():
    model = empty_booster(BINARY)
    added = parse_update(update(BINARY, model, 1), BINARY, 1)
    for other in (b"", b"{}", model[:-1], update(BINARY, model, 1), empty_booster(MULTICLASS)):
        with pytest.raises(ValueError, match="not a booster that was joined here"):
            joined(other, [(added, 1)], BINARY)


def test_kind_survives_metadata():
    for kind in KINDS.values():
        assert BoosterKind.from_metadata({trees.KEY: kind.to_json()}) == kind
    for metadata in ({}, {trees.KEY: "["}, {trees.KEY: "{}"}, {trees.KEY: "3"}):
        with pytest.raises(ValueError, match="description of its trees"):
            BoosterKind.from_metadata(metadata)


# --- what is refused ------------------------------------------------------------------------------


def tree_of(booster: dict[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = booster["learner"]["gradient_booster"]["model"]["trees"][0]
    return tree


def put(value: object, *path: str | int) -> Callable[[dict[str, Any]], None]:
    """Replace what lies at the end of a path."""
    *before, last = path

    def change(booster: dict[str, Any]) -> None:
        inner: Any = booster
        for key in before:
            inner = inner[key]
        inner[last] = value

    return change


def set_model(key: str, value: object) -> Callable[[dict[str, Any]], None]:
    return put(value, *MODEL, key)


def set_in_tree(key: str, node: int, value: object) -> Callable[[dict[str, Any]], None]:
    return put(value, *MODEL, "trees", 0, key, node)


def set_parameter(key: str, value: object) -> Callable[[dict[str, Any]], None]:
    return put(value, "learner", "learner_model_param", key)


def set_leaf(value: object) -> Callable[[dict[str, Any]], None]:
    def change(booster: dict[str, Any]) -> None:
        tree = tree_of(booster)
        tree["split_conditions"][tree["left_children"].index(-1)] = value

    return change


def repeat_tree(times: int) -> Callable[[dict[str, Any]], None]:
    return lambda booster: set_model("trees", [tree_of(booster)] * times)(booster)


def grow_chain(booster: dict[str, Any]) -> None:
    """A tree that is far deeper than its participant may grow one."""
    tree, depth = tree_of(booster), trees.MAX_DEPTH + 1
    size = 2 * depth + 1
    tree["tree_param"]["num_nodes"] = str(size)
    for key in ("split_indices", "default_left", "split_type"):
        tree[key] = [0] * size
    for key in ("split_conditions", "base_weights", "loss_changes", "sum_hessian"):
        tree[key] = [0.0] * size
    tree["left_children"] = [i + 1 if i % 2 == 0 and i < size - 1 else -1 for i in range(size)]
    tree["right_children"] = [i + 2 if i % 2 == 0 and i < size - 1 else -1 for i in range(size)]


REFUSED = {
    "loop": (set_in_tree("left_children", 0, 0), "reaches node 0 twice"),
    "shared child": (set_in_tree("right_children", 0, 1), "reaches node 1 twice"),
    "child beyond the tree": (set_in_tree("left_children", 0, 10**6), "for a child"),
    "child below zero": (set_in_tree("left_children", 0, -2), "for a child"),
    "half a leaf": (set_in_tree("left_children", 0, -1), "for a child"),
    "child that is true": (set_in_tree("left_children", 0, True), "left_children[0]"),
    "feature beyond the columns": (set_in_tree("split_indices", 0, 5), "for a split's feature"),
    "infinite leaf": (set_leaf(1e39), "not a finite float32"),
    "huge integer leaf": (set_leaf(10**400), "out of range"),
    "leaf of text": (set_leaf("1"), "got `str`"),
    "leaf that is NaN": (set_leaf(math.nan), "malformed"),
    "leaf beyond float64": (set_leaf(math.inf), "malformed"),
    "negative hessian": (set_in_tree("sum_hessian", 0, -1.0), "negative value in sum_hessian"),
    "categorical split": (set_in_tree("split_type", 0, 1), "splits by categories"),
    "deep chain": (grow_chain, "deeper than 64"),
    "short column": (lambda b: tree_of(b)["base_weights"].pop(), "entries in base_weights for"),
    "no columns": (lambda b: tree_of(b).pop("left_children"), "field `left_children`"),
    "other features": (set_parameter("num_feature", "6"), "num_feature 6, the model 5"),
    "other classes": (set_parameter("num_class", "4"), "num_class 4, the model 3"),
    "features as a number": (set_parameter("num_feature", 5), "learner_model_param.num_feature"),
    "other order of classes": (set_model("tree_info", [0, 2, 1]), "tree_info does not count"),
    "no trees": (set_model("trees", None), "model.trees"),
    "part of an iteration": (repeat_tree(4), "adds 4 trees"),
    "too many iterations": (repeat_tree(6), "at most 3, 3 each"),
    "text for a tree": (set_model("trees", ["a", "b", "c"]), "model.trees[0]"),
    "no learner": (lambda b: b.pop("learner"), "field `learner`"),
    "other booster": (put("dart", *MODEL[:2], "name"), "gradient_booster.name"),
    "other objective": (
        put("reg:squarederror", "learner", "objective", "name"),
        "has objective 'reg:squarederror'",
    ),
}


@pytest.mark.parametrize(("change", "reason"), REFUSED.values(), ids=REFUSED)
def test_hostile_booster_is_refused(change, reason):
    booster = json.loads(update(MULTICLASS, empty_booster(MULTICLASS), 1))
    change(booster)
    with pytest.raises(InvalidContent, match=re.escape(reason)):
        parse_update(json.dumps(booster).encode(), MULTICLASS, 1)


@pytest.mark.parametrize(
    "data",
    [b"", b"{", b"[]", b"null", b"\xff\xfe", b"[" * 10**6, b'{"learner":' * 10**5, b"9" * 10**5],
    ids=["empty", "cut", "list", "null", "no text", "deep list", "deep object", "long number"],
)
def test_bytes_that_are_no_json_object_are_refused(data):
    with pytest.raises(InvalidContent):
        parse_update(data, MULTICLASS, 1)


def test_larger_update_than_allowed_is_not_parsed():
    with pytest.raises(InvalidContent, match="at most 67108864 are taken"):
        parse_update(bytes(trees.MAX_UPDATE_BYTES + 1), MULTICLASS, 1)


VALUES: tuple[object, ...] = (
    *(
        None,
        True,
        0,
        -1,
        1,
        2,
        7,
        2**31 - 1,
        2**31,
        -(2**63),
        10**400,
        0.0,
        -0.5,
        1e-45,
        3e38,
        1e39,
    ),
    *(math.nan, math.inf, "", "0", "-1", "7", "99999999999", "x", [], [0], {}, {"a": 1}),
)


def mutate(value: Any, chance: Random) -> Any:
    """The same JSON value with one thing changed, anywhere in it."""
    if isinstance(value, dict | list) and value and chance.random() < 0.93:
        key = chance.choice(list(value) if isinstance(value, dict) else range(len(value)))
        if chance.random() < 0.05:
            del value[key]
        elif isinstance(value, list) and chance.random() < 0.05:
            value.insert(key, value[chance.randrange(len(value))])
        else:
            value[key] = mutate(value[key], chance)
        return value
    return chance.choice(VALUES)


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_mutated_booster_is_refused_or_usable(kind):
    """Mutated updates are refused with a reason, or make a model with which XGBoost predicts."""
    chance = Random(7)
    empty = empty_booster(kind)
    good = update(kind, empty, 2)
    data = matrix(kind)
    num_taken = 0
    for _ in range(200):
        booster = json.loads(good)
        # From the trees on, half of the time: most of the checks are there.
        is_deep = chance.random() < 0.5
        start = booster["learner"]["gradient_booster"]["model"] if is_deep else booster
        for _ in range(chance.randint(1, 3)):
            mutate(start, chance)
        try:
            added = parse_update(json.dumps(booster).encode(), kind, 2)
        except InvalidContent:
            continue
        predicted = load(joined(empty, [(added, 3), (added, 4)], kind)).predict(data)
        assert len(predicted) == 60
        num_taken += 1
    assert 0 < num_taken < 200
