"""Which settings of a start are not those of the session."""

from dataclasses import fields, replace
from typing import Any

import pytest

from xain_coordinator.assembly.changed_rules import differences
from xain_coordinator.config.coordinator import CoordinatorConfig
from xain_coordinator.config.rule_keys import key_of, settings_of
from xain_coordinator.core.machine.session import Session
from xain_coordinator.core.vocabulary.values import Lineage, Rules
from xain_foundation.settings.schema import Schema


def config_of(**sections: dict[str, Any]) -> CoordinatorConfig:
    return CoordinatorConfig.model_validate(sections)


def trees_of(mode: str) -> dict[str, Any]:
    """Sections of a session of trees; "" for the default mode."""
    one_of_two = {"fraction_participants": "1/2", "max_participants": 2}
    return {
        "rounds": {"rounds": 10, "min_participants": 1, **one_of_two},
        "workload": {"name": "xgboost"},
        "aggregation": {"rule": "trees", "options": {"mode": mode} if mode else {}},
    }


def told(before: CoordinatorConfig, now: CoordinatorConfig, lineage: Lineage | None = None):
    session = Session("5e55104", before.rules(), lineage)
    return list(differences(session, now))


def test_session_of_the_default_of_earlier_versions_goes_on():
    """As many as the first round waits for could be connected, unless it was set."""
    now = config_of(rounds={"min_participants": 2})
    before = config_of(rounds={"min_participants": 2, "max_participants": 2})
    assert told(before, now) == []
    assert told(config_of(rounds={"min_participants": 2, "max_participants": 3}), now)


def test_session_that_counts_rounds_since_there_were_no_passes_goes_on():
    """A session of before asks for no local models or importances either. A length that is set now
    differs."""
    now = config_of(workload={"name": "sgd"})
    rules = replace(
        now.rules(),
        rounds=10,
        passes=0,
        plans_epochs=False,
        evaluate_local=False,
        evaluate_importance=False,
        evaluate_patience=0,
        evaluate_patience_rows=0,
    )
    session = Session("5e55104", rules)
    assert list(differences(session, now)) == []
    set_now = config_of(workload={"name": "sgd"}, rounds={"rounds": 12})
    assert list(differences(session, set_now)) == ["rounds.rounds = 10 (configured: 12)"]


@pytest.mark.parametrize("options", [{}, {"hidden_layers": [8]}])
def test_network_that_was_averaged_by_default_goes_on(options):
    """Networks of new sessions send gradients, unless the settings ask for local training."""
    workload = {"name": "mlp", "options": options}
    now = config_of(workload=workload)
    assert now.rules().aggregation == "gradient"
    assert told(config_of(workload=workload, rounds={"rounds": 10}), now) == []
    differ = told(config_of(workload=workload, aggregation={"rule": "sum"}), now)
    assert differ == ['aggregation.rule = "sum" (configured: "weighted_average")']
    other = config_of(workload={"name": "mlp", "options": {**options, "seed": 3}})
    assert told(config_of(workload=workload, rounds={"rounds": 10}), other)


def test_session_without_a_limit_of_scaled_numbers_goes_on():
    """The key came later: a session that was opened without it does not differ from a start without
    it, and differs from one with it."""
    session = config_of(workload={"name": "sgd"})
    rules = replace(
        session.rules(), preprocessing='{"scaling":"","missing":"","indicate_missing":false}'
    )
    assert list(differences(Session("5e55104", rules), session)) == []
    limited = config_of(workload={"name": "sgd", "preprocessing": {"clip": 3.0}})
    assert told(session, limited) == ["workload.preprocessing.clip = (not set) (configured: 3.0)"]


def test_every_rule_names_its_key():
    """A rule that is added is compared at a restart, or is said not to matter."""
    schema = Schema(CoordinatorConfig)
    for field in fields(Rules):
        # A study is compared by whole sections.
        if (key := key_of(field.name)) is not None and key != "*":
            dotted = tuple(key.removesuffix(".*").split("."))
            assert dotted in schema.leaves or dotted in schema.sections, key


