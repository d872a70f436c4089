"""Choices of a workload: rule, server optimiser and options that are not set."""

from collections.abc import Mapping
from typing import Any

# Rules and the settings of the workload that need each other.
PAIRS = {
    "trees": ("workload.name", "xgboost"),
    "ensemble": ("workload.name", "bagging"),
    "gradient": ("workload.options.mode", "gradient"),
    "assemble": ("workload.options.mode", "pipeline"),
    "newton": ("workload.name", "glm"),
}

ANY_RULE = "weighted_average"  # where the workload needs none

# Chosen by measurement, see docs/learning.md. A site with few rows has none to hold out, and
# without a penalty nothing keeps a network from learning those of such sites by heart.
_OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "mlp": {"mode": "gradient", "alpha": 0.01},
    "neural": {"mode": "gradient", "weight_decay": 0.01},
}

# Options of the server optimiser of gradient descent, by workload, likewise: a network learns badly
# by steps that suit a linear model. tau is beside the gradient times eta0, which is 0.01.
_STEPS: Mapping[str, Mapping[str, float]] = {
    "sgd": {},
    "mlp": {"learning_rate": 0.01, "tau": 1e-5},
    "neural": {"learning_rate": 0.01, "tau": 1e-5},
}

# Options of a workload that speak of local steps, or of a network that is not its default one.
_OF_LOCAL_STEPS: Mapping[str, tuple[str, ...]] = {
    "mlp": ("solver", "learning_rate_init", "momentum", "batch_size"),
    "neural": ("builder", "layers", "optimizer", "learning_rate", "momentum", "batch_size"),
}

# Settings that speak of averaging, or of rounds in which a part of the sites trains, and how a
# default is written that does not.
_OF_AVERAGING: Mapping[str, tuple[str, ...]] = {
    "rounds.rounds": (),
    "rounds.epochs": (),
    "rounds.fraction_participants": ("1", "1.0"),
    "rounds.over_selection": ("0", "0.0"),
    "rounds.consistency": ("bsp",),
    "rounds.pacing": (),
    "rounds.quorum": (),
    "workload.remedy": (),
    "model.personal": (),
    "aggregation.rule": (),
    "aggregation.options": (),
    "aggregation.optimizer_options": (),
    "server.update_encoding": ("plain",),
    "server.max_update_norm": (),
}

# Settings of [workload] that stand among its options in the metadata of a model alone.
REMEDY = ("remedy", "proximal_mu")

_UNSET: tuple[Any, ...] = (None, "", [], (), {})


def own_rule(workload: Mapping[str, Any]) -> str:
    """The only rule that can train a workload; "" where any rule can. workload: [workload] as it
    was given."""
    options = workload.get("options")
    mode = options.get("mode") if isinstance(options, Mapping) else None
    given = {"workload.name": workload.get("name"), "workload.options.mode": mode}
    return next((rule for rule, (key, value) in PAIRS.items() if given[key] == value), "")


def own_optimizer(
    rule: str, workload: Mapping[str, Any], aggregation: Mapping[str, Any]
) -> tuple[str, Mapping[str, float]]:
    """The server optimiser of a training of which no step is set, and its options; "" for none.

    workload, aggregation: the sections as they were given. With a constant step, which must suit
    the table, gradient descent of as many steps learns a tenth of what this one does on some.
    """
    is_set = any(aggregation.get(key) for key in ("options", "optimizer_options"))
    name = str(workload.get("name"))
    if rule != "gradient" or name not in _STEPS or "optimizer" in aggregation or is_set:
        return "", {}
    return "fedadam", _STEPS[name]


def own_options(given: Mapping[str, Any]) -> Mapping[str, Any]:
    """Options of a network whose settings ask for no local training: mode and penalty; else none.

    given: all sections as they were given. With summed gradients a network learns the same however
    the rows are divided, in few rounds if tables are small; with averaging it loses where sites
    have few rows or unlike ones.
    """
    name, options = _at(given, "workload.name"), _at(given, "workload.options") or {}
    if not (isinstance(options, Mapping) and isinstance(name, str) and name in _OF_LOCAL_STEPS):
        return {}
    is_local = any(option in options for option in ("mode", *REMEDY, *_OF_LOCAL_STEPS[name]))
    has_optimizer = _at(given, "aggregation.optimizer") is not None  # "" is for none
    is_averaged = any(
        (value := _at(given, key)) not in _UNSET and str(value) not in defaults
        for key, defaults in _OF_AVERAGING.items()
    )
    return {} if is_local or has_optimizer or is_averaged else _OPTIONS[name]


def with_choices(given: Mapping[str, Any]) -> dict[str, Any]:
    """The sections with the options of a network, rule and optimiser as the workload chooses them
    where they are not set."""
    workload, aggregation = given.get("workload", {}), given.get("aggregation", {})
    if not (isinstance(workload, Mapping) and isinstance(aggregation, Mapping)):
        return {**given}
    chosen: dict[str, Any] = {}
    if options := own_options(given):
        workload = {**workload, "options": {**options, **(workload.get("options") or {})}}
        chosen["workload"] = workload
    rule = aggregation.get("rule") or own_rule(workload) or ANY_RULE
    aggregation = {**aggregation, "rule": rule}
    optimizer, of_optimizer = own_optimizer(rule, workload, aggregation)
    if optimizer:
        aggregation |= {"optimizer": optimizer, "optimizer_options": dict(of_optimizer)}
    return {**given, **chosen, "aggregation": aggregation}


def without_choices(whole: Mapping[str, Any]) -> dict[str, Any]:
    """The sections without what with_choices() has added to them."""
    of_rule = ("rule", "optimizer", "optimizer_options")
    for keys, has_options in ((of_rule, True), (of_rule, False), (("rule",), False)):
        workload, aggregation = dict(whole.get("workload", {})), dict(whole.get("aggregation", {}))
        aggregation = {key: value for key, value in aggregation.items() if key not in keys}
        if has_options:
            own = _OPTIONS.get(workload.get("name", ""), {}).items()
            options = workload.get("options", {}).items()
            workload["options"] = {key: value for key, value in options if (key, value) not in own}
        before = {**whole, "workload": workload, "aggregation": aggregation}
        after = with_choices(before)
        if all(after[name] == whole.get(name, {}) for name in ("workload", "aggregation")):
            return before
    return {**whole}


def _at(given: Mapping[str, Any], key: str) -> Any:
    """The value of a dotted key; None if it is not set."""
    value: Any = given
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def is_own(rule: str) -> bool:
    """Whether a rule is for one kind of training, in which a round has no epochs to choose."""
    return rule in PAIRS
