"""Files of fitted estimators: what comes back, how large they are, and what is refused."""

import json
import random
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from sklearn.datasets import load_iris
from sklearn.dummy import DummyClassifier
from sklearn.ensemble import VotingRegressor
from sklearn.gaussian_process import GaussianProcessClassifier
from sklearn.linear_model import LinearRegression
from sklearn.tree import DecisionTreeClassifier

from xain_workloads.ensembles.estimators import allowed, described, files, node_tables, skops_files
from xain_workloads.errors import InvalidContent

ROWS, KINDS = load_iris(return_X_y=True)
FOREST = {"estimator": "RandomForestClassifier", "parameters": {"n_estimators": 8}}
NESTED: list[Any] = [
    "DecisionTreeClassifier",
    FOREST,
    {"estimator": "GradientBoostingClassifier", "parameters": {"n_estimators": 3}},
    {"estimator": "HistGradientBoostingClassifier", "parameters": {"max_iter": 3}},
    {"pipeline": ["PCA", {"pipeline": ["PolynomialFeatures", FOREST]}]},
    {"pipeline": [{"estimator": "SelectKBest", "parameters": {"k": 2}}, "KNeighborsClassifier"]},
    {"estimator": "CalibratedClassifierCV", "parameters": {"estimator": FOREST}},
    {
        "estimator": "StackingClassifier",
        "parameters": {"estimators": [FOREST, {"pipeline": ["StandardScaler", "SVC"]}]},
    },
    {"estimator": "BaggingClassifier", "parameters": {"estimator": {"pipeline": ["PCA", FOREST]}}},
    {"estimator": "LabelPropagation", "parameters": {"kernel": "knn"}},
    {"pipeline": ["KBinsDiscretizer", "LogisticRegression"]},
]


def fitted(description: Any) -> tuple[Any, str]:
    """A fitted estimator, and the name of its class."""
    read = described.read(description)
    return described.fit(read.make(0), ROWS, KINDS), read.name


def parts(file: bytes) -> tuple[dict[str, Any], bytes]:
    """The description and the arrays of a file."""
    start = len(files.MAGIC) + 4
    end = start + int.from_bytes(file[start - 4 : start], "little")
    return json.loads(file[start:end]), file[end:]


def whole(description: Mapping[str, Any], arrays: bytes) -> bytes:
    text = json.dumps(description).encode()
    return files.MAGIC + len(text).to_bytes(4, "little") + text + arrays


@pytest.mark.parametrize("description", NESTED, ids=json.dumps)
def test_estimators_come_back_as_they_were(description):
    estimator, name = fitted(description)
    file = files.dump(estimator)
    files.check(file, {name}, 4)
    again = files.load(file)
    assert np.array_equal(again.predict(ROWS), estimator.predict(ROWS))
    if hasattr(estimator, "predict_proba"):
        np.testing.assert_allclose(again.predict_proba(ROWS), estimator.predict_proba(ROWS))
    assert again.get_params().keys() == estimator.get_params().keys()
    assert files.dump(again) == file


def test_other_estimators_are_files_of_skops():
    estimator = GaussianProcessClassifier().fit(ROWS, KINDS)
    file = files.dump(estimator)
    files.check(file, {"GaussianProcessClassifier"}, 4)
    assert np.array_equal(files.load(file).predict(ROWS), estimator.predict(ROWS))
    broken = bytearray(file)
    at = broken.index(b"numpy.random") if b"numpy.random" in broken else broken.index(b"RBF")
    broken[at : at + 3] = b"os."
    with pytest.raises(InvalidContent):
        files.check(bytes(broken), {"GaussianProcessClassifier"}, 4)


def edited(file: bytes, change: Any) -> bytes:
    description, arrays = parts(file)
    change(description)
    return whole(description, arrays)


def with_column(file: bytes, name: str, value: int, at: int = 0) -> bytes:
    """A file with another value in a column of its trees."""
    description, arrays = parts(file)
    number = description["trees"][name]
    start = sum(
        int(np.prod(shape)) * np.dtype(dtype).itemsize
        for dtype, shape, _ in description["arrays"][:number]
    )
    dtype, shape, _ = description["arrays"][number]
    column = np.frombuffer(arrays, dtype, *shape, start).copy()
    column[at] = value
    return whole(description, arrays[:start] + column.tobytes() + arrays[start + column.nbytes :])


def attribute(name: str, value: Any) -> Any:
    def change(description: dict[str, Any]) -> None:
        description["estimator"]["e"][1][name] = value

    return change


