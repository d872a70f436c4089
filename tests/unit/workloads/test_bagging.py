"""Bagging: bootstraps, votes against numpy, out-of-bag scores against scikit-learn, frames."""

import ast
import io
import json
import subprocess
import sys
import zipfile
from dataclasses import replace
from hashlib import sha256
from typing import Any

import numpy as np
import pytest
import skops.io
from sklearn.ensemble import BaggingClassifier, BaggingRegressor
from sklearn.preprocessing import FunctionTransformer
from sklearn.tree import DecisionTreeClassifier, DecisionTreeRegressor

from support.logs import capture_logs
from xain_workloads.ensembles import bagging, ensembles
from xain_workloads.ensembles.bagging import LoadedEstimators, oob_score, seed_of
from xain_workloads.ensembles.bagging_options import BaggingOptions
from xain_workloads.ensembles.ensembles import Frame, check_update, pack, unpack
from xain_workloads.ensembles.estimators import files, skops_files
from xain_workloads.ensembles.estimators.files import dump
from xain_workloads.ensembles.held import (
    Holding,
    check_holding,
    digest_of,
    pack_holdings,
    unpack_holdings,
)
from xain_workloads.ensembles.stacking import Stack, next_model
from xain_workloads.errors import DataError, InvalidContent
from xain_workloads.model import Model
from xain_workloads.tables.data import load
from xain_workloads.tables.dataset import Dataset
from xain_workloads.workload import create, initial_model

TREES = {"parameters": {"max_depth": 4}, "estimators": 3, "publish": True, "vote": "soft"}
SITES = ("east", "north", "west")


def flowers() -> Dataset:
    """Three classes with names."""
    data = load("iris")
    return Dataset(data.features, np.char.add("kind ", data.target.astype(np.str_)))


def update(
    data: Dataset,
    site: str = "east",
    whole: Dataset | None = None,
    epoch_base: int = 0,
    **given: Any,
) -> tuple[Model, bytes]:
    """The empty model of all data, and what a site sends of its own."""
    workload = create("bagging", {**TREES, **given})
    model = workload.initial_model([(whole or data).profile()])
    result = workload.train(model, data, epochs=1, epoch_base=epoch_base, seed=seed_of(0, site))
    return model, result.vector.tobytes()


def ensemble(whole: Dataset, parts: list[Dataset], **given: Any) -> Model:
    """The model of one round of sites with these parts."""
    updates = []
    for site, part in zip(SITES, parts, strict=False):
        model, data = update(part, site, whole, **given)
        updates.append((site, data, part.num_samples))
    joined = next_model(Stack.parse(model.vector.tobytes()), updates, model.metadata)
    return replace(model, vector=np.frombuffer(joined, np.uint8))


def members(model: Model) -> list[tuple[float, Any]]:
    """Weight and estimator of each frame."""
    return [(frame.weight, files.load(frame.file)) for frame in unpack(model.vector.tobytes())]


def by_class(data: Dataset) -> list[Dataset]:
    """Two sites, each of which lacks a class, and one with a single class."""
    names = sorted(set(data.target.tolist()))
    masks = [np.isin(data.target, [names[0], names[1]]), data.target == names[2]]
    third = np.isin(data.target, [names[1], names[2]])
    third[::2] = False
    return [data.subset(np.flatnonzero(mask)) for mask in (*masks, third)]


# --- bootstraps ---


@pytest.fixture
def data() -> Dataset:
    return flowers()


def test_sites_with_equal_rows_fit_different_estimators(data):
    east, west = (unpack(update(data, site)[1]) for site in ("east", "west"))
    again = unpack(update(data, "east", epoch_base=1)[1])
    files = {frame.file for frame in (*east, *west, *again)}
    assert len(files) == 9
    assert len({frame.file for frame in unpack(update(data, seed=1)[1])} | files) == 12


def test_an_array_is_read_again_when_another_thread_parses(monkeypatch):
    """See python/cpython#106905."""
    file = io.BytesIO()
    np.save(file, np.arange(3.0))
    errors = [SystemError("AST constructor recursion depth mismatch")]

    def parse(text, parse=ast.literal_eval):
        if errors:
            raise errors.pop()
        return parse(text)

    monkeypatch.setattr(ast, "literal_eval", parse)
    assert (skops_files._array("0.npy", file.getvalue()) == np.arange(3.0)).all()
    assert not errors


