"""Errors of the HTTP face."""

import re

import pytest

from xain_coordinator.config.coordinator import CoordinatorConfig
from xain_coordinator.core.vocabulary.errors import Reason, Refusal
from xain_coordinator.http_face import bodies, fits
from xain_coordinator.http_face.errors import KNOWN, HttpError, refuse
from xain_foundation.wheels import pip_install
from xain_workloads.errors import DataError


@pytest.mark.parametrize(
    ("error", "status", "code", "text"),
    [
        (Refusal(Reason.ALREADY_FITTING, "wait"), 409, "ALREADY_FITTING", "wait"),
        (DataError("row 3"), 422, "INVALID_DATA", "row 3"),
        (
            ModuleNotFoundError("No module named 'sklearn'", name="sklearn"),
            501,
            "MISSING_PACKAGE",
            f"the coordinator lacks sklearn: {pip_install('xain-coordinator', 'export')}",
        ),
    ],
)
def test_known_errors_have_a_status_and_a_code(error, status, code, text):
    assert isinstance(error, KNOWN)
    with pytest.raises(HttpError) as caught:
        refuse(error)
    assert (caught.value.status, caught.value.code, caught.value.message) == (status, code, text)


@pytest.mark.parametrize("options", [{"builder": "os:system"}, {"publish": True}])
def test_requests_cannot_choose_code_or_have_estimators_sent(options):
    """Participants obey these options, and no HTTP client may set them."""
    config = CoordinatorConfig()
    request = bodies.FitRequest.model_validate({"workload": {"options": options}})
    with pytest.raises(HttpError, match=f"workload.options.{next(iter(options))}: only") as caught:
        fits.changed(config, request)
    assert caught.value.code == "INVALID_SETTING"


@pytest.mark.parametrize(
    ("request_", "keys"),
    [
        (
            {
                "epochs": 2**31 - 1,
                "workload": {"name": "best"},
                "aggregation": {"rule": "sum", "optimizer": "best"},
            },
            ["rounds.epochs", "workload.name", "aggregation.optimizer"],
        ),
        (
            {
                "epochs": 5,
                "min_participants": 2**31 - 1,
                "aggregation": {"rule": "gradient", "optimizer": "best"},
            },
            ["rounds.min_participants", "aggregation.optimizer", "rounds.epochs"],
        ),
        ({"workload": {"options": {"a": 2**70}}}, ["workload.options"]),
    ],
)
def test_all_settings_that_a_request_makes_wrong_are_told(request_, keys):
    """A client mends them in one go: wrong values and conflicts, within sections and between."""
    with pytest.raises(HttpError) as caught:
        fits.changed(CoordinatorConfig(), bodies.FitRequest.model_validate(request_))
    assert re.findall(r"(?:^|; )([a-z_.]+): ", caught.value.message) == keys
    assert "Input should" not in caught.value.message, "words of pydantic"
