"""Requests for a fit change the configuration of the coordinator."""

import pytest

from xain_coordinator.config.coordinator import CoordinatorConfig
from xain_coordinator.http_face.bodies import FitRequest
from xain_coordinator.http_face.fits import changed
from xain_foundation.settings.settings import load

TREES = {"workload.name": "xgboost", "aggregation.options.mode": "bagging"}


@pytest.mark.parametrize(
    ("request_", "rule", "options"),
    [
        ({}, "trees", {"mode": "bagging"}),
        ({"workload": {"options": {"eta": 0.1}}}, "trees", {"mode": "bagging"}),
        ({"workload": {"name": "sgd"}}, "weighted_average", {}),
        ({"workload": {"name": "sgd", "options": {"mode": "gradient"}}}, "gradient", {}),
        ({"workload": {"name": "sgd"}, "aggregation": {"rule": "median"}}, "median", {}),
        (
            {"workload": {"name": "sgd"}, "aggregation": {"optimizer": "fedavgm"}},
            "weighted_average",
            {},
        ),
        ({"aggregation": {"options": {"mode": "histogram"}}}, "trees", {"mode": "histogram"}),
    ],
)
def test_another_workload_brings_its_rule(request_, rule, options):
    """The rule and its options stay as long as the workload needs the same one."""
    config = load(CoordinatorConfig, overrides=TREES)
    fit = changed(config, FitRequest.model_validate(request_))
    assert fit.aggregation.rule == rule
    assert fit.aggregation.options == options


@pytest.mark.parametrize(
    ("request_", "rounds", "passes"),
    [
        ({}, 7, None),
        ({"passes": 3}, None, 3),
        ({"rounds": 4}, 4, None),
        ({"workload": {"options": {"alpha": 0.1}}}, 7, None),
    ],
)
def test_passes_of_a_request_replace_configured_rounds(request_, rounds, passes):
    config = load(CoordinatorConfig, overrides={"workload.name": "sgd", "rounds.rounds": 7})
    fit = changed(config, FitRequest.model_validate(request_))
    assert (fit.rounds.rounds, fit.rounds.passes) == (rounds, passes)


@pytest.mark.parametrize(
    ("request_", "rule", "optimizer"),
    [
        ({}, "gradient", "fedadam"),
        ({"passes": 30}, "gradient", "fedadam"),
        ({"workload": {"options": {"seed": 3}}}, "gradient", "fedadam"),
        ({"rounds": 5}, "weighted_average", ""),
        ({"workload": {"options": {"momentum": 0.5}}}, "weighted_average", ""),
        ({"workload": {"name": "sgd"}}, "weighted_average", ""),
        ({"aggregation": {"optimizer": "fedavgm"}}, "weighted_average", "fedavgm"),
        ({"aggregation": {"rule": "sum"}}, "sum", ""),
    ],
)
def test_request_for_local_training_has_a_network_averaged(request_, rule, optimizer):
    """A choice that the workload made for the configuration is made anew for the request."""
    config = load(CoordinatorConfig, overrides={"workload.name": "mlp"})
    fit = changed(config, FitRequest.model_validate(request_))
    assert (fit.aggregation.rule, fit.aggregation.optimizer) == (rule, optimizer)
    assert ("mode" in fit.workload.options) == (rule == "gradient")


@pytest.mark.parametrize(
    ("request_", "remedy"),
    [
        ({"workload": {"options": {"alpha": 0.1}}}, "scaffold"),
        ({"workload": {"options": {"remedy": "personal"}}}, "personal"),
        ({"workload": {"options": {"remedy": ""}}}, ""),
        ({"workload": {"name": "xgboost"}}, ""),
    ],
)
def test_remedy_is_an_option_of_a_request(request_, remedy):
    """Another workload begins without the remedy, as without all options."""
    settings = {"workload.name": "sgd", "workload.remedy": "scaffold"}
    config = load(CoordinatorConfig, overrides=settings)
    assert changed(config, FitRequest.model_validate(request_)).workload.remedy == remedy
