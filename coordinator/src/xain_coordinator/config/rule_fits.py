"""Checks that the rule of aggregation, the workload and the other settings fit together."""

from collections.abc import Mapping

from xain_coordinator.config.choices import PAIRS, REMEDY
from xain_coordinator.config.sections.together import Sections
from xain_foundation.settings.fields import Conflicts, WrongSetting
from xain_foundation.settings.hints import hint

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


def workload_fits(config: Sections) -> Conflicts:
    """Check that the rule has the workload that it needs, and the workload the rule; told once, of
    the first pair."""
    rule = config.aggregation.rule
    workload = config.workload
    for needed, (key, value) in PAIRS.items():
        is_named = key == "workload.name"
        has_workload = value == (workload.name if is_named else workload.options.get("mode"))
        if has_workload and rule != needed:
            yield WrongSetting("aggregation.rule", f'{key} = "{value}" needs "{needed}"')
            return
        # Programs of others, without a workload of ours, may send gradients and slices.
        if rule == needed and not has_workload and (is_named or workload.name):
            yield WrongSetting("aggregation.rule", f'it needs {key} = "{value}"')
            return


def all_is_read(config: Sections) -> Conflicts:
    """Check that settings which the rule does not read have their defaults."""
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


def scaffold_fits(config: Sections) -> Conflicts:
    """Check that the other settings allow control variates, which are averaged by rows and come as
    exact as they were made. Their size says nothing about that of a step, so that no bound of
    updates holds for them."""
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


def epochs_fit(config: Sections) -> Conflicts:
    """Check that the rule can train a round with this number of epochs."""
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


def script_fits(config: Sections) -> Conflicts:
    """Check that a script can configure each round of the session."""
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


def passes_fit(config: Sections) -> Conflicts:
    """Check that a round of the rule uses rows, where passes over them are set."""
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


def participants_fit(config: Sections) -> Conflicts:
    """Check that the rule can make a model of the updates of this number of participants."""
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


def options_fit(config: Sections) -> Conflicts:
    """Check that options which rule and workload have in common are given to the one that reads
    them."""
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


def evaluated_every(config: Sections) -> int:
    """Number of rounds from one evaluation to the next; 0 for none. Models before the last one of
    Newton's method are no results: none of them may be called the best."""
    every = config.evaluate.every
    return config.num_rounds if every and config.aggregation.rule == "newton" else every


def estimators_fit(config: Sections) -> Conflicts:
    """Check that fitted estimators get columns as they need them, and stay where they can be
    measured."""
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