def test_hostile_files_are_refused():
    """Nothing is loaded by the check."""
    tree = DecisionTreeClassifier(random_state=0).fit(ROWS, KINDS)
    good = files.dump(tree)
    forest = files.dump(fitted(FOREST)[0])
    names = {"DecisionTreeClassifier", "RandomForestClassifier", "GradientBoostingClassifier"}
    other = {"e": ["DecisionTreeClassifier", {"n_features_in_": 9}]}
    for file, why in (
        (b"", "not of skops"),
        (files.MAGIC, "cut off"),
        (good[:-1], "bytes, not the"),
        (good + b"x", "bytes, not the"),
        (good[:12] + b"[" * 100, "cannot be read"),
        (edited(good, lambda d: d["estimator"]["e"].__setitem__(0, "os.system")), "no known"),
        (edited(good, lambda d: d["estimator"]["e"].__setitem__(0, "Ridge")), "is a Ridge"),
        (edited(good, lambda d: d["arrays"][0].__setitem__(0, "|O")), "an array of"),
        (edited(good, lambda d: d["arrays"][0].__setitem__(1, [1 << 40])), "bytes, not the"),
        (edited(good, lambda d: d["arrays"][0].__setitem__(1, [-1])), "wrong shape"),
        (edited(good, attribute("criterion", {"x": 1})), "of the kind 'x'"),
        (edited(good, attribute("criterion", {"a": 99})), "cannot be read"),
        (edited(good, attribute("criterion", {"T": 0})), "of the kind 'T'"),
        (edited(good, attribute("criterion", {"f": "system"})), "cannot be read"),
        (edited(good, attribute("criterion", {"l": ["Popen", {}]})), "cannot be read"),
        (edited(good, attribute("criterion", {"y": "O"})), "unknown type"),
        (edited(good, attribute("criterion", {"e": ["Popen", {}]})), "no known estimator"),
        (edited(good, attribute("tree_", {"T": 1})), "cannot be read"),
        (edited(good, attribute("tree_", {"T": -1})), "does not have"),
        (edited(good, attribute("tree_", 3)), "where a tree must be"),
        (edited(good, attribute("n_features_in_", 5)), "of 5 columns, rows have 4"),
        (edited(good, attribute("n_outputs_", 2)), "more than one output"),
        (edited(good, lambda d: d["trees"].pop("feature")), "no whole numbers 'feature'"),
        (edited(good, lambda d: d["trees"].pop("values")), "lacks columns"),
        (edited(forest, attribute("estimators_", [other])), "no trees of its columns"),
        (edited(forest, attribute("estimators_", [{"k": 0}])), "where an estimator must be"),
        (with_column(good, "left_child", 100), "left_child is none of the tree's"),
        (with_column(good, "left_child", 0), "left_child is none of the tree's"),
        (with_column(good, "right_child", 0), "right_child is none of the tree's"),
        (with_column(good, "feature", 4), "splits none of the columns"),
        (with_column(good, "feature", -2), "splits none of the columns"),
        (with_column(good, "num_features", 5), "of other columns"),
        (with_column(good, "num_nodes", 1), "numbers of nodes"),
        (with_column(good, "num_nodes", 0), "no nodes"),
        (with_column(good, "num_classes", 2), "numbers of values"),
        (with_column(forest, "num_features", 100, 3), "of other columns"),
    ):
        with pytest.raises(InvalidContent, match=why):
            files.check(file, names, 4)


@pytest.mark.parametrize("name", ["SVC", "NuSVC", "SVR", "NuSVR"])
def test_support_vectors_that_do_not_fit_together_are_refused(name):
    """Native code reads as many of each array as the others announce."""
    for wrong in ("support_vectors_", "support_", "_dual_coef_", "_intercept_", "_n_support"):
        estimator, _ = fitted(name)
        files.check(files.dump(estimator), {name}, 4)
        array = getattr(estimator, wrong)
        changed = -array if wrong == "_n_support" else np.ascontiguousarray(array[..., :-1])
        setattr(estimator, wrong, changed)
        with pytest.raises(InvalidContent, match="support vectors do not fit"):
            files.check(files.dump(estimator), {name}, 4)


@pytest.mark.parametrize("name", ["KNeighborsClassifier", "RadiusNeighborsClassifier"])
def test_neighbours_that_are_of_none_of_the_classes_are_refused(name):
    """Native code counts the votes of neighbours at their classes."""
    for wrong in (KINDS + 10**8, KINDS - 1, KINDS * 1.0, KINDS[:-1], np.stack([KINDS, KINDS], 1)):
        estimator, bagging = fitted(
            {"estimator": "BaggingClassifier", "parameters": {"estimator": name}}
        )
        files.check(files.dump(estimator), {bagging}, 4)
        estimator.estimators_[0]._y = wrong
        with pytest.raises(InvalidContent, match="of neighbours"):
            files.check(files.dump(estimator), {bagging}, 4)


