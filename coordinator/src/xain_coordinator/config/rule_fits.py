"""Check that the rule of aggregation, the workload and the other settings fit together."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from xain_foundation.fields import WrongSetting
from xain_foundation.hints import hint

if TYPE_CHECKING:
    from xain_coordinator.config.coordinator import CoordinatorConfig


# Rules and the settings of the workload that need each other.
_PAIRS = {
    "trees": ("workload.name", "xgboost"),
    "ensemble": ("workload.name", "bagging"),
    "gradient": ("workload.options.mode", "gradient"),
    "assemble": ("workload.options.mode", "pipeline"),
}

_OF_BYTES = ("aggregation.optimizer", "model.personal", "server.max_update_norm", "storage.format")
# Settings that must have their defaults with a rule.
_LEFT_OUT: Mapping[str, tuple[str, ...]] = {
    "sum": ("model.personal",),
    "trees": _OF_BYTES,
    "ensemble": _OF_BYTES,
    "gradient": ("model.personal", "server.update_encoding"),
    "assemble": (*_OF_BYTES, "rounds.over_selection", "rounds.quorum", "server.update_encoding"),
}


def require_rule_fits(config: "CoordinatorConfig") -> None:
    """Raises WrongSetting."""
    rule = config.aggregation.rule
    workload = config.workload
    for needed, (key, value) in _PAIRS.items():
        is_named = key == "workload.name"
        has_workload = value == (workload.name if is_named else workload.options.get("mode"))
        if has_workload and rule != needed:
            raise WrongSetting("aggregation.rule", f'{key} = "{value}" needs "{needed}"')
        # Programs of others, without a workload of ours, may send gradients and slices.
        if rule == needed and not has_workload and (is_named or workload.name):
            raise WrongSetting("aggregation.rule", f'it needs {key} = "{value}"')
    for key in _LEFT_OUT.get(rule, ()):
        section, _, name = key.partition(".")
        settings = getattr(config, section)
        if getattr(settings, name) != type(settings).model_fields[name].default:
            raise WrongSetting(key, f'leave it out with aggregation.rule = "{rule}"')
    if check := _CHECKS.get(rule):
        check(config)
    elif rule == "gradient" and config.rounds.epochs != 1:
        raise WrongSetting(
            "rounds.epochs", 'a round of aggregation.rule = "gradient" is one step; set it to 1'
        )


def _check_trees(config: "CoordinatorConfig") -> None:
    if config.rounds.epochs == 0:
        raise WrongSetting(
            "rounds.epochs", "it counts the boosting iterations of a round, at least 1"
        )
    if "mode" in config.workload.options:
        raise WrongSetting(
            "workload.options.mode", hint("xain-coordinator", 'aggregation.options.mode = "NAME"')
        )
    mode = config.aggregation.whole_options["mode"]
    if mode == "histogram" and config.rounds.epochs != 1:
        raise WrongSetting(
            "rounds.epochs",
            "a round grows trees by one level, so it must be 1; it may be more with "
            'aggregation.options.mode = "bagging"',
        )
    if mode == "cyclic" and config.rounds.max_selected != 1:
        raise WrongSetting(
            "rounds.fraction_participants",
            f"{config.rounds.max_selected} participants would train a round, and aggregation."
            'options.mode = "cyclic" is for one after the other: '
            + hint("xain-coordinator", 'rounds.controller = "round_robin"')
            + " and a fraction_participants of 1 / max_participants",
        )


def _check_ensemble(config: "CoordinatorConfig") -> None:
    scaling = config.workload.preprocessing.scaling
    if config.workload.options.get("vote") == "open" and scaling not in ("", "standard"):
        raise WrongSetting(
            "workload.preprocessing.scaling",
            'workload.options.vote = "open" needs columns with mean 0 and deviation 1; '
            'set it to "standard"',
        )
    if config.keeps_estimators:
        for name in ("data", "metric"):
            if getattr(config.evaluate, name):
                raise WrongSetting(
                    f"evaluate.{name}",
                    "with workload.options.publish = false nobody has the whole model, which "
                    "could be measured; participants report oob_score",
                )
    if config.rounds.epochs != 1:
        raise WrongSetting(
            "rounds.epochs",
            "it must be 1: workload.options.estimators says how many estimators a participant "
            "fits in a round",
        )


def _check_assemble(config: "CoordinatorConfig") -> None:
    if config.rounds.initial_weights == "average":
        raise WrongSetting(
            "rounds.initial_weights", 'aggregation.rule = "assemble" averages nothing'
        )
    if config.rounds.epochs == 0:
        raise WrongSetting(
            "rounds.epochs", 'it must be at least 1 with aggregation.rule = "assemble"'
        )
    if config.workload.name and "stages" in config.aggregation.options:
        raise WrongSetting(
            "aggregation.options.stages", hint("xain-coordinator", "workload.options.stages = N")
        )
    if 0 < config.num_stages < config.rounds.min_participants:
        raise WrongSetting(
            "rounds.min_participants",
            f"it must not be more than the number of stages, {config.num_stages}: one "
            "participant trains each",
        )


_CHECKS = {
    "trees": _check_trees,
    "ensemble": _check_ensemble,
    "assemble": _check_assemble,
}