def digests() -> list[str]:
    """SHA-256 of updates with two kinds of trees."""
    names = ("DecisionTreeClassifier", "HistGradientBoostingClassifier")
    return [
        sha256(update(flowers(), estimator=name, parameters={"max_depth": 2})[1]).hexdigest()
        for name in names
    ]


def test_same_inputs_give_the_same_bytes_in_another_process():
    code = "from unit.workloads.test_bagging import digests; print(*digests())"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        env={"PYTHONPATH": "tests", "PYTHONHASHSEED": "1", "OMP_NUM_THREADS": "1"},
        check=True,
        capture_output=True,
        text=True,
    )
    assert done.stdout.split() == digests()
    assert len(set(digests())) == 2


# --- out of bag ---


@pytest.mark.parametrize("task", ["classification", "regression"])
def test_oob_score_is_that_of_scikit_learn(task):
    """With so many estimators each row is out of some bootstrap."""
    is_classes = task == "classification"
    data = load("wine") if is_classes else load("diabetes", task="regression")
    target = np.unique(data.target, return_inverse=True)[1] if is_classes else data.target
    kind = BaggingClassifier if is_classes else BaggingRegressor
    tree = DecisionTreeClassifier if is_classes else DecisionTreeRegressor
    bag = kind(tree(max_depth=3), n_estimators=60, oob_score=True, random_state=0)
    bag.fit(data.features, target)
    found = oob_score(
        bag.estimators_, bag.estimators_samples_, data.features, target, 3 if is_classes else 0
    )
    assert found == pytest.approx(bag.oob_score_, abs=1e-12)


def test_training_reports_the_oob_score():
    data = load("wine")
    workload = create("bagging", {**TREES, "estimators": 20})
    model = workload.initial_model([data.profile()])
    result = workload.train(model, data, epochs=1, epoch_base=0, seed=0)
    assert 0.85 < result.metrics["oob_score"] <= 1
    one_row = data.subset([0])
    assert workload.train(model, one_row, epochs=1, epoch_base=0, seed=0).metrics == {}


def test_rows_out_of_a_bootstrap_are_of_other_groups():
    """Visits of a patient are alike and their label is by chance: a model that knows other visits
    predicts it, and one that is measured on other patients cannot."""
    chance = np.random.RandomState(0)
    patients = np.repeat(np.arange(100), 6)
    features = chance.normal(size=(100, 4))[patients] + 1e-3 * chance.normal(size=(600, 4))
    data = Dataset(features, chance.choice(["a", "b"], 100)[patients])
    scores = {}
    for kind, groups in (("rows", None), ("groups", patients.astype(np.uint64))):
        one = replace(data, groups=groups)
        workload = create("bagging", {"estimator": "DecisionTreeClassifier", "estimators": 20})
        model = workload.initial_model([one.profile()])
        result = workload.train(model, one, epochs=1, epoch_base=0, seed=0)
        scores[kind] = result.metrics["oob_score"]
    assert scores["rows"] > 0.9
    assert scores["groups"] < 0.65


@pytest.mark.parametrize(
    ("grouped", "given", "expected"),
    [(True, {}, False), (False, {}, "auto"), (True, {"early_stopping": True}, True)],
)
def test_estimators_of_rows_with_groups_stop_early_only_where_it_is_set(
    grouped, given, expected, monkeypatch
):
    """Early stopping would divide the rows of a patient."""
    rows = flowers()
    groups = np.arange(rows.num_samples, dtype=np.uint64) // 3 if grouped else None
    kept = []

    def kept_and_dumped(estimator):
        kept.append(estimator)
        return dump(estimator)

    monkeypatch.setattr(bagging, "dump", kept_and_dumped)
    update(
        replace(rows, groups=groups),
        estimator="HistGradientBoostingClassifier",
        parameters={"max_iter": 2, **given},
        estimators=1,
    )
    (estimator,) = kept
    assert estimator.early_stopping == expected


# --- votes ---


