"""Wrong requests are refused by the keys of their JSON, in our words."""

import re
from typing import Any

import pytest
from pydantic import ValidationError

from xain_coordinator.http_face.bodies import ChimeraPredictRequest, FitRequest, PredictRequest
from xain_coordinator.http_face.wrong_requests import sentence

PREDICT: dict[str, Any] = {"columns": ["a"], "rows": [[1]], "model": "last", "probabilities": True}
FIT: dict[str, Any] = {
    "wait": True,
    "rounds": 1,
    "epochs": 1,
    "seed": 1,
    "min_participants": 1,
    "workload": {"name": "sgd", "options": {}},
    "aggregation": {"rule": "sum", "options": {"a": 1}, "optimizer": "x", "optimizer_options": {}},
}
CHIMERA: dict[str, Any] = {"X_pred_columns": ["a"], "X_pred_rows": [[1]]}
VALUES = (
    None,
    True,
    1,
    -1,
    2**70,
    1.5,
    float("nan"),
    "text",
    "",
    "x" * 20_000,
    [],
    [{}],
    {},
    {"b": []},
)
WORDS = re.compile("constrained|input|should|valid|list\\[|union|literal\\[|dict|/v1/docs")


def mutations(value: Any) -> Any:
    """(a body with one value replaced, the keys that lead to it) for each value within."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, item in items:
        others = dict(value) if isinstance(value, dict) else list(value)
        for wrong in VALUES:
            others[key] = wrong
            yield type(value)(others), [str(key)]
        if isinstance(item, dict | list):
            for inner, path in mutations(item):
                others[key] = inner
                yield type(value)(others), [str(key), *path]


@pytest.mark.parametrize(
    ("model", "body"),
    [(FitRequest, FIT), (PredictRequest, PREDICT), (ChimeraPredictRequest, CHIMERA)],
)
def test_wrong_value_is_named_by_its_keys(model, body):
    """A value of each type at each key of each body."""
    model.model_validate(body)
    num_refused = 0
    for wrong, path in mutations(body):
        try:
            model.model_validate(wrong)
        except ValidationError as error:
            errors = [{**each, "loc": ("body", *each["loc"])} for each in error.errors()]
            said = sentence(errors, wrong)
            named = said.removeprefix("body.").partition(":")[0]
            at = ".".join(path)  # or in what stands there
            assert at.startswith(named) or named in (f"{at}.b", f"{at}.0"), said
            assert re.match(r"[\w.]+: (it must be |there is no such key|rows? )", said), said
            assert not WORDS.search(said.partition(": ")[2]), said
            num_refused += 1
    assert num_refused > len(VALUES)


def test_unknown_and_missing_keys_are_named():
    with pytest.raises(ValidationError) as caught:
        PredictRequest.model_validate({"columns": ["a"], "more": 1})
    errors = [{**each, "loc": ("body", *each["loc"])} for each in caught.value.errors()]
    said = {sentence([error], {"columns": ["a"], "more": 1}) for error in errors}
    assert said == {"body.rows: it must be given", "body.more: there is no such key"}
