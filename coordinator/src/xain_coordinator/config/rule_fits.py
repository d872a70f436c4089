"""Check that the rule of aggregation, the workload and the other settings fit together."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from xain_foundation.fields import WrongSetting

if TYPE_CHECKING:
    from xain_coordinator.config.coordinator import CoordinatorConfig


@dataclass(frozen=True, slots=True)
class _Pair:
    """A rule and a workload, or a mode of workloads, that need each other.

    why_rule: the sentence for a configuration with the workload and another rule.
    why_workload: for one with the rule and another workload, or none if it is `named`.
    """

    workload: str
    why_rule: str
    why_workload: str
    named: bool = True

    def has_workload(self, config: "CoordinatorConfig") -> bool:
        workload = config.workload
        return self.workload == (workload.name if self.named else workload.options.get("mode"))


_PAIRS: Mapping[str, _Pair] = {
    "trees": _Pair(
        "xgboost",
        'the workload "xgboost" trains trees, which cannot be averaged; set it to "trees"',
        'it joins trees, which only a workload makes; set workload.name = "xgboost"',
    ),
    "ensemble": _Pair(
        "bagging",
        'the workload "bagging" fits estimators, which cannot be averaged; set it to "ensemble"',
        'it joins estimators, which only a workload fits; set workload.name = "bagging"',
    ),
    "gradient": _Pair(
        "gradient",
        'participants send gradients with workload.options.mode = "gradient"; set it to "gradient"',
        'it takes gradients: set workload.options.mode = "gradient"',
        named=False,
    ),
    "assemble": _Pair(
        "pipeline",
        'participants train stages with workload.options.mode = "pipeline"; set it to "assemble"',
        'it takes slices: set workload.options.mode = "pipeline"',
        named=False,
    ),
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
    for needed, pair in _PAIRS.items():
        has_workload = pair.has_workload(config)
        if has_workload and rule != needed:
            raise WrongSetting("aggregation.rule", pair.why_rule)
        if rule == needed and not has_workload and (pair.named or config.workload.name):
            raise WrongSetting("aggregation.rule", pair.why_workload)
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
        raise WrongSetting("workload.options.mode", "set aggregation.options.mode")
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
            'options.mode = "cyclic" is for one after the other: set controller = '
            '"round_robin" and a fraction_participants of 1 / max_participants',
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
        raise WrongSetting("aggregation.options.stages", "set workload.options.stages")
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