@pytest.mark.parametrize("vote", ["soft", "hard"])
def test_votes_of_sites_with_missing_classes_are_those_of_numpy(vote, data):
    """String labels; one site knows a single class. Votes weigh as many rows as the site has."""
    model = ensemble(data, by_class(data), vote=vote)
    names = sorted(set(data.target.tolist()))
    votes = np.zeros((data.num_samples, 3))
    for weight, estimator in members(model):
        probabilities = estimator.predict_proba(data.features)
        if vote == "hard":
            probabilities = np.eye(probabilities.shape[1])[probabilities.argmax(axis=1)]
        votes[:, estimator.classes_.astype(int)] += weight * probabilities
    expected = np.array(names)[votes.argmax(axis=1)]
    workload = create("bagging", json.loads(model.metadata["options"]))
    assert workload.predict(model, data.features).tolist() == expected.tolist()
    assert {len(estimator.classes_) for _, estimator in members(model)} == {1, 2}
    measured = workload.measure(model, data).metrics
    assert measured["accuracy"] == np.mean(expected == data.target)
    if vote == "soft":
        votes /= votes.sum(axis=1, keepdims=True)
        of_target = votes[np.arange(len(votes)), np.searchsorted(names, data.target)]
        assert measured["loss"] == pytest.approx(-np.log(np.maximum(of_target, 1e-15)).mean())


def test_regression_takes_the_weighted_mean():
    data = load("diabetes", task="regression")
    parts = [data.subset(rows) for rows in np.array_split(np.arange(data.num_samples), [100, 150])]
    model = ensemble(data, parts, estimator="DecisionTreeRegressor")
    weights, estimators = zip(*members(model), strict=True)
    expected = np.average([e.predict(data.features) for e in estimators], axis=0, weights=weights)
    workload = create("bagging", json.loads(model.metadata["options"]))
    assert np.allclose(workload.predict(model, data.features), expected)
    assert workload.measure(model, data).metrics["r2"] > 0.4


def test_empty_ensemble_is_measured_and_predicts_nothing(data):
    workload = create("bagging", TREES)
    model = initial_model(workload, [data.profile()])
    assert workload.measure(model, data).metrics["loss"] == pytest.approx(np.log(3))
    with pytest.raises(ValueError, match="no estimators before the first round"):
        workload.predict(model, data.features)


# --- options ---


def test_rows_that_an_estimator_cannot_be_fitted_on_are_an_error_of_the_data():
    data = load("iris")
    negative = Dataset(data.features - 10, data.target)
    with pytest.raises(DataError, match="MultinomialNB cannot be fitted"):
        update(negative, estimator="MultinomialNB", parameters={})


# --- hostile bytes ---


def rewritten(file: bytes, change: Any = None, compress: int = zipfile.ZIP_STORED) -> bytes:
    """A file of skops whose members were changed."""
    with zipfile.ZipFile(io.BytesIO(file)) as archive:
        content = {name: archive.read(name) for name in archive.namelist()}
    if change is not None:
        change(content)
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", compress) as archive:
        for name, data in content.items():
            archive.writestr(name, data)
    return out.getvalue()


def edit_nodes(field: str, value: int) -> Any:
    def change(content: dict[str, bytes]) -> None:
        for name in content:
            if name.endswith(".npy"):
                array = np.load(io.BytesIO(content[name]), allow_pickle=False)
                if array.dtype.names:
                    array[field][0] = value
                    out = io.BytesIO()
                    np.save(out, array)
                    content[name] = out.getvalue()

    return change


def edit_schema(old: str, new: str) -> Any:
    def change(content: dict[str, bytes]) -> None:
        text = content["schema.json"].decode()
        assert old in text
        content["schema.json"] = text.replace(old, new).encode()

    return change


def announce_many(content: dict[str, bytes]) -> None:
    name = next(name for name in content if name.endswith(".npy"))
    out = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        out, {"descr": "<f8", "fortran_order": False, "shape": (1 << 40,)}
    )
    content[name] = out.getvalue()