def test_transformers_with_other_columns_than_they_announce_are_refused():
    """Native code reads as many columns of the centers, and writes as many, as are announced."""
    means, name = fitted({"pipeline": ["KMeans", "LogisticRegression"]})
    means.steps[0][1].cluster_centers_ = means.steps[0][1].cluster_centers_[:, :1].copy()
    bins, _ = fitted({"pipeline": ["KBinsDiscretizer", "LogisticRegression"]})
    bins.steps[0][1]._encoder._n_features_outs = [1] * 4
    for estimator in (means, bins):
        with pytest.raises(InvalidContent, match="other columns"):
            files.check(files.dump(estimator), {name}, 4)


def broken_estimators() -> list[Any]:
    """Estimators whose arrays native code would follow out of their bounds."""
    vectors, neighbours, boosting = (
        fitted(one)[0] for one in ("SVC", "KNeighborsClassifier", NESTED[2])
    )
    vectors._dual_coef_ = vectors._dual_coef_[:, :-1].copy()
    neighbours._y = neighbours._y + 10**8
    boosting.init_ = DecisionTreeClassifier(max_depth=1).fit(ROWS, KINDS > 0)
    return [vectors, neighbours, boosting]


def test_files_of_skops_pass_the_checks_of_arrays():
    """Version 0.1 wrote files of skops, which are read still."""
    for estimator in broken_estimators():
        name = type(estimator).__name__
        file = skops_files.dump(estimator)
        files.check(file, {name}, 4)
        with pytest.raises(InvalidContent):
            files.load(file)
        inner = {"arrays": [["|u1", [len(file)], "C"]], "estimator": {"k": 0}}
        with pytest.raises(InvalidContent, match="not a Gauss"):
            files.check(whole(inner, file), {name}, 4)
    for described_so in NESTED[:4]:
        estimator, name = fitted(described_so)
        file = skops_files.dump(estimator)
        files.check(file, {name}, 4)
        assert np.array_equal(files.load(file).predict(ROWS), estimator.predict(ROWS))


def test_files_of_skops_have_no_estimators_that_arrays_describe():
    process = GaussianProcessClassifier().fit(ROWS, KINDS)
    process.base_estimator_.estimators_[0] = broken_estimators()[0]
    process.base_estimator_.kernel = process.base_estimator_.estimators_[1].kernel_
    with pytest.raises(InvalidContent, match="described by arrays"):
        files.check(files.dump(process), allowed.NAMES, 4)


def test_boosting_with_more_trees_in_a_stage_than_classes_is_not_loaded():
    """Native code would add their values behind the end of an array."""
    estimator, name = fitted(NESTED[2])
    estimator.init_ = DecisionTreeClassifier(max_depth=1).fit(ROWS, KINDS > 0)
    file = files.dump(estimator)
    files.check(file, {name}, 4)
    with pytest.raises(InvalidContent, match="other trees in a stage"):
        files.load(file)


def test_boosting_starts_from_a_prediction_for_each_row():
    """Native code would write to rows that a vote of columns does not predict."""
    rows = ROWS[:, :1]
    boosting, name = fitted({"estimator": "GradientBoostingRegressor"})
    vote = VotingRegressor([("one", LinearRegression())]).fit(ROWS, KINDS)
    vote.estimators_ = [LinearRegression().fit(ROWS, rows)]
    boosting.init_ = vote
    with pytest.raises(InvalidContent, match="has a VotingRegressor as init_"):
        files.check(files.dump(boosting), {name}, 4)
    for init, why in (("VotingRegressor", "must be a tree"), ("Ridge", "")):
        one = {"estimator": name, "parameters": {"init": {"estimator": init}, "n_estimators": 2}}
        if why:
            with pytest.raises(ValueError, match=why):
                described.read(one)
            continue
        estimator, _ = fitted(one)
        file = files.dump(estimator)
        files.check(file, {name}, 4)
        assert np.array_equal(files.load(file).predict(ROWS), estimator.predict(ROWS))


def test_nodes_of_histogram_boosting_in_files_of_skops_are_checked():
    nodes = fitted(NESTED[3])[0]._predictors[0][0].nodes
    one = np.ones(1, np.int64)
    columns = node_tables.columns_of(nodes)
    node_tables.check(columns, one * len(nodes), one * 4, node_tables.PREDICTOR)
    for field, value in (("left", 10**6), ("right", 0), ("feature_idx", 4)):
        broken = nodes.copy()
        broken[field][0] = value
        with pytest.raises(InvalidContent):
            node_tables.check(
                node_tables.columns_of(broken), one * len(nodes), one * 4, node_tables.PREDICTOR
            )


