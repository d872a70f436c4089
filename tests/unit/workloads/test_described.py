"""Descriptions of pipelines and of nested estimators."""

from typing import Any

import numpy as np
import pytest

from unit.workloads.test_bagging import ensemble, flowers
from xain_workloads.ensembles.bagging_options import BaggingOptions
from xain_workloads.ensembles.estimators import described, files, skops_files
from xain_workloads.ensembles.stacking import Stack
from xain_workloads.exported import formats
from xain_workloads.tables.dataset import Dataset
from xain_workloads.workload import create, predict

FOREST: dict[str, Any] = {"estimator": "RandomForestClassifier", "parameters": {"n_estimators": 7}}
STACKED: dict[str, Any] = {
    "estimator": "StackingClassifier",
    "parameters": {
        "estimators": [
            FOREST,
            {"pipeline": ["StandardScaler", "PCA", "SVC"]},
            "GaussianNB",
            FOREST,
        ],
        "final_estimator": "LogisticRegression",
    },
}


def test_description_makes_what_it_names():
    made = described.read(STACKED).make(5)
    assert [name for name, _ in made.estimators] == [
        "randomforestclassifier-1",
        "pipeline",
        "gaussiannb",
        "randomforestclassifier-4",
    ]
    assert [name for name, _ in made.estimators[1][1].steps] == ["standardscaler", "pca", "svc"]
    assert made.estimators[0][1].n_estimators == 7
    states = {k: v for k, v in made.get_params().items() if k.endswith("random_state")}
    assert len(states) == 5
    assert set(states.values()) == {5}


@pytest.mark.parametrize(
    ("estimator", "why"),
    [
        ("os.system", "estimator is 'os.system'; choose one of"),
        ({"estimator": "Pipeline"}, "estimator is 'Pipeline'; choose one of"),
        ({"estimator": "_BinMapper"}, "choose one of"),
        ({"pipeline": []}, "must be a list of descriptions"),
        ({"pipeline": ["PCA", "Popen"]}, "estimator is 'Popen'; choose one of"),
        ({"pipeline": ["SVC", "PCA"]}, "SVC is no transformer"),
        ({"pipeline": ["SVC", "SVC"]}, "SVC is no transformer"),
        ({"pipeline": [{"estimator": "PCA", "parameters": {"n": 2}}, "SVC"]}, "do not fit PCA"),
        ({"pipelines": ["PCA"]}, "describes no estimator; a name, {estimator"),
        ({"estimator": "SVC", "code": "x"}, "describes no estimator"),
        ({"estimator": "SVC", "parameters": 3}, "must be a table"),
        ({"estimator": "SVC", "parameters": {"random_state": 3}}, "set the option seed"),
        ({"estimator": "StackingRegressor"}, "StackingRegressor needs the parameter 'estimators'"),
        (
            {"estimator": "CalibratedClassifierCV", "parameters": {"estimator": "Ridge"}},
            "Ridge is made for regression, CalibratedClassifierCV for classification",
        ),
        (
            {"pipeline": [{"estimator": "SelectKBest", "parameters": {"score_func": "os"}}, "SVC"]},
            "score_func is 'os'; choose one of: chi2",
        ),
        ("IsotonicRegression", "IsotonicRegression cannot be fitted: it takes one column"),
    ],
)
def test_wrong_descriptions_are_named(estimator, why):
    with pytest.raises(ValueError, match=why):
        BaggingOptions(estimator)


def test_descriptions_have_a_depth():
    nested = "LogisticRegression"
    for _ in range(described.MAX_DEPTH + 1):
        nested = {"pipeline": [nested]}
    with pytest.raises(ValueError, match="nested deeper than 8"):
        BaggingOptions(nested)


def test_parameters_stand_within_a_description():
    with pytest.raises(ValueError, match="parameters stand within the description"):
        BaggingOptions({"pipeline": ["PCA", "SVC"]}, {"C": 2.0})


