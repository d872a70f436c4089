"""A client that knows nothing but Chimera's REST contract, against both kinds of master."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.served import SGD, Served
from xain_workloads.tables.data import load

pytestmark = pytest.mark.frameworks

CANCER = load("breast_cancer")
ALONE: dict[str, object] = {**SGD, "rounds.min_participants": 1}
AGGREGATION, SERVER = "/v1/chimera/aggregation", "/v1/chimera/parameter-server"

BAGGING: dict[str, object] = {
    **SGD,
    "rounds.rounds": 1,
    "workload.name": "bagging",
    "workload.options.estimators": 3,
    "aggregation.rule": "ensemble",
    "predict.timeout_s": 3.0,
}


def body(features: Any = CANCER.features, names: Any = CANCER.feature_names) -> dict[str, Any]:
    return {
        "X_pred_columns": [f"{name.upper()} " for name in names],
        "X_pred_rows": [list(map(float, row)) for row in features],
    }


def envelope(answer: Any) -> tuple[int, str]:
    """(status, errorMessage) of an error in Chimera's envelope."""
    found = answer.json()
    assert set(found) == {"message", "details"}, found
    assert found["details"]["errorCode"] == answer.status_code
    return answer.status_code, found["details"]["errorMessage"]


@pytest.fixture
def served(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Served]:
    with Served(tmp_path / "http", request.param) as served:
        served.start()
        yield served


@pytest.mark.parametrize(
    "served",
    [BAGGING, {**BAGGING, "workload.options.publish": "true"}],
    ids=["held", "published"],
    indirect=True,
)
def test_aggregation_fits_and_predicts_the_probability_of_the_second_class(served):
    client = served.client
    assert envelope(client.post(f"{AGGREGATION}/predict", json=body())) == (409, "NotFittedError")
    served.join("north", "south", data="breast_cancer")
    answer = client.post(f"{AGGREGATION}/fit")
    assert (answer.status_code, answer.json()) == (200, {"fit": "ok"})
    answer = client.post(f"{AGGREGATION}/predict", json=body())
    assert answer.status_code == 200, answer.text
    assert set(answer.json()) == {"y_pred_rows"}
    probabilities = np.array(answer.json()["y_pred_rows"])
    classes = sorted(set(CANCER.target.tolist()))
    assert np.mean((probabilities > 0.5) == (CANCER.target == classes[1])) > 0.93
    own = {"columns": body()["X_pred_columns"], "rows": body()["X_pred_rows"]}
    more = client.post("/v1/predict", json={**own, "probabilities": True}).json()
    np.testing.assert_allclose([row[1] for row in more["probabilities"]], probabilities)
    assert envelope(client.post(f"{SERVER}/predict", json=body())) == (409, "OtherWorkload")
    assert envelope(client.post(f"{SERVER}/fit")) == (409, "OtherWorkload")
    wrong = body(CANCER.features[:, :3], CANCER.feature_names[:3])
    assert envelope(client.post(f"{AGGREGATION}/predict", json=wrong)) == (422, "MissingColumn")
    malformed = client.post(f"{AGGREGATION}/predict", json={"X_pred_rows": [[1]]})
    assert envelope(malformed) == (422, "RequestValidationError")
    served.kill("south")
    one = client.post("/v1/predict", json=own).json()
    if served.settings.get("workload.options.publish"):
        assert (one["answered"], one["missing"]) == ([], {}), "nobody is asked"
        return
    assert (more["answered"], more["missing"]) == (["north", "south"], {})
    assert (one["answered"], set(one["missing"])) == (["north"], {"south"})
    served.kill("north")
    answer = client.post(f"{AGGREGATION}/predict", json=body())
    assert envelope(answer) == (503, "ResponseException"), "nobody is left"


@pytest.mark.parametrize(
    "served",
    [
        ALONE,
        {
            **ALONE,
            "rounds.rounds": 60,
            "workload.options.mode": "gradient",
            "aggregation.rule": "gradient",
            "aggregation.options.eta0": 1.0,
        },
    ],
    ids=["federated", "gradient"],
    indirect=True,
)
def test_parameter_server_fits_and_predicts_labels(served):
    client = served.client
    assert envelope(client.post(f"{SERVER}/predict", json=body())) == (409, "NotFittedError")
    served.join("north", data="breast_cancer")
    answer = client.post(f"{SERVER}/fit")
    assert (answer.status_code, answer.json()) == (200, {"fit": "ok"})
    answer = client.post(f"{SERVER}/predict", json=body())
    assert answer.status_code == 200, answer.text
    labels = np.array(answer.json()["y_pred_rows"])
    assert np.mean(labels == CANCER.target) > 0.9
    assert envelope(client.post(f"{AGGREGATION}/fit")) == (409, "OtherWorkload")


@pytest.mark.parametrize(
    "served",
    [{**ALONE, "workload.options.task": "regression", "rounds.rounds": 5}],
    indirect=True,
)
def test_parameter_server_predicts_numbers(served):
    diabetes = load("diabetes", task="regression")
    served.join("north", data="diabetes", task="regression")
    assert served.client.post(f"{SERVER}/fit").json() == {"fit": "ok"}
    rows = body(diabetes.features, diabetes.feature_names)
    predicted = np.array(served.client.post(f"{SERVER}/predict", json=rows).json()["y_pred_rows"])
    assert np.corrcoef(predicted, diabetes.target)[0, 1] > 0.6