def test_files_that_stand_for_far_more_than_they_hold_are_refused():
    """Lists of estimators have once what all have alike, also within each other."""
    file = files.dump(DummyClassifier().fit(ROWS, KINDS))
    nested = [1]
    for _ in range(3):
        nested = {"E": ["DummyClassifier", 200, {"z": nested}, {"i": list(range(200))}]}
    wide = {"E": ["DummyClassifier", 5000, {f"k{n}": 0 for n in range(5000)}, {"i": [0] * 5000}]}
    for value in (nested, wide):
        with pytest.raises(InvalidContent, match="repeats its values"):
            files.check(edited(file, attribute("z", value)), {"DummyClassifier"}, 4)
    array = np.zeros(1 << 17)
    dummy = DummyClassifier().fit(ROWS, KINDS)
    dummy.z = [array] * 300
    with pytest.raises(InvalidContent, match="repeats its arrays"):
        files.check(files.dump(dummy), {"DummyClassifier"}, 4)


def test_attributes_that_lead_around_the_checks_of_rows_are_refused():
    boosting, name = fitted(NESTED[3])
    function = {"e": ["FunctionTransformer", {"func": {"y": "<f8"}, "inverse_func": None}]}
    good = files.dump(boosting)
    for key, value, why in (
        ("_in_fit", True, "_in_fit"),
        ("_preprocessor", function, "_preprocessor"),
        ("x", function, "has a function"),
    ):
        with pytest.raises(InvalidContent, match=why):
            files.check(edited(good, attribute(key, value)), {name}, 4)
    for key in ("_preprocess_X", "predict", "classes", "_more_checks"):
        changed = edited(good, attribute(key, {"y": "<f8"}))
        files.check(changed, {name}, 4)
        if hasattr(type(boosting), key):
            with pytest.raises(InvalidContent, match="which its class has"):
                files.load(changed)
        else:
            files.load(changed)
    positive, name = fitted("LassoLars")  # a parameter that its class has, too
    files.load(files.dump(positive))


def test_gradient_boosting_of_far_too_many_columns_is_refused():
    """Gradient boosting predicts two rows of as many columns when it is loaded."""
    name = NESTED[2]["estimator"]
    outer = files.dump(DummyClassifier().fit(ROWS, KINDS))
    inner = {"n_features_in_": 10**12, "init_": "zero", "estimators_": []}
    with pytest.raises(InvalidContent, match="1000000000000 columns"):
        files.check(edited(outer, attribute("z", {"e": [name, inner]})), {"DummyClassifier"}, 4)


def test_nodes_are_checked_as_the_numbers_that_they_become():
    """A column has the type that the file says, and a field of a node has one of its own."""
    good = node_tables.predictor_table_of(fitted(NESTED[3])[0]._predictors[0])
    node_tables.check_predictor_table(good)
    ones = np.ones(len(good["left"]), np.int64)
    for field, wrong in (
        ("is_leaf", ones * 256),
        ("is_leaf", -ones),
        ("left", ones.astype(np.uint64) << np.uint64(63)),
    ):
        with pytest.raises(InvalidContent, match=field):
            node_tables.check_predictor_table({**good, field: wrong})
    for field, wrong in (("bin_threshold", ones * 256), ("count", ones << 40)):
        changed = {**good, field: wrong}
        node_tables.check_predictor_table(changed)
        with pytest.raises(InvalidContent, match="do not fit"):
            node_tables.predictors_of(changed)


def mutated(seed: int, num_files: int) -> dict[str, int]:
    """Load and use files with changed bytes, of which each is refused or predicts."""
    chance = random.Random(seed)
    chosen = NESTED[:6]
    made = [(files.dump(fitted(one)[0]), fitted(one)[1]) for one in chosen]
    outcomes = {"refused": 0, "predicted": 0, "cannot": 0}
    for _ in range(num_files):
        file, name = chance.choice(made)
        changed = bytearray(file)
        for _ in range(chance.choice((1, 2, 8))):
            changed[chance.randrange(len(changed))] = chance.choice((0, 1, 2, 127, 255))
        try:
            files.check(bytes(changed), {name}, 4)
            loaded = files.load(bytes(changed))
        except InvalidContent:
            outcomes["refused"] += 1
            continue
        try:
            getattr(loaded, "predict_proba", loaded.predict)(ROWS)
            outcomes["predicted"] += 1
        except Exception:  # a wrong attribute may lead to any error of Python's
            outcomes["cannot"] += 1
    return outcomes


def test_changed_bytes_never_end_the_process():
    """scikit-learn's native code follows nodes without a check of its own."""
    code = """
import json
from unit.workloads.test_estimator_files import mutated
print(json.dumps(mutated(7, 600)))
"""
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        env={"PYTHONPATH": "tests", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    outcomes = json.loads(ran.stdout)
    assert outcomes["refused"] > 50
    assert outcomes["predicted"] > 50