@pytest.mark.parametrize("vote", ["soft", "stacked"])
def test_pipelines_and_stacked_estimators_are_weak_learners(vote):
    """All sites' votes predict; the second site has one class, which is fitted all the same."""
    data = flowers()
    halves = [data.subset(range(0, 150, 2)), data.subset(range(50))]
    for estimator in ({"pipeline": ["PCA", FOREST]}, STACKED):
        given = {"estimator": estimator, "parameters": {}, "estimators": 2, "vote": vote}
        model = ensemble(data, halves, **given)
        workload = create("bagging", {**given, "publish": True})
        assert workload.measure(model, data).metrics["accuracy"] > 0.8


def test_exported_ensembles_hold_each_estimator_once(tmp_path):
    """A file of nested estimators is read again, and is no multiple of their own files."""
    data = flowers()
    best = {"estimator": "SelectKBest", "parameters": {"k": 2}}
    calibrated = {"estimator": "CalibratedClassifierCV", "parameters": {"estimator": FOREST}}
    for estimator in ({"pipeline": [best, FOREST]}, calibrated):
        given = {"estimator": estimator, "parameters": {}, "vote": "stacked"}
        model = ensemble(data, [data, data], **given)
        path = tmp_path / "model.skops"
        formats.write(path, model, {})
        read = formats.read(path).pipeline
        assert read.predict(data.features).tolist() == predict(model, data).tolist()
        frames = Stack.parse(model.vector.tobytes()).frames
        alone = sum(len(skops_files.dump(files.load(frame.file))) for frame in frames)
        assert path.stat().st_size < 2 * alone


def test_weights_of_rows_reach_the_last_step():
    rows, target = np.array([[0.0], [1.0]] * 10), np.array([0, 1] * 10)
    for estimator in (
        {"pipeline": ["StandardScaler", "LogisticRegression"]},
        {
            "estimator": "VotingClassifier",
            "parameters": {"estimators": ["LogisticRegression"], "voting": "soft"},
        },
    ):
        BaggingOptions(estimator, class_weight="balanced")
        plain, weighted = described.read(estimator).make(), described.read(estimator).make()
        described.fit(plain, rows, target)
        described.fit(weighted, rows, target, np.where(target, 9.0, 1.0))
        assert (weighted.predict_proba(rows) > plain.predict_proba(rows))[:, 1].all()
    for estimator in (
        {"pipeline": ["PCA", "KNeighborsClassifier"]},
        {"estimator": "VotingClassifier", "parameters": {"estimators": ["KNeighborsClassifier"]}},
    ):
        with pytest.raises(ValueError, match="takes no weights of rows"):
            BaggingOptions(estimator, class_weight="balanced")


def test_estimator_of_two_classes_is_refused_for_more_before_it_is_fitted():
    fixed = {"estimator": "FixedThresholdClassifier", "parameters": {"estimator": "SVC"}}
    with pytest.raises(ValueError, match="is made for two classes, and there are 3"):
        create("bagging", {"estimator": fixed}).initial_model([flowers().profile()])
    pairs = {"estimator": "OneVsOneClassifier", "parameters": {"estimator": fixed}}
    create("bagging", {"estimator": pairs}).initial_model([flowers().profile()])


def test_early_stopping_of_one_estimator_decides_for_no_other():
    """Two of one class, of which one says that it stops early."""
    data = flowers()
    grouped = Dataset(data.features, data.target, groups=np.arange(150, dtype=np.uint64) // 3)
    both = [
        {"estimator": "HistGradientBoostingClassifier", "parameters": {"max_iter": 2, **own}}
        for own in ({"early_stopping": True}, {})
    ]
    for estimators in (both, both[::-1]):
        voting = {"estimator": "VotingClassifier", "parameters": {"estimators": estimators}}
        made = create("bagging", {"estimator": voting})._fitted(
            grouped, data.features, np.arange(150) // 50, np.random.default_rng(0), None
        )
        early = [one.early_stopping for one in made.estimators_]
        assert early == ["early_stopping" in one["parameters"] for one in estimators]
