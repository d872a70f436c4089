"""Checks that the rule of aggregation, the workload and the other settings fit together."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from xain_foundation.settings.fields import Conflicts, WrongSetting
from xain_foundation.settings.hints import hint

if TYPE_CHECKING:
    from xain_coordinator.config.coordinator import CoordinatorConfig

# Rules and the settings of the workload that need each other.
_PAIRS = {
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
    """The only rule that can train a workload; "" where any rule can.

    workload: [workload] as it was given.
    """
    options = workload.get("options")
    mode = options.get("mode") if isinstance(options, Mapping) else None
    given = {"workload.name": workload.get("name"), "workload.options.mode": mode}
    return next((rule for rule, (key, value) in _PAIRS.items() if given[key] == value), "")


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
    return rule in _PAIRS


_OF_BYTES = ("aggregation.optimizer", "model.personal", "server.max_update_norm", "storage.format")
# A step is made of the rows of all sites.
_OF_ALL = ("rounds.fraction_participants", "rounds.over_selection", "rounds.quorum")
# Settings that must have their defaults with a rule.
_LEFT_OUT: Mapping[str, tuple[str, ...]] = {
    "sum": ("model.personal",),
    "trees": _OF_BYTES,
    "ensemble": _OF_BYTES,
    "gradient": ("model.personal", "server.update_encoding"),
    "newton": (*_OF_BYTES, *_OF_ALL, "server.update_encoding"),
    "assemble": (*_OF_BYTES, "rounds.over_selection", "rounds.quorum", "server.update_encoding"),
}


def workload_fits(config: "CoordinatorConfig") -> Conflicts:
    """The rule needs the workload, and the workload the rule; told once, of the first pair."""
    rule = config.aggregation.rule
    workload = config.workload
    for needed, (key, value) in _PAIRS.items():
        is_named = key == "workload.name"
        has_workload = value == (workload.name if is_named else workload.options.get("mode"))
        if has_workload and rule != needed:
            yield WrongSetting("aggregation.rule", f'{key} = "{value}" needs "{needed}"')
            return
        # Programs of others, without a workload of ours, may send gradients and slices.
        if rule == needed and not has_workload and (is_named or workload.name):
            yield WrongSetting("aggregation.rule", f'it needs {key} = "{value}"')
            return


def all_is_read(config: "CoordinatorConfig") -> Conflicts:
    """Settings that the rule does not read have their defaults."""
    rule = config.aggregation.rule
    if "model.personal" in _LEFT_OUT.get(rule, ()) and config.workload.remedy == "personal":
        yield WrongSetting("workload.remedy", f'leave it out with aggregation.rule = "{rule}"')
    for key in _LEFT_OUT.get(rule, ()):
        section, _, name = key.partition(".")
        if getattr(config, section).changed(name):
            yield WrongSetting(key, f'leave it out with aggregation.rule = "{rule}"')
    if rule == "assemble" and config.rounds.initial_weights == "average":
        yield WrongSetting(
            "rounds.initial_weights", 'aggregation.rule = "assemble" averages nothing'
        )


def scaffold_fits(config: "CoordinatorConfig") -> Conflicts:
    """Control variates are averaged by rows, and come as exact as they were made. Their size says
    nothing about that of a step, so that no bound of updates holds for them."""
    if config.workload.remedy != "scaffold":
        return
    needed_by = 'workload.remedy = "scaffold"'
    if config.aggregation.rule != "weighted_average":
        yield WrongSetting("aggregation.rule", f'{needed_by} needs "weighted_average"')
    elif config.rounds.max_staleness != 0:
        key = "pacing" if config.rounds.pacing else "consistency"
        yield WrongSetting(
            f"rounds.{key}",
            f"with {needed_by} an update counts in the round that it was trained for alone: "
            + hint("xain-coordinator", 'rounds.consistency = "bsp"'),
        )
    for key in (
        "model.personal",
        "server.update_encoding",
        "server.max_update_norm",
        "storage.format",
    ):
        section, _, name = key.partition(".")
        if getattr(config, section).changed(name):
            yield WrongSetting(key, f"leave it out with {needed_by}")


def epochs_fit(config: "CoordinatorConfig") -> Conflicts:
    """The rule can train a round with this number of epochs."""
    rule, epochs = config.aggregation.rule, config.rounds.effective_epochs
    if rule == "trees" and epochs == 0:
        must = "it counts the boosting iterations of a round, at least 1"
    elif rule == "trees" and epochs > 1 and config.aggregation.whole_options["mode"] == "histogram":
        must = (
            "a round grows trees by one level, so it must be 1; it may be more with "
            'aggregation.options.mode = "bagging"'
        )
    elif rule == "ensemble" and epochs != 1:
        must = (
            "it must be 1: workload.options.estimators says how many estimators a participant "
            "fits in a round"
        )
    elif rule in ("gradient", "newton") and epochs != 1:
        must = f'a round of aggregation.rule = "{rule}" is one step; set it to 1'
    elif rule == "assemble" and epochs == 0:
        must = 'it must be at least 1 with aggregation.rule = "assemble"'
    else:
        return
    yield WrongSetting("rounds.epochs", must)


def script_fits(config: "CoordinatorConfig") -> Conflicts:
    """A script can configure each round of the session."""
    rounds = config.rounds
    if not rounds.scripted:
        return
    with_script = "leave it out with rounds.scripted = true"
    if rounds.max_staleness != 0:
        key = "pacing" if rounds.pacing else "consistency"
        yield WrongSetting(
            f"rounds.{key}",
            f"sites go on with a round while the script configures the next; {with_script}",
        )
    if config.study.kind is not None or config.search.is_on:
        key = "search.options" if config.search.is_on else f"study.{config.study.kind}"
        yield WrongSetting(key, f"each of its sessions would wait for a script; {with_script}")
    if config.passes:
        yield WrongSetting(
            "rounds.passes",
            "the script says how many epochs a round has; with rounds.scripted = true set "
            "rounds.rounds",
        )
    if config.aggregation.rule == "assemble":
        yield WrongSetting(
            "aggregation.rule",
            f"all stages of the model train the same way in a process group; {with_script}",
        )


def passes_fit(config: "CoordinatorConfig") -> Conflicts:
    """A round of the rule uses rows."""
    if config.aggregation.rule == "ensemble" and config.rounds.passes is not None:
        yield WrongSetting(
            "rounds.passes",
            "a round of bagging fits workload.options.estimators at each site, each on rows that "
            "it draws; " + hint("xain-coordinator", "rounds.rounds = N"),
        )
    if config.aggregation.rule == "newton" and config.rounds.passes is not None:
        yield WrongSetting(
            "rounds.passes",
            "the steps of a fit end by themselves; to bound them, "
            + hint("xain-coordinator", "rounds.rounds = N"),
        )


def participants_fit(config: "CoordinatorConfig") -> Conflicts:
    """The rule can make a model of the updates of this number of participants."""
    rule = config.aggregation.rule
    if rule == "trees" and config.aggregation.whole_options["mode"] == "cyclic":
        if config.rounds.max_selected != 1:
            yield WrongSetting(
                "rounds.fraction_participants",
                f"{config.rounds.max_selected} participants would train a round, and aggregation."
                'options.mode = "cyclic" is for one after the other: '
                + hint("xain-coordinator", 'rounds.controller = "round_robin"')
                + " and a fraction_participants of 1 / max_participants",
            )
    elif rule == "assemble" and 0 < config.num_stages < config.rounds.min_participants:
        yield WrongSetting(
            "rounds.min_participants",
            f"it must not be more than the number of stages, {config.num_stages}: one "
            "participant trains each",
        )


def options_fit(config: "CoordinatorConfig") -> Conflicts:
    """Options that rule and workload have in common are given to the one that reads them."""
    rule = config.aggregation.rule
    section = {
        "remedy": hint("xain-coordinator", 'workload.remedy = "scaffold"'),
        "proximal_mu": hint("xain-coordinator", "workload.proximal_mu = VALUE"),
    }
    for name in REMEDY:
        if name in config.workload.options:
            yield WrongSetting(f"workload.options.{name}", section[name])
    if rule == "trees" and "mode" in config.workload.options:
        yield WrongSetting(
            "workload.options.mode", hint("xain-coordinator", 'aggregation.options.mode = "NAME"')
        )
    if rule == "assemble" and config.workload.name and "stages" in config.aggregation.options:
        yield WrongSetting(
            "aggregation.options.stages", hint("xain-coordinator", "workload.options.stages = N")
        )
    if rule in ("trees", "ensemble", "newton") and config.workload.preprocessing.scaling == "site":
        yield WrongSetting(
            "workload.preprocessing.scaling",
            f'aggregation.rule = "{rule}" joins what was learnt from columns that all sites scale '
            'alike; "site" is for the workloads sgd, mlp and neural',
        )


def evaluated_every(config: "CoordinatorConfig") -> int:
    """How often models are evaluated. Those before the last one of Newton's method are no results:
    none of them may be called the best."""
    every = config.evaluate.every
    return config.num_rounds if every and config.aggregation.rule == "newton" else every


def estimators_fit(config: "CoordinatorConfig") -> Conflicts:
    """Fitted estimators get columns as they need them, and stay where they can be measured."""
    if config.aggregation.rule != "ensemble":
        return
    scaling = config.workload.preprocessing.scaling
    name = config.workload.made_options.description.of_counts() if config.workload.name else ""
    if name and scaling != "none":
        yield WrongSetting(
            "workload.preprocessing.scaling",
            f"{name} takes no negative numbers, which standardised columns have: set it to "
            '"none" if no column has any, or scale them before it: '
            + hint(
                "xain-coordinator",
                f'workload.options.estimator = {{pipeline = ["MinMaxScaler", "{name}"]}}',
            ),
        )
    if config.keeps_estimators:
        for name in config.evaluate.changed("data", "metric"):
            yield WrongSetting(
                f"evaluate.{name}",
                "with workload.options.publish = false nobody has the whole model, which "
                "could be measured; participants report oob_score",
            )