@pytest.mark.parametrize(
    ("before", "now", "expected"),
    [
        (
            {"rounds": {"epochs": 1}},
            {"rounds": {"epochs": 3}},
            ["rounds.epochs = 1 (configured: 3)"],
        ),
        (
            {"rounds": {"min_participants": 2}},
            {"rounds": {"min_participants": 3}},
            ["rounds.min_participants = 2 (configured: 3)"],
        ),
        (
            {"aggregation": {"rule": "median"}},
            {"aggregation": {"rule": "weighted_average"}},
            ['aggregation.rule = "median" (configured: "weighted_average")'],
        ),
        (
            {"aggregation": {"optimizer": "fedavgm"}},
            {"aggregation": {"optimizer": "fedavgm", "optimizer_options": {"beta": 0.5}}},
            ["aggregation.optimizer_options.beta = 0.9 (configured: 0.5)"],
        ),
        (
            {"workload": {"name": "sgd"}},
            {"workload": {"name": "sgd", "options": {"eta0": 0.5}}},
            ["workload.options.eta0 = (not set) (configured: 0.5)"],
        ),
        ({"workload": {"name": "sgd"}}, {}, ['workload.name = "sgd" (configured: "")']),
        (
            {"train": {"lr": 1, "depth": 2}},
            {"train": {"lr": 2}},
            ["train.depth = 2 (configured: (not set))", "train.lr = 1 (configured: 2)"],
        ),
        (
            {"rounds": {"initial_weights": "average"}},
            {},
            ['rounds.initial_weights = "average" (configured: "first")'],
        ),
        (
            {"evaluate": {"metric": "loss"}},
            {"evaluate": {"metric": "accuracy"}},
            [
                'evaluate.metric = "loss" (configured: "accuracy")',
                'evaluate.direction = "min" (configured: "max")',
            ],
        ),
        (
            {"schema": {"columns": {"age": "number"}}},
            {"schema": {"columns": {"age": "category"}, "target": "dead"}},
            [
                'schema.columns.age = "number" (configured: "category")',
                'schema.target = "" (configured: "dead")',
            ],
        ),
        (
            trees_of("histogram"),
            trees_of("bagging"),
            ['aggregation.options.mode = "histogram" (configured: "bagging")'],
        ),
        (
            trees_of("cyclic"),
            trees_of(""),
            ['aggregation.options.mode = "cyclic" (configured: "histogram")'],
        ),
        (
            {"workload": {"name": "sgd"}, "rounds": {"passes": 20}},
            {"workload": {"name": "sgd"}, "rounds": {"rounds": 30}},
            [
                "rounds.rounds = (not set) (configured: 30)",
                "rounds.passes = 20 (configured: (not set))",
            ],
        ),
        ({"server": {"heartbeat_time_s": 1.0, "port": 1}}, {"logging": {"level": "debug"}}, []),
    ],
)
def test_differences_are_told_by_key(before, now, expected):
    """With the old and the new value, in the words of the configuration; what follows from another
    key is not told, and what may change at any time neither."""
    assert told(config_of(**before), config_of(**now)) == expected


@pytest.mark.parametrize(("number", "is_other"), [(30, False), (50, False), (40, True)])
@pytest.mark.parametrize(
    ("unit", "known", "workload"),
    [
        ("rounds", {"num_epochs": 30, "configured_rounds": 30}, ""),
        ("passes", {"configured_rounds": 30, "num_passes": 30, "configured_passes": 30}, "sgd"),
    ],
)
def test_an_extended_session_fits_its_old_configuration_and_its_new_one(
    unit, known, workload, number, is_other
):
    """After `extend` from 30 to 50 rounds or passes both numbers are right, and no other."""
    before, now = (
        config_of(workload={"name": workload}, rounds={unit: one}) for one in (20, number)
    )
    lineage = Lineage("5e55104/30", num_rounds=30, **known)
    assert bool(told(before, now, lineage)) is is_other


def test_settings_of_a_session_are_those_that_are_no_defaults():
    """A reader of the report sees how to repeat the training, and no default."""
    workload = {"name": "sgd", "options": {"eta0": 0.5}, "remedy": "scaffold"}
    config = config_of(workload=workload, rounds={"rounds": 7})
    settings = settings_of(config.rules())
    assert settings["rounds.rounds"] == "7"
    assert settings["workload.options.eta0"] == "0.5"
    assert settings["workload.remedy"] == '"scaffold"'
    assert "rounds.seed" not in settings
    assert settings_of(config_of().rules()) == {}
    by_passes = settings_of(config_of(workload={"name": "sgd"}).rules())
    assert by_passes["rounds.passes"] == "50"
    assert not {"rounds.rounds", "rounds.epochs"} & by_passes.keys()