def test_hostile_files_are_refused_before_they_are_loaded(data):
    options = BaggingOptions(parameters={"max_depth": 4}, publish=True)
    _, sent = update(data)
    good = skops_files.dump(files.load(unpack(sent)[0].file))  # as of earlier versions
    ensembles.check_file(good, options, 4)
    other = skops.io.dumps(DecisionTreeRegressor().fit(data.features, np.arange(150.0)))
    function = skops.io.dumps(FunctionTransformer(np.log1p))
    no_schema = rewritten(good, lambda content: content.pop("schema.json"))
    for file, why in (
        (b"", "not of skops"),
        (b"PK\x03\x04 and so on", "not of skops"),
        (good[:-40], "not of skops"),
        (rewritten(good, compress=zipfile.ZIP_DEFLATED), "is compressed"),
        (no_schema, "has no schema"),
        (rewritten(good, lambda c: c.update({"x.py": b"1"})), "neither a schema nor an array"),
        (rewritten(good, lambda c: c.update({"schema.json": b"["})), "not JSON"),
        (rewritten(good, lambda c: c.update({"schema.json": b"[" * 10**6})), "not JSON"),
        (other, "is a sklearn.tree._classes.DecisionTreeRegressor, not a Dec"),
        (function, "not a DecisionTreeClassifier"),
        (rewritten(good, edit_schema('"Tree"', '"system"')), "not trusted"),
        (rewritten(good, edit_schema('"sklearn.tree._tree"', '"os"')), "not trusted"),
        (rewritten(good, edit_schema('"TreeNode"', '"FunctionNode"')), "has a FunctionNode"),
        (rewritten(good, edit_schema('"TreeNode"', '"MethodNode"')), "has a MethodNode"),
        (rewritten(good, announce_many), "another size than its header says"),
        (rewritten(good, edit_nodes("left_child", 10**6)), "left_child is none of the tree's"),
        (rewritten(good, edit_nodes("right_child", 0)), "right_child is none of the tree's"),
        (rewritten(good, edit_nodes("feature", 4)), "splits none of the columns"),
    ):
        with pytest.raises(InvalidContent, match=why):
            ensembles.load(file, options, 4)


def test_site_is_warned_before_its_rows_are_published():
    nested = {"pipeline": ["PCA", "KNeighborsClassifier"]}
    for estimator, publish, expected in (
        (nested, True, [["KNeighborsClassifier"]]),
        (nested, False, []),
        ("GaussianNB", True, []),
    ):
        with capture_logs() as entries:
            update(flowers(), estimator=estimator, parameters={}, publish=publish)
        told = [one["estimators"] for one in entries if one["event"] == "rows_are_published"]
        assert told == expected


def test_estimators_with_classes_that_the_model_lacks_are_refused(data):
    model = ensemble(data, [data])
    for target in (np.arange(150) % 5, np.char.add("kind ", (np.arange(150) % 3).astype(str))):
        file = files.dump(DecisionTreeClassifier().fit(data.features, target))
        broken = replace(model, vector=np.frombuffer(pack([Frame(1, file)]), np.uint8))
        workload = create("bagging", json.loads(model.metadata["options"]))
        with pytest.raises(ValueError, match=r"estimator .*has the classes"):
            workload.predict(broken, data.features)


def test_wrong_frames_are_refused(data):
    _, sent = update(data)
    options = BaggingOptions(parameters={"max_depth": 4}, estimators=3, publish=True)
    check_update(sent, options, 4)
    frames = unpack(sent)
    for wrong, why in (
        (b"", "no ensemble"),
        (b"{}", "no ensemble"),
        (sent[:-1], "ends within frame 2 of 3"),
        (sent + b"x", "1 bytes follow"),
        (sent[:8] + b"\xff\xff\xff\xff" + sent[12:], "ends within frame"),
        (pack(frames[:2]), "has 2 estimators, a round adds 3"),
        (pack([]), "has 0 estimators"),
        (pack([*frames[:2], Frame(1, b"hello")]), "estimator 2: the file is not of skops"),
    ):
        with pytest.raises(InvalidContent, match=why):
            check_update(wrong, options, 4)


@pytest.mark.parametrize("vote", ["soft", "hard"])
def test_ensembles_of_version_0_1_are_read_and_go_on_by_plain_votes(vote, data):
    """Frames of 0.1 have no owner and no number, without which no linear model can be trained."""
    model, sent = update(data, vote=vote)
    whole = next_model(Stack.parse(model.vector.tobytes()), [("east", sent, 150)], model.metadata)
    old = b"XENSEMB1" + len(unpack(whole)).to_bytes(4, "little")
    for frame in unpack(whole):
        head = np.array([frame.weight, len(frame.file)], "<u8")
        old += head.tobytes() + frame.file
    now, before = (replace(model, vector=np.frombuffer(one, np.uint8)) for one in (whole, old))
    workload = create("bagging", json.loads(model.metadata["options"]))
    predicted = workload.predict(before, data.features)
    assert np.array_equal(predicted, workload.predict(now, data.features))
    after = next_model(Stack.parse(old), [("east", sent, 150)], model.metadata)
    assert len(unpack(after)) == 6
    stacked = {**json.loads(model.metadata["options"]), "vote": "stacked"}
    metadata = {**model.metadata, "options": json.dumps(stacked)}
    with pytest.raises(InvalidContent, match=r"estimators of version 0\.1"):
        next_model(Stack.parse(old), [("east", sent, 150)], metadata)


# --- estimators that stay at the participants ---


def held(data: Dataset, parts: list[Dataset], **given: Any) -> tuple[Model, list[bytes]]:
    """The model of one round of sites that keep their estimators, and what each one keeps."""
    workload = create("bagging", {**TREES, **given, "publish": False})
    model = workload.initial_model([data.profile()])
    updates, kept = [], []
    empty = replace(model, vector=np.empty(0, np.uint8))  # a participant need not download it
    for site, part in zip(SITES, parts, strict=False):
        result = workload.train(empty, part, epochs=1, epoch_base=0, seed=seed_of(0, site))
        updates.append((site, result.vector.tobytes(), part.num_samples))
        kept.append(result.kept)
    listed = next_model(Stack.parse(model.vector.tobytes()), updates, model.metadata)
    return replace(model, vector=np.frombuffer(listed, np.uint8)), kept


@pytest.mark.parametrize("vote", ["soft", "hard"])
def test_votes_of_kept_estimators_are_those_of_the_published_ensemble(vote, data):
    """One site knows a single class. Weights are as in the published ensemble."""
    parts = by_class(data)
    published = ensemble(data, parts, vote=vote)
    model, kept = held(data, parts, vote=vote)
    holdings = unpack_holdings(model.vector.tobytes())
    assert [one.participant for one in holdings] == list(SITES)
    assert [one.digest for one in holdings] == [digest_of(frames) for frames in kept]
    loaded = [LoadedEstimators(frames, model.metadata) for frames in kept]
    total = sum(
        one.rows * site.sum_of_votes(data.features)
        for one, site in zip(holdings, loaded, strict=True)
    )
    names = np.array(sorted(set(data.target.tolist())))
    workload = create("bagging", {**TREES, "vote": vote})
    expected = workload.predict(published, data.features)
    assert names[np.argmax(total, axis=1)].tolist() == expected.tolist()


def test_list_of_estimators_of_version_0_1_is_read():
    known = [Holding(3, "ab" * 16, "east", 7)]
    text = pack_holdings(known)[12:]
    assert unpack_holdings(b"XENHELD1" + text) == known


def test_list_of_estimators_says_why_it_cannot_predict(data):
    model, _ = held(data, by_class(data))
    workload = create("bagging", TREES | {"publish": False})
    for call in (workload.predict, workload.to_sklearn, workload.measure):
        given = {workload.predict: (data.features,), workload.measure: (data,)}.get(call, ())
        with pytest.raises(ValueError, match="the fitted estimators stay at the participants"):
            call(model, *given)


def listing(text: bytes) -> bytes:
    """A list of estimators with this text."""
    return b"XENHELD2" + len(text).to_bytes(4, "little") + text


@pytest.mark.parametrize(
    ("update", "why"),
    [
        (pack([]), "no list of estimators"),
        (listing(b"{"), "cannot be read"),
        (listing(b"[" * 1000), "cannot be read"),
        (listing(b"[]"), "names 0 trainings"),
        (listing(b"[]")[:-1], "is cut off"),
        (listing(b"[]") + b"x", "1 bytes follow"),
        (listing(b'[{"estimators":3,"digest":"aa"}]'), r"\.digest"),
        (listing(b'[{"estimators":-3,"digest":"aa"}]'), r"\.estimators"),
        (listing(b'[{"estimators":3,"digest":"aa","code":"x"}]'), "cannot be read"),
        (pack_holdings([Holding(2, 32 * "a")]), "names 2 estimators, a round adds 3"),
        (pack_holdings(20 * [Holding(3, 32 * "a")]), "takes 1024 at most"),
    ],
)
def test_wrong_lists_of_estimators_are_refused(update, why):
    with pytest.raises(InvalidContent, match=why):
        check_holding(update, 3)
